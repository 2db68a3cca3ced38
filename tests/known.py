"""Envs whose best return is known, one for each kind of observation and action space.

Each step shows a target; the action that matches it earns 1. An episode has LENGTH steps, so the optimum
is LENGTH. Nothing is learned by chance: a random policy earns LENGTH / 4 or less.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

LENGTH = 8
N = 4


class Match(gym.Env[Any, Any]):
    """Observes a target as `obs_kind`; the matching action of `action_kind` earns 1."""

    def __init__(self, obs_kind: str = "box", action_kind: str = "discrete") -> None:
        self._obs_kind, self._action_kind = obs_kind, action_kind
        self.observation_space = observation_space(obs_kind)
        self.action_space = action_space(action_kind)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._t = 0
        return self._show(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        reward = score(self._action_kind, self._target, action)
        self._t += 1
        return self._show(), reward, self._t == LENGTH, False, {}

    def _show(self) -> Any:
        self._target = int(self.np_random.integers(N))
        return show(self._obs_kind, self._target)


def action_space(kind: str) -> gym.Space[Any]:
    by_kind: dict[str, gym.Space[Any]] = {
        "discrete": spaces.Discrete(N),
        "discrete_from_3": spaces.Discrete(N, start=3),
        "multidiscrete": spaces.MultiDiscrete([2, N]),
        "multibinary": spaces.MultiBinary(2),
        "box": spaces.Box(-10.0, 30.0, (2,)),
        "box_unbounded": spaces.Box(-np.inf, np.inf, (1,)),
    }
    return by_kind[kind]


def score(kind: str, target: int, action: Any) -> float:
    if kind == "discrete":
        return float(action == target)
    if kind == "discrete_from_3":
        return float(action == target + 3)
    if kind == "multidiscrete":
        return (float(action[0] == target % 2) + float(action[1] == target)) / 2
    if kind == "multibinary":
        return (float(action[0] == target % 2) + float(action[1] == target // 2)) / 2
    if kind == "box":
        want = np.array([-5.0 + 10 * target, 25.0 - 10 * target])
        return float(max(0.0, 1.0 - np.abs(action - want).mean() / 20.0))
    return float(max(0.0, 1.0 - abs(action[0] - (target - 1.5)) / 2.0))


def observation_space(kind: str) -> gym.Space[Any]:
    by_kind: dict[str, gym.Space[Any]] = {
        "box": spaces.Box(-1.0, 1.0, (N,)),
        "image": spaces.Box(0, 255, (8, 8, 1), np.uint8),
        "image_first": spaces.Box(0, 255, (3, 40, 40), np.uint8),
        "discrete": spaces.Discrete(N, start=-1),
        "multidiscrete": spaces.MultiDiscrete([2, 2]),
        "multibinary": spaces.MultiBinary(2),
        "dict": spaces.Dict({"low": spaces.Discrete(2), "high": spaces.Dict({"b": spaces.MultiBinary(1)})}),
        "tuple": spaces.Tuple((spaces.Box(0, 1, (1,)), spaces.Discrete(2))),
    }
    return by_kind[kind]


def show(kind: str, target: int) -> Any:
    low, high = target % 2, target // 2
    if kind == "box":
        return np.eye(N, dtype=np.float32)[target]
    if kind in ("image", "image_first"):
        side = 8 if kind == "image" else 40
        plane = np.zeros((side, side), np.uint8)
        half = side // 2
        plane[high * half : (high + 1) * half, low * half : (low + 1) * half] = 255
        return plane[:, :, None] if kind == "image" else np.stack([plane] * 3)
    return {
        "discrete": np.int64(target - 1),
        "multidiscrete": np.array([low, high]),
        "multibinary": np.array([low, high], np.int8),
        "dict": {"low": np.int64(low), "high": {"b": np.array([high], np.int8)}},
        "tuple": (np.array([high], np.float32), np.int64(low)),
    }[kind]


class OnlyTheMaskTells(gym.Env[Any, Any]):
    """Of 50 actions only the one that the mask allows earns a reward; the observation does not show which."""

    def __init__(self, where: str = "obs") -> None:
        self._in_info = where == "info"
        plain = spaces.Box(0, 1, (1,))
        self.observation_space: gym.Space[Any] = (
            plain
            if self._in_info
            else spaces.Dict({"x": plain, "action_mask": spaces.Box(0, 1, (50,), np.int8)})
        )
        self.action_space = spaces.Discrete(50)

    def _now(self) -> tuple[Any, dict[str, Any]]:
        self._target = int(self.np_random.integers(50))
        mask = (np.arange(50) == self._target).astype(np.int8)
        x = np.zeros(1, np.float32)
        return (x, {"action_mask": mask}) if self._in_info else ({"x": x, "action_mask": mask}, {})

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._t = 0
        return self._now()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward = float(action == self._target)
        self._t += 1
        obs, info = self._now()
        return obs, reward, self._t == LENGTH, False, info


class Forever(gym.Env[Any, Any]):
    """Reward 1 per step for any action; ends after five steps, by truncation or termination."""

    observation_space = spaces.Box(0, 1, (1,))
    action_space = spaces.Discrete(2)

    def __init__(self, how: str = "truncated") -> None:
        self._truncates = how == "truncated"

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._t = 0
        return np.ones(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._t += 1
        end = self._t == 5
        return np.ones(1, np.float32), 1.0, end and not self._truncates, end and self._truncates, {}


class Recall(gym.Env[Any, Any]):
    """Shows one of N cues in the first observation; `delay` steps later the action that matches it earns 1, the optimum."""

    observation_space = spaces.Box(0, 1, (N + 1,))
    action_space = spaces.Discrete(N)

    def __init__(self, delay: int = 30) -> None:
        self._delay = delay

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._t, self._cue = 0, int(self.np_random.integers(N))
        return np.eye(N + 1, dtype=np.float32)[self._cue], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward = float(self._t == self._delay and action == self._cue)
        self._t += 1
        obs = np.zeros(N + 1, np.float32)
        obs[N] = self._t == self._delay  # the cue's turn
        return obs, reward, self._t > self._delay, False, {}
