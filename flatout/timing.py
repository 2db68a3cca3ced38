"""Clocks of a run: what each lane (the learner, a collector, the device) did, and when.

A lane is always in exactly one phase, so the seconds of its phases add up to its wall time. Clocks keep recent spans
in detail and older ones as seconds per phase, so that spans.jsonl stays small. Nothing here blocks or takes a lock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from threading import get_ident
from time import perf_counter
from typing import Any, NamedTuple, Protocol, Self

MAX_WAITING = 50_000
"""Spans kept in memory until they are written; beyond it the oldest are lost."""
DETAIL = 1000
"""Fine spans of the first second, and of every doubling of a run's time."""
STRETCH = 300
"""Fine spans in a row at most, so that long rollouts are seen at several times of a run."""
FEWEST = 100
FOLD_SECONDS = 0.2
FOLDS = 10_000
"""A folded span covers at least 1/FOLDS of the time so far, and at least FOLD_SECONDS."""


class Phase(StrEnum):
    """What a lane is doing. The values are the names in summary.json, spans.jsonl and metrics."""

    START = "start"
    """Learner: everything before the first iteration."""
    WAIT = "wait"
    """Learner: waiting for a rollout."""
    STAGE = "stage"
    """Learner: copying the rollout to the device."""
    ADVANTAGE = "advantage"
    """Learner: computing advantages or returns."""
    COMPILE = "compile"
    """Compiling code, or starting or taking over a compiled update."""
    UPDATE = "update"
    """Learner: gradient steps."""
    PUBLISH = "publish"
    """Learner: handing parameters to the collectors."""
    RECORD = "record"
    """Learner: writing metrics and updating the display."""
    EVALUATE = "evaluate"
    CHECKPOINT = "checkpoint"
    ACT = "act"
    """Collector: policy inference."""
    ENV = "env"
    """Collector: stepping envs."""
    TAIL = "tail"
    """Collector: waiting for the slowest envs at the end of a rollout."""
    STORE = "store"
    """Collector: writing steps into the rollout."""
    SLOT = "slot"
    """Collector: waiting for the learner to free a rollout."""
    IDLE = "idle"
    """Device: nothing to run."""


LEARN_PHASES = (Phase.ADVANTAGE, Phase.UPDATE)
"""The learner's work; every other phase of its lane is idle time."""
COLLECT_PHASES = (Phase.ACT, Phase.ENV, Phase.TAIL, Phase.STORE)
"""The collectors' work."""
# For loops that run once per env step: `Phase.ACT` takes 60 ns longer than a global name.
ACT, ENV, TAIL, STORE = COLLECT_PHASES


class Span(NamedTuple):
    """What a lane did from `start` to `end`, in seconds on the lane's clock; a fine span has one phase."""

    start: float
    end: float
    phases: dict[str, float]


class Lane(Protocol):
    """A lane as its readers see it; it may run in another process."""

    lane: str
    spans: deque[Span]
    n_spans: int
    """Spans so far, including those already written or lost."""

    def read(self) -> dict[str, float]:
        """Seconds per phase up to now."""
        ...


@dataclass(slots=True, eq=False)
class PhaseClock:
    """The host clock of one lane: adds the time since the last `enter` to the phase that was running."""

    lane: str = "learner"
    traced: bool = False
    """Whether spans are kept."""
    seconds: dict[str, float] = field(default_factory=dict)
    current: Phase = Phase.START
    since: float = 0.0
    """When the current phase began."""
    spans: deque[Span] = field(default_factory=lambda: deque(maxlen=MAX_WAITING))
    n_spans: int = 0
    _began: float = 0.0
    _n_kept: int = 0
    _room: int = 0
    """Fine spans that may still be kept before the next `cut`."""
    _fold: dict[str, float] = field(default_factory=dict)
    _fold_began: float = 0.0

    def __post_init__(self) -> None:
        self.restart({})

    def restart(self, seconds: dict[str, float], phase: Phase = Phase.START) -> None:
        """Start again from the seconds of an earlier part of the same run."""
        self.seconds = dict(seconds)
        self.current = phase
        self.since = self._began = perf_counter()
        self._n_kept = 0
        self._fold, self._fold_began = dict(seconds), self.since
        self._room = self._free_room() if self.traced else 0

    def enter(self, phase: Phase) -> None:
        """End the current phase and begin `phase`."""
        now = perf_counter()
        try:
            self.seconds[self.current] += now - self.since
        except KeyError:  # once per phase; .get() on each call takes longer
            self.seconds[self.current] = now - self.since
        if self._room:
            self._keep(now)
        self.current = phase
        self.since = now

    def read(self) -> dict[str, float]:
        """Seconds per phase up to now, including the current phase; safe from any thread."""
        seconds, current = dict(self.seconds), self.current
        seconds[current] = seconds.get(current, 0.0) + perf_counter() - self.since
        return seconds

    def cut(self) -> None:
        """Call between rollouts: emit a folded span if one is due, and decide whether the next spans are fine."""
        if not self.traced:
            return
        self.enter(self.current)
        if not self._room:
            elapsed = self.since - self._fold_began
            if elapsed < max(FOLD_SECONDS, (self.since - self._began) / FOLDS):
                return
            phases = {name: s - self._fold.get(name, 0.0) for name, s in self.seconds.items()}
            spent = {name: s for name, s in phases.items() if s > 0}
            self._add(Span(self._fold_began, self.since, spent))
        self._room = self._free_room()
        self._fold, self._fold_began = dict(self.seconds), self.since

    def _keep(self, now: float) -> None:
        self._room -= 1
        self._n_kept += 1
        self._add(Span(self.since, now, {self.current: now - self.since}))
        if not self._room:
            self._fold, self._fold_began = dict(self.seconds), now

    def _add(self, span: Span) -> None:
        self.n_spans += 1
        self.spans.append(span)

    def _free_room(self) -> int:
        elapsed = self.since - self._began
        free = int(DETAIL * (1 + math.log2(1 + elapsed))) - self._n_kept
        return min(free, STRETCH) if free >= FEWEST else 0


