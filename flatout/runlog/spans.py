"""spans.jsonl, what each lane did and when: read back whole, or as it grows.

Spans lie on one continuous clock from the start of the run, across resumes. From them come the busy and idle
shares of each lane, its timeline, and the causes of its idle time in plain words.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from sys import intern
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from flatout.runlog.files import Record, Tail, json_object, number, plural, read_records
from flatout.timing import LEARN_PHASES, Phase

Floats: TypeAlias = npt.NDArray[np.float64]
Row: TypeAlias = tuple[float, float, Mapping[str, float]]
"""Start, end, and seconds per phase."""
CLOCKS = ("host", "device")
_ROUNDING = 1e-4
"""Spans may overlap by this much before it counts as a problem."""
WAITS: dict[str, str] = {
    Phase.ENV: "waiting for envs",
    Phase.TAIL: "waiting for the slowest env",
    Phase.ACT: "waiting for inference",
    Phase.STORE: "Python overhead of collecting",
}
"""What the learner waits for while a collector is in a phase."""

CAUSES: dict[str, str] = WAITS | {
    Phase.WAIT: "waiting for data",
    Phase.STAGE: "staging data",
    Phase.RECORD: "writing records",
    Phase.COMPILE: "compiling",
    Phase.EVALUATE: "evaluating",
    Phase.CHECKPOINT: "saving checkpoints",
    Phase.PUBLISH: "handing parameters to the collectors",
    Phase.START: "starting",
    Phase.SLOT: "waiting for the learner",
}


@dataclass(frozen=True)
class Lane:
    """The spans of one lane, in order and without overlaps."""

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
        """Seconds from the start of the first span to the end of the last."""
        return float(self.end[-1] - self.start[0]) if len(self.start) else 0.0

    def total(self) -> dict[str, float]:
        """Seconds per phase over all spans."""
        return dict(zip(self.phases, self.seconds.sum(axis=0).tolist(), strict=True))

    def until(self, times: npt.ArrayLike) -> Floats:
        """Seconds of each phase (column) up to each time (row); within a span they are spread evenly."""
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
    problems: Sequence[str] = ()

    @property
    def end(self) -> float:
        """The end of the last span of any lane."""
        return max((float(lane.end[-1]) for lane in self.lanes.values()), default=0.0)

    @property
    def collectors(self) -> list[Lane]:
        """The lanes of the collectors."""
        return [lane for name, lane in self.lanes.items() if name.startswith("collector")]


class _Rows:
    """The spans of each lane so far, from records in the order of the file."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], list[Row]] = {}
        self._offset = 0.0
        self.n_dropped = self.n_wrong = 0

    def take(self, record: Record) -> None:
        if "began" in record:
            self._offset = max(0.0, number(record.get("offset")) or 0.0)
            # A resumed run repeats what came after its checkpoint.
            self._rows = {key: _clip(rows, 0.0, self._offset) for key, rows in self._rows.items()}
        elif "dropped" in record:
            self.n_dropped += int(number(record["dropped"]) or 0)
        elif (row := _row(record, self._offset)) is None:
            self.n_wrong += 1
        else:
            self._rows.setdefault((record["lane"], record.get("clock", "host")), []).append(row)

    def lanes(self, seconds: float | None = None) -> tuple[dict[str, Lane], int]:
        """The lanes, over the last seconds if given, and how many spans overlapped an earlier one."""
        end = max((rows[-1][1] for rows in self._rows.values() if rows), default=0.0)
        since = 0.0 if seconds is None else max(0.0, end - seconds)
        lanes, n_cut = {}, 0
        for name, clock in sorted(self._rows, key=_lane_order):
            rows = self._rows[name, clock]
            first = bisect_right(rows, since, key=lambda row: row[1]) if since > 0 else 0
            lane, n = make_lane(name, clock, _clip(rows[first:], since, math.inf))
            n_cut += n
            if len(lane.start):
                lanes[name] = lane
        return lanes, n_cut


