"""Batched envs, which step N envs at once: Gymnasium's VectorEnv, or the same with tensors. Does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import gymnasium as gym
from gymnasium.vector import VectorEnv

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BatchedKind = Literal["numpy", "tensor"]


class TensorEnvs(Protocol):
    """N envs in one object that takes and returns tensors on `device`, with N as their first dimension.

    Autoreset is SAME_STEP: where an episode ended, `obs` is the first observation of the next one, and
    `info["final_obs"]`, structured like `obs`, holds the last one of the ended episode; for other envs it is not read.
    Dict and Tuple observations are dicts and tuples of tensors. The env may return the same buffers at every step.
    """

    @property
    def num_envs(self) -> int:
        """Number of envs, N."""
        ...

    @property
    def single_observation_space(self) -> gym.Space[Any]:
        """The space of one env's observations."""
        ...

    @property
    def single_action_space(self) -> gym.Space[Any]:
        """The space of one env's actions."""
        ...

    @property
    def device(self) -> torch.device:
        """Device of observations, rewards and actions."""
        ...

    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode in every env; returns observations and an info."""
        ...

    def step(self, actions: Tensor) -> tuple[Any, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Step every env; returns observations, rewards, terminated, truncated and an info."""
        ...


BatchedEnvs: TypeAlias = VectorEnv[Any, Any, Any] | TensorEnvs

_TENSOR_ENVS_MEMBERS = (
    "num_envs",
    "single_observation_space",
    "single_action_space",
    "device",
    "reset",
    "step",
)


def batched_kind(envs: object) -> BatchedKind | None:
    """Whether an object is a batched env, of NumPy arrays or of tensors; None if not, also for classes of such."""
    if isinstance(envs, VectorEnv):
        return "numpy"
    if isinstance(envs, gym.Env | type):
        return None
    return "tensor" if all(hasattr(envs, name) for name in _TENSOR_ENVS_MEMBERS) else None
