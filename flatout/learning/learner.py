"""What every learner has, whatever the algorithm: parameters, the update and its backend, notes, checkpoints.

An algorithm that learns from rollouts adds its loss (`loss`) and how a rollout becomes samples (`samples`); one that
learns otherwise overrides `learn`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, ClassVar, Generic, Literal, Protocol

import torch
from torch import Tensor, nn

from flatout.buffers.rollout import Learnable, Rollout, Staging
from flatout.device.accelerator import Retries, is_accelerator, is_out_of_memory, pinned, short_reason
from flatout.device.machine import torch_threads
from flatout.envs.loader import Code
from flatout.envs.spaces import Array
from flatout.learning.normalize import RewardScaler, RunningMoments
from flatout.learning.rollouts import Transitions
from flatout.learning.update import Backend, Batch, GraphBackend, PartSize, Repeated, Update, in_parts
from flatout.models.params import FlatParams, copy_all
from flatout.models.policy import PolicyNet
from flatout.timing import DeviceClock, Phase, PhaseClock

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Number format of an update's forward passes; everything else is float32."""
TINY_BATCH = 8
"""Samples that memory per sample is measured with."""
SHARE_OF_FREE = 0.5
"""Fraction of the free memory that one part's activations may take; the rest is for gradients and copies."""
IMAGES_AT_ONCE = 256
"""Images that are valued at once on a CPU: more would leave its cache, and take memory."""
VISIT_SECONDS = 0.2
"""How often to ask for a compiled update; an iteration of few steps is far shorter."""
STEPS_OF_A_GRAPH = 64
"""Steps that one graph has at most."""


class Compiles(Protocol):
    """Brings a compiled backend into a run once there is one."""

    only_cached: bool
    """Whether to begin no compilation."""
    wait: bool
    """Whether the run waits for it before its first update."""
    notes: list[str]
    """Messages for the user, one line each."""

    def visit(self, update: Update[Any], batch: Any, *, seconds_left: float) -> None:
        """Called between rollouts."""

    def close(self) -> None:
        """End a compilation that is under way."""


