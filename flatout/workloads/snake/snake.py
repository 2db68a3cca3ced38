"""Snake as a Gymnasium env: one game of `SnakeGames`, rendered as an image or as text."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

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

Colour = tuple[int, int, int]

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
        scene = Scene(self._games)
        return draw(scene) if self.render_mode == "rgb_array" else write(scene)


def _first(obs: dict[str, Tensor]) -> dict[str, Any]:
    return {"view": obs["view"][0].numpy().copy(), MASK_KEY: obs[MASK_KEY][0].numpy().astype(np.int8)}


class Scene:
    """What an image or text shows of a game."""

    def __init__(self, games: SnakeGames, n: int = 0) -> None:
        rules, state = games.rules, games.state
        length, self.facing = int(state.length[n]), int(state.facing[n])
        self.height, self.width = rules.height, rules.width
        self.body = [divmod(cell, rules.width) for cell in state.board[n, :-1].argsort()[-length:].tolist()]
        """From tail to head."""
        self.food = None if length == rules.n_cells else divmod(int(state.food[n]), rules.width)


def write(scene: Scene) -> str:
    """The board as text, with a frame."""
    rows = [["·"] * scene.width for _ in range(scene.height)]
    for y, x in scene.body:
        rows[y][x] = "■"
    if scene.food is not None:
        rows[scene.food[0]][scene.food[1]] = "●"
    y, x = scene.body[-1]
    rows[y][x] = "▲▶▼◀"[scene.facing]
    line = "─" * (2 * scene.width + 1)
    return "\n".join([f"┌{line}┐", *(f"│ {' '.join(row)} │" for row in rows), f"└{line}┘"])


def draw(scene: Scene) -> Array:
    """The board as an RGB image, (height, width, 3)."""
    small = max(6, min(32, LONGEST // max(scene.height, scene.width)))
    side = small * FINE
    odd = np.indices((scene.height, scene.width)).sum(axis=0)[..., None] % 2
    board = Image.fromarray(np.where(odd, GROUND_2, GROUND).astype(np.uint8))
    image = board.resize((scene.width * side, scene.height * side), Image.Resampling.NEAREST)
    pen = ImageDraw.Draw(image)

    def centre(place: tuple[float, float]) -> tuple[float, float]:
        return (place[1] + 0.5) * side, (place[0] + 0.5) * side

    def disc(x: float, y: float, radius: float, colour: Colour) -> None:
        r = radius * side
        pen.ellipse((x - r, y - r, x + r, y + r), colour)

    if scene.food is not None:
        x, y = centre(scene.food)
        disc(x, y, 0.32, FOOD)
        disc(x - 0.1 * side, y - 0.1 * side, 0.09, SHINE)
    for k, (a, b) in enumerate(pairwise(scene.body), 1):
        colour = _between(TAIL, HEAD, k / (len(scene.body) - 1))
        for start, end in _strokes(a, b):
            pen.line([*centre(start), *centre(end)], colour, round(0.72 * side))
        disc(*centre(a), 0.36, colour)
    x, y = centre(scene.body[-1])
    disc(x, y, 0.42, HEAD)
    (down, right), (aside_down, aside_right) = MOVES[scene.facing], MOVES[(scene.facing + 1) % 4]
    for eye in (-0.17, 0.17):
        eye_x, eye_y = 0.14 * right + eye * aside_right, 0.14 * down + eye * aside_down
        disc(x + side * eye_x, y + side * eye_y, 0.08, EYE)
    pen.rectangle((0, 0, image.width - 1, image.height - 1), outline=EDGE, width=side // 16)
    return np.asarray(image.resize((scene.width * small, scene.height * small), Image.Resampling.BOX))


def _strokes(a: tuple[int, int], b: tuple[int, int]) -> list[tuple[Any, Any]]:
    """The line from a cell to its neighbour; two lines if it crosses the edge of the board."""
    dy, dx = b[0] - a[0], b[1] - a[1]
    if abs(dy) + abs(dx) == 1:
        return [(a, b)]
    step = (-np.sign(dy), -np.sign(dx))
    return [(a, (a[0] + step[0], a[1] + step[1])), ((b[0] - step[0], b[1] - step[1]), b)]


def _between(a: Colour, b: Colour, share: float) -> Colour:
    r, g, b_ = (round(x + (y - x) * share) for x, y in zip(a, b, strict=True))
    return r, g, b_
