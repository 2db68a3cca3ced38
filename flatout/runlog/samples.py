"""samples.jsonl, what the machine and the GPU did: written from a thread while a run trains, read back as columns."""

from __future__ import annotations

import json
import math
import threading
import time
from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from sys import intern
from typing import Any, NamedTuple

import numpy as np

from flatout.runlog.files import AppendedFile, Record, number, plural, read_records
from flatout.runlog.meters import GpuMeter, HostMeter, open_gpu
from flatout.runlog.spans import Floats

VERSION = 1
CLOSE_SECONDS = 0.3
SAMPLES = 10_000
"""Written samples are 1/SAMPLES of the run's time apart, so that the file grows with the logarithm of that time."""
_MEANS = ("device_utilization", "cores_percent")
"""Figures that are means; the others are peaks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """A run's samples in one number each, as in summary.json; None for what is not known."""

    device_utilization: float | None = None
    """Mean share of time in which any kernel ran, 0 to 1."""
    device_energy_joules: float | None = None
    """Of the whole card since the run began."""
    device_memory_bytes: int | None = None
    """Peak use of the card's memory, by all processes."""
    memory_bytes: int | None = None
    """Peak use of the machine's memory, by all processes."""
    run_memory_bytes: int | None = None
    """Peak memory of the run's processes."""
    cores_percent: float | None = None
    """Mean load of the machine's cores."""


