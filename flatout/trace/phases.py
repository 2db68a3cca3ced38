"""What one lane does, on the host clock: seconds per phase, and spans that say when.

The lane is always in exactly one phase, so the phases add up to its wall time. Spans are kept in detail for as many
stretches as a bounded file can hold, and folded to seconds per phase otherwise. Nothing here blocks or takes a lock.
"""

from __future__ import annotations

import math
from collections import deque
from time import perf_counter
from typing import NamedTuple, Protocol

MAX_WAITING = 50_000
"""Spans that nobody has taken yet; beyond it the oldest are lost."""
DETAIL = 1000
"""Fine spans of the first second, and of every doubling of a run's time."""
STRETCH = 300
"""Fine spans in a row at most, so that long rollouts are seen at several times of a run."""
FEWEST = 100
FOLD_SECONDS = 0.2
FOLDS = 10_000
"""A folded span covers at least this part of the time so far, or FOLD_SECONDS."""


class Span(NamedTuple):
    """What a lane did from `start` to `end`, seconds on the lane's clock; a fine span has one phase."""

    start: float
    end: float
    phases: dict[str, float]


class Lane(Protocol):
    """A lane as its readers see it, wherever it runs."""

    lane: str
    spans: deque[Span]
    n_spans: int
    """How many there were; some may have been lost since."""

    def read(self) -> dict[str, float]:
        """Seconds per phase up to now."""
        ...


class PhaseClock:
    """Charges the time since the last `enter` to the phase that was running."""

    __slots__ = (
        "_began",
        "_fold",
        "_fold_began",
        "_n_kept",
        "_room",
        "current",
        "lane",
        "n_spans",
        "seconds",
        "since",
        "spans",
        "traced",
    )

    def __init__(self, lane: str = "learner") -> None:
        self.lane = lane
        self.traced = False
        """Whether spans are kept."""
        self.since = 0.0
        """When the current phase began."""
        self.spans: deque[Span] = deque(maxlen=MAX_WAITING)
        self.n_spans = 0
        self.restart({})

    def restart(self, seconds: dict[str, float], phase: str = "start") -> None:
        """Begin anew with what an earlier part of the same run has spent; the lane must be doing nothing."""
        self.seconds = dict(seconds)
        self.current = phase
        self.since = self._began = perf_counter()
        self._n_kept = self._room = 0
        self._begin_fold()
        if self.traced:
            self._room = self._free_room()

    def enter(self, phase: str) -> None:
        """End the running phase and begin `phase`."""
        now = perf_counter()
        seconds, current = self.seconds, self.current
        seconds[current] = seconds.get(current, 0.0) + now - self.since
        if self._room:
            self._keep(now)
        self.current = phase
        self.since = now

    def read(self) -> dict[str, float]:
        """Seconds per phase up to now, the running phase included; any thread may ask."""
        seconds, current = dict(self.seconds), self.current
        seconds[current] = seconds.get(current, 0.0) + perf_counter() - self.since
        return seconds

    def cut(self) -> None:
        """Between two stretches, such as rollouts: hand over what was folded, and see if there is room for detail."""
        if not self.traced:
            return
        self.enter(self.current)
        if not self._room:
            elapsed = self.since - self._fold_began
            if elapsed < max(FOLD_SECONDS, (self.since - self._began) / FOLDS):
                return
            fold = self._fold
            phases = {name: s - fold.get(name, 0.0) for name, s in self.seconds.items()}
            spent = {name: s for name, s in phases.items() if s > 0}
            self._add(Span(self._fold_began, self.since, spent))
        self._room = self._free_room()
        self._begin_fold()

    def _keep(self, now: float) -> None:
        self._room -= 1
        self._n_kept += 1
        self._add(Span(self.since, now, {self.current: now - self.since}))
        if not self._room:
            self._fold, self._fold_began = dict(self.seconds), now

    def _add(self, span: Span) -> None:
        self.n_spans += 1
        self.spans.append(span)

    def _begin_fold(self) -> None:
        self._fold, self._fold_began = dict(self.seconds), self.since

    def _free_room(self) -> int:
        elapsed = self.since - self._began
        free = int(DETAIL * (1 + math.log2(1 + elapsed))) - self._n_kept
        return min(free, STRETCH) if free >= FEWEST else 0
