"""What a device does, on its own clock: events are recorded in its stream as phases begin, and read when they are over.

Nothing waits for the device. Host and device seconds are never added.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any

from flatout.trace.phases import MAX_WAITING, Span

IDLE = "idle"


class DeviceClock:
    """The device's lane."""

    def __init__(self, make_event: Callable[[], Any]) -> None:
        """`make_event` makes marks for the device's stream, such as torch.cuda.Event(enable_timing=True)."""
        self.lane = "device"
        self.spans: deque[Span] = deque(maxlen=MAX_WAITING)
        self.n_spans = 0
        self._seconds: dict[str, float] = {}
        self._make = make_event
        self._zero = make_event()
        self._zero.record()
        self._zero.synchronize()  # once, before anything runs: where the two clocks meet
        self._zero_at = perf_counter()
        self._pending: deque[tuple[str, Any]] = deque([(IDLE, self._zero)])

    def enter(self, phase: str) -> None:
        """Mark that what is launched from here on belongs to `phase`."""
        event = self._make()
        event.record()
        self._pending.append((phase, event))

    def cut(self) -> None:
        """Take what the device has finished by now; never waits."""
        while len(self._pending) > 1 and self._pending[1][1].query():
            phase, began = self._pending.popleft()
            start, end = (
                self._zero_at + self._zero.elapsed_time(event) / 1e3 for event in (began, self._pending[0][1])
            )
            self._seconds[phase] = self._seconds.get(phase, 0.0) + end - start
            self.spans.append(Span(start, end, {phase: end - start}))
            self.n_spans += 1

    def read(self) -> dict[str, float]:
        """Seconds per phase of what is finished."""
        return dict(self._seconds)
