"""spans.jsonl as arrays per lane, on one continuous clock from the start of the run.

In: a file that may be missing, cut, broken or still growing. Out: what is there, and in plain words what is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flatout.runlog.lines import number, read_lines

Floats = npt.NDArray[np.float64]
CLOCKS = ("host", "device")
_ROUNDING = 1e-4
"""Spans may overlap by this much before it counts as a problem."""


@dataclass(frozen=True)
class Lane:
    """The spans of one lane, in order, none over another."""

    name: str
    clock: str
    start: Floats
    """Seconds since the run began, one per span."""
    end: Floats
    phases: tuple[str, ...]
    seconds: Floats
    """Seconds of each phase (column) in each span (row)."""

    @property
    def wall(self) -> float:
        """Seconds from the first span's start to the last one's end."""
        return float(self.end[-1] - self.start[0]) if len(self.start) else 0.0

    def total(self) -> dict[str, float]:
        """Seconds per phase over all spans."""
        return dict(zip(self.phases, self.seconds.sum(axis=0).tolist(), strict=True))

    def until(self, times: npt.ArrayLike) -> Floats:
        """Seconds of each phase (column) from the start up to each time (row); a span's are spread evenly."""
        edges = np.column_stack((self.start, self.end)).ravel()
        sums = np.cumsum(self.seconds, axis=0)
        stairs = np.stack((sums - self.seconds, sums), axis=1).reshape(len(edges), len(self.phases))
        columns = [np.interp(np.asarray(times, float), edges, column) for column in stairs.T]
        return np.stack(columns, axis=1)


@dataclass(frozen=True)
class Spans:
    """What every lane of a run did, and when."""

    lanes: Mapping[str, Lane] = field(default_factory=dict)
    """By name: the learner first, then the device, then the collectors by number."""
    began: float | None = None
    problems: Sequence[str] = ()

    @property
    def end(self) -> float:
        """When the last span of any lane ended."""
        return max((float(lane.end[-1]) for lane in self.lanes.values()), default=0.0)

    @property
    def collectors(self) -> list[Lane]:
        """The lanes of the collectors."""
        return [lane for name, lane in self.lanes.items() if name.startswith("collector")]


Row = tuple[float, float, Mapping[str, float]]


def read_spans(path: Path) -> Spans:
    """The spans of a run; what cannot be read is left out and told."""
    lines = read_lines(path)
    rows: dict[tuple[str, str], list[Row]] = {}
    n_dropped = n_wrong = 0
    for offset, records in lines.parts:
        # A resumed run walks again what came after its checkpoint; those spans are no part of it.
        rows = {key: before(lane, offset) for key, lane in rows.items()}
        for record in records:
            if "dropped" in record:
                n_dropped += int(number(record["dropped"]) or 0)
            elif (row := span_row(record, offset)) is None:
                n_wrong += 1
            else:
                rows.setdefault((record["lane"], record.get("clock", "host")), []).append(row)
    problems = list(lines.problems)
    if n_wrong:
        problems.append(f"{path.name} has {n_wrong:,} line{'s'[: n_wrong > 1]} that say no span")
    if n_dropped:
        problems.append(f"{n_dropped:,} span{'s were' if n_dropped > 1 else ' was'} lost in writing")
    lanes = {name: make_lane(name, clock, rows[name, clock]) for name, clock in sorted(rows, key=lane_order)}
    overlapping = sum(n for _, n in lanes.values())
    if overlapping:
        problems.append(f"{overlapping:,} spans lay over others of their lane and were cut")
    return Spans({name: lane for name, (lane, _) in lanes.items() if len(lane.start)}, lines.began, problems)


def make_lane(name: str, clock: str, rows: Sequence[Row]) -> tuple[Lane, int]:
    """A lane of the spans in order, each cut where an earlier one lies, and how many had to be cut."""
    rows = sorted((row for row in rows if row[1] > row[0]), key=lambda row: row[0])
    phases = tuple(dict.fromkeys(phase for _, _, seconds in rows for phase in seconds))
    start = np.array([row[0] for row in rows], float)
    end = np.array([row[1] for row in rows], float)
    seconds = np.array([[row[2].get(phase, 0.0) for phase in phases] for row in rows], float)
    seconds = seconds.reshape(len(rows), len(phases))
    taken = np.maximum.accumulate(np.concatenate(([-np.inf], end)))[:-1]
    left = np.clip((end - np.maximum(start, taken)) / (end - start), 0.0, 1.0)
    n_cut = int(((taken - start > _ROUNDING) & (left < 1.0)).sum())
    lane = Lane(name, clock, np.maximum(start, taken), end, phases, seconds * left[:, None])
    kept = left > 0
    return replace(lane, start=lane.start[kept], end=end[kept], seconds=lane.seconds[kept]), n_cut


def span_row(record: Mapping[str, Any], offset: float) -> Row | None:
    """The start, end and phases of a span line on the run's clock; None if it is not one."""
    start, end = number(record.get("start")), number(record.get("end"))
    phases, lane, clock = record.get("phases"), record.get("lane"), record.get("clock", "host")
    if start is None or end is None or not isinstance(phases, dict) or not phases:
        return None
    if not isinstance(lane, str) or clock not in CLOCKS or end < max(start, 0.0):
        return None
    seconds = {str(phase): number(value) for phase, value in phases.items()}
    known = {phase: value for phase, value in seconds.items() if value is not None and value >= 0}
    if len(known) < len(seconds):
        return None
    if start < 0:  # a lane may have begun a moment before the file
        share = end / (end - start)
        start, known = 0.0, {phase: value * share for phase, value in known.items()}
    return offset + start, offset + end, known


def before(rows: Sequence[Row], limit: float) -> list[Row]:
    """The spans up to `limit`; one across it is cut, with its part of the seconds."""
    kept: list[Row] = []
    for start, end, seconds in rows:
        if end <= limit:
            kept.append((start, end, seconds))
        elif start < limit:
            share = (limit - start) / (end - start)
            kept.append((start, limit, {phase: value * share for phase, value in seconds.items()}))
    return kept


def lane_order(key: tuple[str, str]) -> tuple[int, int, str]:
    """Sorts lanes given as (name, clock): learner, device, collectors by number."""
    name = key[0]
    number_in_name = name.rpartition(" ")[2]
    rank = {"learner": 0, "device": 1}.get(name, 2 if name.startswith("collector") else 3)
    return rank, int(number_in_name) if number_in_name.isdecimal() else 0, name
