"""Ctrl-C and SIGTERM as a polite request: the iteration is finished if that takes seconds, else cut.

A second signal does not wait: it raises KeyboardInterrupt.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from types import FrameType

from flatout.collect.ragged import Interrupted

GRACE_SECONDS = 3.0
"""How long the running iteration may go on after the first signal."""
BLOCKED_SECONDS = 5.0
"""After this an env that blocks in its step is interrupted."""


class StopRequest:
    """Whether, and by which signal, the run was asked to stop."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._deadline = float("inf")
        self._can_interrupt = False

    @property
    def requested(self) -> bool:
        """Whether to stop after this iteration."""
        return self.signal is not None

    def now(self) -> bool:
        """Whether to stop in the middle of this iteration."""
        return self.signal is not None and perf_counter() > self._deadline

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Marks code, such as an env's step, that may be cut short by `Interrupted`."""
        self._can_interrupt = True
        try:
            yield
        finally:
            self._can_interrupt = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take over SIGINT and SIGTERM for the duration, where that is possible (the main thread)."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._on_alarm)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)
        self._deadline = perf_counter() + GRACE_SECONDS
        signal.setitimer(signal.ITIMER_REAL, BLOCKED_SECONDS)

    def _on_alarm(self, _: int, __: FrameType | None) -> None:
        if self._can_interrupt:
            raise Interrupted
