"""All that goes on on this machine at one moment: its cores, memory and GPUs, and the runs.

In: a folder of runs, or runs by path. Out: a Moment, whenever it is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from flatout.runlog.nvml import open_gpu
from flatout.views.job import Job, JobReader
from flatout.views.life import goes_on

_FIRST_SECONDS = 0.2
"""How long the first look at the cores' load takes; later ones are over the time between them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """What is going on."""

    cores: list[float]
    """Load of each core, 0 to 1."""
    memory: int
    """Bytes in use on the machine."""
    memory_total: int
    gpus: dict[str, dict[str, Any]]
    """The newest sample of each device that a run uses."""
    no_gpu: str
    """Why there is none, where there is none."""
    jobs: list[Job]
    """Those that run first."""
    note: str
    """What is to be said when no run goes on."""


class Monitor:
    """Watches the named runs or, without any, all that go on in `runs_dir`."""

    def __init__(self, runs_dir: Path, named: Sequence[Path] = ()) -> None:
        self._runs_dir = runs_dir
        self._is_named = bool(named)
        self._readers = {path: JobReader(path) for path in named}
        self._no_gpu: str | None = None
        self._loads: list[float] = []

    def read(self, n_cells: int = 60) -> Moment:
        """What is going on now; strips get so many cells."""
        if not self._is_named:
            self._find()
        jobs = [reader.read(n_cells) for reader in self._readers.values()]
        jobs.sort(key=lambda job: job.status != "running")
        gpus = {job.device: job.gpu for job in jobs if job.gpu is not None}
        memory = psutil.virtual_memory()
        interval = None if self._loads else _FIRST_SECONDS
        self._loads = psutil.cpu_percent(interval, percpu=True)
        return Moment(
            cores=[load / 100 for load in self._loads],
            memory=memory.total - memory.available,
            memory_total=memory.total,
            gpus=gpus,
            no_gpu="" if gpus else self._why_no_gpu(),
            jobs=jobs,
            note="" if any(job.status == "running" for job in jobs) else self._note(),
        )

    def has_ended(self, moment: Moment) -> bool:
        """Whether there is nothing more to see: all named runs have ended."""
        return self._is_named and not any(job.status == "running" for job in moment.jobs)

    def _find(self) -> None:
        """Take up runs that go on; those taken up once stay until their folder goes."""
        self._readers = {path: reader for path, reader in self._readers.items() if path.is_dir()}
        for path in _folders(self._runs_dir):
            if path not in self._readers and goes_on(path):
                self._readers[path] = JobReader(path)

    def _note(self) -> str:
        if self._is_named:
            return ""
        place = os.path.join(self._runs_dir, "")
        return f"no run is going on in {place}" if self._runs_dir.is_dir() else f"{place} does not exist"

    def _why_no_gpu(self) -> str:
        if self._no_gpu is None:
            meter, reason = open_gpu("cuda")
            self._no_gpu = reason if meter is None else ""
            if meter is not None:
                meter.close()
        return f"no NVIDIA GPU: {self._no_gpu}" if self._no_gpu else "no run that is shown uses the GPU"


def _folders(runs_dir: Path) -> list[Path]:
    try:
        with os.scandir(runs_dir) as entries:
            return sorted(Path(entry.path) for entry in entries if entry.is_dir() and entry.name[0] != ".")
    except OSError:
        return []
