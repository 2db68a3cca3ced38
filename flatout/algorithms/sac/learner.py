"""SAC's learner: an actor and two critics that learn from a replay buffer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flatout.algorithms.sac import loss as sac
from flatout.algorithms.sac.config import SACConfig
from flatout.algorithms.sac.fused import FusedSAC, UpdateNoise, can_fuse
from flatout.algorithms.sac.loss import SACMinibatch
from flatout.algorithms.sac.model import SACModel
from flatout.algorithms.sac.noise import noise_key, normal
from flatout.buffers.batch import ReplayBatch
from flatout.learning.off_policy import OffPolicyLearner
from flatout.learning.update import Update


class SACLearner(OffPolicyLearner[SACMinibatch]):
    """Trains an actor and two critics from a replay buffer, on one device."""

    METRICS = sac.METRICS
    model: SACModel
    config: SACConfig
    networks: sac.TargetCritics

    def __init__(self, model: SACModel, config: SACConfig, **how: Any) -> None:
        """`how`: the keywords of `Learner`."""
        super().__init__(model, config, **how)
        self._key = noise_key(self.seed)
        self._ahead = UpdateNoise(self._key)
        self._n_noise = torch.zeros(1, dtype=torch.int64, device=self.device)
        """Number of the next step, which its noise depends on."""
        self._n_ahead = 0
        """Minibatches whose noise was drawn before their step."""
        self.explore(0.0, 0)

    def make_update(self, module: nn.Module, **options: Any) -> Update[SACMinibatch]:
        """With the target critics, and with each sample's TD error."""
        self.networks = module = sac.TargetCritics(self.model, self.params)
        return super().make_update(module, sample_output=True, **options)

    def loss(self, batch: SACMinibatch, coefficient: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG002
        return sac.loss(self.networks, batch, self.config)

    def minibatch(self, sample: ReplayBatch) -> SACMinibatch:
        """With memory for noise, which `before_step` draws."""
        it = sample
        noise = torch.zeros(len(it.reward), 2 * it.action.shape[1], device=it.action.device)
        return SACMinibatch(it.obs, it.next_obs, it.action, it.reward, it.discount, it.weight, noise)

    def explore(self, progress: float, env_steps: int) -> dict[str, float]:  # noqa: ARG002
        """Act at random until learning starts."""
        self.model.head.random.fill_(float(env_steps < self.config.learning_starts))
        return {}

    def drawn(self, whole: SACMinibatch, parts: list[SACMinibatch]) -> None:
        """Draw the noise of all of them at once."""
        self._n_ahead = len(parts)
        size = parts[0].noise.numel()
        if self.device.type == "cpu":
            noise = self._ahead.draw(int(self._n_noise), len(parts), size)
        else:
            noise = normal(self._key, self._n_noise + torch.arange(len(parts), device=self.device), size)
        whole.noise.copy_(noise.view_as(whole.noise))

    def before_step(self, batch: SACMinibatch) -> SACMinibatch:
        """Draw the noise of its actions, where that is not done."""
        if self._n_ahead:
            self._n_ahead -= 1
        else:
            batch.noise.copy_(normal(self._key, self._n_noise, batch.noise.numel()).view_as(batch.noise))
        self._n_noise.add_(1)
        return batch

    def after_step(self) -> None:
        self.networks.soft_update(self.config.tau)

    def make_fused(self) -> FusedSAC | None:
        """The fused backend, for plain ReLU MLPs."""
        fits = can_fuse(self.model, self.config, self.device)
        return FusedSAC(self.networks, self.params, self.config, self.update) if fits else None

    def threads(self, n_cores: int, n_taken: int = 0) -> int:
        """The fused backend has two threads itself, each of which uses so many."""
        n_threads = super().threads(n_cores, n_taken)
        return max(n_threads // 2, 1) if self.update.backend == "fused" else n_threads

    def example_batch(self, n: int) -> SACMinibatch:
        obs, action = self.example_inputs(n)
        reward, ones = torch.linspace(-1, 1, n).to(self.device), torch.ones(n, device=self.device)
        noise = torch.linspace(-1, 1, n).to(self.device)[:, None].repeat(1, 2 * action.shape[1])
        others = reward, ones, ones.clone(), noise
        return SACMinibatch(obs, tuple(x.clone() for x in obs), action, *others)

    def state(self) -> dict[str, Tensor]:
        return super().state() | {"n_noise": self._n_noise}

    def close(self) -> None:
        super().close()
        if self._fused is not None:
            self._fused.close()