def read_spans(path: Path) -> Spans:
    """The spans of a run; what cannot be read is left out and named in `problems`."""
    rows = _Rows()
    problems: list[str] = []
    for record in read_records(path, problems):
        rows.take(record)
    lanes, n_cut = rows.lanes()
    if rows.n_wrong:
        problems.append(f"{path.name} has {plural(rows.n_wrong, 'record')} without a valid span")
    if rows.n_dropped:
        problems.append(f"{plural(rows.n_dropped, 'span')} lost in writing")
    if n_cut:
        problems.append(f"{plural(n_cut, 'span')} cut where they overlap others of their lane")
    return Spans(lanes, problems)


class SpanFollower:
    """Follows the spans of a run that is still training; each read parses only what is new."""

    def __init__(self, path: Path) -> None:
        self._tail, self._rows = Tail(path), _Rows()

    def read(self) -> bool:
        """Take in what is new; whether anything was."""
        restarted, lines = self._tail.read()
        if restarted:
            self._rows = _Rows()
        for line in lines:
            self._rows.take(json_object(line) or {})
        return restarted or bool(lines)

    def last(self, seconds: float | None = None) -> Spans:
        """The spans of the last seconds; of the whole run unless given."""
        return Spans(self._rows.lanes(seconds)[0])


def make_lane(name: str, clock: str, rows: Sequence[Row]) -> tuple[Lane, int]:
    """A lane of the spans in order, each cut where it overlaps an earlier one, and how many were cut."""
    rows = sorted((row for row in rows if row[1] > row[0]), key=lambda row: row[0])
    phases = tuple(dict.fromkeys(phase for _, _, seconds in rows for phase in seconds))
    start = np.array([row[0] for row in rows], float)
    end = np.array([row[1] for row in rows], float)
    seconds = np.array([[row[2].get(phase, 0.0) for phase in phases] for row in rows], float)
    seconds = seconds.reshape(len(rows), len(phases))
    taken = np.maximum.accumulate(np.concatenate(([-np.inf], end)))[:-1]
    left = np.clip((end - np.maximum(start, taken)) / (end - start), 0.0, 1.0)
    n_cut = int(((taken - start > _ROUNDING) & (left < 1.0)).sum())
    kept, start, seconds = left > 0, np.maximum(start, taken), seconds * left[:, None]
    return Lane(name, clock, start[kept], end[kept], phases, seconds[kept]), n_cut


def _row(record: Record, offset: float) -> Row | None:
    """Start, end and phases of a record on the run's clock; None if it is not a valid span."""
    start, end = number(record.get("start")), number(record.get("end"))
    phases, lane, clock = record.get("phases"), record.get("lane"), record.get("clock", "host")
    if start is None or end is None or not isinstance(phases, dict) or not phases:
        return None
    if not isinstance(lane, str) or clock not in CLOCKS or end < max(start, 0.0):
        return None
    seconds = {intern(phase): number(value) for phase, value in phases.items()}
    known = {phase: value for phase, value in seconds.items() if value is not None and value >= 0}
    if len(known) < len(seconds):
        return None
    if start < 0:  # a lane may have begun a moment before the file
        share = end / (end - start)
        start, known = 0.0, {phase: value * share for phase, value in known.items()}
    return offset + start, offset + end, known


def _clip(rows: Iterable[Row], since: float, until: float) -> list[Row]:
    """The spans between two times; one across a limit is cut, with its share of the seconds."""
    kept: list[Row] = []
    for start, end, seconds in rows:
        low, high = max(start, since), min(end, until)
        if low == start and high == end:
            kept.append((start, end, seconds))
        elif low < high:
            share = (high - low) / (end - start)
            kept.append((low, high, {phase: value * share for phase, value in seconds.items()}))
    return kept


