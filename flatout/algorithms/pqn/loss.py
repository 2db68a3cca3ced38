"""PQN's targets, loss and metrics: the definition of the algorithm. No env, no I/O, no host sync."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flatout.algorithms.dqn.loss import METRICS as METRICS
from flatout.algorithms.dqn.loss import sample_losses
from flatout.algorithms.pqn.config import PQNConfig
from flatout.learning.rollouts import Transitions, lambda_returns
from flatout.learning.update import Minibatch
from flatout.models.heads import masked
from flatout.models.policy import QNetwork


@dataclass(frozen=True, slots=True)
class PQNMinibatch(Minibatch):
    """Samples of a rollout, in any order."""

    obs: tuple[Tensor, ...]
    action: Tensor
    returns: Tensor


@torch.no_grad()
def best_values(model: QNetwork, obs: tuple[Tensor, ...]) -> Tensor:
    """The largest Q-value (B,) among the allowed actions."""
    return masked(model(obs).float(), model.mask(obs)).amax(1)


@torch.no_grad()
def targets(
    value_of: Callable[[tuple[Tensor, ...]], Tensor], data: Transitions, config: PQNConfig
) -> PQNMinibatch:
    """Samples with their λ-returns by the current network; time and env flattened."""
    _, next_value_tn = data.values(value_of)
    returns_tn = lambda_returns(
        data.reward_tn,
        next_value_tn,
        data.terminated_tn,
        data.truncated_tn,
        gamma=config.gamma,
        mix=config.q_lambda,
    )
    return PQNMinibatch(data.flat_obs(), data.action_tn.flatten(0, 1), returns_tn.flatten())


def loss(model: QNetwork, batch: PQNMinibatch, config: PQNConfig) -> tuple[Tensor, Tensor]:
    """The mean loss over a minibatch, and its METRICS as one vector."""
    q = model(batch.obs).float().gather(1, batch.action).squeeze(1)
    total = sample_losses(q, batch.returns, config.loss).mean()
    with torch.no_grad():
        metrics = torch.stack([total, q.mean(), (batch.returns - q).abs().mean()])
    return total, metrics
