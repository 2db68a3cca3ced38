"""PPO's learner: advantages of a rollout, then epochs of shuffled minibatches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flatout.algorithms.ppo import loss as ppo
from flatout.algorithms.ppo.config import PPOConfig
from flatout.algorithms.ppo.fused import FusedPPO, can_fuse
from flatout.buffers.rollout import Learnable
from flatout.learning.learner import Learner, example_actions, example_obs, scheduled
from flatout.learning.normalize import RewardScaler
from flatout.learning.rollouts import Epochs, Transitions
from flatout.learning.update import PartSize, Update, in_parts
from flatout.models.policy import ActorCritic
from flatout.timing import Phase

KL_SLACK = 1.5
"""Updates stop at this multiple of target_kl, as in OpenAI's and Stable-Baselines3's PPO."""


class PPOLearner(Learner[ppo.PPOMinibatch]):
    """PPO's update over rollouts of one shape, on one device."""

    def __init__(self, model: ActorCritic, config: PPOConfig, **how: Any) -> None:
        """`how`: the keywords of `Learner`."""
        super().__init__(model, normalize_obs=config.normalize_obs, **how)
        self.model, self.config = model, config
        self.update = Update(
            model,
            self.params,
            partial(_loss, model, config),
            len(ppo.METRICS),
            max_grad_norm=config.max_grad_norm,
            batch_size=config.batch_size,
            prepare=partial(ppo.prepare, config=config),
            kl_index=ppo.KL,
            kl_limit=config.target_kl and config.target_kl * KL_SLACK,
            autocast=self.autocast,
        )
        self._fused: FusedPPO | None = None
        self._epochs = Epochs(self.update, seed=self.seed)
        self._total_batch = self.n_envs * config.n_steps
        self._value_parts = PartSize(self._total_batch)
        self._reward_scaler = (
            RewardScaler(self.n_envs, config.gamma, self.device) if config.normalize_reward else None
        )

    def learn(
        self,
        rollout: Learnable,
        *,
        iteration: int,
        progress: float,
        lag: int = 0,
        stop: Callable[[], bool] = lambda: False,
    ) -> dict[str, float]:
        """Learn from one rollout; `progress` in [0, 1] drives the schedules. Returns the metrics.

        `lag`: how many versions older than the current policy the one that collected it is.
        """
        config = self.config
        learning_rate = scheduled(config.learning_rate, config.learning_rate_schedule, progress)
        clip_range = scheduled(config.clip_range, config.clip_range_schedule, progress)

        self._enter(Phase.STAGE)
        data = self._transitions(rollout)
        self._enter(Phase.ADVANTAGE)
        log_ratio = self._value_parts.attempt(lambda: self._log_ratio(data)) if lag else None
        weights = log_ratio if config.vtrace else None
        batch = self._value_parts.attempt(lambda: ppo.advantages(self._values, data, config, weights))
        # Before a compiled step is compared: at a clip range of 0 rounding alone would decide about gradients.
        self.update.begin(learning_rate, clip_range)
        self._prepare_backend(lambda: batch.take(slice(0, config.batch_size)), progress)

        self._enter(Phase.UPDATE)
        self._epochs.begin(iteration)
        kl_sums = [self._kl_so_far()]
        for _ in range(config.n_epochs):
            if stop() or self._epochs.run(batch, stop) or self._has_stopped():
                break
            kl_sums.append(self._kl_so_far())
        self._update_obs_statistics(batch.obs)
        explained = 1 - (batch.returns - batch.value).var() / batch.returns.var()
        names = (*ppo.METRICS, "train/grad_norm", "train/explained_variance")
        metrics = self._read(names, explained) | _settled(kl_sums)
        self._leave()
        if log_ratio is not None:
            metrics |= dict(zip(ppo.DRIFT, ppo.drift(log_ratio).tolist(), strict=True))
        return metrics | {"train/learning_rate": learning_rate, "train/clip_range": clip_range}

    def _has_stopped(self) -> bool:
        """Whether the remaining epochs would change nothing."""
        return self.config.target_kl is not None and bool(self.update.stopped)

    def _kl_so_far(self) -> Tensor:
        """Sum of the updates' KL and their number, left on the device."""
        return torch.stack([self.update.metrics[ppo.KL], self.update.n_taken])

    def make_fused(self) -> FusedPPO | None:
        """The fused backend, for plain MLPs."""
        fits = can_fuse(self.model, self.device)
        self._fused = FusedPPO(self.model, self.params, self.config, self.update) if fits else None
        return self._fused

    def _fused_for(self, n: int) -> FusedPPO | None:
        """The fused backend, if it is used and there is memory for a whole rollout at once."""
        whole = self._total_batch == n == self._value_parts.n_rows
        return self._fused if whole and self.update.backend == "fused" else None

    def _values(self, obs: tuple[Tensor, ...]) -> Tensor:
        n = len(obs[0])
        if (fused := self._fused_for(n)) is not None:
            return fused.values(obs)
        size = self._value_parts.n_rows
        return in_parts(lambda part: self.model.value(tuple(array[part] for array in obs)), n, size)

    def _log_ratio(self, data: Transitions) -> Tensor:
        obs, action, log_prob = data.flat_obs(), data.action_tn.flatten(0, 1), data.log_prob_tn.flatten()
        if (fused := self._fused_for(len(log_prob))) is not None:
            return (fused.log_prob(obs, action) - log_prob).view(data.log_prob_tn.shape)

        def ratio(part: slice) -> Tensor:
            return ppo.log_ratio(
                self.model, tuple(array[part] for array in obs), action[part], log_prob[part]
            )

        flat = in_parts(ratio, len(log_prob), self._value_parts.n_rows)
        return flat.view(data.log_prob_tn.shape)

    def example_batch(self, n: int) -> ppo.PPOMinibatch:
        """A minibatch of the right shapes."""
        columns = [torch.linspace(-1, 1, n).to(self.device) for _ in range(4)]
        obs, action = example_obs(self.model, n, self.device), example_actions(self.model, n, self.device)
        return ppo.PPOMinibatch(obs, action, *columns)

    def _parts(self) -> list[PartSize]:
        return [self.update.parts, self._value_parts]

    def _transitions(self, rollout: Learnable) -> Transitions:
        data = rollout.tensors(self._staging)
        if self._reward_scaler is None:
            return Transitions.of(data)
        ended = data.terminated | data.truncated
        return Transitions.of(data, self._reward_scaler.scale(data.reward, ended))

    def state(self) -> dict[str, Tensor]:
        """Everything that a checkpoint needs, by name."""
        tensors = super().state()
        if self._reward_scaler is not None:
            state = self._reward_scaler.state()
            tensors |= {f"reward_scaler.{name}": value for name, value in state.items()}
        return tensors


def _settled(kl_sums: list[Tensor]) -> dict[str, float]:
    """The middle epoch's KL as a fraction of the last one's: near 1, the later epochs changed nothing."""
    if len(kl_sums) < 5:
        return {}
    totals, counts = torch.stack(kl_sums).diff(dim=0).T.tolist()
    means = [kl / max(n, 1.0) for kl, n in zip(totals, counts, strict=True)]
    middle, last = means[len(means) // 2 - 1], means[-1]
    return {"train/kl_settled": min(middle / last, 1.0)} if last > 0 else {}


def _loss(
    model: ActorCritic, config: PPOConfig, batch: ppo.PPOMinibatch, clip_range: Tensor
) -> tuple[Tensor, Tensor]:
    return ppo.loss(model, batch, clip_range, config)
