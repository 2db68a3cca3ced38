"""Envs that step N at once: what counts as one, in NumPy or in tensors. Knows torch by name only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import gymnasium as gym
from gymnasium.vector import VectorEnv

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BatchedKind = Literal["numpy", "tensor"]


class TensorEnvs(Protocol):
    """N envs as one object that takes and gives tensors on `device`, N rows each.

    Autoreset is SAME_STEP: where an episode ended, `obs` is the next one's first observation, and
    `info["final_obs"]`, structured like `obs`, holds the ended one's last in that row (other rows are not read).
    Dict and Tuple observations are dicts and tuples of tensors. What it returns may be its own buffers, reused.
    """

    @property
    def num_envs(self) -> int:
        """N."""
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
        """Where its tensors are and actions must be."""
        ...

    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode in every env; returns observations and an info."""
        ...

    def step(self, actions: Tensor) -> tuple[Any, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Step every env; returns observations, rewards, terminated, truncated and an info."""
        ...


BatchedEnvs: TypeAlias = VectorEnv[Any, Any, Any] | TensorEnvs

_OF_TENSOR_ENVS = ("num_envs", "single_observation_space", "single_action_space", "device", "reset", "step")


def batched_kind(envs: object) -> BatchedKind | None:
    """How an object steps N envs at once; None for anything else, classes of such objects too."""
    if isinstance(envs, VectorEnv):
        return "numpy"
    if isinstance(envs, gym.Env | type):
        return None
    return "tensor" if all(hasattr(envs, name) for name in _OF_TENSOR_ENVS) else None
