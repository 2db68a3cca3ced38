"""Snake as a Gymnasium env: one game of `SnakeGames`, rendered as an image or as text."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from PIL import Image, ImageDraw
from torch import Tensor

from flatout.envs.spaces import MASK_KEY, Array
from flatout.errors import EnvError
from flatout.workloads.snake.games import MOVES, SnakeGames
from flatout.workloads.validate import Info, check_choice

Place: TypeAlias = tuple[int, int]

LONGEST = 640
"""Largest side of the image in pixels."""
FINE = 4
"""Supersampling factor, for smooth edges."""
GROUND, GROUND_2, EDGE = (22, 27, 34), (26, 32, 40), (56, 66, 80)
HEAD, TAIL = (126, 231, 135), (35, 112, 61)
FOOD, SHINE, EYE = (255, 107, 107), (255, 190, 180), (13, 17, 23)


class Snake(gym.Env[dict[str, Any], Any]):
    """Eat food and grow; the game ends at a wall or the snake's own body. Takes the keywords of `Rules`."""

    batched_form = SnakeGames
    metadata = {"render_modes": ["rgb_array", "ansi"], "render_fps": 12}  # noqa: RUF012  # as Gymnasium declares it

    def __init__(self, render_mode: str | None = None, **settings: Any) -> None:
        check_choice("snake: render_mode", render_mode, (None, *self.metadata["render_modes"]))
        self.render_mode = render_mode
        self._games = SnakeGames(1, "cpu", autoreset=False, **settings)
        self.observation_space = self._games.single_observation_space
        self.action_space = spaces.Discrete(4)

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[dict[str, Any], Info]:
        """Start a game: the first one of the seed, or the next one."""
        del options
        super().reset(seed=seed)
        obs, _ = self._games.reset(seed)
        return _first(obs), {"food": 0}

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, Info]:
        """Move: 0 up, 1 right, 2 down, 3 left. An action that would reverse the snake goes straight on."""
        if not self.action_space.contains(action):
            raise EnvError(f"snake: action is {action!r}; it must be 0 up, 1 right, 2 down or 3 left")
        obs, reward, ended, _, info = self._games.step(torch.tensor([int(action)]))
        return _first(obs), float(reward[0]), bool(ended[0]), False, {"food": int(info["food"][0])}

    def render(self) -> Any:
        """The board as an image or as text."""
        if self.render_mode is None:
            return None
        return draw(self._games) if self.render_mode == "rgb_array" else write(self._games)


def _first(obs: dict[str, Tensor]) -> dict[str, Any]:
    return {"view": obs["view"][0].numpy().copy(), MASK_KEY: obs[MASK_KEY][0].numpy().astype(np.int8)}


def _places(games: SnakeGames) -> tuple[list[Place], Place | None]:
    """The (row, column) of the first game's snake, from tail to head, and of its food, if there is any."""
    rules, state, length = games.rules, games.state, int(games.state.length[0])
    body = [divmod(cell, rules.width) for cell in state.board[0, :-1].argsort()[-length:].tolist()]
    return body, None if length == rules.n_cells else divmod(int(state.food[0]), rules.width)


def write(games: SnakeGames) -> str:
    """The board of the first game as text, with a frame."""
    body, food = _places(games)
    board = np.full((games.rules.height, games.rules.width), "·")
    board[tuple(np.transpose(body))] = "■"
    if food is not None:
        board[food] = "●"
    board[body[-1]] = "▲▶▼◀"[int(games.state.facing[0])]
    line = "─" * (2 * games.rules.width + 1)
    return "\n".join([f"┌{line}┐", *(f"│ {' '.join(row)} │" for row in board), f"└{line}┘"])


def draw(games: SnakeGames) -> Array:
    """The board of the first game as an RGB image, (height, width, 3)."""
    height, width, facing = games.rules.height, games.rules.width, int(games.state.facing[0])
    body, food = _places(games)
    small = max(6, min(32, LONGEST // max(height, width)))
    side = small * FINE
    odd = np.indices((height, width)).sum(axis=0)[..., None] % 2
    board = Image.fromarray(np.where(odd, GROUND_2, GROUND).astype(np.uint8))
    image = board.resize((width * side, height * side), Image.Resampling.NEAREST)
    pen = ImageDraw.Draw(image)

    def centre(place: tuple[float, float]) -> tuple[float, float]:
        return (place[1] + 0.5) * side, (place[0] + 0.5) * side

    def disc(x: float, y: float, radius: float, colour: tuple[int, ...]) -> None:
        r = radius * side
        pen.ellipse((x - r, y - r, x + r, y + r), colour)

    if food is not None:
        x, y = centre(food)
        disc(x, y, 0.32, FOOD)
        disc(x - 0.1 * side, y - 0.1 * side, 0.09, SHINE)
    for k, (a, b) in enumerate(pairwise(body), 1):
        share = k / (len(body) - 1)
        colour = tuple(round(tail + (head - tail) * share) for tail, head in zip(TAIL, HEAD, strict=True))
        # Drawn from both cells: a step across the edge leaves the board on one side and enters it on the other.
        dy, dx = (d if abs(d) == 1 else -np.sign(d) for d in np.subtract(b, a))
        for start, end in ((a, (a[0] + dy, a[1] + dx)), ((b[0] - dy, b[1] - dx), b)):
            pen.line([*centre(start), *centre(end)], colour, round(0.72 * side))
        disc(*centre(a), 0.36, colour)
    x, y = centre(body[-1])
    disc(x, y, 0.42, HEAD)
    (down, right), (aside_down, aside_right) = MOVES[facing], MOVES[(facing + 1) % 4]
    for eye in (-0.17, 0.17):
        eye_x, eye_y = 0.14 * right + eye * aside_right, 0.14 * down + eye * aside_down
        disc(x + side * eye_x, y + side * eye_y, 0.08, EYE)
    pen.rectangle((0, 0, image.width - 1, image.height - 1), outline=EDGE, width=side // 16)
    return np.asarray(image.reduce(FINE))
