"""A small discrete-event simulation: activities that compute on shared cores, wait, and signal each other.

An activity is a generator that yields `Compute`, `Wait` or a `Signal` to wait for. Cores are shared evenly; what
holds the same lock (Python's) shares one core.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Generator
from dataclasses import dataclass, field
from itertools import count
from typing import TypeAlias

EPSILON = 1e-12


@dataclass(slots=True)
class Compute:
    """So many seconds of work, as if alone."""

    seconds: float
    lock: int | None = None
    """Work with the same lock takes turns."""
    width: int = 1
    """Cores it uses at once."""


@dataclass(slots=True)
class Wait:
    """So many seconds of doing nothing."""

    seconds: float


@dataclass(slots=True)
class Signal:
    """Activities that wait for it go on when it is fired; one that was fired before anyone waited is kept."""

    fired: bool = False
    waiting: list[Activity] = field(default_factory=list)


Activity: TypeAlias = Generator["Compute | Wait | Signal", None, None]


class Cores:
    """Runs activities until none is left or it is told to stop."""

    def __init__(self, n_cores: int) -> None:
        self.now = 0.0
        self.stopped = False
        self._n_cores = n_cores
        self._order = count()
        self._computing: list[tuple[Compute, Activity]] = []
        self._sleeping: list[tuple[float, int, Activity]] = []

    def start(self, activity: Activity) -> None:
        """Begin an activity now."""
        self._go_on(activity)

    def fire(self, signal: Signal) -> None:
        """Let those who wait for the signal go on."""
        if not signal.waiting:
            signal.fired = True
        waiting, signal.waiting = signal.waiting, []
        for activity in waiting:
            heapq.heappush(self._sleeping, (self.now, next(self._order), activity))

    def run(self) -> None:
        """Until nothing is left to do."""
        while (self._computing or self._sleeping) and not self.stopped:
            rates = self._rates()
            computed = min(
                (work.seconds / rate for (work, _), rate in zip(self._computing, rates, strict=True)),
                default=math.inf,
            )
            slept = self._sleeping[0][0] - self.now if self._sleeping else math.inf
            passed = max(min(computed, slept), 0.0)
            self.now += passed
            for (work, _), rate in zip(self._computing, rates, strict=True):
                work.seconds -= passed * rate
            done = [item for item in self._computing if item[0].seconds <= EPSILON]
            if done:
                self._computing = [item for item in self._computing if item[0].seconds > EPSILON]
            ready = [activity for _, activity in done]
            while self._sleeping and self._sleeping[0][0] <= self.now + EPSILON:
                ready.append(heapq.heappop(self._sleeping)[2])
            for activity in ready:
                self._go_on(activity)

    def _rates(self) -> list[float]:
        """How fast each piece of work goes: what shares a lock shares a core, and all share the cores."""
        holders: dict[int, int] = {}
        wanted = 0.0
        for work, _ in self._computing:
            if work.lock is None:
                wanted += work.width
            else:
                wanted += work.lock not in holders
                holders[work.lock] = holders.get(work.lock, 0) + 1
        share = min(1.0, self._n_cores / wanted) if wanted else 1.0
        return [share / holders[work.lock] if work.lock is not None else share for work, _ in self._computing]

    def _go_on(self, activity: Activity) -> None:
        while True:
            try:
                wish = next(activity)
            except StopIteration:
                return
            if isinstance(wish, Compute):
                if wish.seconds > EPSILON:
                    self._computing.append((wish, activity))
                    return
            elif isinstance(wish, Wait):
                if wish.seconds > EPSILON:
                    heapq.heappush(self._sleeping, (self.now + wish.seconds, next(self._order), activity))
                    return
            elif wish.fired:
                wish.fired = False
            else:
                wish.waiting.append(activity)
                return
