"""Data-parallel learning on torch.distributed: several processes, the ranks, train one agent.

Each rank steps its own envs and computes its own part of every minibatch. All ranks hold the same parameters, optimizer
state, statistics and, after each rollout, the same transitions of all envs (`RankCollector`). So everything but the gradient of a
minibatch (`SharedGradient`) is computed as in a run of one process, and the result is the same but for rounding. A
checkpoint does not depend on the number of ranks either. Rank 0 writes the run's folder, prints and evaluates.

Ranks are started by `flatout train --devices N` or by torchrun. Gradients travel over NCCL between CUDA devices, everything
else over gloo. Shapes: T time steps, N envs.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from flatout.buffers.rollout import Rollout, TensorRollout
from flatout.collect.collector import Collects
from flatout.config.fields import replace
from flatout.config.run_config import RunConfig
from flatout.device.accelerator import collective_backend, is_accelerator, short_reason
from flatout.envs.check import EnvInfo
from flatout.envs.spaces import Array
from flatout.errors import FlatoutError
from flatout.executors.base import Episode
from flatout.executors.episodes import merge_snapshots, part_of_snapshot
from flatout.learning.update import Batch, Update
from flatout.models.policy import Policy, PolicyNet
from flatout.runlog.recorder import Progress
from flatout.timing import Lane
from flatout.training.checkpoint import Checkpoint, CheckpointFolder

T = TypeVar("T")
TIMEOUT = "FLATOUT_RANK_TIMEOUT"
"""The environment variable for --rank-timeout: seconds that a rank waits for the others …"""
TIMEOUT_SECONDS = 600.0
"""… and how many if it is not set."""


class LostRankError(FlatoutError):
    """Another rank has died, or has not answered in time."""

    exit_code = 75
    """The system's code for failures that may be gone when tried again."""


@cache
def join() -> Ranks | None:
    """The ranks of this run, once all of them are there; None if this process is on its own.

    Environment variables say so: torchrun's, or those of cli/devices.py.
    """
    said = os.environ
    n = int(said.get("WORLD_SIZE", "1"))
    if n == 1:
        return None
    timeout = timedelta(seconds=float(said.get(TIMEOUT, TIMEOUT_SECONDS)))
    with _together("start"):
        meeting = said.get("FLATOUT_RENDEZVOUS", "env://")
        dist.init_process_group("gloo", meeting, timeout, world_size=n, rank=int(said["RANK"]))
        # Its threads would abort the process if they were there at its end.
        atexit.register(dist.destroy_process_group)
        return Ranks(dist.get_rank(), n, timeout)


@contextmanager
def _together(doing: str) -> Iterator[None]:
    """Turn errors of torch.distributed into one line."""
    try:
        yield
    except RuntimeError as error:
        reason = short_reason(error).rpartition("] ")[2]
        who = f"rank {os.environ.get('RANK')} of {os.environ.get('WORLD_SIZE')}"
        raise LostRankError(f"{who} lost the others ({doing}: {reason})") from error


