"""What every learner has, whatever the algorithm: parameters, the update, its compiled form, notes, checkpoints.

An algorithm adds how a rollout becomes minibatches: `learn` takes a rollout and tells what happened, once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any, Generic, Protocol

import torch
from torch import Tensor

from flatout.buffers.rollout import Learnable, Staging
from flatout.device.machine import torch_threads
from flatout.envs.spaces import Array
from flatout.learning.graphs import Captured
from flatout.learning.memory import PartSize, bytes_per_row, rows_that_fit
from flatout.learning.normalize import RunningMoments
from flatout.learning.update import Batch, Update
from flatout.models.params import FlatParams
from flatout.models.policy import PolicyNet
from flatout.timing import DeviceClock, Phase, PhaseClock

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The number format that forward passes of an update use; all else is float32."""
TINY_BATCH = 8
"""Rows that memory per row is measured with."""
VISIT_SECONDS = 0.2
"""How often to ask for a compiled update; an iteration of few steps is far shorter."""


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


class Learner(ABC, Generic[Batch]):
    """Makes better parameters of rollouts of one shape, on one device."""

    update: Update[Batch]

    def __init__(
        self, model: PolicyNet, *, n_envs: int, seed: int, clock: PhaseClock, normalize_obs: bool
    ) -> None:
        self.params = FlatParams(model)
        self.device = self.params.flat.device
        self.n_updates = 0
        self.n_envs, self.seed = n_envs, seed
        self.notes: list[str] = []
        self._net, self._clock = model, clock
        self._staging = Staging(self.device)
        self.compilation: BringsCompiled | None = None
        """Brings a compiled update in; None: learn without."""
        self._visit_at = 0.0
        self.device_clock: DeviceClock | None = None
        """Sees when the device works on what; None on the host, whose clock sees it."""
        self.capture = False
        """Whether to capture the step as a CUDA graph."""
        self._obs_moments = {
            i: RunningMoments(tuple(model.get_buffer(f"obs_mean_{i}").shape), self.device)
            for i in model.vector_indices
            if normalize_obs
        }

    def threads(self, n_cores: int, n_taken: int = 0) -> int:
        """Threads for its updates on cores of which `n_taken` have other work too."""
        return torch_threads(self.params.flat.numel(), self.update.batch_size, n_cores, n_taken)

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

        `lag`: how many versions the policy that collected it is behind.
        """

    @abstractmethod
    def example_batch(self, n_rows: int) -> Batch:
        """A minibatch of the right shapes, to try things with."""

    @abstractmethod
    def loss(self, batch: Batch) -> Tensor:
        """The loss of a minibatch, to see what it takes."""

    def reserve(self) -> None:
        """Take what memory a whole run needs besides updates, or refuse."""

    def replay(self) -> Mapping[str, Array] | None:
        """What was stored to be learned from again, if it is to be kept."""
        return None

    def restore_replay(self, saved: Mapping[str, Array] | None, env_steps: int) -> None:
        """Go on at so many env steps with what `replay` gave, or without."""

    def close(self) -> None:
        """End what is under way."""
        if self.compilation is not None:
            self.compilation.close()

    def _parts(self) -> Sequence[PartSize]:
        """All that may run out of memory."""
        return [self.update.parts]

    def _enter(self, phase: Phase) -> None:
        self._clock.enter(phase)
        if self.device_clock is not None:
            self.device_clock.enter(phase)

    def _leave(self) -> None:
        """The rollout is learned from."""
        if self.device_clock is not None:
            self.device_clock.enter(Phase.IDLE)
            self.device_clock.cut()

    def _speed_up(self, example: Callable[[], Batch], progress: float) -> None:
        """Bring in the compiled update or the CUDA graph, if it is time."""
        if self.compilation is not None and self.update.compiled is None and perf_counter() >= self._visit_at:
            self._enter(Phase.COMPILE)
            self.compilation.visit(self.update, example(), seconds_left=self._seconds_left(progress))
            self._visit_at = perf_counter() + VISIT_SECONDS
        if self.capture and self.update.replayed is None:
            self._capture(example())

    def _seconds_left(self, progress: float) -> float:
        """What the updates still to come take if they take what those before took."""
        return self._clock.seconds.get(Phase.UPDATE, 0.0) * (1 - progress) / progress if progress > 0 else 0.0

    def _capture(self, batch: Batch) -> None:
        """Capture the step; where that cannot be done, learn without and say so."""
        try:
            self.update.replayed = Captured(self.update, self.update.run, batch).step
        except RuntimeError as error:
            self.capture = False
            self.notes.append(f"learning without a CUDA graph: {str(error).splitlines()[0]}")

    def fit_into(self, free_bytes: int) -> None:
        """Learn from minibatches in parts from the start where a whole one would not fit into this much memory."""
        tiny, size = self.example_batch(TINY_BATCH), self.update.parts.n_rows
        row_bytes = bytes_per_row(lambda: self.loss(tiny), len(tiny))
        self.update.parts.n_rows = n_rows = rows_that_fit(free_bytes, row_bytes, size)
        if n_rows < size:
            self.notes.append(
                f"a minibatch of {size} rows wants {size * row_bytes / 1e9:.1f} GB, {free_bytes / 1e9:.1f} GB are free: "
                f"it is learned from in parts of {n_rows}, same result"
            )

    @property
    def n_backoffs(self) -> int:
        """How often memory ran out."""
        return sum(parts.n_backoffs for parts in self._parts())

    def take_notes(self) -> list[str]:
        """What happened since this was asked last, one line each."""
        sources = [self.notes, *(parts.notes for parts in self._parts())]
        if self.compilation is not None:
            sources.append(self.compilation.notes)
        notes = [note for source in sources for note in source]
        for source in sources:
            source.clear()
        return notes

    def _renormalize(self, obs: Sequence[Tensor]) -> None:
        """Take these observations into what they are normalised by, after the updates."""
        # A rollout is learned from with the statistics it was collected with.
        with torch.no_grad():
            for i, moments in self._obs_moments.items():
                moments.merge(obs[i])
                self._net.get_buffer(f"obs_mean_{i}").copy_(moments.mean)
                self._net.get_buffer(f"obs_scale_{i}").copy_((moments.var + 1e-8).rsqrt())

    def _read(self, names: Sequence[str], *more: Tensor) -> dict[str, float]:
        """Means of the update's metrics, and others: the one read from the device of an iteration."""
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
        """Everything that learning on needs, by name."""
        tensors = {f"model.{name}": value for name, value in self._net.state_dict().items()}
        tensors |= {f"optimizer.{name}": value for name, value in self.update.state().items()}
        for i, moments in self._obs_moments.items():
            tensors |= {f"obs_moments.{i}.{name}": value for name, value in moments.state().items()}
        return tensors

    def load_state(self, tensors: dict[str, Any]) -> None:
        """Take back what `state` gave, in place."""
        with torch.no_grad():
            for name, tensor in self.state().items():
                tensor.copy_(tensors[name])


def example_obs(model: PolicyNet, n_rows: int, device: torch.device) -> tuple[Tensor, ...]:
    """Observations of the right shapes, with every action allowed, to try things with."""
    leaves = []
    for leaf, layout in zip(model.obs.alloc(n_rows), model.obs.specs, strict=True):
        tensor = torch.from_numpy(leaf)
        if layout.kind == "discrete":
            tensor += torch.tensor(layout.start).view(tensor.shape[1:])
        elif layout.kind == "mask":
            tensor.fill_(True)
        leaves.append(tensor.to(device))
    return tuple(leaves)
