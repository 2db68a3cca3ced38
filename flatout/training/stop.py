"""SIGINT, SIGTERM and SIGHUP as a request to stop: the iteration is finished if that takes seconds, else cut off.

A second signal does not wait: it raises KeyboardInterrupt. While the run is being saved only a third SIGINT does.
"""

from __future__ import annotations

import _thread
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any

from flatout.collect.ragged import Interrupted

HANGUP = getattr(signal, "SIGHUP", None)  # not on Windows
SIGNALS = [number for number in (signal.SIGINT, signal.SIGTERM, HANGUP) if number is not None]
GRACE_SECONDS = 3.0
"""How long the current iteration may go on after the first signal, unless several processes must end it together."""
BLOCKED_SECONDS = 5.0
"""After this, an env that blocks in its step is interrupted."""


@contextmanager
def ignoring_signals() -> Iterator[None]:
    """Ignore the signals meanwhile: everything is saved, and an impatient Ctrl-C must not disturb closing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {n: signal.signal(n, signal.SIG_IGN) for n in SIGNALS if signal.getsignal(n) is not None}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class StopRequest:
    """Whether, and by which signal, the run was asked to stop."""

    def __init__(self, grace_seconds: float | None = GRACE_SECONDS) -> None:
        """`grace_seconds`: how long the current iteration may go on; None: to its end, whatever it takes."""
        self._grace_seconds = grace_seconds
        self.signal: signal.Signals | None = None
        self.requested = False
        """Whether to stop after this iteration."""
        self.saving = False
        """Whether the run has ended and is being saved."""
        self._grace_is_over = threading.Event()
        self.now = self._grace_is_over.is_set
        """Call it: whether to stop in the middle of this iteration."""
        self._interruptible = False
        self._n_signals = 0
        self._is_alarm = False
        self._listens: SimpleQueue[bool] = SimpleQueue()  # its put() may be called in a signal handler
        """True when the first signal has come, False when nobody listens any more."""

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let `Interrupted` cut this off, such as an env's step, when it blocks for too long."""
        self._interruptible = True
        try:
            yield
        finally:
            self._interruptible = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals meanwhile, where that is possible (in the main thread)."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # A handler of C code (None) could not be restored. SIGHUP stays ignored under nohup.
        before = {n: handler for n in SIGNALS if (handler := signal.getsignal(n)) is not None}
        if HANGUP is not None and before.get(HANGUP) == signal.SIG_IGN:
            del before[HANGUP]
        # A thread and not a timer of the process, which may be in use.
        watch = threading.Thread(
            target=self._watch, args=(threading.get_ident(),), name="flatout stopping", daemon=True
        )
        watch.start()
        self._hook, sys.unraisablehook = sys.unraisablehook, self._on_ignored
        try:
            for number in before:
                signal.signal(number, self._on_signal)
            yield
        finally:
            self.saving = True
            self._listens.put(False)
            watch.join()  # before the handlers are restored, to which it must not send a signal
            for number, handler in before.items():
                signal.signal(number, handler)
            sys.unraisablehook = self._hook

    def _on_ignored(self, ignored: Any) -> None:
        """Python ignores what a signal raises in a finalizer: then this iteration is cut off all the same."""
        if issubclass(ignored.exc_type, KeyboardInterrupt | Interrupted):
            self._grace_is_over.set()
        else:
            self._hook(ignored)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self._is_alarm:
            self._is_alarm = False
            if self._interruptible:
                raise Interrupted
            return
        self._n_signals += 1
        if self.signal is None:
            self.signal, self.requested = signal.Signals(number), True
            self._listens.put(True)
        elif not self.saving or (number == signal.SIGINT and self._n_signals > 2):
            raise KeyboardInterrupt

    def _watch(self, thread_id: int) -> None:
        """After the first signal: end the grace period in time, then interrupt the thread while it is blocked."""
        listens, seconds = self._listens.get(), self._grace_seconds
        while listens:
            try:
                listens = self._listens.get(timeout=seconds)
            except Empty:
                if self.now() and self._interruptible and self.signal is not None:
                    self._is_alarm = True
                    if hasattr(signal, "pthread_kill"):
                        signal.pthread_kill(thread_id, self.signal)
                    else:
                        _thread.interrupt_main(self.signal)  # Windows
                self._grace_is_over.set()
                seconds = BLOCKED_SECONDS - GRACE_SECONDS
