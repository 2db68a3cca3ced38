"""samples.jsonl, what the machine and the GPU did: written from a thread while a run trains, read back as columns."""

from __future__ import annotations

import json
import math
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from flatout.runlog.folder import Record, end_last_line, number, plural, read_records
from flatout.runlog.meters import GpuMeter, HostMeter, open_gpu
from flatout.runlog.spans import Floats

VERSION = 1
CLOSE_SECONDS = 0.3
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
    """Count, sum and peak of each figure's samples so far."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, float, float]] = {}

    def add(self, row: Record) -> None:
        gpu = _gpu_of(row)
        for name, value in (
            ("device_utilization", gpu.get("utilization")),
            ("device_energy_joules", gpu.get("energy")),
            ("device_memory_bytes", gpu.get("memory")),
            ("memory_bytes", row.get("memory")),
            ("run_memory_bytes", row.get("run_memory")),
            *(("cores_percent", load) for load in _core_loads(row)),
        ):
            if (known := number(value)) is not None:
                n, total, peak = self._seen.get(name, (0, 0.0, known))
                self._seen[name] = n + 1, total + known, max(peak, known)

    def figures(self) -> Figures:
        seen = self._seen.items()
        means = {name: total / n for name, (n, total, _) in seen if name in _MEANS}
        peaks: dict[str, Any] = {name: int(peak) if "bytes" in name else peak for name, (_, _, peak) in seen}
        return Figures(**(peaks | means))


class Sampler:
    """Samples from its creation until `close`, in a thread that can never fail the run."""

    def __init__(self, path: Path, *, began: float, offset: float, device: str, hertz: float = 5) -> None:
        """`began` is in unix seconds; `offset` is the run's wall time before it was resumed."""
        self._path, self._period, self._device = path, 1 / hertz, device
        self._header = {"began": began, "offset": offset, "version": VERSION}
        # Taken once: setting the system's clock during the run moves no sample.
        self._zero = time.perf_counter() - (time.time() - began)
        self._totals = _Totals()
        self._joules_before = 0.0
        self._figures = Figures()
        self._ending = threading.Event()
        self.problem: str | None = None
        """Why sampling stopped early, or why the GPU is not sampled, in one line."""
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
            end_last_line(self._path)
            with self._path.open("ab", buffering=0) as file:
                file.write(_line(self._header))
                self._sample(file, HostMeter(), gpu)
        except OSError as error:
            self.problem = f"sampling stopped: {self._path.name}: {error.strerror or error}"
        except Exception as error:  # a run is worth more than its samples
            self.problem = f"sampling stopped: {type(error).__name__}: {error}"
        finally:
            if gpu is not None:
                gpu.close()

    def _add_earlier_parts(self) -> None:
        """Count the samples up to the checkpoint that the run was resumed from."""
        if self._header["offset"] <= 0 or not self._path.exists():
            return
        for row in _read_rows(self._path)[0]:
            if row["t"] <= self._header["offset"]:
                self._totals.add(row)
        self._figures = self._totals.figures()
        self._joules_before = self._figures.device_energy_joules or 0.0

    def _sample(self, file: BinaryIO, host: HostMeter, gpu: GpuMeter | None) -> None:
        while not self._ending.wait(self._period):
            now, card = host.read(), gpu.read() if gpu is not None else None
            if gpu is not None and card is None:
                self.problem = "the GPU does not answer any more"
            row: Record = {
                "t": round(time.perf_counter() - self._zero, 3),
                **asdict(now),
                "run_cpu": None if now.run_cpu is None else round(now.run_cpu, 1),
                "gpu": None if card is None else asdict(card),
            }
            file.write(_line(row))
            if card is not None and card.energy is not None:
                row["gpu"]["energy"] = self._joules_before + card.energy
            self._totals.add(row)
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


def read_samples(path: Path) -> Samples:
    """The samples of a run; what cannot be read is left out and named in `problems`."""
    rows, problems = _read_rows(path)
    gpus = [_gpu_of(row) for row in rows]
    names = ("utilization", "memory", "memory_total", "power", "energy")
    told = [reasons for gpu in gpus if isinstance(reasons := gpu.get("throttled"), list)]
    throttled = Counter(str(reason) for reasons in told for reason in reasons)
    loads = [_core_loads(row) for row in rows]
    n_cores = max(map(len, loads), default=0)
    cores = [[*map(_value, row), *[math.nan] * (n_cores - len(row))] for row in loads]
    return Samples(
        **{name: _column(rows, name) for name in ("t", "memory", "run_memory", "run_cpu")},
        cores=np.array(cores, dtype=np.float64).reshape(len(rows), n_cores),
        gpu={name: _column(gpus, name) for name in names} if any(gpus) else {},
        problems=problems,
        throttled={reason: n / len(told) for reason, n in throttled.items()},
    )


def _read_rows(path: Path) -> tuple[list[Record], list[str]]:
    """The sample records with time and energy made continuous across resumes, and the problems met."""
    records, problems = read_records(path)
    rows: list[Record] = []
    offset = joules = 0.0
    n_headers = n_wrong = 0
    for record in records:
        if "began" in record:
            n_headers += 1
            offset = number(record.get("offset")) or 0.0
            # A resumed run repeats what came after its checkpoint.
            while rows and rows[-1]["t"] > offset:
                rows.pop()
            spent = (number(_gpu_of(row).get("energy")) for row in reversed(rows))
            joules = next((value for value in spent if value is not None), 0.0)
        elif (t := number(record.get("t"))) is not None:
            record["t"] = offset + t
            if (energy := number(_gpu_of(record).get("energy"))) is not None:
                record["gpu"]["energy"] = joules + energy
            rows.append(record)
        else:
            n_wrong += 1
    if rows and not n_headers:
        problems.append(f"{path.name} has no header; times are as written")
    if n_wrong:
        problems.append(f"{path.name} has {plural(n_wrong, 'record')} without a valid sample")
    return rows, problems


def _line(row: Record) -> bytes:
    return json.dumps(row).encode() + b"\n"


def _gpu_of(row: Mapping[str, Any]) -> dict[str, Any]:
    gpu = row.get("gpu")
    return gpu if isinstance(gpu, dict) else {}


def _core_loads(row: Mapping[str, Any]) -> list[object]:
    cores = row.get("cores")
    return cores if isinstance(cores, list) else []


def _value(value: object) -> float:
    known = number(value)
    return math.nan if known is None else known


def _column(rows: Iterable[Mapping[str, Any]], name: str) -> Floats:
    return np.array([_value(row.get(name)) for row in rows], dtype=np.float64)
