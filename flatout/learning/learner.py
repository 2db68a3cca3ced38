"""What every learner has, whatever the algorithm: parameters, the update and its backend, notes, checkpoints.

An algorithm adds how a rollout becomes minibatches: `learn` takes a rollout and returns metrics.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any, Generic, Literal, Protocol

import torch
from torch import Tensor

from flatout.buffers.rollout import Learnable, Staging
from flatout.device.machine import torch_threads
from flatout.envs.spaces import Array
from flatout.learning.normalize import RunningMoments
from flatout.learning.update import Backend, Batch, GraphBackend, PartSize, Update
from flatout.models.params import FlatParams
from flatout.models.policy import PolicyNet
from flatout.timing import DeviceClock, Phase, PhaseClock

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Number format of an update's forward passes; everything else is float32."""
TINY_BATCH = 8
"""Samples that memory per sample is measured with."""
SHARE_OF_FREE = 0.5
"""Fraction of the free memory that one part's activations may take; the rest is for gradients and copies."""
VISIT_SECONDS = 0.2
"""How often to ask for a compiled update; an iteration of few steps is far shorter."""


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

    update: Update[Batch]

    def __init__(
        self,
        model: PolicyNet,
        *,
        n_envs: int,
        seed: int,
        clock: PhaseClock,
        precision: str = "fp32",
        normalize_obs: bool = False,
    ) -> None:
        self.params = FlatParams(model)
        self.autocast = AUTOCAST.get(precision)
        self.device = self.params.flat.device
        self.n_updates = 0
        self.n_envs, self.seed = n_envs, seed
        self.notes: list[str] = []
        self._net, self._clock = model, clock
        self._staging = Staging(self.device)
        self.compilation: Compiles | None = None
        """Brings a compiled update in; None: no compilation."""
        self._visit_at = 0.0
        self.device_clock: DeviceClock | None = None
        """Times phases on the device; None on the CPU, where the host's clock does."""
        self.capture = False
        """Whether to capture the step as a CUDA graph."""
        self._obs_moments = {
            i: RunningMoments(tuple(model.get_buffer(f"obs_mean_{i}").shape), self.device)
            for i in model.vector_indices
            if normalize_obs
        }

    @abstractmethod
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

    @abstractmethod
    def example_batch(self, n: int) -> Batch:
        """A minibatch of `n` samples of the right shapes, for timing, compiling and measuring memory."""

    def make_fused(self) -> Backend[Batch] | None:
        """The algorithm's fused backend for this model; None: it has none."""
        return None

    def use_fused(self) -> bool:
        """Compute steps by the fused backend, if the algorithm has one for this model; returns whether it has."""
        fused = self.make_fused() if self.update.autocast is None and self.device.type == "cpu" else None
        self.update.use(fused)
        return fused is not None

    @property
    def backend(self) -> str:
        """The backend that its updates use, or will use from the first one on."""
        if self.capture:
            return "graph"
        waits = self.compilation is not None and self.compilation.wait
        return "compiled" if waits else self.update.backend

    def threads(self, n_cores: int, n_taken: int = 0) -> int:
        """Threads for its updates on cores of which `n_taken` have other work too."""
        return torch_threads(self.params.flat.numel(), self.update.batch_size, n_cores, n_taken)

    def reserve(self) -> None:
        """Allocate what memory a whole run needs besides updates, or refuse."""

    def replay(self) -> Mapping[str, Array] | None:
        """The replay buffer's content, if checkpoints are to keep it."""
        return None

    def restore_replay(self, saved: Mapping[str, Array] | None, env_steps: int) -> None:
        """Continue after so many env steps with what `replay` gave, or without."""

    def close(self) -> None:
        """End what is under way."""
        if self.compilation is not None:
            self.compilation.close()

    def _parts(self) -> Sequence[PartSize]:
        """Everything that may run out of memory."""
        return [self.update.parts]

    def _enter(self, phase: Phase) -> None:
        self._clock.enter(phase)
        if self.device_clock is not None:
            self.device_clock.enter(phase)

    def _leave(self) -> None:
        """After a rollout's last operation."""
        if self.device_clock is not None:
            self.device_clock.enter(Phase.IDLE)
            self.device_clock.cut()

    def _prepare_backend(self, example: Callable[[], Batch], progress: float) -> None:
        """Bring in the compiled update or the CUDA graph, if it is time; called between rollouts."""
        if self.update.backend != "eager":
            return
        if self.compilation is not None and perf_counter() >= self._visit_at:
            self._enter(Phase.COMPILE)
            self.compilation.visit(self.update, example(), seconds_left=self._seconds_left(progress))
            self._visit_at = perf_counter() + VISIT_SECONDS
        if self.capture:
            self._capture(example())

    def _seconds_left(self, progress: float) -> float:
        """What the remaining updates take if they take as long as those so far."""
        return self._clock.seconds.get(Phase.UPDATE, 0.0) * (1 - progress) / progress if progress > 0 else 0.0

    def _capture(self, batch: Batch) -> None:
        """Capture the step; where that fails, continue without and say so."""
        try:
            self.update.use(GraphBackend(self.update, batch))
        except RuntimeError as error:
            self.capture = False
            self.notes.append(f"learning without a CUDA graph: {str(error).splitlines()[0]}")

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
        return sum(parts.n_backoffs for parts in self._parts())

    def take_notes(self) -> list[str]:
        """Messages since the last call, one line each."""
        sources = [self.notes, *(parts.notes for parts in self._parts())]
        if self.compilation is not None:
            sources.append(self.compilation.notes)
        notes = [note for source in sources for note in source]
        for source in sources:
            source.clear()
        return notes

    def _update_obs_statistics(self, obs: Sequence[Tensor]) -> None:
        """Merge these observations into the statistics that normalize them, after the updates."""
        # A rollout is learned from with the statistics it was collected with.
        with torch.no_grad():
            for i, moments in self._obs_moments.items():
                moments.merge(obs[i])
                self._net.get_buffer(f"obs_mean_{i}").copy_(moments.mean)
                self._net.get_buffer(f"obs_scale_{i}").copy_((moments.var + 1e-8).rsqrt())

    def _read(self, names: Sequence[str], *more: Tensor) -> dict[str, float]:
        """Means of the update's metrics, and `more`: the only read from the device in an iteration."""
        update = self.update
        tail = torch.stack([*more, update.n_taken, update.n_bad])
        values = torch.cat([update.metrics / update.n_taken.clamp(min=1), tail]).tolist()
        n_taken, n_bad = values[-2:]
        self.n_updates += int(n_taken)
        return dict(zip(names, values, strict=False)) | {
            "train/n_updates": float(self.n_updates),
            "train/n_taken": n_taken,
            "train/nan_skips": n_bad,
        }

    def state(self) -> dict[str, Tensor]:
        """Everything that a checkpoint needs, by name."""
        tensors = {f"model.{name}": value for name, value in self._net.state_dict().items()}
        tensors |= {f"optimizer.{name}": value for name, value in self.update.state().items()}
        for i, moments in self._obs_moments.items():
            tensors |= {f"obs_moments.{i}.{name}": value for name, value in moments.state().items()}
        return tensors

    def load_state(self, tensors: dict[str, Any]) -> None:
        """Restore what `state` gave, in place."""
        with torch.no_grad():
            for name, tensor in self.state().items():
                tensor.copy_(tensors[name])


