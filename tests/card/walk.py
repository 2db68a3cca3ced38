"""An env with episodes that are truncated; it is imported by child processes, so it imports little."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Walk(gym.Env[Any, Any]):
    """A walk on a line. An episode is truncated after seven steps, unless it left the line before."""

    observation_space = spaces.Box(-3.0, 3.0, (2,))

    def __init__(self, action_kind: str = "discrete") -> None:
        self.action_space = spaces.Discrete(3) if action_kind == "discrete" else spaces.Box(-2.0, 1.0, (1,))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._t, self._x, self._goal = 0, self.np_random.uniform(-1, 1), self.np_random.uniform(-1, 1)
        return self._obs(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._t += 1
        step = float(np.asarray(action).reshape(-1)[0])
        self._x += 0.5 * (step - 1 if isinstance(self.action_space, spaces.Discrete) else step)
        gone = abs(self._x) > 1.5
        return self._obs(), 1.0 - abs(self._x - self._goal), gone, self._t >= 7 and not gone, {}

    def _obs(self) -> Any:
        return np.array([self._x, self._goal], np.float32)
