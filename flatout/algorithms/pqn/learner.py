"""PQN's learner: λ-returns of a rollout by the current network, then epochs of shuffled minibatches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flatout.algorithms.pqn import loss as pqn
from flatout.algorithms.pqn.config import PQNConfig
from flatout.learning.learner import Learner
from flatout.learning.rollouts import Transitions
from flatout.models.policy import QNetwork


class PQNLearner(Learner[pqn.PQNMinibatch]):
    """PQN's update over rollouts of one shape, on one device."""

    METRICS = pqn.METRICS
    SPLITS = True
    model: QNetwork
    config: PQNConfig

    def __init__(self, model: QNetwork, config: PQNConfig, **how: Any) -> None:
        """`how`: the keywords of `Learner`."""
        super().__init__(model, config, **how)
        model.greedy.epsilon.fill_(config.epsilon(0.0))

    def samples(self, data: Transitions, lag: int) -> pqn.PQNMinibatch:  # noqa: ARG002  # Q-learning is off-policy
        """Samples with their λ-returns by the current network."""
        return pqn.targets(self.values, data, self.config)

    def value(self, obs: tuple[Tensor, ...]) -> Tensor:
        return pqn.best_values(self.model, obs)

    def loss(self, batch: pqn.PQNMinibatch, coefficient: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        return pqn.loss(self.model, batch, self.config)

    def after_updates(self, batch: pqn.PQNMinibatch, progress: float) -> dict[str, Tensor | float]:  # noqa: ARG002
        """Lower epsilon."""
        epsilon = self.config.epsilon(progress)
        self.model.greedy.epsilon.fill_(epsilon)
        return {"rollout/exploration_rate": epsilon}

    def example_batch(self, n: int) -> pqn.PQNMinibatch:
        return pqn.PQNMinibatch(*self.example_inputs(n), torch.linspace(-1, 1, n).to(self.device))
