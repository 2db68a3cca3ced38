"""What runs on this machine now: its cores, memory and GPUs, and the runs, read again and again from their folders."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import time
from typing import Any

import numpy as np
import psutil

from flatout.runlog.files import Tail, number, read_json
from flatout.runlog.meters import GpuWatch
from flatout.runlog.recorder import cell_value
from flatout.runlog.records import is_running, run_status
from flatout.runlog.spans import Floats, Lane, SpanFollower, idle_causes, lane_use, timeline
from flatout.views.figures import printable
from flatout.views.live import History
from flatout.views.runs import RunIndex, RunRow, newest_first

_FIRST_SECONDS = 0.2
"""The first load of the cores is measured over this time; later ones since the read before."""
WINDOW_SECONDS = 60.0
"""Time that the strips of a running run show."""
_FIGURES = (
    *("env_steps", "total_steps", "wall_seconds", "steps_per_second"),
    *("episodes", "return_mean", "return_std", "learner_busy"),
)
"""Figures of progress.json that a job has under the same names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Strip:
    """What one lane did over the time that is shown."""

    lane: str
    clock: str
    busy: float
    """Share of that time."""
    phases: dict[str, float]
    """Share of each phase, largest first."""
    cells: list[str]
    """The largest phase in each bin of time; empty if nothing is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The state of a run; None for what is not known."""

    name: str
    status: str
    """`running`, `ended`, `killed`, `gone` (no folder any more) or `unknown` (nothing written yet)."""
    outcome: str = ""
    """How it ended: `finished`, `stopped` or `failed`."""
    env: str = ""
    algo: str = ""
    device: str = ""
    executor: str = ""
    collectors: float | None = None
    overlap: bool | None = None
    env_steps: float | None = None
    total_steps: float | None = None
    wall_seconds: float | None = None
    seconds_left: float | None = None
    seconds_silent: float | None = None
    """Since the last write of progress.json, for a running run."""
    steps_per_second: float | None = None
    episodes: float | None = None
    return_mean: float | None = None
    return_std: float | None = None
    returns: list[float] = field(default_factory=list)
    """Mean return over the run, evenly spaced."""
    learner_busy: float | None = None
    seconds_shown: float = 0.0
    """Time that the strips show."""
    strips: list[Strip] = field(default_factory=list)
    idle: dict[str, float] = field(default_factory=dict)
    """The learner's idle time by cause, as shares of the time shown, largest first."""
    gpu: dict[str, Any] | None = None
    """The newest sample of its GPU, for a running run."""


