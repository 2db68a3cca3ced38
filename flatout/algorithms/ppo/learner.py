"""PPO's learner: advantages of a rollout, then epochs of shuffled minibatches."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flatout.algorithms.ppo import loss as ppo
from flatout.algorithms.ppo.config import PPOConfig
from flatout.algorithms.ppo.fused import FusedPPO, can_fuse
from flatout.learning.learner import Learner, scheduled
from flatout.learning.rollouts import Transitions
from flatout.learning.update import Update, in_parts
from flatout.models.policy import ActorCritic

KL_SLACK = 1.5
"""Updates stop at this multiple of target_kl, as in OpenAI's and Stable-Baselines3's PPO."""


class PPOLearner(Learner[ppo.PPOMinibatch]):
    """PPO's update over rollouts of one shape, on one device."""

    METRICS = ppo.METRICS
    SPLITS = True
    model: ActorCritic
    config: PPOConfig
    _log_ratio: Tensor | None
    """Log-ratios (T, N) of the current policy and an older one that collected the rollout."""

    def __init__(self, model: ActorCritic, config: PPOConfig, **how: Any) -> None:
        """`how`: the keywords of `Learner`."""
        super().__init__(model, config, **how)
        self._kl_sums = torch.zeros(config.epochs + 1, 2, device=self.device)
        """Sum of the updates' KL and their number after each epoch; the first row is zero."""
        self._epoch = torch.ones(1, dtype=torch.int64, device=self.device)
        """The row to be written next."""

    def make_update(self, module: nn.Module, **options: Any) -> Update[ppo.PPOMinibatch]:
        """With advantages normalized over whole minibatches, and stopped by target_kl."""
        config = self.config
        kl_limit = config.target_kl and config.target_kl * KL_SLACK
        prepare = partial(ppo.prepare, config=config)
        return super().make_update(module, prepare=prepare, kl_index=ppo.KL, kl_limit=kl_limit, **options)

    def loss(self, batch: ppo.PPOMinibatch, coefficient: Tensor) -> tuple[Tensor, Tensor]:
        return ppo.loss(self.model, batch, coefficient, self.config)

    def coefficient(self, progress: float) -> float:
        """The clip range."""
        return scheduled(self.config.clip_range, self.config.clip_range_schedule, progress)

    def samples(self, data: Transitions, lag: int) -> ppo.PPOMinibatch:
        """Samples with their advantages by the current critic."""
        self._epoch.fill_(1)
        self._log_ratio = self._log_ratio_of(data) if lag else None
        weights = self._log_ratio if self.config.vtrace else None
        return ppo.advantages(self.values, data, self.config, weights)

    def epoch_ended(self) -> None:
        """Remember the KL."""
        now = torch.stack([self.update.metrics[ppo.KL], self.update.n_taken])
        self._kl_sums.index_copy_(0, self._epoch, now.view(1, 2))
        self._epoch.add_(1)

    def after_updates(self, batch: ppo.PPOMinibatch, progress: float) -> dict[str, Tensor | float]:  # noqa: ARG002
        return {"train/clip_range": self.coefficient(progress)}

    def batch_metrics(self, batch: ppo.PPOMinibatch) -> dict[str, Tensor]:
        """Metrics of the critic, the epochs and the policy lag."""
        metrics = _settled(self._kl_sums[: self._n_ended + 1])
        metrics["train/explained_variance"] = 1 - (batch.returns - batch.value).var() / batch.returns.var()
        if self._log_ratio is not None:
            metrics |= dict(zip(ppo.DRIFT, ppo.drift(self._log_ratio), strict=True))
        return metrics

    def make_fused(self) -> FusedPPO | None:
        """The fused backend, for plain MLPs."""
        fits = can_fuse(self.model, self.device)
        return FusedPPO(self.model, self.params, self.config, self.update) if fits else None

    def _fused_for(self, n: int) -> FusedPPO | None:
        """The fused backend, if it is used and there is memory for a whole rollout at once."""
        whole = self.n_envs * self.config.n_steps == n == self._value_parts.n_rows
        return self._fused if whole and self.update.backend == "fused" else None

    def values(self, obs: tuple[Tensor, ...]) -> Tensor:
        fused = self._fused_for(len(obs[0]))
        return super().values(obs) if fused is None else fused.values(obs)

    def _log_ratio_of(self, data: Transitions) -> Tensor:
        obs, action, log_prob = data.flat_obs(), data.action_tn.flatten(0, 1), data.log_prob_tn.flatten()
        if (fused := self._fused_for(len(log_prob))) is not None:
            return (fused.log_prob(obs, action) - log_prob).view(data.log_prob_tn.shape)

        def ratio(part: slice) -> Tensor:
            return ppo.log_ratio(
                self.model, tuple(array[part] for array in obs), action[part], log_prob[part]
            )

        return in_parts(ratio, len(log_prob), self._value_parts.n_rows).view(data.log_prob_tn.shape)

    def example_batch(self, n: int) -> ppo.PPOMinibatch:
        columns = [torch.linspace(-1, 1, n).to(self.device) for _ in range(4)]
        return ppo.PPOMinibatch(*self.example_inputs(n), *columns)


def _settled(kl_sums: Tensor) -> dict[str, Tensor]:
    """The middle epoch's KL as a fraction of the last one's: near 1, the later epochs changed nothing."""
    if len(kl_sums) < 5:
        return {}
    totals, counts = kl_sums.diff(dim=0).unbind(1)
    means = totals / counts.clamp(min=1.0)
    middle, last = means[len(means) // 2 - 1], means[-1]
    return {"train/kl_settled": torch.where(last > 0, (middle / last).clamp(max=1.0), torch.nan)}
