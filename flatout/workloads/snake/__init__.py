"""Snake: `SnakeGames` is N games as tensors on any device, `Snake` one game as a Gymnasium env."""

from flatout.workloads.snake.games import SnakeGames
from flatout.workloads.snake.snake import Snake

__all__ = ["Snake", "SnakeGames"]
