"""Parallelised Q-learning (Gallici et al. 2024): values learned from rollouts of many envs, no replay, no target network.

Comes in: tensors of one rollout. Goes out: a loss to differentiate. No env, no I/O, no host sync.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flatout.algorithms.dqn.loss import METRICS as METRICS
from flatout.algorithms.dqn.loss import row_losses
from flatout.algorithms.pqn.config import PQNConfig
from flatout.learning.minibatch import Rows
from flatout.learning.returns import lambda_returns
from flatout.learning.transitions import Transitions, values_and_next
from flatout.models.heads import MASKED
from flatout.models.policy import QNetwork


@dataclass(frozen=True, slots=True)
class Minibatch(Rows):
    """Rows to learn from, in any order."""

    obs: tuple[Tensor, ...]
    action: Tensor
    returns: Tensor

    def tensors(self) -> list[Tensor]:
        """All of its tensors, in a fixed order."""
        return [self.action, self.returns, *self.obs]

    def like(self, tensors: Sequence[Tensor]) -> Minibatch:
        """A minibatch of these tensors."""
        return Minibatch(tuple(tensors[2:]), *tensors[:2])


@torch.no_grad()
def best_values(model: QNetwork, obs: tuple[Tensor, ...]) -> Tensor:
    """Value (B,) of the best action that is allowed."""
    values, mask = model(obs).float(), model.mask(obs)
    best: Tensor = (values if mask is None else values.masked_fill(~mask, MASKED)).amax(1)
    return best


@torch.no_grad()
def targets(
    value_of: Callable[[tuple[Tensor, ...]], Tensor], data: Transitions, config: PQNConfig
) -> Minibatch:
    """What the values of the actions taken should have been; time and env flattened."""
    _, next_value_tn = values_and_next(value_of, data)
    returns_tn = lambda_returns(
        data.reward_tn,
        next_value_tn,
        data.terminated_tn,
        data.truncated_tn,
        gamma=config.gamma,
        mix=config.q_lambda,
    )
    obs = tuple(leaf.flatten(0, 1) for leaf in data.obs_tn)
    return Minibatch(obs, data.action_tn.flatten(0, 1), returns_tn.flatten())


def loss(model: QNetwork, batch: Minibatch, config: PQNConfig) -> tuple[Tensor, Tensor]:
    """The mean loss over rows, and its METRICS as one vector."""
    value = model(batch.obs).float().gather(1, batch.action).squeeze(1)
    total = row_losses(value, batch.returns, config.loss).mean()
    with torch.no_grad():
        parts = torch.stack([total, value.mean(), (batch.returns - value).abs().mean()])
    return total, parts