compile_listeners: list[Callable[[bool], None]] = []
"""Called by `device/jit.py` as it begins (True) and ends to compile a function that no cache has."""


class CompileWatch:
    """While it is entered: tells, once, that this thread compiles, and counts the time as COMPILE."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell: Callable[[], None] | None = tell
        self._thread, self._depth = get_ident(), 0
        self.clock: PhaseClock | None = None
        """Of this thread's lane, once there is one."""
        self._before: Phase | None = None

    def __enter__(self) -> Self:
        compile_listeners.append(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        compile_listeners.remove(self._note)

    def _note(self, begins: bool) -> None:
        if get_ident() != self._thread:
            return
        self._depth += 1 if begins else -1
        if begins and self._depth == 1:
            if self._tell is not None:
                tell, self._tell = self._tell, None
                tell()
            if self.clock is not None:
                self._before = self.clock.current
                self.clock.enter(Phase.COMPILE)
        elif self._depth == 0 and self.clock is not None and self._before is not None:
            self.clock.enter(self._before)


class DeviceClock:
    """The device's clock: events recorded in its stream as phases begin, and read once the device has passed them.

    It never waits for the device. Device seconds and host seconds are never added.
    """

    def __init__(self, make_event: Callable[[], Any]) -> None:
        """`make_event` makes an event of the device that keeps its time."""
        self.lane = "device"
        self.spans: deque[Span] = deque(maxlen=MAX_WAITING)
        self.n_spans = 0
        self._seconds: dict[str, float] = {}
        self._fold: dict[str, float] = {}
        self._fold_began = 0.0
        self._n_fine = 0
        self._make = make_event
        self._zero = make_event()
        self._zero.record()
        self._zero.synchronize()  # once, before anything runs: aligns the two clocks
        self._zero_at = perf_counter()
        self._pending: deque[tuple[Phase, Any]] = deque([(Phase.IDLE, self._zero)])

    def enter(self, phase: Phase) -> None:
        """Count what is launched from here on as `phase`."""
        event = self._make()
        event.record()
        self._pending.append((phase, event))

    def cut(self) -> None:
        """Read the phases that the device has finished; never waits."""
        while len(self._pending) > 1 and self._pending[1][1].query():
            phase, began = self._pending.popleft()
            start, end = (
                self._zero_at + self._zero.elapsed_time(event) / 1e3 for event in (began, self._pending[0][1])
            )
            self._seconds[phase] = self._seconds.get(phase, 0.0) + end - start
            self._keep(start, end, phase)

    def _keep(self, start: float, end: float, phase: Phase) -> None:
        """Add a phase to the spans, as one of its own or folded with its neighbours, like those of the other lanes."""
        if not self._fold:
            self._fold_began = start
        self._fold[phase] = self._fold.get(phase, 0.0) + end - start
        elapsed = end - self._zero_at
        is_fine = self._n_fine < DETAIL * (1 + math.log2(1 + max(elapsed, 0.0)))
        if is_fine or end - self._fold_began >= max(FOLD_SECONDS, elapsed / FOLDS):
            self._n_fine += is_fine
            self.n_spans += 1
            self.spans.append(Span(self._fold_began, end, self._fold))
            self._fold = {}

    def read(self) -> dict[str, float]:
        """Seconds per finished phase."""
        return dict(self._seconds)


def run_phases(lanes: dict[str, dict[str, float]], *, overlapped: bool) -> dict[str, float]:
    """Seconds per phase of the run as a whole, which add up to its wall time.

    In lockstep, the learner's waiting is replaced by what the collectors did meanwhile.
    """
    phases = dict(lanes["learner"])
    spent = {name: sum(lane.get(name, 0.0) for lane in _collectors(lanes)) for name in COLLECT_PHASES}
    total = sum(spent.values())
    if not overlapped and total > 0:
        waited = phases.pop(Phase.WAIT, 0.0)
        phases |= {name: seconds * waited / total for name, seconds in spent.items() if seconds > 0}
    return phases


def collect_seconds(lanes: dict[str, dict[str, float]]) -> float:
    """Seconds that the slowest collector spent collecting."""
    sums = (sum(lane.get(name, 0.0) for name in COLLECT_PHASES) for lane in _collectors(lanes))
    return max(sums, default=0.0)


def busy_seconds(lanes: dict[str, dict[str, float]]) -> float:
    """Seconds in which the learner's device ran update work, on the device's own clock if it has one."""
    phases = lanes.get("device") or lanes["learner"]
    return sum(phases.get(name, 0.0) for name in LEARN_PHASES)


def _collectors(lanes: dict[str, dict[str, float]]) -> list[dict[str, float]]:
    return [lane for name, lane in lanes.items() if name.startswith("collector")]