def example_obs(model: PolicyNet, n: int, device: torch.device) -> tuple[Tensor, ...]:
    """Observations of the right shapes, with every action allowed."""
    arrays = []
    for array, spec in zip(model.obs.alloc(n), model.obs.specs, strict=True):
        tensor = torch.from_numpy(array)
        if spec.kind == "discrete":
            tensor += torch.tensor(spec.start).view(tensor.shape[1:])
        elif spec.kind == "mask":
            tensor.fill_(True)
        arrays.append(tensor.to(device))
    return tuple(arrays)


def example_actions(model: PolicyNet, n: int, device: torch.device) -> Tensor:
    """Actions of the right shapes."""
    dtype = torch.float32 if model.action.continuous else torch.int64
    return torch.zeros(n, model.action.size, dtype=dtype, device=device)


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


def rows_that_fit(free_bytes: int, row_bytes: float, n_rows: int) -> int:
    """The largest of n_rows, n_rows / 2, n_rows / 4 … whose activations fit."""
    while n_rows > 1 and n_rows * row_bytes > free_bytes * SHARE_OF_FREE:
        n_rows = -(-n_rows // 2)
    return n_rows


def scheduled(value: float, schedule: Literal["constant", "linear"], progress: float) -> float:
    """A setting's value at this point of the run; `progress` in [0, 1]."""
    return value * max(1.0 - progress, 0.0) if schedule == "linear" else value
