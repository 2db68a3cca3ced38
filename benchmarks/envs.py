"""Envs of known cost: one that computes, one that waits, one that awaits; and one with frames and a known best return."""

from __future__ import annotations

import asyncio
import os
import time
from time import perf_counter
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Burn(gym.Env[Any, Any]):
    """Computes in plain Python: about 300 µs a step, or the loops that BURN_LOOPS says, the same in every process."""

    observation_space = spaces.Box(-1, 1, (16,))
    action_space = spaces.Discrete(4)

    def __init__(self) -> None:
        self._n = int(os.environ.get("BURN_LOOPS", 0)) or loops_for(300.0)
        self._obs = np.zeros(16, np.float32)
        self._t = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._t = 0
        return self._obs.copy(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        _burn(self._n)
        self._t += 1
        return self._obs.copy(), 1.0, self._t % 200 == 0, False, {}


def _burn(n: int) -> int:
    total = 0
    for i in range(n):
        total += i * i % 7
    return total


def loops_for(micros: float) -> int:
    """Loops that take so long on this machine, by the fastest of several tries."""
    times = []
    for _ in range(20):
        began = perf_counter()
        _burn(5_000)
        times.append(perf_counter() - began)
    return int(5_000 / min(times) * micros * 1e-6)


class Wait(gym.Env[Any, Any]):
    """Waits 10 ± 5 ms a step, as an HTTP request does; 64 floats observed, 8 actions."""

    observation_space = spaces.Box(-1, 1, (64,))
    action_space = spaces.Discrete(8)

    def __init__(self, mean: float = 0.010, spread: float = 0.005) -> None:
        self._mean, self._spread = mean, spread
        self._obs = np.zeros(64, np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._t = 0
        return self._obs.copy(), {}

    def _next(self) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._t += 1
        return self._obs.copy(), 1.0, self._t % 500 == 0, False, {}

    def _seconds(self) -> float:
        return self._mean + self._spread * float(self.np_random.uniform(-1, 1))

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(self._seconds())
        return self._next()


class Await(Wait):
    """The same as a coroutine."""

    async def reset(  # type: ignore[override]
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        return super().reset(seed=seed, options=options)

    async def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:  # type: ignore[override]
        await asyncio.sleep(self._seconds())
        return self._next()


class Remote(gym.Wrapper[Any, Any, Any, Any]):
    """An env whose steps wait 10 ± 5 ms before they are taken, as one behind a network does."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self._rng = np.random.default_rng()

    def step(self, action: Any) -> Any:
        time.sleep(self._rng.uniform(0.005, 0.015))
        return self.env.step(action)


def remote_cartpole() -> gym.Env[Any, Any]:
    """CartPole behind a network."""
    return Remote(gym.make("CartPole-v1"))


class Catch(gym.Env[Any, Any]):
    """A ball falls straight down from any column; a paddle of three pixels that meets it earns 1, else the return is -1.

    The frames are all there is to see: `side` x `side` x 3 bytes, the ball red and the paddle green. Every ball can be
    met, so the best return is 1. A random policy has about -0.6.
    """

    action_space = spaces.Discrete(3)

    def __init__(self, side: int = 16) -> None:
        self._side = side
        self.observation_space = spaces.Box(0, 255, (side, side, 3), np.uint8)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._y, self._paddle = 0, self._side // 2
        self._x = int(self.np_random.integers(self._side))
        return self._frame(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._paddle = min(max(self._paddle + int(action) - 1, 1), self._side - 2)
        self._y += 1
        is_down = self._y == self._side - 1
        is_met = abs(self._x - self._paddle) <= 1
        return self._frame(), (1.0 if is_met else -1.0) if is_down else 0.0, is_down, False, {}

    def _frame(self) -> Any:
        frame = np.zeros((self._side, self._side, 3), np.uint8)
        frame[self._y, self._x, 0] = 255
        frame[-1, self._paddle - 1 : self._paddle + 2, 1] = 255
        return frame
