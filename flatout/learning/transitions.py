"""A rollout as algorithms see it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flatout.buffers.rollout import RolloutTensors


@dataclass(frozen=True, slots=True)
class Transitions:
    """A rollout as tensors on the learner's device; T time steps, N envs."""

    obs_tn: tuple[Tensor, ...]
    action_tn: Tensor
    log_prob_tn: Tensor
    reward_tn: Tensor
    terminated_tn: Tensor
    truncated_tn: Tensor
    last_obs_n: tuple[Tensor, ...]
    final_obs: tuple[Tensor, ...]
    """Last observations of the truncated episodes, one row each."""
    final_index: Tensor
    """Their places t · N + n."""


def as_transitions(data: RolloutTensors, reward_tn: Tensor) -> Transitions:
    """A rollout with these rewards, its last observations apart."""
    return Transitions(
        obs_tn=tuple(leaf[:-1] for leaf in data.obs),
        action_tn=data.action,
        log_prob_tn=data.log_prob,
        reward_tn=reward_tn,
        terminated_tn=data.terminated,
        truncated_tn=data.truncated,
        last_obs_n=tuple(leaf[-1] for leaf in data.obs),
        final_obs=data.final_obs,
        final_index=data.final_index,
    )


def values_and_next(
    value_of: Callable[[tuple[Tensor, ...]], Tensor], data: Transitions
) -> tuple[Tensor, Tensor]:
    """Values (T, N) of all observations, and of those that followed: the final ones where episodes were truncated."""
    n_steps, n_envs = data.reward_tn.shape
    value_tn = value_of(tuple(leaf.flatten(0, 1) for leaf in data.obs_tn)).view(n_steps, n_envs)
    tail = tuple(
        torch.cat([last, final]) for last, final in zip(data.last_obs_n, data.final_obs, strict=True)
    )
    tail_value = value_of(tail)
    next_value = torch.cat([value_tn[1:].reshape(-1), tail_value[:n_envs]])
    next_value = next_value.index_copy(0, data.final_index, tail_value[n_envs:])
    return value_tn, next_value.view(n_steps, n_envs)
