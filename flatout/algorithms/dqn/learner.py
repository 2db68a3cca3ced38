"""DQN's learner: a Q-network that learns from a replay buffer, with a target network and epsilon-greedy exploration."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flatout.algorithms.dqn import loss as dqn
from flatout.algorithms.dqn.config import DQNConfig
from flatout.algorithms.dqn.fused import FusedDQN, can_fuse
from flatout.algorithms.dqn.loss import DQNMinibatch
from flatout.buffers.batch import ReplayBatch
from flatout.learning.off_policy import OffPolicyLearner
from flatout.learning.update import Update
from flatout.models.policy import QNetwork


class DQNLearner(OffPolicyLearner[DQNMinibatch]):
    """Trains a Q-network from a replay buffer, on one device."""

    METRICS = dqn.METRICS
    SPLITS = True
    model: QNetwork
    config: DQNConfig
    networks: dqn.TargetNetwork

    def __init__(self, model: QNetwork, config: DQNConfig, **how: Any) -> None:
        """`how`: the keywords of `Learner`."""
        super().__init__(model, config, **how)
        model.greedy.epsilon.fill_(config.epsilon(0.0))

    def make_update(self, module: nn.Module, **options: Any) -> Update[DQNMinibatch]:
        """With the target network, and with each sample's TD error."""
        self.networks = module = dqn.TargetNetwork(self.model, self.params)
        return super().make_update(module, sample_output=True, **options)

    def loss(self, batch: DQNMinibatch, coefficient: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG002
        return dqn.loss(self.networks, batch, self.config)

    def minibatch(self, sample: ReplayBatch) -> DQNMinibatch:
        it = sample
        return DQNMinibatch(it.obs, it.next_obs, it.action, it.reward, it.discount, it.weight)

    def explore(self, progress: float, env_steps: int) -> dict[str, float]:
        """Lower epsilon."""
        before = env_steps - self.n_envs * self.config.n_steps  # as progress
        epsilon = self.config.epsilon_after(before, progress)
        self.model.greedy.epsilon.fill_(epsilon)
        return {"rollout/exploration_rate": epsilon}

    def before_updates(self, before: int, after: int) -> None:
        """Copy to the target network, if that is due."""
        interval = self.config.target_update_interval
        if self.config.tau >= 1 and after // interval > before // interval:
            self.networks.soft_update()

    def drawn(self, whole: DQNMinibatch, parts: list[DQNMinibatch]) -> None:
        """Compute the target network's Q-values of all of them at once, if it stays the same meanwhile."""
        alone = self.update.ranks is None
        ahead = self.update.backend == "fused" and self.config.tau >= 1 and alone
        q, size = self._fused.target_q(whole) if ahead else None, self.config.batch_size
        for i, part in enumerate(parts):
            part.target_q = None if q is None else q[i * size : (i + 1) * size]

    def after_step(self) -> None:
        if self.config.tau < 1:
            self.networks.soft_update(self.config.tau)

    def make_fused(self) -> FusedDQN | None:
        """The fused backend, for plain MLPs."""
        fits = can_fuse(self.model, self.device)
        return FusedDQN(self.networks, self.params, self.config, self.update) if fits else None

    def example_batch(self, n: int) -> DQNMinibatch:
        obs, action = self.example_inputs(n)
        reward, ones = torch.linspace(-1, 1, n).to(self.device), torch.ones(n, device=self.device)
        return DQNMinibatch(obs, tuple(x.clone() for x in obs), action, reward, ones, ones.clone())
