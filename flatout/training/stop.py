"""Ctrl-C and SIGTERM as a request to stop: the current iteration is finished if that takes seconds, else cut off.

A second signal does not wait: it raises KeyboardInterrupt.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from flatout.collect.ragged import Interrupted

GRACE_SECONDS = 3.0
"""How long the current iteration may go on after the first signal."""
BLOCKED_SECONDS = 5.0
"""After this, an env that blocks in its step is interrupted."""


class StopRequest:
    """Whether, and by which signal, the run was asked to stop."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.requested = False
        """Whether to stop after this iteration."""
        self._grace_is_over = threading.Event()
        self.now = self._grace_is_over.is_set
        """Call it: whether to stop in the middle of this iteration."""
        self.interruptible = False
        """Set it around code, such as an env's step, that `Interrupted` may cut off."""

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle SIGINT and SIGTERM meanwhile, where that is possible (in the main thread)."""
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
        if self.requested:
            raise KeyboardInterrupt
        self.signal, self.requested = signal.Signals(number), True
        signal.setitimer(signal.ITIMER_REAL, GRACE_SECONDS, BLOCKED_SECONDS - GRACE_SECONDS)

    def _on_alarm(self, _: int, __: FrameType | None) -> None:
        if self.now() and self.interruptible:
            raise Interrupted
        self._grace_is_over.set()
