"""samples.jsonl read back as columns, whatever state a killed run left it in.

In: the file. Out: Samples on the run's own time, over all its resumes, and the problems met on the way.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Column: TypeAlias = npt.NDArray[np.float64]
Row: TypeAlias = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSamples:
    """A value per sample; NaN where the card did not tell it."""

    utilization: Column
    memory: Column
    memory_total: Column
    power: Column
    energy: Column
    """Joules since the run began, its earlier parts included."""
    sm_clock: Column
    temperature: Column
    n_processes: Column
    throttled: list[list[str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """A value per sample; NaN where it is not known."""

    t: Column
    """Seconds of the run's wall time, its earlier parts included."""
    cores: Column
    """Percent, a row per sample and a column per core."""
    memory: Column
    run_memory: Column
    run_cpu: Column
    n_processes: Column
    gpu: GpuSamples | None
    """None when no sample has one."""
    problems: list[str]
    """What could not be read, a line each; empty for a sound file."""


def read_samples(path: Path) -> Samples:
    """The samples of a run; none, and a problem, where there is no file."""
    rows, problems = read_rows(path)
    return Samples(
        t=_column(rows, "t"),
        cores=_cores(rows),
        memory=_column(rows, "memory"),
        run_memory=_column(rows, "run_memory"),
        run_cpu=_column(rows, "run_cpu"),
        n_processes=_column(rows, "n_processes"),
        gpu=_gpu(rows),
        problems=problems,
    )


def read_rows(path: Path) -> tuple[list[Row], list[str]]:
    """The sample lines with time and energy made continuous, and the problems met."""
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        return [], [f"{path.name}: {error.strerror or error}"]
    parts, bad = _Parts(), []
    for nth, line in enumerate(lines, 1):
        if not parts.take(_object(line)):
            bad.append(nth)
    return parts.rows, [f"{path.name}: {problem}" for problem in _problems(bad, lines, parts.headers)]


class _Parts:
    """Joins what the run wrote each time it was started."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.headers = 0
        self._offset = self._joules = 0.0

    def take(self, line: Row) -> bool:
        """Add a line; False for one that is neither a header nor a sample."""
        if math.isfinite(number(line.get("began"))):
            self._begin(number(line.get("offset")))
        elif math.isfinite(t := number(line.get("t"))):
            line["t"] = self._offset + t
            if isinstance(gpu := line.get("gpu"), dict) and math.isfinite(
                energy := number(gpu.get("energy"))
            ):
                gpu["energy"] = self._joules + energy
            self.rows.append(line)
        else:
            return False
        return True

    def _begin(self, offset: float) -> None:
        """Start a part; what came after its checkpoint in the part before was lost, and is left out."""
        self._offset = offset if math.isfinite(offset) else 0.0
        while self.rows and self.rows[-1]["t"] > self._offset:
            self.rows.pop()
        spent = (number(gpu_of(row).get("energy")) for row in reversed(self.rows))
        self._joules = next((joules for joules in spent if math.isfinite(joules)), 0.0)
        self.headers += 1


def gpu_of(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The GPU's part of a sample line, empty where it has none."""
    gpu = row.get("gpu")
    return gpu if isinstance(gpu, dict) else {}


def number(value: object) -> float:
    """A JSON number as float; NaN for anything else."""
    try:
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:
        return math.nan


def core_loads(row: Mapping[str, Any]) -> list[float]:
    """The loads of the cores in a sample line, empty where it has none."""
    cores = row.get("cores")
    return [number(load) for load in cores] if isinstance(cores, list) else []


def _object(line: bytes) -> Row:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _problems(bad: list[int], lines: list[bytes], headers: int) -> Iterable[str]:
    if lines and not headers:
        yield "no header; times are as written"
    if bad and bad[-1] == len(lines) and not lines[-1].endswith(b"\n"):
        yield "the last line is cut"
        bad = bad[:-1]
    if bad:
        yield f"{len(bad)} of {len(lines)} lines could not be read, the first is line {bad[0]}"


def _column(rows: Iterable[Mapping[str, Any]], name: str) -> Column:
    return np.array([number(row.get(name)) for row in rows], dtype=np.float64)


def _cores(rows: list[Row]) -> Column:
    loads = [core_loads(row) for row in rows]
    table = np.full((len(rows), max(map(len, loads), default=0)), np.nan)
    for nth, row in enumerate(loads):
        table[nth, : len(row)] = row
    return table


def _gpu(rows: list[Row]) -> GpuSamples | None:
    gpus = [gpu_of(row) for row in rows]
    if not any(gpus):
        return None
    names = [name for name in GpuSamples.__slots__ if name != "throttled"]
    reasons = [gpu.get("throttled") for gpu in gpus]
    return GpuSamples(
        **{name: _column(gpus, name) for name in names},
        throttled=[[str(word) for word in words] if isinstance(words, list) else [] for words in reasons],
    )


def cores_in_use(samples: Samples) -> Column:
    """The mean load of the cores as a share of all of them; NaN where none is known."""
    known = np.isfinite(samples.cores)
    loads, counts = np.where(known, samples.cores, 0.0).sum(axis=1), known.sum(axis=1)
    means: Column = np.divide(loads, 100 * counts, out=np.full(len(loads), np.nan), where=counts > 0)
    return means