class JobReader:
    """Reads one run's folder again and again; damaged and missing files are no errors."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._spans = SpanFollower(path / "spans.jsonl")
        self._curve = _Curve(path / "metrics.csv")
        self._config: dict[str, Any] = {}
        self._seen: tuple[str, int] | None = None
        self._job = Job(name=printable(path.resolve().name), status="unknown")

    def read(self, n_cells: int) -> Job:
        """The run now, each strip with `n_cells` cells."""
        if not self._path.is_dir():
            self._job = replace(self._job, status="gone", seconds_left=None, gpu=None)
            return self._job
        status, record = run_status(self._path)
        self._job = self._strips(status, n_cells)
        self._job = replace(self._job, status=status, **self._figures(status, record))
        return self._job

    def _strips(self, status: str, n_cells: int) -> Job:
        """The job with its lanes updated, if they have changed."""
        if not self._spans.read() and self._seen == (status, n_cells):
            return self._job
        self._seen = status, n_cells
        spans = self._spans.last(WINDOW_SECONDS if status == "running" else None)
        learner = spans.lanes.get("learner")
        wall = learner.wall if learner is not None else 0.0
        edges = _edges(spans.end, status, n_cells)
        return replace(
            self._job,
            seconds_shown=float(edges[-1] - edges[0]),
            strips=[_strip(lane, edges) for lane in spans.lanes.values()] if spans.end > 0 else [],
            idle={cause: seconds / wall for cause, seconds in idle_causes(spans).items()} if wall > 0 else {},
        )

    def _figures(self, status: str, record: Mapping[str, Any]) -> dict[str, Any]:
        self._config = self._config or read_json(self._path / "config.json")
        known, runs = {**self._config, **record}, status == "running"
        executor, overlap = _mapping(record.get("executor")), _mapping(record.get("overlap"))
        figures = {name: number(record.get(name)) for name in _FIGURES}
        total = figures["total_steps"] or number(self._config.get("timesteps"))
        updated = number(record.get("updated")) if runs else None
        silent = None if updated is None else max(0.0, time() - updated)
        left = number(record.get("seconds_left")) if runs else None
        return {
            **figures,
            "total_steps": total,
            "env": printable(known.get("env")),
            "algo": printable(known.get("algo")),
            "device": printable(record.get("device")),
            "outcome": printable(record.get("status")) if status == "ended" else "",
            "executor": printable(executor.get("kind")),
            "collectors": number(executor.get("collectors")),
            "overlap": on if isinstance(on := overlap.get("on"), bool) else None,
            "seconds_silent": silent,
            "seconds_left": None if left is None else max(0.0, left - (silent or 0.0)),
            "returns": self._curve.read(),
            "gpu": _mapping(record.get("gpu")) or None if runs else None,
        }


class _Curve:
    """The mean return over a run, from metrics.csv."""

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path)
        self._column, self._history = -1, History()

    def read(self) -> list[float]:
        restarted, lines = self._tail.read()
        if restarted:
            self._column, self._history = -1, History()
        for line in lines:
            cells = line.decode(errors="replace").split(",")
            if self._column < 0:
                name = "rollout/ep_rew_mean"
                self._column = cells.index(name) if name in cells else len(cells)
            elif self._column < len(cells) and (value := number(cell_value(cells[self._column]))) is not None:
                self._history.add(value)
        return self._history.values


def _edges(end: float, status: str, n_cells: int) -> Floats:
    """Edges of the bins, which stay in place while time passes: a new bin begins when the last is full."""
    if status != "running":
        return np.linspace(0.0, max(end, 1e-3), n_cells + 1)
    width = WINDOW_SECONDS / n_cells
    n_bins = max(n_cells, math.ceil(end / width))
    return width * np.arange(n_bins - n_cells, n_bins + 1, dtype=float)


def _strip(lane: Lane, edges: Floats) -> Strip:
    use, shares = lane_use(lane), timeline(lane, edges)
    cells = [lane.phases[int(row.argmax())] if row.sum() > 0 else "" for row in shares]
    largest_first = sorted(use.seconds.items(), key=lambda item: -item[1])
    phases = {phase: seconds / use.wall for phase, seconds in largest_first if seconds > 0}
    return Strip(lane=lane.name, clock=lane.clock, busy=use.busy, phases=phases, cells=cells)


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


@dataclass(frozen=True, kw_only=True, slots=True)
class MonitorState:
    """The machine and its runs at one time."""

    cores: list[float]
    """Load of each core, 0 to 1."""
    memory: int
    """Bytes in use on the machine."""
    memory_total: int
    gpus: dict[str, dict[str, Any]]
    """The newest sample of each card of this machine; without a driver here, of each device that a running run uses."""
    no_gpu: str
    """Why no GPU is shown; empty if one is."""
    jobs: list[Job]
    """Running ones first."""
    note: str
    """A line for the user when no run is running."""
    runs: list[RunRow] = field(default_factory=list)
    """Of a folder: all its runs, as a table instead of jobs."""


class Monitor:
    """Watches the named runs, or all runs of `folder`, or all running ones in `runs_dir`."""

    def __init__(self, runs_dir: Path, named: Sequence[Path] = (), folder: Path | None = None) -> None:
        self._runs_dir = folder or runs_dir
        self._index = RunIndex(folder) if folder is not None else None
        self._is_named = bool(named)
        self._readers = {path: JobReader(path) for path in named}
        self._cards = GpuWatch()
        self._loads: list[float] = []

    def read(self, n_cells: int = 60) -> MonitorState:
        """The machine and its runs now, each strip with `n_cells` cells."""
        runs = newest_first(self._index.read().values()) if self._index is not None else []
        if not self._is_named and self._index is None:
            self._find()
        jobs = [reader.read(n_cells) for reader in self._readers.values()]
        jobs.sort(key=lambda job: job.status != "running")
        gpus = {f"GPU {name}": asdict(sample) for name, sample in self._cards.newest().items()}
        gpus = gpus or {job.device: job.gpu for job in jobs if job.gpu is not None}
        memory = psutil.virtual_memory()
        interval = None if self._loads else _FIRST_SECONDS
        self._loads = psutil.cpu_percent(interval, percpu=True)
        return MonitorState(
            cores=[load / 100 for load in self._loads],
            memory=memory.total - memory.available,
            memory_total=memory.total,
            gpus=gpus,
            no_gpu="" if gpus else f"no NVIDIA GPU: {self._cards.reason or 'it does not answer any more'}",
            jobs=jobs,
            note=""
            if "running" in [*(it.status for it in jobs), *(it.status for it in runs)]
            else self._note(),
            runs=runs,
        )

    def has_ended(self, state: MonitorState) -> bool:
        """Whether all named runs have ended."""
        return self._is_named and not any(job.status == "running" for job in state.jobs)

    def _find(self) -> None:
        """Add running runs; a run stays until its folder is removed."""
        self._readers = {path: reader for path, reader in self._readers.items() if path.is_dir()}
        for path in sorted(self._runs_dir.glob("[!.]*/")):
            if path not in self._readers and is_running(path):
                self._readers[path] = JobReader(path)

    def _note(self) -> str:
        if self._is_named:
            return ""
        place = os.path.join(self._runs_dir, "")
        return f"no run is running in {place}" if self._runs_dir.is_dir() else f"{place} does not exist"

    def close(self) -> None:
        """Stop reading the cards."""
        self._cards.close()
