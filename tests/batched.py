"""The known-answer env of tests.known as envs that step N at once: in NumPy in each autoreset mode, and in torch.

Each step shows a target; the action that matches it earns 1. Env i's episodes have LENGTH steps, the optimum.
Every other env's are truncated. `FAULT` breaks one thing, for refusals.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from torch import Tensor

from flatout.envs.spaces import Array
from tests.known import LENGTH, N


class MatchBatch(VectorEnv[Any, Any, Array]):
    """In NumPy."""

    def __init__(self, num_envs: int = 8, mode: str = "SameStep", fault: str = "") -> None:
        self.metadata = {"autoreset_mode": AutoresetMode(mode)}
        self.num_envs, self._mode, self._fault = num_envs, mode, fault
        self.single_observation_space = spaces.Box(-1.0, 1.0, (N,))
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.single_action_space: gym.Space[Any] = spaces.Discrete(N)
        if fault == "space":
            self.single_action_space = spaces.Text(3)
        else:
            self.action_space = batch_space(self.single_action_space, num_envs)
        self._truncates = np.arange(num_envs) % 2 == 1
        self.n_resets, self.n_closes = 0, 0
        self.seeds: list[int | None] = []

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        mask = (options or {}).get("reset_mask")
        if mask is None:
            self.seeds.append(seed)
            self._rng = np.random.default_rng(seed)
            # Staggered, so that envs end at different times and NEXT_STEP is ragged.
            self._count = -(np.arange(self.num_envs) % 3)
            self._target = np.zeros(self.num_envs, np.int64)
            self._late = np.zeros(self.num_envs, np.bool_)
            mask = np.ones(self.num_envs, np.bool_)
            self._draw(mask)
            return self._obs(), {}
        self._begin(mask)
        return self._obs(), {}

    def step(self, actions: Array) -> Any:
        if self._fault == "raise":
            raise ValueError("no more")
        stepped = ~self._late
        reward = (actions == self._target).astype(np.float64) * stepped
        self._begin(self._late)
        self._count[stepped] += 1
        done = stepped & (self._count >= LENGTH)
        self._draw(stepped)
        infos: dict[str, Any] = {}
        if self._mode == "SameStep" and done.any():
            infos = {"final_obs": self._obs(), "_final_obs": done}
            self._begin(done)
        self._late = done if self._mode == "NextStep" else np.zeros_like(done)
        return self._broken(self._obs(), reward, done & ~self._truncates, done & self._truncates, infos)

    def close(self, **kwargs: Any) -> None:
        self.n_closes += 1

    def _broken(self, obs: Array, reward: Array, terminated: Array, truncated: Array, infos: Any) -> Any:
        if self._fault == "four":
            return obs, reward, terminated | truncated, infos
        if self._fault == "nan":
            obs[1] = np.nan
        if self._fault == "obs":
            obs = obs[1:]
        if self._fault == "reward":
            reward = reward[:, None]
        if self._fault == "flags":
            return obs, reward, terminated.astype(np.float64), truncated, infos
        return obs, reward, terminated, truncated, infos

    def _begin(self, mask: Array) -> None:
        self._count[mask] = 0
        self._draw(mask)

    def _draw(self, mask: Array) -> None:
        self._target[mask] = self._rng.integers(N, size=self.num_envs)[mask]

    def _obs(self) -> Array:
        return np.eye(N, dtype=np.float32)[self._target]


class MatchTensors:
    """In torch, as duck-typed TensorEnvs; changes its own buffers in place."""

    single_observation_space = spaces.Box(-1.0, 1.0, (N,))
    single_action_space = spaces.Discrete(N)
    device = torch.device("cpu")

    def __init__(self, num_envs: int = 8, fault: str = "") -> None:
        self.num_envs, self._fault = num_envs, fault
        self._generator = torch.Generator()
        self._truncates = torch.arange(num_envs) % 2 == 1
        self._count = torch.zeros(num_envs, dtype=torch.int64)
        self.n_closes = 0
        self.seeds: list[int | None] = []

    def reset(self, seed: int | None = None) -> tuple[Tensor, dict[str, Any]]:
        self.seeds.append(seed)
        if seed is not None:
            self._generator.manual_seed(seed)
        self._count = -(torch.arange(self.num_envs) % 3)
        return self._draw(), {}

    def step(self, actions: Tensor) -> tuple[Any, Tensor, Tensor, Tensor, dict[str, Any]]:
        reward = (actions == self._target).float()
        self._count += 1
        done = self._count >= LENGTH
        final = self._draw()
        self._count.masked_fill_(done, 0)
        obs: Any = self._draw()
        info = {} if self._fault == "final" else {"final_obs": final}
        if self._fault == "numpy":
            obs = obs.numpy()
        return obs, reward, done & ~self._truncates, done & self._truncates, info

    def close(self) -> None:
        self.n_closes += 1

    def _draw(self) -> Tensor:
        self._target = torch.randint(N, (self.num_envs,), generator=self._generator)
        return torch.nn.functional.one_hot(self._target, N).float()
