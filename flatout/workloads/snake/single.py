"""One game of Snake as a Gymnasium env; underneath it is `SnakeGames` with one game."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from flatout.envs.spaces import MASK_KEY
from flatout.errors import EnvError
from flatout.workloads.snake.games import SnakeGames
from flatout.workloads.snake.picture import Scene, draw, write


class Snake(gym.Env[dict[str, Any], Any]):
    """Eat, grow, and run neither into yourself nor into a wall. Keywords are those of `SnakeGames`."""

    batched_form = SnakeGames
    metadata = {"render_modes": ["rgb_array", "ansi"], "render_fps": 12}  # noqa: RUF012  # as Gymnasium declares it

    def __init__(
        self,
        render_mode: str | None = None,
        *,
        height: int = 10,
        width: int = 10,
        wrap: bool = False,
        starve_after: int | None = None,
        death_reward: float = 0.0,
        obs: str = "vector",
    ) -> None:
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise EnvError(f"snake: render_mode is {render_mode!r}; there is rgb_array and ansi")
        self.render_mode = render_mode
        self._games = SnakeGames(
            1,
            "cpu",
            height=height,
            width=width,
            wrap=wrap,
            starve_after=starve_after,
            death_reward=death_reward,
            obs=obs,
            autoreset=False,
        )
        self.observation_space = self._games.single_observation_space
        self.action_space = spaces.Discrete(4)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin a game: the seed's first, or the next."""
        del options
        super().reset(seed=seed)
        obs, _ = self._games.reset(seed)
        return _first(obs), {"food": 0}

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Move the snake: 0 up, 1 right, 2 down, 3 left. Turning back means going straight on."""
        if not self.action_space.contains(action):
            raise EnvError(f"snake: there is no action {action!r}; give 0 up, 1 right, 2 down or 3 left")
        obs, reward, ended, _, info = self._games.step(torch.tensor([int(action)]))
        return _first(obs), float(reward[0]), bool(ended[0]), False, {"food": int(info["food"][0])}

    def render(self) -> Any:
        """The board as an image or as text."""
        if self.render_mode is None:
            return None
        scene = Scene.of(self._games)
        return draw(scene) if self.render_mode == "rgb_array" else write(scene)


def _first(obs: dict[str, Tensor]) -> dict[str, Any]:
    return {
        "view": obs["view"][0].numpy().copy(),
        MASK_KEY: obs[MASK_KEY][0].numpy().astype(np.int8),
    }
