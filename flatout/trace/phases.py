"""Seconds per phase of one lane, on the host clock.

The lane is always in exactly one phase, so the phases add up to the lane's wall time.
"""

from __future__ import annotations

from time import perf_counter


class PhaseClock:
    """Charges the time since the last `enter` to the phase that was running."""

    __slots__ = ("_since", "current", "seconds")

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.current = "start"
        self._since = perf_counter()

    def restart(self, seconds: dict[str, float]) -> None:
        """Begin anew with what an earlier part of the same run has spent."""
        self.seconds = dict(seconds)
        self.current = "start"
        self._since = perf_counter()

    def enter(self, phase: str) -> None:
        """End the running phase and begin `phase`."""
        now = perf_counter()
        seconds = self.seconds
        seconds[self.current] = seconds.get(self.current, 0.0) + now - self._since
        self.current = phase
        self._since = now

    def read(self) -> dict[str, float]:
        """Seconds per phase up to now, the running phase included."""
        self.enter(self.current)
        return dict(self.seconds)