class _Totals:
    """Seconds, sum over time and peak of each figure's samples so far."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, float, float]] = {}

    def add(self, row: _Row, seconds: float) -> None:
        """Count a sample that stands for so much time."""
        for name, value in (
            ("device_utilization", row.gpu[0]),
            ("device_energy_joules", row.gpu[4]),
            ("device_memory_bytes", row.gpu[1]),
            ("memory_bytes", row.host[0]),
            ("run_memory_bytes", row.host[1]),
            *(("cores_percent", load) for load in row.cores),
        ):
            if not math.isnan(value):
                time_before, total, peak = self._seen.get(name, (0.0, 0.0, value))
                self._seen[name] = time_before + seconds, total + value * seconds, max(peak, value)

    def figures(self) -> Figures:
        seen = self._seen.items()
        means = {name: total / seconds for name, (seconds, total, _) in seen if name in _MEANS}
        peaks: dict[str, Any] = {name: int(peak) if "bytes" in name else peak for name, (_, _, peak) in seen}
        return Figures(**(peaks | means))


class Sampler:
    """Samples from its creation until `close`, in a thread that can never fail the run."""

    def __init__(self, path: Path, *, began: float, offset: float, device: str, hertz: float = 5) -> None:
        """`began` is in unix seconds; `offset` is the run's wall time before it was resumed."""
        self._offset, self._period, self._device = offset, 1 / hertz, device
        self.file = AppendedFile(path)
        self._header = {"began": began, "offset": offset, "version": VERSION}
        # Taken once: setting the system's clock during the run moves no sample.
        self._zero = time.perf_counter() - (time.time() - began)
        self._totals = _Totals()
        self._joules_before = 0.0
        self._figures = Figures()
        self._ending = threading.Event()
        self.problem: str | None = None
        """Why sampling stopped early, or why the GPU is not sampled, in one line."""
        self.gpu: dict[str, Any] | None = None
        """The newest reading of the GPU."""
        self._thread = threading.Thread(target=self._run, name="flatout-sampler", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self.problem = f"nothing is sampled: {error}"

    def figures(self) -> Figures:
        """The figures so far, with those of earlier parts of a resumed run; safe from any thread."""
        return self._figures

    def close(self) -> None:
        """Stop sampling; returns soon even when the driver or the disk hangs."""
        self._ending.set()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        gpu = None
        try:
            gpu, reason = open_gpu(self._device)
            if gpu is None and self._device.startswith("cuda"):
                self.problem = f"the GPU is not sampled: {reason}"
            self._add_earlier_parts()
            self.file.write(_line(self._header))
            self._sample(HostMeter(), gpu)
        except Exception as error:  # a run is worth more than its samples
            self.problem = f"sampling stopped: {type(error).__name__}: {error}"
        finally:
            self.file.close()
            if gpu is not None:
                gpu.close()

    def _add_earlier_parts(self) -> None:
        """Count the samples up to the checkpoint that the run was resumed from."""
        if self._offset <= 0:
            return
        rows = [row for row in _read_rows(self.file.path, []) if row.t <= self._offset]
        for before, row in pairwise([_row({}, 0.0), *rows]):
            self._totals.add(row, row.t - before.t)
        self._figures = self._totals.figures()
        self._joules_before = self._figures.device_energy_joules or 0.0

    def _sample(self, host: HostMeter, gpu: GpuMeter | None) -> None:
        written = -math.inf
        while not self._ending.wait(self._period):
            t = time.perf_counter() - self._zero
            now, card = host.read(), gpu.read() if gpu is not None else None
            if gpu is not None and card is None:
                self.problem = "the GPU does not answer any more"
            self.gpu = None if card is None else asdict(card)
            record: Record = {
                "t": round(t, 3),
                **asdict(now),
                "run_cpu": None if now.run_cpu is None else round(now.run_cpu, 1),
                "gpu": self.gpu,
            }
            if t - written >= (self._offset + t) / SAMPLES:
                written = t
                self.file.write(_line(record))
            self._totals.add(_row(record, self._joules_before), self._period)
            self._figures = self._totals.figures()


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """A value per sample; NaN where it is not known."""

    t: Floats
    """Seconds of the run's wall time, across resumes."""
    cores: Floats
    """Percent, a row per sample and a column per core."""
    memory: Floats
    run_memory: Floats
    run_cpu: Floats
    gpu: Mapping[str, Floats]
    """utilization (0 to 1), memory and memory_total (bytes), power (W) and energy (J since the run began); empty when no
    sample has a GPU."""
    problems: list[str]
    """What could not be read."""
    throttled: Mapping[str, float] = field(default_factory=dict)
    """Share of samples by the GPU's reason for throttling."""

    def cores_in_use(self) -> Floats:
        """The mean load of the cores, 0 to 1; NaN where none is known."""
        known = np.isfinite(self.cores)
        loads, counts = np.where(known, self.cores, 0.0).sum(axis=1), known.sum(axis=1)
        means: Floats = np.divide(loads, 100 * counts, out=np.full(len(loads), np.nan), where=counts > 0)
        return means


_HOST = ("memory", "run_memory", "run_cpu")
_GPU = ("utilization", "memory", "memory_total", "power", "energy")


class _Row(NamedTuple):
    """A sample in little memory; NaN where a value is not known."""

    t: float
    host: array[float]
    """_HOST."""
    cores: array[float]
    gpu: array[float]
    """_GPU."""
    throttled: tuple[str, ...] | None


def _row(record: Mapping[str, Any], joules: float, offset: float = 0.0) -> _Row:
    """The sample in a record; `joules` and `offset` are the energy and time of the run's earlier parts."""
    gpu = value if isinstance(value := record.get("gpu"), dict) else {}
    cores = value if isinstance(value := record.get("cores"), list) else []
    throttled = value if isinstance(value := gpu.get("throttled"), list) else None
    card = array("d", [_value(gpu.get(name)) for name in _GPU])
    card[-1] += joules
    return _Row(
        offset + (number(record.get("t")) or 0.0),
        array("d", [_value(record.get(name)) for name in _HOST]),
        array("d", map(_value, cores)),
        card,
        None if throttled is None else tuple(intern(str(reason)) for reason in throttled),
    )


def read_samples(path: Path) -> Samples:
    """The samples of a run; what cannot be read is left out and named in `problems`."""
    problems: list[str] = []
    rows = _read_rows(path, problems)
    told = [row.throttled for row in rows if row.throttled is not None]
    throttled = Counter(reason for reasons in told for reason in reasons)
    cores = np.full((len(rows), max((len(row.cores) for row in rows), default=0)), math.nan)
    for loads, row in zip(cores, rows, strict=True):
        loads[: len(row.cores)] = row.cores
    host = np.array([row.host for row in rows], float).reshape(-1, len(_HOST)).T
    gpu = np.array([row.gpu for row in rows], float).reshape(-1, len(_GPU)).T
    return Samples(
        t=np.array([row.t for row in rows], float),
        **dict(zip(_HOST, host, strict=True)),
        cores=cores,
        gpu=dict(zip(_GPU, gpu, strict=True)) if np.isfinite(gpu).any() else {},
        problems=problems,
        throttled={reason: n / len(told) for reason, n in throttled.items()},
    )


def _read_rows(path: Path, problems: list[str]) -> list[_Row]:
    """The samples with time and energy made continuous across resumes."""
    rows: list[_Row] = []
    offset = joules = 0.0
    n_headers = n_wrong = 0
    for record in read_records(path, problems):
        if "began" in record:
            n_headers += 1
            offset = number(record.get("offset")) or 0.0
            # A resumed run repeats what came after its checkpoint.
            while rows and rows[-1].t > offset:
                rows.pop()
            joules = next((row.gpu[-1] for row in reversed(rows) if not math.isnan(row.gpu[-1])), 0.0)
        elif number(record.get("t")) is not None:
            rows.append(_row(record, joules, offset))
        else:
            n_wrong += 1
    if rows and not n_headers:
        problems.append(f"{path.name} has no header; times are as written")
    if n_wrong:
        problems.append(f"{path.name} has {plural(n_wrong, 'record')} without a valid sample")
    return rows


def _line(row: Record) -> bytes:
    return json.dumps(row).encode() + b"\n"


def _value(value: object) -> float:
    known = number(value)
    return math.nan if known is None else known
