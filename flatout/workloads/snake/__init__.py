"""Snake: `SnakeGames` plays N games at once as tensors on any device, `Snake` one of them as a Gymnasium env."""

from flatout.workloads.snake.games import SnakeGames
from flatout.workloads.snake.snake import Snake

__all__ = ["Snake", "SnakeGames"]
