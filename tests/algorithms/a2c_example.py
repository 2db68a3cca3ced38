"""Advantage actor-critic (A2C, Mnih et al. 2016) as an algorithm of your own: one gradient step per rollout.

flatout train CartPole-v1 --algo a2c_example.py:A2C
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flatout.algorithms.base import Algorithm, AlgorithmConfig, Recipe, Schedule, check
from flatout.learning.learner import Learner
from flatout.learning.rollouts import Transitions, gae
from flatout.learning.update import Minibatch
from flatout.models.config import NetworkConfig
from flatout.models.policy import ActorCritic


@dataclass(frozen=True, kw_only=True, slots=True)
class A2CConfig(AlgorithmConfig):
    """Hyperparameters: each becomes a flag, a JSON key and a Python keyword."""

    n_steps: int = 8
    batch_size: int = 128
    learning_rate: float = 1e-3
    learning_rate_schedule: Schedule = "linear"
    gae_lambda: float = 0.95
    """Trade-off between bias (0) and variance (1) of the advantages."""
    value_weight: float = 0.5
    """Weight of the value loss."""
    entropy_weight: float = 0.0
    """Weight of the entropy bonus."""

    def __post_init__(self) -> None:
        AlgorithmConfig.__post_init__(self)
        check(self, "0 or more", "value_weight", "entropy_weight")


@dataclass(frozen=True, slots=True)
class A2CMinibatch(Minibatch):
    """Samples of a rollout."""

    obs: tuple[Tensor, ...]
    action: Tensor
    advantage: Tensor
    returns: Tensor


class A2CLearner(Learner[A2CMinibatch]):
    """Advantages of a rollout, then one update for each `batch_size` of its transitions."""

    METRICS = ("train/loss", "train/policy_gradient_loss", "train/value_loss", "train/entropy_loss")
    model: ActorCritic
    config: A2CConfig

    def samples(self, data: Transitions, lag: int) -> A2CMinibatch:
        """All samples of a rollout, with their advantages."""
        value, next_value = data.values(self.values)
        tensors = data.reward_tn, value, next_value, data.terminated_tn, data.truncated_tn
        advantage = gae(*tensors, gamma=self.config.gamma, gae_lambda=self.config.gae_lambda)
        returns = (advantage + value).flatten()
        return A2CMinibatch(data.flat_obs(), data.action_tn.flatten(0, 1), advantage.flatten(), returns)

    def loss(self, batch: A2CMinibatch, coefficient: Tensor) -> tuple[Tensor, Tensor]:
        """The mean loss of a minibatch, and METRICS as one vector."""
        log_prob, entropy, value = self.model.evaluate(batch.obs, batch.action)
        policy_loss = -(batch.advantage * log_prob).mean()
        value_loss = (value - batch.returns).square().mean()
        config, entropy_loss = self.config, -entropy.mean()
        total = policy_loss + config.value_weight * value_loss + config.entropy_weight * entropy_loss
        return total, torch.stack([total, policy_loss, value_loss, entropy_loss]).detach()

    def after_updates(self, batch: A2CMinibatch, progress: float) -> dict[str, Tensor | float]:
        """A metric of its own."""
        return {"train/advantage_std": batch.advantage.std()}

    def example_batch(self, n: int) -> A2CMinibatch:
        """A minibatch of the right shapes, for timing and compiling."""
        column = torch.linspace(-1, 1, n, device=self.device)
        return A2CMinibatch(*self.example_inputs(n), column, column.clone())


CARTPOLE = Recipe(n_envs=16, timesteps=300_000, algorithm=A2CConfig(), network=NetworkConfig())
OWN = ("train/advantage_std",)
A2C = Algorithm(
    name="a2c", config=A2CConfig, make_learner=A2CLearner, recipes={"CartPole-v1": CARTPOLE}, metrics=OWN
)