class Learner(ABC, Generic[Batch]):
    """Improves a model's parameters from rollouts of one shape, on one device."""

    METRICS: ClassVar[tuple[str, ...]]
    """Entries of the loss's metrics vector; the first is the loss."""
    SPLITS: ClassVar[bool] = False
    """Whether threads may compute the loss of parts of a minibatch at the same time."""
    model: Any
    """The network that learns and acts."""
    config: Any
    """The algorithm's config."""

    def __init__(
        self,
        model: PolicyNet,
        config: Any,
        *,
        n_envs: int,
        seed: int,
        clock: PhaseClock,
        precision: str = "fp32",
    ) -> None:
        self.model, self.config = model, config
        self.params = FlatParams(model)
        self.autocast = AUTOCAST.get(precision)
        self.device = self.params.flat.device
        self._on_accelerator = is_accelerator(self.device)
        self.n_updates = 0
        self.n_envs, self.seed = n_envs, seed
        self.notes: list[str] = []
        self._clock = clock
        self._staging = Staging(self.device)
        n_values = n_envs * config.n_steps
        if not self._on_accelerator and any(spec.kind == "image" for spec in model.obs.specs):
            n_values = min(n_values, IMAGES_AT_ONCE)
        self._value_parts = PartSize(n_values, self.device)
        self._n_epochs = config.epochs
        self._samples: Batch | None = None
        """On an accelerator: memory for a rollout's samples, allocated once …"""
        self._order: Tensor | None = None
        """… and for the order of all its epochs, a row for each minibatch."""
        self._drawn: tuple[int, Tensor] = -1, torch.empty(0)
        """The iteration that an order was drawn for ahead, and that order."""
        self._row = torch.zeros(1, dtype=torch.int64, device=self.device)
        """The row that the next captured step learns from."""
        self._graph: GraphBackend[Batch] | None = None
        self._beginning = Repeated[None](self.device)
        self._sampling, self._reading = Repeated[Batch](self.device), Repeated[Any](self.device)
        """On an accelerator: before a rollout's updates, making its samples, and the metrics after the updates."""
        self._n_ended = 0
        """Whole passes over the last rollout."""
        self.compilation: Compiles | None = None
        """Brings a compiled update in; None: no compilation."""
        self._visit_at = 0.0
        self._fused: Any = None
        self.device_clock: DeviceClock | None = None
        """Times phases on the device; None on the CPU, where the host's clock does."""
        self.capture = False
        """Whether to capture the step as a graph."""
        self._obs_moments = {
            i: RunningMoments(tuple(model.get_buffer(f"obs_mean_{i}").shape), self.device)
            for i in model.vector_indices
            if config.normalize_obs
        }
        self._reward_scaler: RewardScaler | None = None
        if getattr(config, "normalize_reward", False):
            self._reward_scaler = RewardScaler(n_envs, config.gamma, self.device)
        self.update = self.make_update(model)

    def make_update(self, module: nn.Module, **options: Any) -> Update[Batch]:
        """The update of this loss; `module` holds every parameter and buffer that the loss reads."""
        config = self.config
        options |= {"max_grad_norm": config.max_grad_norm, "batch_size": config.batch_rows}
        update = Update(module, self.params, self.loss, len(self.METRICS), autocast=self.autocast, **options)
        # A user's own network may depend on the whole minibatch.
        can_split = self.model.independent_rows and not self.model.state_size
        update.splits = self.SPLITS and can_split and self.device.type == "cpu" and self.autocast is None
        if config.optimizer is not None:
            from flatout.learning.optimizer import OwnOptimizer

            update.optimizer = OwnOptimizer(config.optimizer, self.params, config.learning_rate)
        return update

    @abstractmethod
    def loss(self, batch: Batch, coefficient: Tensor) -> tuple[Tensor, ...]:
        """The mean loss of a minibatch, and METRICS as one vector; see `LossFn`."""

    def samples(self, data: Transitions, lag: int) -> Batch:
        """All samples of a rollout, time and env flattened; repeated if it runs out of memory.

        `lag`: how many versions older than the current policy the one that collected it is.
        """
        raise NotImplementedError

    def coefficient(self, progress: float) -> float:  # noqa: ARG002
        """The scheduled number that `loss` is given."""
        return 0.0

    def epoch_ended(self) -> None:
        """Follows each whole pass over a rollout; may be captured as a part of a graph, so it changes tensors only."""

    def batch_metrics(self, batch: Batch) -> dict[str, Tensor]:  # noqa: ARG002
        """Metrics of a rollout's samples after its updates; may be captured as a graph."""
        return {}

    def after_updates(self, batch: Batch, progress: float) -> dict[str, Tensor | float]:  # noqa: ARG002
        """Called after a rollout's updates; returns metrics besides the loss's."""
        return {}

    def stage(self, rollout: Learnable, stop: Callable[[], bool]) -> None:
        """Begin to copy a rollout to the device, while the one before is learned from; called by another thread."""
        if isinstance(rollout, Rollout):
            try:
                self._staging.stage(rollout, stop)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                self.notes.append(
                    f"out of memory: a rollout is copied later, same result ({short_reason(error)})"
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
        """Learn from one rollout; `progress` in [0, 1] drives the schedules. Returns the metrics."""
        self._enter(Phase.STAGE)
        try:
            batch = self._batch_of(self._value_parts.attempt(lambda: rollout.tensors(self._staging)), lag)
        finally:
            self._staging.release()
        # Before a compiled step is compared: at a clip range of 0 rounding alone would decide about gradients.
        self._begin(progress)
        self._prepare_backend(lambda: batch.take(slice(0, self.update.batch_size)), progress)
        self._enter(Phase.UPDATE)
        self._n_ended = 0
        if self._graph is None:
            shuffle = torch.Generator().manual_seed(self._shuffle_seed(iteration))
            for _ in range(self._n_epochs):
                if stop() or self._pass_over(batch, shuffle, stop) or self.update.has_stopped():
                    break
                self._value_parts.attempt(self.epoch_ended)
                self._n_ended += 1
        else:
            self._replay(self._graph, iteration, stop)
        self._set_obs_statistics()
        return self._end(self._value_parts.attempt(lambda: self.after_updates(batch, progress)), batch)

    @torch.no_grad()
    def _batch_of(self, data: Transitions, lag: int) -> Batch:
        """The samples of a rollout; on an accelerator in memory of their own, so that the rollout's is free again."""
        self._enter(Phase.ADVANTAGE)
        make = self._captured_samples if self._on_accelerator else self._samples_of
        batch = self._value_parts.attempt(lambda: make(data, lag))
        self._merge_obs_statistics(data.flat_obs())
        return batch

    def _samples_of(self, data: Transitions, lag: int) -> Batch:
        """The samples, of rewards clipped or scaled if the config says so."""
        if self.config.clip_reward:
            data = replace(data, reward_tn=data.reward_tn.sign())
        if self._reward_scaler is not None:
            ended_tn = data.terminated_tn | data.truncated_tn
            data = replace(data, reward_tn=self._reward_scaler.scaled(data.reward_tn, ended_tn))
        return self.samples(data, lag)

    def _captured_samples(self, data: Transitions, lag: int) -> Batch:
        key = (lag, data.reward_tn.data_ptr(), len(data.final_index)) if data.stays and self.capture else None
        return self._sampling.run(key, lambda: self._kept(self._samples_of(data, lag)))

    def _kept(self, batch: Batch) -> Batch:
        if self._samples is None:
            self._samples = batch.like([tensor.clone() for tensor in batch.tensors()])
        else:
            copy_all(self._samples.tensors(), batch.tensors())
        return self._samples

    def _begin(self, progress: float) -> None:
        """Before a rollout's updates."""
        config = self.config
        rate = scheduled(config.learning_rate, config.learning_rate_schedule, progress)
        self.update.set(rate, self.coefficient(progress))
        if self._on_accelerator:
            version = self._sampling.version if self._reward_scaler is not None else 0
            self._beginning.run(version if self.capture else None, self._clear)
        else:
            self._clear()

    def _clear(self) -> None:
        """Clear the sums of the updates before, and keep the statistics of the rewards; may be captured as a graph."""
        self.update.clear()
        if self._reward_scaler is not None:
            self._reward_scaler.commit()

    def _pass_over(self, batch: Batch, shuffle: torch.Generator, stop: Callable[[], bool]) -> bool:
        """One pass over shuffled minibatches; true when `stop` ended it early."""
        n, size = len(batch), self.update.batch_size
        order = torch.randperm(n, generator=shuffle)
        # Shuffled once, then sliced: one gather per epoch instead of one per minibatch.
        shuffled = self._value_parts.attempt(lambda: batch.take(order.to(self.device)))
        for start in range(0, n, size):
            self.update.step(shuffled.take(slice(start, start + size)))
            if stop():
                return True
        return False

    def _replay(self, graph: GraphBackend[Batch], iteration: int, stop: Callable[[], bool]) -> None:
        """All epochs by replays of a graph, with the order of all of them sent to the device at once."""
        assert self._order is not None, "the graph reads it"
        n_updates = len(self._order)
        n_minibatches = n_updates // self._n_epochs
        drawn_for, drawn = self._drawn
        self._order.copy_(drawn if drawn_for == iteration else self._draw(iteration), non_blocking=True)
        self._row.zero_()
        for n_done in range(0, n_updates, graph.n_steps):
            if stop():
                break
            graph.replay()
            n_done += graph.n_steps
            if graph.n_steps < n_minibatches and n_done % n_minibatches == 0:
                self._value_parts.attempt(self.epoch_ended)
            self._n_ended = n_done // n_minibatches
        self._drawn = iteration + 1, self._draw(iteration + 1)  # now, while the device has work

    def _shuffle_seed(self, iteration: int) -> int:
        """Of the order of an iteration's minibatches."""
        return self.seed * 1_000_003 + iteration

    def _draw(self, iteration: int) -> Tensor:
        """The order of the samples in all epochs of an iteration, a row for each minibatch."""
        from flatout.learning.shuffle import draw_orders  # imports Numba, which takes a moment

        assert self._order is not None, "it is allocated before"
        drawn = draw_orders(
            self._shuffle_seed(iteration), self._n_epochs, self._order.numel() // self._n_epochs
        )
        return pinned(torch.from_numpy(drawn).view(self._order.shape), self.device)

    def values(self, obs: tuple[Tensor, ...]) -> Tensor:
        """Values of many observations, in parts that fit into memory."""
        size = self._value_parts.n_rows
        return in_parts(lambda part: self.value(tuple(array[part] for array in obs)), len(obs[0]), size)

    def value(self, obs: tuple[Tensor, ...]) -> Tensor:
        """Values (B,) of observations."""
        value: Tensor = self.model.value(obs)
        return value

    @abstractmethod
    def example_batch(self, n: int) -> Batch:
        """A minibatch of `n` samples of the right shapes, for timing, compiling and measuring memory."""

    def example_inputs(self, n: int) -> tuple[tuple[Tensor, ...], Tensor]:
        """Observations and actions of the right shapes, with every action allowed."""
        arrays, action = [], self.model.action
        for array, spec in zip(self.model.obs.alloc(n), self.model.obs.specs, strict=True):
            tensor = torch.from_numpy(array)
            if spec.kind == "discrete":
                tensor += torch.tensor(spec.start).view(tensor.shape[1:])
            elif spec.kind == "mask":
                tensor.fill_(True)
            arrays.append(tensor.to(self.device))
        dtype = torch.float32 if action.continuous else torch.int64
        return tuple(arrays), torch.zeros(n, action.size, dtype=dtype, device=self.device)

    def make_fused(self) -> Backend[Batch] | None:
        """The algorithm's fused backend for this model; None: it has none."""
        return None

    def use_fused(self) -> bool:
        """Compute steps by the fused backend, if the algorithm has one for this model; returns whether it has."""
        can = self.autocast is None and self.device.type == "cpu" and self.update.optimizer is None
        self._fused = self.make_fused() if can else None
        self.update.use(self._fused)
        return self._fused is not None

    @property
    def backend(self) -> str:
        """The backend that its updates use, or will use from the first one on."""
        if self.capture:
            return "graph"
        waits = self.compilation is not None and self.compilation.wait
        return "compiled" if waits else self.update.backend

    def threads(self, n_cores: int, n_taken: int = 0) -> int:
        """Threads for its updates on cores of which `n_taken` have other work too."""
        return torch_threads(self.model.n_multiplies, self.config.batch_size, n_cores, n_taken)

    def reserve(self) -> None:
        """Allocate what memory a whole run needs besides updates, or refuse."""

    def memory(self) -> list[str]:
        """What memory a whole run takes besides updates, for its header; at most one line."""
        return []

    def replay(self) -> Mapping[str, Array] | None:
        """The replay buffer's content, if checkpoints are to keep it."""
        return None

    def restore_replay(self, saved: Mapping[str, Array] | None, env_steps: int) -> None:
        """Continue after so many env steps with what `replay` gave, or without."""

    def close(self) -> None:
        """End what is under way."""
        if self.compilation is not None:
            self.compilation.close()
        self.update.close()

    def _enter(self, phase: Phase) -> None:
        self._clock.enter(phase)
        if self.device_clock is not None:
            self.device_clock.enter(phase)

    def _prepare_backend(self, example: Callable[[], Batch], progress: float) -> None:
        """Bring in the compiled update or the graph, if it is time; called between rollouts."""
        if self.update.backend != "eager":
            return
        if self.compilation is not None and perf_counter() >= self._visit_at:
            self._enter(Phase.COMPILE)
            so_far = self._clock.seconds.get(Phase.UPDATE, 0.0)
            seconds_left = so_far * (1 - progress) / progress if progress > 0 else 0.0
            self.compilation.visit(self.update, example(), seconds_left=seconds_left)
            self._visit_at = perf_counter() + VISIT_SECONDS
        if self.capture:
            try:
                self.update.parts.attempt(self._capture)
            except RuntimeError as error:
                self._no_graph(error)

    def _no_graph(self, error: RuntimeError) -> None:
        self.capture, self._graph, self.update.backend = False, None, "eager"
        self.notes.append(f"learning without a graph: {str(error).splitlines()[0]}")

    def _capture(self) -> None:
        """Capture the step, for whole minibatches of a rollout's samples."""
        samples, size = self._samples, self.update.batch_size
        assert samples is not None, "there is a rollout to learn from"
        if len(samples) % size:
            raise RuntimeError(f"a rollout is no multiple of the batch size {size}")
        n_minibatches, n_taken = len(samples) // size, 0
        shape = n_minibatches * self._n_epochs, size
        self._order = order = torch.zeros(shape, dtype=torch.int64, device=self.device)
        alone = self.update.ranks is None  # else the ranks meet after each gradient
        n_steps = _steps_of_a_graph(n_minibatches, self._n_epochs) if alone else 1

        def next_batch() -> Batch:
            batch = samples.take(order.index_select(0, self._row).view(-1))
            self._row.add_(1)
            return batch

        def after() -> None:
            nonlocal n_taken
            n_taken += 1
            if n_steps >= n_minibatches and n_taken % n_minibatches == 0:
                self.epoch_ended()

        self._graph = GraphBackend(self.update, next_batch, samples.take(slice(0, size)), after, n_steps)
        self.update.backend = self._graph.name

    def fit_into(self, free_bytes: int) -> None:
        """Split minibatches into parts from the start where a whole one would not fit into this much memory."""
        tiny, size = self.example_batch(TINY_BATCH), self.update.parts.n_rows
        row_bytes = bytes_per_row(lambda: self.update.loss(tiny), len(tiny))
        self.update.parts.n_rows = n = rows_that_fit(free_bytes, row_bytes, size)
        if n < size:
            self.notes.append(
                f"a minibatch of {size} samples needs {size * row_bytes / 1e9:.1f} GB, {free_bytes / 1e9:.1f} GB are free: "
                f"it is computed in parts of {n}, same result"
            )

    @property
    def n_backoffs(self) -> int:
        """How often memory ran out."""
        return sum(it.n_backoffs for it in self._watched())

    def _watched(self) -> list[PartSize | Retries]:
        """What repeats work that ran out of memory."""
        return [self.update.parts, self._value_parts]

    def take_notes(self) -> list[str]:
        """Messages since the last call, one line each."""
        repeated = (self._beginning, self._sampling, self._reading)
        sources = [self.notes, *(it.notes for it in (*repeated, *self._watched()))]
        if self.compilation is not None:
            sources.append(self.compilation.notes)
        notes = [note for source in sources for note in source]
        for source in sources:
            source.clear()
        return notes

    @torch.no_grad()
    def _merge_obs_statistics(self, obs: Sequence[Tensor]) -> None:
        """Merge these observations into the statistics."""
        for i, moments in self._obs_moments.items():
            self._value_parts.attempt(partial(moments.merge, obs[i]))

    def _set_obs_statistics(self) -> None:
        """Normalize with the current statistics from now on; called after the updates."""
        # A rollout is learned from with the statistics it was collected with.
        for i, moments in self._obs_moments.items():
            self._value_parts.attempt(partial(self._set_statistics, i, moments))

    @torch.no_grad()
    def _set_statistics(self, i: int, moments: RunningMoments) -> None:
        self.model.get_buffer(f"obs_mean_{i}").copy_(moments.mean)
        self.model.get_buffer(f"obs_scale_{i}").copy_((moments.var + 1e-8).rsqrt())

    def _end(self, more: Mapping[str, Tensor | float], batch: Batch | None = None) -> dict[str, float]:
        """Means of the update's metrics, and others unless they are NaN: the only read from the device in an iteration."""
        update, on_device = self.update, {k: v for k, v in more.items() if isinstance(v, Tensor)}

        def read() -> tuple[list[str], list[float]]:
            if self._on_accelerator:
                can_capture = self.capture and batch is not None
                key = (self._sampling.version, self._n_ended) if can_capture else None
                names, values = self._reading.run(key, lambda: self._metrics(batch))
            else:
                names, values = self._metrics(batch)
            if on_device:
                values = torch.cat([values, torch.stack(list(on_device.values()))])
            return [*names, *on_device], values.tolist()

        n_always = len(self.METRICS) + 3
        named = enumerate(zip(*self._value_parts.attempt(read), strict=True))
        metrics = {k: v for k, v in more.items() if not isinstance(v, Tensor)}
        metrics |= {k: v for i, (k, v) in named if v == v or i < n_always}
        self.n_updates += int(metrics["train/n_taken"])
        if self.device_clock is not None:
            self.device_clock.enter(Phase.IDLE)
            self.device_clock.cut()
        return metrics | {"train/n_updates": float(self.n_updates), "train/learning_rate": update.step_size}

    def _metrics(self, batch: Batch | None) -> tuple[list[str], Tensor]:
        update, more = self.update, {} if batch is None else self.batch_metrics(batch)
        names = [*self.METRICS, "train/grad_norm", "train/n_taken", "train/nan_skips", *more]
        rest = torch.stack([update.n_taken, update.n_bad, *more.values()])
        return names, torch.cat([update.metrics / update.n_taken.clamp(min=1), rest])

    def state(self) -> dict[str, Tensor]:
        """Everything that a checkpoint needs, by name."""
        parts = {"model": self.model.state_dict(), "optimizer": self.update.state()}
        parts |= {f"obs_moments.{i}": moments.state() for i, moments in self._obs_moments.items()}
        if self._reward_scaler is not None:
            parts["reward_scaler"] = self._reward_scaler.state()
        return {f"{part}.{name}": x for part, tensors in parts.items() for name, x in tensors.items()}

    def load_state(self, tensors: dict[str, Any]) -> None:
        """Restore what `state` gave, in place."""
        with torch.no_grad():
            for name, tensor in self.state().items():
                tensor.copy_(tensors[name])
        if self.update.optimizer is not None:
            own = {name[10:]: tensor for name, tensor in tensors.items() if name.startswith("optimizer.own.")}
            self.update.optimizer.load(own)


def bytes_per_row(loss: Callable[[], Tensor], n_rows: int) -> float:
    """Bytes per row that `loss`, over `n_rows` rows, saves for its backward pass."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        # Tensors that do not grow with the rows, such as parameters, do not count.
        if tensor.ndim and tensor.shape[0] == n_rows:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss()
    return sum(kept.values()) / n_rows


def _steps_of_a_graph(n_minibatches: int, n_epochs: int) -> int:
    """Whole epochs if they are few steps, else a part of one; always so that a rollout's updates are whole graphs."""
    whole, among = (n_minibatches, n_epochs) if n_minibatches <= STEPS_OF_A_GRAPH else (1, n_minibatches)
    return whole * max(n for n in range(1, among + 1) if among % n == 0 and n * whole <= STEPS_OF_A_GRAPH)


def rows_that_fit(free_bytes: int, row_bytes: float, n_rows: int) -> int:
    """The largest of n_rows, n_rows / 2, n_rows / 4 … whose activations fit."""
    while n_rows > 1 and n_rows * row_bytes > free_bytes * SHARE_OF_FREE:
        n_rows = -(-n_rows // 2)
    return n_rows


def scheduled(value: float, schedule: Literal["constant", "linear"] | Code, progress: float) -> float:
    """A setting's value at this point of the run; `progress` in [0, 1]."""
    if isinstance(schedule, Code):
        factor = schedule.load("learning_rate_schedule", None, "a function of the progress")
        return value * float(factor(progress))
    return value * max(1.0 - progress, 0.0) if schedule == "linear" else value
