"""What learners of rollouts share: returns and advantages, of the transitions that a rollout becomes.

Returns are parallel scans: log2(T) vector operations, on any device, without a host sync.
Shapes: T time steps, N envs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flatout.buffers.rollout import Transitions as Transitions


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
