"""The learner: takes a rollout, makes better parameters, tells what happened once per rollout."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flatout.algorithms import ppo
from flatout.algorithms.config import PPOConfig
from flatout.buffers.rollout import Learnable
from flatout.learn.normalize import RewardScaler, RunningMoments
from flatout.learn.params import FlatParams
from flatout.learn.update import Update
from flatout.models.policy import ActorCritic
from flatout.trace.phases import PhaseClock

KL_SLACK = 1.5
"""Updates stop at this multiple of target_kl, as in OpenAI's and Stable-Baselines3's PPO."""


class Learner:
    """PPO's update over rollouts of one shape, on one device."""

    def __init__(
        self, model: ActorCritic, config: PPOConfig, *, n_envs: int, seed: int, clock: PhaseClock
    ) -> None:
        self.model, self.config = model, config
        self.params = FlatParams(model)
        self.device = self.params.flat.device
        self.n_updates = 0
        self._seed, self._clock = seed, clock
        self._shuffle = torch.Generator(self.device)
        self.update: Update[ppo.Minibatch] = Update(
            model,
            self.params,
            partial(_loss, model, config),
            len(ppo.METRICS),
            max_grad_norm=config.max_grad_norm,
            batch_size=config.batch_size,
            prepare=partial(ppo.prepare, config=config),
            kl_index=ppo.KL,
            kl_limit=config.target_kl and config.target_kl * KL_SLACK,
        )
        self._obs_moments = {
            i: RunningMoments(tuple(model.get_buffer(f"obs_mean_{i}").shape), self.device)
            for i in model.float_leaves
            if config.normalize_obs
        }
        self._reward_scaler = (
            RewardScaler(n_envs, config.gamma, self.device) if config.normalize_reward else None
        )

    def learn(
        self,
        rollout: Learnable,
        *,
        iteration: int,
        progress: float,
        stop: Callable[[], bool] = lambda: False,
    ) -> dict[str, float]:
        """Learn from one rollout; `progress` in [0, 1] drives the schedules. Returns the metrics."""
        config = self.config
        left = max(1.0 - progress, 0.0)
        learning_rate = config.learning_rate * (left if config.learning_rate_schedule == "linear" else 1.0)
        clip_range = config.clip_range * (left if config.clip_range_schedule == "linear" else 1.0)

        self._clock.enter("advantage")
        data = self._transitions(rollout)
        batch = ppo.advantages(self.model, data, config)

        self._clock.enter("update")
        self.update.begin(learning_rate, clip_range)
        self._shuffle.manual_seed(self._seed * 1_000_003 + iteration)
        for _ in range(config.n_epochs):
            if stop() or self._epoch(batch, stop):
                break
        with torch.no_grad():
            for i, moments in self._obs_moments.items():
                self._renormalize(i, moments, batch.obs[i])
        metrics = self._read_metrics(batch)
        return metrics | {"train/learning_rate": learning_rate, "train/clip_range": clip_range}

    def _epoch(self, batch: ppo.Minibatch, stop: Callable[[], bool]) -> bool:
        """One pass in a new order; true when the remaining epochs would change nothing."""
        size = self.config.batch_size
        n_rows = len(batch.action)
        # Shuffled once, then sliced: one gather per epoch instead of one per minibatch.
        shuffled = batch.take(torch.randperm(n_rows, generator=self._shuffle, device=self.device))
        for start in range(0, n_rows, size):
            self.update.step(shuffled.take(slice(start, start + size)))
            if stop():
                return True
        return self.config.target_kl is not None and bool(self.update.stopped)

    def _transitions(self, rollout: Learnable) -> ppo.Transitions:
        data = rollout.tensors(self.device)
        reward = data.reward
        if self._reward_scaler is not None:
            reward = self._reward_scaler.scale(reward, data.terminated | data.truncated)
        return ppo.Transitions(
            obs_tn=tuple(leaf[:-1] for leaf in data.obs),
            action_tn=data.action,
            log_prob_tn=data.log_prob,
            reward_tn=reward,
            terminated_tn=data.terminated,
            truncated_tn=data.truncated,
            last_obs_n=tuple(leaf[-1] for leaf in data.obs),
            final_obs=data.final_obs,
            final_index=data.final_index,
        )

    def _renormalize(self, i: int, moments: RunningMoments, rows: Tensor) -> None:
        # After the updates: a rollout is learned from with the statistics it was collected with.
        moments.merge(rows)
        self.model.get_buffer(f"obs_mean_{i}").copy_(moments.mean)
        self.model.get_buffer(f"obs_scale_{i}").copy_((moments.var + 1e-8).rsqrt())

    def _read_metrics(self, batch: ppo.Minibatch) -> dict[str, float]:
        """The one read from the device of an iteration."""
        update = self.update
        spread = batch.returns.var()
        explained = 1 - (batch.returns - batch.value).var() / spread
        tail = torch.stack([explained, update.n_taken, update.n_bad, update.stopped.float()])
        values = torch.cat([update.metrics / update.n_taken.clamp(min=1), tail]).tolist()
        names = (*ppo.METRICS, "train/grad_norm", "train/explained_variance")
        n_taken, n_bad, _ = values[len(names) :]
        self.n_updates += int(n_taken)
        metrics = dict(zip(names, values, strict=False))
        return metrics | {
            "train/n_updates": float(self.n_updates),
            "train/n_taken": n_taken,
            "train/nan_skips": n_bad,
        }

    def state(self) -> dict[str, Tensor]:
        """Everything that learning on needs, by name."""
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        tensors |= {f"optimizer.{name}": value for name, value in self.update.state().items()}
        for i, moments in self._obs_moments.items():
            tensors |= {f"obs_moments.{i}.{name}": value for name, value in moments.state().items()}
        if self._reward_scaler is not None:
            state = self._reward_scaler.state()
            tensors |= {f"reward_scaler.{name}": value for name, value in state.items()}
        return tensors

    def load_state(self, tensors: dict[str, Any]) -> None:
        """Take back what `state` gave, in place."""
        with torch.no_grad():
            for name, tensor in self.state().items():
                tensor.copy_(tensors[name])


def _loss(
    model: ActorCritic, config: PPOConfig, batch: ppo.Minibatch, clip_range: Tensor
) -> tuple[Tensor, Tensor]:
    return ppo.loss(model, batch, clip_range, config)
