"""Advantage actor-critic (A2C, Mnih et al. 2016) as an algorithm of your own: one gradient step per rollout.

flatout train CartPole-v1 --algo a2c_example.py:A2C
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flatout.algorithms.base import Algorithm, AlgorithmConfig, Recipe, check
from flatout.buffers.rollout import Learnable
from flatout.learning.learner import Learner, example_actions, example_obs, scheduled
from flatout.learning.rollouts import Transitions, gae
from flatout.learning.update import Minibatch, Update
from flatout.models.config import NetworkConfig
from flatout.models.policy import ActorCritic
from flatout.timing import Phase

METRICS = ("train/loss", "train/policy_gradient_loss", "train/value_loss", "train/entropy_loss")


@dataclass(frozen=True, kw_only=True, slots=True)
class A2CConfig(AlgorithmConfig):
    """Hyperparameters: each becomes a flag, a JSON key and a Python keyword."""

    n_steps: int = 8
    """Env steps of each env in a rollout."""
    batch_size: int = 128
    """Transitions in an update; divides n_envs x n_steps."""
    learning_rate: float = 1e-3
    """Adam's step size; falls linearly to zero."""
    gamma: float = 0.99
    """Discount per step."""
    gae_lambda: float = 0.95
    """Trade-off between bias (0) and variance (1) of the advantages."""
    value_weight: float = 0.5
    """Weight of the value loss."""
    entropy_weight: float = 0.0
    """Weight of the entropy bonus."""

    def __post_init__(self) -> None:
        check("learning_rate", self.learning_rate, self.learning_rate > 0, "above 0")


@dataclass(frozen=True, slots=True)
class A2CMinibatch(Minibatch):
    """Samples of a rollout."""

    obs: tuple[Tensor, ...]
    action: Tensor
    advantage: Tensor
    returns: Tensor


def loss(model: ActorCritic, config: A2CConfig, batch: A2CMinibatch, _: Tensor) -> tuple[Tensor, Tensor]:
    """The mean loss of a minibatch, and METRICS as one vector."""
    log_prob, entropy, value = model.evaluate(batch.obs, batch.action)
    policy_loss = -(batch.advantage * log_prob).mean()
    value_loss = (value - batch.returns).square().mean()
    total = policy_loss + config.value_weight * value_loss - config.entropy_weight * entropy.mean()
    return total, torch.stack([total, policy_loss, value_loss, -entropy.mean()]).detach()


class A2CLearner(Learner[A2CMinibatch]):
    """Advantages of a rollout, then one update for each `batch_size` of its transitions."""

    def __init__(self, model: ActorCritic, config: A2CConfig, **how: Any) -> None:
        super().__init__(model, **how)
        self.model, self.config = model, config
        self.update = Update(
            model,
            self.params,
            partial(loss, model, config),
            len(METRICS),
            max_grad_norm=0.5,
            batch_size=config.batch_size,
            autocast=self.autocast,
        )

    def learn(self, rollout: Learnable, *, progress: float, **_: Any) -> dict[str, float]:
        """Learn from one rollout; returns the metrics."""
        self._enter(Phase.STAGE)
        data, size = Transitions.of(rollout.tensors(self._staging)), self.config.batch_size
        self._enter(Phase.ADVANTAGE)
        batch = self._samples(data)
        self.update.begin(scheduled(self.config.learning_rate, "linear", progress))
        self._prepare_backend(lambda: batch.take(slice(0, size)), progress)
        self._enter(Phase.UPDATE)
        for start in range(0, len(batch), size):
            self.update.step(batch.take(slice(start, start + size)))
        metrics = self._read((*METRICS, "train/grad_norm"))
        self._leave()
        return metrics | {"train/advantage_std": batch.advantage.std().item()}

    @torch.no_grad()
    def _samples(self, data: Transitions) -> A2CMinibatch:
        value, next_value = data.values(self.model.value)
        tensors = data.reward_tn, value, next_value, data.terminated_tn, data.truncated_tn
        advantage = gae(*tensors, gamma=self.config.gamma, gae_lambda=self.config.gae_lambda)
        returns = (advantage + value).flatten()
        return A2CMinibatch(data.flat_obs(), data.action_tn.flatten(0, 1), advantage.flatten(), returns)

    def example_batch(self, n: int) -> A2CMinibatch:
        """A minibatch of the right shapes, for timing and compiling."""
        obs, action = example_obs(self.model, n, self.device), example_actions(self.model, n, self.device)
        column = torch.linspace(-1, 1, n, device=self.device)
        return A2CMinibatch(obs, action, column, column.clone())


CARTPOLE = Recipe(n_envs=16, timesteps=300_000, algorithm=A2CConfig(), network=NetworkConfig())
OWN = ("train/advantage_std",)
A2C = Algorithm(
    name="a2c", config=A2CConfig, make_learner=A2CLearner, recipes={"CartPole-v1": CARTPOLE}, metrics=OWN
)
