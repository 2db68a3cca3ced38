"""A network of one's own: attention over a set of entities, for a Dict observation.

    flatout train examples/attention.py:Gather --network examples/attention.py:Attention
    flatout train examples/attention.py:Gather --network examples/attention.py:Attention --algo dqn
    flatout train examples/attention.py:Gather --network examples/attention.py:Attention --algo sac \\
        --env-kwargs '{"continuous": true}'

`Gather` has a varying number of fruits. The answer does not depend on their order, and neither does the network's.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

N_FRUITS = 6
MOVES = np.array([[0, 1], [0, -1], [1, 0], [-1, 0]], np.float32) / 10


class Gather(gym.Env[dict[str, Any], Any]):
    """Walk to the ripe fruit among up to six; of each, position and ripeness are seen."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 8}  # noqa: RUF012  # as Gymnasium declares it

    def __init__(self, continuous: bool = False, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        entities = spaces.Box(-2, 2, (N_FRUITS, 3))
        present = spaces.MultiBinary(N_FRUITS)
        self.observation_space = spaces.Dict({"fruits": entities, "present": present})
        self.action_space = spaces.Box(-1, 1, (2,)) if continuous else spaces.Discrete(len(MOVES))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self._fruits = self.np_random.uniform(-1, 1, (N_FRUITS, 2)).astype(np.float32)
        n_fruits = int(self.np_random.integers(2, N_FRUITS + 1))
        self._present = self.np_random.permutation(np.arange(N_FRUITS) < n_fruits)
        self._ripe = int(self.np_random.choice(np.flatnonzero(self._present)))
        self._at, self._t = np.zeros(2, np.float32), 0
        return self._obs(), {}

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        before = self._distance()
        move = (
            MOVES[int(action)] if isinstance(self.action_space, spaces.Discrete) else np.asarray(action) / 10
        )
        self._at = np.clip(self._at + move, -1, 1).astype(np.float32)
        self._t += 1
        found = self._distance() < 0.15
        reward = before - self._distance() + float(found)
        return self._obs(), reward, found, self._t >= 40, {}

    def render(self) -> Any:
        """The agent is blue, the ripe fruit red, the others green."""
        picture = np.full((240, 240, 3), 240, np.uint8)
        dots = [(place, (90, 170, 90)) for place in self._fruits[self._present]]
        for (x, y), colour in [*dots, (self._fruits[self._ripe], (220, 60, 50)), (self._at, (50, 100, 220))]:
            left, top = int(110 * (x + 1)), int(110 * (y + 1))
            picture[top : top + 16, left : left + 16] = colour
        return picture

    def _distance(self) -> float:
        return float(np.linalg.norm(self._fruits[self._ripe] - self._at))

    def _obs(self) -> dict[str, Any]:
        ripe = np.arange(N_FRUITS) == self._ripe
        fruits = np.column_stack([self._fruits - self._at, ripe]) * self._present[:, None]
        return {"fruits": fruits.astype(np.float32), "present": self._present.astype(np.int8)}


class Attention(nn.Module):
    """Embeds every entity, lets a learned query attend to those that are there, and returns what it saw."""

    def __init__(self, observation_space: spaces.Dict, width: int = 32) -> None:
        super().__init__()
        shape = observation_space["fruits"].shape
        assert shape is not None
        self.embed = nn.Sequential(nn.Linear(shape[1], width), nn.ReLU())
        self.key, self.value = nn.Linear(width, width), nn.Linear(width, width)
        self.query = nn.Parameter(torch.randn(width) / width**0.5)

    def forward(self, obs: dict[str, Tensor]) -> Tensor:
        x = self.embed(obs["fruits"])
        score = (self.key(x) @ self.query).masked_fill(obs["present"] == 0, -1e8)
        seen: Tensor = (score.softmax(-1).unsqueeze(-1) * self.value(x)).sum(1)
        return seen
