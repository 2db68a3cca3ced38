"""samples.jsonl as arrays: what the machine did while the run went.

In: a file that may be missing, cut or still growing. Out: readings on the run's clock, NaN where there is none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flatout.meter.lines import number, read_lines
from flatout.meter.spans import Floats


def _none() -> Floats:
    return np.zeros(0)


@dataclass(frozen=True)
class Usage:
    """Readings of the machine, one per time."""

    t: Floats = field(default_factory=_none)
    """Seconds since the run began."""
    cores: Floats = field(default_factory=_none)
    """Mean use of the cores, as a share of all of them."""
    run_cores: Floats = field(default_factory=_none)
    """Cores' worth of time that the run's processes took."""
    gpu: Floats = field(default_factory=_none)
    """Device utilisation as a share; NaN without a GPU."""
    gpu_power: Floats = field(default_factory=_none)
    """Watts; NaN without a GPU."""
    problems: Sequence[str] = ()


def read_usage(path: Path) -> Usage:
    """The samples of a run; what cannot be read is left out and told."""
    lines = read_lines(path)
    rows: list[list[float]] = []
    for offset, records in lines.parts:
        rows = [row for row in rows if row[0] <= offset]
        rows += [row for record in records if (row := _row(record, offset)) is not None]
    columns = np.array(sorted(rows), float).reshape(len(rows), 5).T
    t, cores, run_cores, gpu, gpu_power = columns
    return Usage(t, cores, run_cores, gpu, gpu_power, lines.problems)


def _row(record: Mapping[str, Any], offset: float) -> list[float] | None:
    t = number(record.get("t"))
    if t is None or t < 0:
        return None
    cores, gpu = record.get("cores"), record.get("gpu")
    shares = [
        value / 100
        for core in (cores if isinstance(cores, list) else [])
        if (value := number(core)) is not None
    ]
    gpu = gpu if isinstance(gpu, dict) else {}
    run = number(record.get("run_cpu"))
    values = (
        sum(shares) / len(shares) if shares else None,
        None if run is None else run / 100,
        number(gpu.get("utilization")),
        number(gpu.get("power")),
    )
    return [offset + t, *(float("nan") if value is None else value for value in values)]
