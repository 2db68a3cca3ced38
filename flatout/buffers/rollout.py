"""One rollout, allocated once and written in place: T time steps of N envs.

NumPy arrays and the torch tensors share their memory, so neither side copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from flatout.buffers.staging import Staging
from flatout.device.shared import Spec
from flatout.envs.spaces import ActionLayout, Array, ObsLayout


@dataclass(frozen=True, slots=True)
class RolloutTensors:
    """A rollout as tensors on the learner's device; T time steps, N envs."""

    obs: tuple[Tensor, ...]
    """(T + 1, N, …): the last row is the observation after the last step."""
    action: Tensor
    log_prob: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    final_obs: tuple[Tensor, ...]
    """Last observations of the episodes that were truncated and not terminated, one row each."""
    final_index: Tensor
    """Their places t · N + n."""


class Learnable(Protocol):
    """What the learner needs of a rollout, wherever its transitions lie."""

    def tensors(self, staging: Staging) -> RolloutTensors:
        """The rollout as tensors on the staging's device."""
        ...


def rollout_spec(obs: ObsLayout, action: ActionLayout, n_steps: int, n_envs: int) -> Spec:
    """Shapes and dtypes of a rollout's arrays; `obs` has one row more, the observation after the last step."""
    shape = (n_steps, n_envs)
    leaves = list(enumerate(obs.specs))
    return {
        **{f"obs.{i}": ((n_steps + 1, n_envs, *leaf.shape), leaf.dtype) for i, leaf in leaves},
        **{f"final_obs.{i}": ((*shape, *leaf.shape), leaf.dtype) for i, leaf in leaves},
        "action": ((*shape, action.size), action.dtype),
        "log_prob": (shape, np.float32),
        "reward": (shape, np.float32),
        "terminated": (shape, np.bool_),
        "truncated": (shape, np.bool_),
    }


class Rollout:
    """Transitions of `n_steps` × `n_envs`, in arrays of `rollout_spec`'s shapes."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self._arrays = arrays
        self.n_steps: int = arrays["reward"].shape[0]
        self.n_envs: int = arrays["reward"].shape[1]
        n_leaves = sum(name.startswith("obs.") for name in arrays)
        self.obs = tuple(arrays[f"obs.{i}"] for i in range(n_leaves))
        self.final_obs = tuple(arrays[f"final_obs.{i}"] for i in range(n_leaves))
        """Written only where an episode was truncated; the untouched pages cost no memory."""
        self.action, self.log_prob = arrays["action"], arrays["log_prob"]
        self.reward = arrays["reward"]
        self.terminated, self.truncated = arrays["terminated"], arrays["truncated"]

    @staticmethod
    def alloc(obs: ObsLayout, action: ActionLayout, n_steps: int, n_envs: int) -> Rollout:
        """A rollout in ordinary memory."""
        spec = rollout_spec(obs, action, n_steps, n_envs)
        return Rollout({name: np.zeros(shape, dtype) for name, (shape, dtype) in spec.items()})

    def part(self, first: int, end: int) -> Rollout:
        """The envs from `first` to before `end`, in the same memory."""
        return Rollout({name: array[:, first:end] for name, array in self._arrays.items()})

    @property
    def n_transitions(self) -> int:
        """`n_steps` × `n_envs`."""
        return self.n_steps * self.n_envs

    def tensors(self, staging: Staging) -> RolloutTensors:
        """The rollout as tensors on the staging's device."""
        index = np.flatnonzero(self.truncated & ~self.terminated)
        t, n = np.divmod(index, self.n_envs)
        kept = [self.action, self.log_prob, self.reward, self.terminated, self.truncated, *self.obs]
        action, log_prob, reward, terminated, truncated, *obs = staging.to_device(kept)
        device = staging.device
        final_obs = tuple(torch.from_numpy(leaf[t, n]).to(device) for leaf in self.final_obs)
        return RolloutTensors(
            obs=tuple(obs),
            action=action,
            log_prob=log_prob,
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            final_obs=final_obs,
            final_index=torch.from_numpy(index).to(device),
        )

    @property
    def arrays(self) -> Mapping[str, Array]:
        """Its arrays by name."""
        return self._arrays
