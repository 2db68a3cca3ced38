"""Snake: `SnakeGames` plays N games at once as tensors on any device, `Snake` one of them as a Gymnasium env."""

from flatout.envs.snake.games import SnakeGames
from flatout.envs.snake.single import Snake

__all__ = ["Snake", "SnakeGames"]
