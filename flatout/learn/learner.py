"""The learner: takes a rollout, makes better parameters, tells what happened once per rollout."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from flatout.algorithms import ppo
from flatout.algorithms.config import PPOConfig
from flatout.buffers.rollout import Learnable
from flatout.buffers.staging import Staging
from flatout.learn.graphs import Captured
from flatout.learn.memory import PartSize, bytes_per_row, rows_that_fit
from flatout.learn.normalize import RewardScaler, RunningMoments
from flatout.learn.params import FlatParams
from flatout.learn.update import Update
from flatout.models.policy import ActorCritic
from flatout.trace.device import IDLE, DeviceClock
from flatout.trace.phases import PhaseClock

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The number format that forward passes of an update use; all else is float32."""
TINY_BATCH = 8
"""Rows that memory per row is measured with."""
KL_SLACK = 1.5
"""Updates stop at this multiple of target_kl, as in OpenAI's and Stable-Baselines3's PPO."""


class BringsCompiled(Protocol):
    """Gives an update its compiled step, when there is one."""

    only_kept: bool
    """Whether to begin no compilation."""
    notes: list[str]
    """What a user should know, one line each."""

    def visit(self, update: Update[Any], batch: Any, *, seconds_left: float) -> None:
        """Called between rollouts."""

    def close(self) -> None:
        """End what is under way."""


