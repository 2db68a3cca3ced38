"""One rollout, allocated once and written in place: T time steps of N envs.

NumPy arrays and the torch tensors share their memory, so neither side copies.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from flatout.envs.spaces import ActionLayout, Array, ObsLayout


class Rollout:
    """Transitions of `n_steps` × `n_envs`; row `n_steps` of `obs` is the observation after the last step."""

    def __init__(self, obs: ObsLayout, action: ActionLayout, n_steps: int, n_envs: int) -> None:
        self.n_steps, self.n_envs = n_steps, n_envs
        row_type = np.float32 if action.continuous else np.int64
        self.obs = obs.alloc(n_steps + 1, n_envs)
        self.final_obs = obs.alloc(n_steps, n_envs)
        """Written only where an episode was truncated; the untouched pages cost no memory."""
        self.action: Array = np.zeros((n_steps, n_envs, action.size), row_type)
        self.log_prob: Array = np.zeros((n_steps, n_envs), np.float32)
        self.reward: Array = np.zeros((n_steps, n_envs), np.float32)
        self.terminated: Array = np.zeros((n_steps, n_envs), np.bool_)
        self.truncated: Array = np.zeros((n_steps, n_envs), np.bool_)
        self.obs_rows = [tuple(torch.from_numpy(leaf[t]) for leaf in self.obs) for t in range(n_steps)]
        """Observations of each time step as tensors, made once so that acting makes none."""
        self.action_rows = list(torch.from_numpy(self.action).unbind(0))
        self.log_prob_rows = list(torch.from_numpy(self.log_prob).unbind(0))

    @property
    def n_transitions(self) -> int:
        """`n_steps` × `n_envs`."""
        return self.n_steps * self.n_envs

    def bootstrap_rows(self) -> tuple[tuple[Array, ...], Array]:
        """Final observations of the episodes that were truncated and not terminated, and their places."""
        index = np.flatnonzero(self.truncated & ~self.terminated)
        t, n = np.divmod(index, self.n_envs)
        return tuple(leaf[t, n] for leaf in self.final_obs), index

    def tensors(self, device: torch.device) -> dict[str, Tensor]:
        """Actions, log-probabilities, rewards and ends as tensors on the device."""
        names = ("action", "log_prob", "reward", "terminated", "truncated")
        return {name: torch.from_numpy(getattr(self, name)).to(device) for name in names}
