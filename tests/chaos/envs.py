"""Envs that misbehave on a schedule: a folder with one file for each fault, claimed by the env that reaches its step.

Steps count from the time when the file `armed` is there, so that nothing happens while an env is tried out.

An observation is (episode, step), so that a transition that spans a lost step shows.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

HANG_SECONDS = 1000.0
SLOW_SECONDS = 0.3


class Faults:
    """The faults that are left in a folder; their names are `KIND@STEP-NUMBER`."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        names = [path.name for path in self._folder.glob("*@*") if not path.name.startswith("done")]
        self._at = sorted((int(name.partition("@")[2].partition("-")[0]), name) for name in names)
        self._n_steps = 0
        self._armed = False

    def next_kind(self) -> str | None:
        """Count a step; the kind of a fault that is due and that nobody else has claimed."""
        self._n_steps += 1
        if not self._armed:
            if self._n_steps % 20 == 0 and (self._folder / "armed").exists():
                self._armed, self._n_steps = True, 0
            return None
        while self._at and self._at[0][0] <= self._n_steps:
            _, name = self._at.pop(0)
            try:
                (self._folder / name).rename(self._folder / f"done {name}")
            except OSError:
                continue
            return name.partition("@")[0]
        return None


def misbehave(kind: str, obs: Any) -> Any:
    """Do what the fault says; returns the observation that the step then gives."""
    if kind == "crash":
        raise RuntimeError("chaos")
    if kind == "exit":
        sys.exit(3)
    if kind == "die":
        os._exit(3)
    if kind == "segfault":
        ctypes.string_at(0)
    if kind == "clock":  # the system's clock is set, as far as this process can see
        seconds = 86_400.0 * (1 if obs[1] % 2 else -1)
        now = time.time
        time.time = lambda: now() + seconds
    if kind == "nan":
        return obs * np.float32("nan")
    if kind == "shape":
        return np.zeros(7, np.float32)
    return obs


class ChaosEnv(gym.Env[Any, Any]):
    """Counts steps; an episode has 20."""

    observation_space = spaces.Box(-1e9, 1e9, (2,))
    action_space = spaces.Discrete(2)
    length = 20

    def __init__(self, faults: str, step_seconds: float = 0.0) -> None:
        self._faults, self._step_seconds = Faults(faults), step_seconds
        self._episode = self._t = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._episode, self._t = int(self.np_random.integers(1, 900_000)), 0
        return self._obs(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        seconds, kind = self._before()
        if seconds:
            time.sleep(seconds)
        return self._after(kind, action)

    def _before(self) -> tuple[float, str | None]:
        kind = self._faults.next_kind()
        return {"hang": HANG_SECONDS, "slow": SLOW_SECONDS}.get(kind or "", self._step_seconds), kind

    def _after(self, kind: str | None, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._t += 1
        obs = self._obs()
        if kind is not None:
            obs = misbehave(kind, obs)
        ends = self._t == self.length
        return obs, float(action), ends and self._episode % 2 == 0, ends and self._episode % 2 == 1, {}

    def _obs(self) -> Any:
        return np.array([self._episode, self._t], np.float32)


class AsyncChaosEnv(ChaosEnv):
    """The same for an event loop."""

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:  # type: ignore[override]
        return super().reset(seed=seed, options=options)

    async def step(self, action: Any) -> Any:  # type: ignore[override]
        seconds, kind = self._before()
        await asyncio.sleep(seconds)
        return self._after(kind, action)


class ChaosVec(VectorEnv[Any, Any, Any]):
    """The same as a batched env; it has only faults that come from outside."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012

    def __init__(self, faults: str, num_envs: int = 8, step_seconds: float = 0.0) -> None:
        self.num_envs = num_envs
        self._envs = [ChaosEnv(faults, step_seconds / num_envs) for _ in range(num_envs)]
        self.single_observation_space, self.single_action_space = (
            ChaosEnv.observation_space,
            ChaosEnv.action_space,
        )

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        first = [env.reset(seed=None if seed is None else seed + i)[0] for i, env in enumerate(self._envs)]
        return np.stack(first), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        steps = [env.step(action) for env, action in zip(self._envs, actions, strict=True)]
        obs, reward, terminated, truncated = (
            np.array(column) for column in list(zip(*steps, strict=True))[:4]
        )
        ended, final = terminated | truncated, obs.copy()
        for i in np.flatnonzero(ended):
            obs[i] = self._envs[i].reset()[0]
        return obs, reward, terminated, truncated, {"final_obs": final, "_final_obs": ended}
