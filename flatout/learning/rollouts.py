"""What learners of rollouts share: transitions, returns and advantages.

Returns are parallel scans: log2(T) vector operations, on any device, without a host sync.
Shapes: T time steps, N envs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flatout.buffers.rollout import RolloutTensors


@dataclass(frozen=True, slots=True)
class Transitions:
    """A rollout as tensors on the learner's device."""

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

    @staticmethod
    def of(data: RolloutTensors, reward_tn: Tensor | None = None) -> Transitions:
        """A rollout's transitions, with other rewards where some are given."""
        return Transitions(
            obs_tn=tuple(array[:-1] for array in data.obs),
            action_tn=data.action,
            log_prob_tn=data.log_prob,
            reward_tn=data.reward if reward_tn is None else reward_tn,
            terminated_tn=data.terminated,
            truncated_tn=data.truncated,
            last_obs_n=tuple(array[-1] for array in data.obs),
            final_obs=data.final_obs,
            final_index=data.final_index,
        )

    def flat_obs(self) -> tuple[Tensor, ...]:
        """The observations (T · N, ...)."""
        return tuple(array.flatten(0, 1) for array in self.obs_tn)

    def values(self, value_of: Callable[[tuple[Tensor, ...]], Tensor]) -> tuple[Tensor, Tensor]:
        """Values (T, N) of all observations and of the ones that followed: final ones where episodes were truncated."""
        n_steps, n_envs = self.reward_tn.shape
        value_tn = value_of(self.flat_obs()).view(n_steps, n_envs)
        pairs = zip(self.last_obs_n, self.final_obs, strict=True)
        tail_value = value_of(tuple(torch.cat([last, final]) for last, final in pairs))
        next_value = torch.cat([value_tn[1:].reshape(-1), tail_value[:n_envs]])
        next_value = next_value.index_copy(0, self.final_index, tail_value[n_envs:])
        return value_tn, next_value.view(n_steps, n_envs)


def discounted_scan(x_tn: Tensor, decay_tn: Tensor) -> Tensor:
    """Solves y[t] = x[t] + decay[t] · y[t+1] with y[T] = 0, by doubling (Hillis and Steele 1986)."""
    y, decay = x_tn, decay_tn
    n_steps, reach = len(x_tn), 1
    while reach < n_steps:
        head = n_steps - reach
        y = torch.cat([y[:head] + decay[:head] * y[reach:], y[head:]])
        decay = torch.cat([decay[:head] * decay[reach:], decay[head:] * 0])
        reach *= 2
    return y


def lambda_returns(
    reward_tn: Tensor,
    next_value_tn: Tensor,
    terminated_tn: Tensor,
    truncated_tn: Tensor,
    *,
    gamma: float,
    mix: float,
) -> Tensor:
    """λ-returns with λ = `mix` (Peng and Williams 1994): y[t] = r[t] + γ ((1 - λ) V[t+1] + λ y[t+1]).

    `next_value` is the value of the observation that followed, the final one where an episode was truncated. At the
    last step of the rollout and where an episode was truncated, all of the future is that value; a terminated step
    has no future.
    """
    alive = (~terminated_tn).to(reward_tn.dtype)
    goes_on = (~(terminated_tn | truncated_tn)).to(reward_tn.dtype)
    goes_on = torch.cat([goes_on[:-1], torch.zeros_like(goes_on[:1])])
    bootstrapped = reward_tn + gamma * alive * (1 - mix * goes_on) * next_value_tn
    return discounted_scan(bootstrapped, gamma * mix * goes_on)


def gae(
    reward_tn: Tensor,
    value_tn: Tensor,
    next_value_tn: Tensor,
    terminated_tn: Tensor,
    truncated_tn: Tensor,
    *,
    gamma: float,
    gae_lambda: float,
    weight_tn: Tensor | None = None,
) -> Tensor:
    """Generalized advantage estimates (Schulman et al. 2016), each step counted with its weight (None: 1).

    `next_value` is the value of the observation that followed, the final one where an episode was
    truncated. A terminated step has no future; both kinds of end cut the sum over later steps.
    """
    alive = (~terminated_tn).to(reward_tn.dtype)
    goes_on = (~(terminated_tn | truncated_tn)).to(reward_tn.dtype)
    delta = reward_tn + gamma * next_value_tn * alive - value_tn
    if weight_tn is not None:
        delta, goes_on = delta * weight_tn, goes_on * weight_tn
    return discounted_scan(delta, gamma * gae_lambda * goes_on)
