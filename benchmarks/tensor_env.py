"""A batched env of tensors, in its own file, because loading torch before flatout changes its threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces


class TensorPoles:
    """N cart poles as torch tensors, without Gymnasium's own equations: what costs is the number of operations."""

    single_observation_space = spaces.Box(-np.inf, np.inf, (4,))
    single_action_space = spaces.Discrete(2)

    def __init__(self, num_envs: int, device: str = "cpu") -> None:
        self.num_envs, self.device = num_envs, torch.device(device)
        self._generator = torch.Generator(self.device)

    def _new(self) -> torch.Tensor:
        noise = torch.rand(self.num_envs, 4, generator=self._generator, device=self.device)
        return noise * 0.1 - 0.05

    def reset(self, seed: int | None = None) -> tuple[torch.Tensor, dict[str, Any]]:
        if seed is not None:
            self._generator.manual_seed(seed)
        self._state = self._new()
        return self._state, {}

    def step(
        self, actions: torch.Tensor
    ) -> tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
        _, speed, angle, spin = self._state.unbind(1)
        push = actions.float() * 2 - 1
        moved = [speed, 10 * push - angle.sin(), spin, 15 * angle.sin() - 14 * push * angle.cos()]
        state = self._state + 0.02 * torch.stack(moved, 1)
        terminated = (state[:, 0].abs() > 2.4) | (state[:, 2].abs() > 0.21)
        self._state = torch.where(terminated[:, None], self._new(), state)
        reward = torch.ones(self.num_envs, device=self.device)
        return self._state, reward, terminated, torch.zeros_like(terminated), {"final_obs": state}

    def close(self) -> None:
        """Nothing to close."""
