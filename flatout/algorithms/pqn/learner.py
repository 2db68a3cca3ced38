"""PQN's learner: λ-returns of a rollout by the current network, then epochs of shuffled minibatches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flatout.algorithms.pqn import loss as pqn
from flatout.algorithms.pqn.config import PQNConfig
from flatout.buffers.rollout import Learnable
from flatout.learning.learner import Learner, example_actions, example_obs, scheduled
from flatout.learning.rollouts import Epochs, Transitions
from flatout.learning.update import PartSize, Update, in_parts
from flatout.models.policy import QNetwork
from flatout.timing import Phase

NAMES = (*pqn.METRICS, "train/grad_norm")


class PQNLearner(Learner[pqn.PQNMinibatch]):
    """PQN's update over rollouts of one shape, on one device."""

    def __init__(self, model: QNetwork, config: PQNConfig, **how: Any) -> None:
        """`how`: the keywords of `Learner`."""
        super().__init__(model, normalize_obs=config.normalize_obs, **how)
        self.model, self.config = model, config
        self.update = Update(
            model,
            self.params,
            partial(_loss, model, config),
            len(pqn.METRICS),
            max_grad_norm=config.max_grad_norm,
            batch_size=config.batch_size,
            autocast=self.autocast,
        )
        self._epochs = Epochs(self.update, seed=self.seed)
        self._value_parts = PartSize(self.n_envs * config.n_steps)
        model.greedy.epsilon.fill_(config.epsilon(0.0))

    def learn(
        self,
        rollout: Learnable,
        *,
        iteration: int,
        progress: float,
        stop: Callable[[], bool] = lambda: False,
        **_unused: Any,  # lag: Q-learning is off-policy
    ) -> dict[str, float]:
        """Learn from one rollout; `progress` in [0, 1] drives the schedules. Returns the metrics."""
        config = self.config
        learning_rate = scheduled(config.learning_rate, config.learning_rate_schedule, progress)
        self._enter(Phase.STAGE)
        data = rollout.tensors(self._staging)
        self._enter(Phase.ADVANTAGE)
        transitions = Transitions.of(data)
        batch = self._value_parts.attempt(lambda: pqn.targets(self._values, transitions, config))
        self.update.begin(learning_rate)
        self._prepare_backend(lambda: batch.take(slice(0, config.batch_size)), progress)
        self._enter(Phase.UPDATE)
        self._epochs.begin(iteration)
        for _ in range(config.n_epochs):
            if stop() or self._epochs.run(batch, stop):
                break
        self._update_obs_statistics(batch.obs)
        epsilon = config.epsilon(progress)
        self.model.greedy.epsilon.fill_(epsilon)
        metrics = self._read(NAMES)
        self._leave()
        return metrics | {"train/learning_rate": learning_rate, "rollout/exploration_rate": epsilon}

    def _values(self, obs: tuple[Tensor, ...]) -> Tensor:
        def best(part: slice) -> Tensor:
            return pqn.best_values(self.model, tuple(array[part] for array in obs))

        return in_parts(best, len(obs[0]), self._value_parts.n_rows)

    def example_batch(self, n: int) -> pqn.PQNMinibatch:
        """A minibatch of the right shapes."""
        obs, action = example_obs(self.model, n, self.device), example_actions(self.model, n, self.device)
        return pqn.PQNMinibatch(obs, action, torch.linspace(-1, 1, n).to(self.device))

    def _parts(self) -> list[PartSize]:
        return [self.update.parts, self._value_parts]


def _loss(model: QNetwork, config: PQNConfig, batch: pqn.PQNMinibatch, _: Tensor) -> tuple[Tensor, Tensor]:
    return pqn.loss(model, batch, config)
