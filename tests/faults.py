"""Envs that misbehave on command, for the executors' fault tests; importable by child processes."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Walk(gym.Env[Any, Any]):
    """Observes (episode, step), so that a transition made of two episodes shows at once."""

    observation_space = spaces.Box(-1, 1e6, (2,))
    action_space = spaces.Discrete(2)

    def __init__(self, length: int = 7) -> None:
        self._length = length
        self._episode = -1

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._episode, self._t = int(self.np_random.integers(1, 900_000)), 0
        return self._obs(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._t += 1
        return self._obs(), 1.0, self._t == self._length, False, {}

    def _obs(self) -> Any:
        return np.array([self._episode, self._t], np.float32)


class Once(Walk):
    """Misbehaves once: the process that creates the file `flag` does it."""

    def __init__(self, flag: str, fault: str, at_step: int = 20) -> None:
        super().__init__()
        self._flag, self._fault, self._at = Path(flag), fault, at_step
        self._n = 0
        if fault.endswith("in constructor") and self._mine():
            self._do()

    def _mine(self) -> bool:
        try:
            with self._flag.open("x") as file:
                file.write(str(os.getpid()))
        except FileExistsError:
            return False
        return True

    def _do(self) -> None:
        if self._fault.startswith("raise"):
            raise KeyError("speed")
        if self._fault.startswith("hang"):
            time.sleep(1000)
        os._exit(3)

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        if self._fault.endswith("in reset") and self._n >= self._at and self._mine():
            self._do()
        return super().reset(**kwargs)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._n += 1
        if self._fault.endswith("in step") and self._n >= self._at and self._mine():
            self._do()
        return super().step(action)


class Doomed(Walk):
    """Raises in the step after its attribute `doomed` was set; the env that takes its place does not."""

    doomed = False

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.doomed:
            raise KeyError("speed")
        return super().step(action)


class AlwaysRaises(Walk):
    """Raises at its fifth step, every time it is rebuilt."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._t == 4:
            raise RuntimeError("broken for good")
        return super().step(action)


class Hangs(Walk):
    """Hangs at its fifth step."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._t == 4:
            time.sleep(1000)
        return super().step(action)