class Ranks:
    """This process among the ranks. All ranks call the same methods in the same order."""

    def __init__(self, rank: int, n: int, timeout: timedelta) -> None:
        self.rank, self.n, self._timeout = rank, n, timeout
        self.is_first = rank == 0
        # Rollouts are exchanged by the thread that collects, so they have a group of their own.
        self._rollouts = self.new_group("gloo")
        self.backend = "gloo"
        """What gradients travel over."""
        self.notes = RelayedNotes()
        """What this rank would tell the user; rank 0 tells it."""

    def from_first(self, make: Callable[[], T]) -> T:
        """What `make` returns in rank 0, on all ranks."""
        box: list[Any] = [make() if self.is_first else None]
        with _together("broadcast"):
            dist.broadcast_object_list(box)
        made: T = box[0]
        return made

    def gather(self, value: T, group: dist.ProcessGroup | None = None) -> list[T]:
        """Every rank's value, on all ranks."""
        values: list[Any] = [None] * self.n
        with _together("exchange"):
            dist.all_gather_object(values, value, group=group)
        return values

    def agree(self, stop: bool, params: Tensor) -> tuple[bool, list[str]]:
        """Whether any rank wants to stop, and the notes of the others; raises if parameters differ in a single bit."""
        told = self.gather((stop, checksum(params), self.notes.take()))
        stops, digests, notes = zip(*told, strict=True)
        if len(set(digests)) > 1:
            raise FlatoutError(
                f"the ranks' parameters differ (checksums {', '.join(map(str, digests))}); all machines need the same versions "
                "of flatout and PyTorch, and devices of one kind"
            )
        return any(stops), [f"rank {rank}: {note}" for rank, own in enumerate(notes) for note in own]

    def describe(self, config: RunConfig) -> str:
        """One line for a run's header."""
        n_envs, size = config.n_envs // self.n, config.algorithm.batch_size // self.n
        where = f"gradients over {self.backend}"
        return f"devices: {self.n}, each with {n_envs} envs and {size} samples of a minibatch; {where}"

    def check(self, config: RunConfig) -> None:
        """Raise if another rank has other settings, as recipes that go by a machine's cores may give."""
        names = ("n_envs", "n_steps", "batch_size", "seed", "timesteps")
        own = {name: getattr(config, name, None) or getattr(config.algorithm, name, 0) for name in names}
        first = self.from_first(lambda: own)
        for name, value in own.items():
            if value != first[name]:
                flag = f"--{name.replace('_', '-')}"
                raise FlatoutError(f"rank 0 has {flag} {first[name]}, rank {self.rank} {value}; pass {flag}")

    def env_ids(self, n_envs: int) -> Array:
        """This rank's envs among all envs of the run."""
        return np.arange(n_envs // self.n) + self.rank * (n_envs // self.n)

    def attach(self, update: Update[Any]) -> None:
        """Let this update compute its minibatches together with the other ranks."""
        self.backend = collective_backend(update.device)
        update.ranks = SharedGradient(self, update)

    def new_group(self, backend: str) -> dist.ProcessGroup:
        """A group of all ranks, for one thread of each."""
        with _together("start"):
            group: dist.ProcessGroup = dist.new_group(backend=backend, timeout=self._timeout)
        return group

    def exchange(self, own: Tensor) -> list[Tensor]:
        """Every rank's tensor of this size in RAM; for the thread that collects."""
        parts = [torch.empty_like(own) for _ in range(self.n)]
        with _together("rollout"):
            dist.all_gather(parts, own, group=self._rollouts)
        return parts

    def exchange_objects(self, own: T) -> list[T]:
        """Every rank's object; for the thread that collects."""
        return self.gather(own, self._rollouts)


class RelayedNotes:
    """What a rank other than the first would tell the user; a `runlog.recorder.Sink`."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def write(self, progress: Progress) -> None:
        """Nothing: rank 0 knows the progress of all."""

    def note(self, text: str) -> None:
        """Keep a line."""
        self._lines.append(text.removeprefix("note: "))

    def close(self) -> None:
        """Nothing."""

    def take(self) -> list[str]:
        """The lines since the last call."""
        lines, self._lines = self._lines, []
        return lines


class SharedGradient:
    """The gradient of a minibatch that every rank computes a part of; see `learning.update.Ranks`."""

    def __init__(self, ranks: Ranks, update: Update[Any]) -> None:
        self.n, self._rank = ranks.n, ranks.rank
        self._sizes = [len(update.momentum), len(update.metrics) - 1, len(update.sample_output)]
        self._sums = torch.zeros(sum(self._sizes), device=update.device)
        """Gradient, metrics and the outputs of all samples of a minibatch, summed over ranks."""
        self._group = None if ranks.backend == "gloo" else ranks.new_group(ranks.backend)
        goes_through_ram = ranks.backend == "gloo" and is_accelerator(update.device)
        self._in_ram = torch.zeros(sum(self._sizes)) if goes_through_ram else None

    def part(self, batch: Batch) -> Batch:
        size = len(batch) // self.n
        return batch.take(slice(self._rank * size, (self._rank + 1) * size))

    @torch.no_grad()
    def put(self, grad: Tensor, metrics: Tensor, samples: Sequence[Tensor]) -> None:
        into_grad, into_metrics, outputs = self._sums.split(self._sizes)
        into_grad.copy_(grad).div_(self.n)
        into_metrics.copy_(metrics).div_(self.n)
        outputs.zero_()
        for values in samples:  # the others add theirs to the zeros
            outputs[self._rank * len(values) :][: len(values)] = values

    def reduce(self) -> None:
        with _together("all-reduce"):
            if self._in_ram is None:
                dist.all_reduce(self._sums, group=self._group)
            else:
                self._in_ram.copy_(self._sums)
                dist.all_reduce(self._in_ram)
                self._sums.copy_(self._in_ram)

    def take(self) -> tuple[Tensor, Tensor, list[Tensor]]:
        grad, metrics, outputs = self._sums.split(self._sizes)
        return grad, metrics, [outputs] if len(outputs) else []


def checksum(params: Tensor) -> int:
    """A number that differs if a bit of the parameters does, almost certainly."""
    return int(params.detach().view(torch.int32).sum(dtype=torch.int64))


class RankCollector:
    """Looks like a collector of all envs: collects this rank's and exchanges them with the other ranks."""

    def __init__(
        self,
        collector: Collects[Any],
        own: Sequence[Any],
        ranks: Ranks,
        policy: Policy,
        n_envs: int,
    ) -> None:
        """`own`: the rollouts that the collector fills. `n_envs`: of all ranks."""
        self._collector, self._own, self._ranks = collector, own, ranks
        size = n_envs // ranks.n
        self._shares = [(k * size, (k + 1) * size) for k in range(ranks.n)]
        self.rollouts = [_alloc(policy.model, rollout, n_envs) for rollout in own]
        """For the transitions of all envs."""

    @property
    def n_steps(self) -> int:
        """Steps each env has taken for finished rollouts."""
        return self._collector.n_steps

    @n_steps.setter
    def n_steps(self, n_steps: int) -> None:
        self._collector.n_steps = n_steps

    @property
    def lanes(self) -> Sequence[Lane]:
        """Those of this rank."""
        return self._collector.lanes

    def trace(self, spans: bool) -> None:
        self._collector.trace(spans)

    def publish(self) -> None:
        self._collector.publish()

    def offer_next(self, rollout: Rollout | TensorRollout) -> None:
        self._collector.offer_next(self._own[self._slot(rollout)])

    def reset(self) -> None:
        self._collector.reset()

    def collect(self, rollout: Rollout | TensorRollout, stop: Callable[[], bool]) -> list[Episode]:
        own = self._own[self._slot(rollout)]
        episodes = self._collector.collect(own, stop)
        # In RAM only few final observations mean anything.
        names = [name for name in own.by_name if isinstance(own, TensorRollout) or name[:9] != "final_obs"]
        parts = self._ranks.exchange(_packed([own.by_name[name] for name in names]))
        for share, part in zip(self._shares, parts, strict=True):
            _unpack(part, [rollout.by_name[name][:, slice(*share)] for name in names])
        told = self._ranks.exchange_objects((episodes, _cut(own)))
        self._set_cut(rollout, [cut for _, cut in told])
        return [episode for episodes, _ in told for episode in episodes]

    def _set_cut(self, rollout: Rollout | TensorRollout, cut: list[Any]) -> None:
        """Write what `_cut` gave of all ranks."""
        if isinstance(rollout, TensorRollout):
            rollout.n_cut = None if None in cut else sum(cut)
            return
        for (first, _), (t, n, rows) in zip(self._shares, cut, strict=True):
            for out, values in zip(rollout.final_obs, rows, strict=True):
                out[t, first + n] = values

    def snapshot(self) -> dict[str, Array]:
        parts = self._ranks.gather(self._collector.snapshot())
        if not all("actions" in part for part in parts):  # of batched envs
            return parts[0]
        return merge_snapshots(parts)

    def restore(self, snapshot: Mapping[str, Array]) -> list[int]:
        first, end = self._shares[self._ranks.rank]
        if "actions" in snapshot:
            snapshot = part_of_snapshot(snapshot, first, end)
        return [first + i for i in self._collector.restore(snapshot)]

    def take_notes(self) -> list[str]:
        return self._collector.take_notes()

    def close(self) -> None:
        self._collector.close()

    def _slot(self, rollout: Rollout | TensorRollout) -> int:
        return next(k for k, known in enumerate(self.rollouts) if known is rollout)


class Unwritten(CheckpointFolder):
    """The checkpoints of a run that rank 0 writes, as the other ranks see them."""

    def save(self, checkpoint: Checkpoint, env_steps: int) -> Path:  # noqa: ARG002
        return self.path

    def save_best(self, checkpoint: Checkpoint) -> Path:  # noqa: ARG002
        return self.path


def _alloc(model: PolicyNet, like: Rollout | TensorRollout, n_envs: int) -> Any:
    """A rollout of so many envs where another one is."""
    if isinstance(like, TensorRollout):
        return TensorRollout(model.obs, model.action, like.n_steps, n_envs, like.reward.device)
    return Rollout.alloc(model.obs, model.action, like.n_steps, n_envs)


def _packed(arrays: Sequence[Array | Tensor]) -> Tensor:
    """Arrays or tensors as one tensor of bytes in RAM."""
    tensors = [torch.as_tensor(array).cpu().contiguous() for array in arrays]
    return torch.cat([tensor.view(-1).view(torch.uint8) for tensor in tensors])


def _unpack(packed: Tensor, into: Sequence[Array | Tensor]) -> None:
    """Write what `_packed` gave."""
    start = 0
    for array in into:
        tensor = torch.as_tensor(array)
        end = start + tensor.numel() * tensor.element_size()
        tensor.copy_(packed[start:end].clone().view(tensor.dtype).view(tensor.shape))  # the clone is aligned
        start = end


def _cut(rollout: Rollout | TensorRollout) -> Any:
    """Steps and envs where episodes were truncated, with their last observations; of tensors, only how many, if known."""
    if isinstance(rollout, TensorRollout):
        return rollout.n_cut
    index, rows = rollout.final_steps()
    return *np.divmod(index, rollout.n_envs), rows


def share_of(config: RunConfig, env: EnvInfo, n: int) -> RunConfig:
    """The settings of one rank of `n`, as if it were a run of its own; raises if the run cannot be split."""
    if env.factory.is_instance or env.n_envs is not None:
        raise FlatoutError(
            f"env '{config.env}' is made already, or makes a fixed number of envs: it cannot be split over {n} devices; give a "
            "function or class that makes one env"
        )
    rows = config.algorithm.batch_rows
    for flag, value in (("n-envs", config.n_envs), ("batch-size", rows)):
        if value % n:
            unit = config.algorithm.batch_size // rows if flag == "batch-size" else 1
            near = " or ".join(str(k * unit) for k in (value // n * n, value // n * n + n) if k)
            raise FlatoutError(f"--{flag} {value * unit} cannot be split over {n} devices; {near} can")
    return replace(config, {"n_envs": config.n_envs // n, "batch_size": config.algorithm.batch_size // n})