def _lane_order(key: tuple[str, str]) -> tuple[int, int, str]:
    """Sort key of lanes given as (name, clock): learner, device, collectors by number."""
    name = key[0]
    number_in_name = name.rpartition(" ")[2]
    rank = {"learner": 0, "device": 1}.get(name, 2 if name.startswith("collector") else 3)
    return rank, int(number_in_name) if number_in_name.isdecimal() else 0, name


@dataclass(frozen=True)
class LaneUse:
    """How a lane spent its wall time."""

    wall: float
    seconds: Mapping[str, float]
    """Per phase."""
    busy: float
    """Share of the wall time."""
    idle: float


def is_idle(lane: str, phase: str) -> bool:
    """Whether a phase counts as idle time of a lane."""
    return phase == Phase.SLOT if lane.startswith("collector") else phase not in LEARN_PHASES


def lane_use(lane: Lane) -> LaneUse:
    """Busy and idle shares of one lane."""
    seconds, wall = lane.total(), lane.wall
    idle = sum(value for phase, value in seconds.items() if is_idle(lane.name, phase))
    busy = sum(seconds.values()) - idle
    shares = [value / wall if wall > 0 else 0.0 for value in (busy, idle)]
    return LaneUse(wall, seconds, *shares)


def timeline(lane: Lane, edges: Floats) -> Floats:
    """The share of each phase (column) in each bin of time (row)."""
    return np.diff(lane.until(edges), axis=0) / np.diff(edges)[:, None]


def idle_causes(spans: Spans, name: str = "learner") -> dict[str, float]:
    """A lane's idle seconds by cause in plain words, largest first; they add up to its idle time."""
    lane = spans.lanes.get(name)
    if lane is None:
        return {}
    causes: defaultdict[str, float] = defaultdict(float)
    for phase, seconds in lane.total().items():
        if phase == Phase.WAIT:
            for cause, part in _causes_of_waiting(lane, spans).items():
                causes[cause] += part
        elif is_idle(name, phase):
            causes[cause_of(phase)] += seconds
    largest_first = sorted(causes.items(), key=lambda item: -item[1])
    return {cause: seconds for cause, seconds in largest_first if seconds > 0}


def cause_of(phase: str) -> str:
    """The cause of idle time in a phase."""
    return CAUSES.get(phase, f"in phase {phase!r}")


def _without_slots_in_folds(collector: Lane) -> Lane:
    """The lane without `slot` in folded spans: the collector waits for the learner while the learner does not wait."""
    if Phase.SLOT not in collector.phases:
        return collector
    slot = collector.phases.index(Phase.SLOT)
    total = collector.seconds.sum(axis=1)
    work = total - collector.seconds[:, slot]
    seconds = collector.seconds * np.divide(total, work, out=np.ones_like(total), where=work > 0)[:, None]
    seconds[:, slot] = np.where(work > 0, 0.0, total)
    return replace(collector, seconds=seconds)


def _causes_of_waiting(lane: Lane, spans: Spans) -> dict[str, float]:
    """The seconds of `wait`, split by what the collectors did meanwhile."""
    wait = lane.seconds[:, lane.phases.index(Phase.WAIT)]
    work = np.zeros((len(wait), len(WAITS)))
    for collector in spans.collectors:
        if collector.clock == lane.clock:
            working = _without_slots_in_folds(collector)
            done = working.until(lane.end) - working.until(lane.start)
            for column, phase in enumerate(WAITS):
                if phase in collector.phases:
                    work[:, column] += done[:, collector.phases.index(phase)]
    # Where collectors worked less than the learner waited, the rest has no known cause.
    whole = np.maximum(work.sum(axis=1), wait)
    split = work * np.divide(wait, whole, out=np.zeros_like(wait), where=whole > 0)[:, None]
    causes = dict(zip(WAITS.values(), split.sum(axis=0).tolist(), strict=True))
    return causes | {CAUSES[Phase.WAIT]: max(0.0, float(wait.sum()) - sum(causes.values()))}