class Learner:
    """PPO's update over rollouts of one shape, on one device."""

    def __init__(
        self,
        model: ActorCritic,
        config: PPOConfig,
        *,
        n_envs: int,
        seed: int,
        clock: PhaseClock,
        precision: str = "fp32",
    ) -> None:
        self.model, self.config = model, config
        self.params = FlatParams(model)
        self.device = self.params.flat.device
        self.n_updates = 0
        self._staging = Staging(self.device)
        self.notes: list[str] = []
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
            autocast=AUTOCAST.get(precision),
        )
        self.compilation: BringsCompiled | None = None
        """Brings a compiled update in; None: learn without."""
        self.device_clock: DeviceClock | None = None
        """Sees when the device works on what; None on the host, whose clock sees it."""
        self.capture = False
        """Whether to capture the step as a CUDA graph."""
        self._value_parts = PartSize(n_envs * config.n_steps)
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
        lag: int = 0,
        stop: Callable[[], bool] = lambda: False,
    ) -> dict[str, float]:
        """Learn from one rollout; `progress` in [0, 1] drives the schedules. Returns the metrics.

        `lag`: how many versions the policy that collected it is behind.
        """
        config = self.config
        left = max(1.0 - progress, 0.0)
        learning_rate = config.learning_rate * (left if config.learning_rate_schedule == "linear" else 1.0)
        clip_range = config.clip_range * (left if config.clip_range_schedule == "linear" else 1.0)

        self._enter("stage")
        data = self._transitions(rollout)
        self._enter("advantage")
        log_ratio = self._value_parts.attempt(lambda: self._log_ratio(data)) if lag else None
        weigh_by = log_ratio if config.vtrace else None
        batch = self._value_parts.attempt(lambda: ppo.advantages(self._values, data, config, weigh_by))
        # Before anything is compared: at a clip range of 0 rounding alone would decide about gradients.
        self.update.begin(learning_rate, clip_range)
        if self.compilation is not None and self.update.compiled is None:
            self._enter("compile")
            first = batch.take(slice(0, config.batch_size))
            self.compilation.visit(self.update, first, seconds_left=self._seconds_left(progress))
        if self.capture and self.update.replayed is None:
            self._capture(batch.take(slice(0, config.batch_size)))

        self._enter("update")
        self._shuffle.manual_seed(self._seed * 1_000_003 + iteration)
        sums = [self._kl_so_far()]
        for _ in range(config.n_epochs):
            if stop() or self._epoch(batch, stop):
                break
            sums.append(self._kl_so_far())
        with torch.no_grad():
            for i, moments in self._obs_moments.items():
                self._renormalize(i, moments, batch.obs[i])
        metrics = self._read_metrics(batch) | _settled(sums)
        if self.device_clock is not None:
            self.device_clock.enter(IDLE)
            self.device_clock.cut()
        if log_ratio is not None:
            metrics |= dict(zip(ppo.DRIFT, ppo.drift(log_ratio).tolist(), strict=True))
        return metrics | {"train/learning_rate": learning_rate, "train/clip_range": clip_range}

    def _enter(self, phase: str) -> None:
        self._clock.enter(phase)
        if self.device_clock is not None:
            self.device_clock.enter(phase)

    def _kl_so_far(self) -> Tensor:
        """Sum of the updates' KL and their number, left on the device."""
        return torch.stack([self.update.metrics[ppo.KL], self.update.n_taken])

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

    def _seconds_left(self, progress: float) -> float:
        """What the updates still to come take if they take what those before took."""
        return self._clock.seconds.get("update", 0.0) * (1 - progress) / progress if progress > 0 else 0.0

    def _capture(self, batch: ppo.Minibatch) -> None:
        """Capture the step; where that cannot be done, learn without and say so."""
        try:
            self.update.replayed = Captured(self.update, self.update.run, batch).step
        except RuntimeError as error:
            self.capture = False
            self.notes.append(f"learning without a CUDA graph: {str(error).splitlines()[0]}")

    def _values(self, obs: tuple[Tensor, ...]) -> Tensor:
        return self._in_parts(lambda rows: self.model.value(tuple(leaf[rows] for leaf in obs)), len(obs[0]))

    def _log_ratio(self, data: ppo.Transitions) -> Tensor:
        obs = tuple(leaf.flatten(0, 1) for leaf in data.obs_tn)
        action, log_prob = data.action_tn.flatten(0, 1), data.log_prob_tn.flatten()
        flat = self._in_parts(
            lambda rows: ppo.log_ratio(
                self.model, tuple(leaf[rows] for leaf in obs), action[rows], log_prob[rows]
            ),
            len(log_prob),
        )
        return flat.view(data.log_prob_tn.shape)

    def _in_parts(self, function: Callable[[slice], Tensor], n_rows: int) -> Tensor:
        """What `function` gives for all rows, in as many parts as memory wants."""
        size = self._value_parts.n_rows
        if size >= n_rows:
            return function(slice(None))
        return torch.cat([function(slice(i, i + size)) for i in range(0, n_rows, size)])

    def example_batch(self, n_rows: int) -> ppo.Minibatch:
        """A minibatch of the right shapes, to try things with."""
        action = self.model.action
        kind = torch.float32 if action.continuous else torch.int64
        rows = torch.zeros(n_rows, action.size, dtype=kind)
        columns = [torch.linspace(-1, 1, n_rows) for _ in range(4)]
        obs = [torch.from_numpy(leaf) for leaf in self.model.obs.alloc(n_rows)]
        for leaf, layout in zip(obs, self.model.obs.leaves, strict=True):
            if layout.kind == "discrete":
                leaf += torch.tensor(layout.start).view(leaf.shape[1:])
        tensors = [tensor.to(self.device) for tensor in (rows, *columns, *obs)]
        return ppo.Minibatch(tuple(tensors[5:]), *tensors[:5])

    def fit_into(self, free_bytes: int) -> None:
        """Learn from minibatches in parts from the start where a whole one would not fit into this much memory."""
        tiny, size = self.example_batch(TINY_BATCH), self.config.batch_size
        row_bytes = bytes_per_row(
            lambda: _loss(self.model, self.config, tiny, self.update.coefficient)[0], len(tiny)
        )
        self.update.parts.n_rows = n_rows = rows_that_fit(free_bytes, row_bytes, size)
        if n_rows < size:
            self.notes.append(
                f"a minibatch of {size} rows wants {size * row_bytes / 1e9:.1f} GB, {free_bytes / 1e9:.1f} GB are free: "
                f"it is learned from in parts of {n_rows}, same result"
            )

    @property
    def n_backoffs(self) -> int:
        """How often memory ran out."""
        return self.update.parts.n_backoffs + self._value_parts.n_backoffs

    def take_notes(self) -> list[str]:
        """What happened since this was asked last, one line each."""
        sources = [self.notes, self.update.parts.notes, self._value_parts.notes]
        if self.compilation is not None:
            sources.append(self.compilation.notes)
        notes = [note for source in sources for note in source]
        for source in sources:
            source.clear()
        return notes

    def _transitions(self, rollout: Learnable) -> ppo.Transitions:
        data = rollout.tensors(self._staging)
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


def _settled(sums: list[Tensor]) -> dict[str, float]:
    """How far the policy had moved in the middle epoch, as a share of how far in the last: near 1, the rest did nothing."""
    if len(sums) < 5:
        return {}
    kl_sums, counts = torch.stack(sums).diff(dim=0).T.tolist()
    means = [kl / max(n, 1.0) for kl, n in zip(kl_sums, counts, strict=True)]
    middle, last = means[len(means) // 2 - 1], means[-1]
    return {"train/kl_settled": min(middle / last, 1.0)} if last > 0 else {}


def _loss(
    model: ActorCritic, config: PPOConfig, batch: ppo.Minibatch, clip_range: Tensor
) -> tuple[Tensor, Tensor]:
    return ppo.loss(model, batch, clip_range, config)
