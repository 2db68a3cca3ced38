"""The live view in a terminal: a panel redrawn four times a second by a thread of its own.

In: the latest Progress. Out: escape codes on the given stream. The training loop only leaves its figures here.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TextIO, cast

from rich.console import Console, ConsoleDimensions, RenderableType
from rich.live import Live
from rich.text import Text

from flatout.runlog.metrics import Progress
from flatout.runlog.stream import SafeStream
from flatout.views.view import History, Snapshot, panel

REFRESHES_PER_SECOND = 4


class LiveDisplay:
    """Shows a run's state in place; notes and what the env prints scroll by above it."""

    def __init__(self, stream: SafeStream, phase: Callable[[], str] = lambda: "") -> None:
        self._stream = stream
        self._phase = phase
        self._progress: Progress | None = None
        self._since = perf_counter()
        self._returns = History()
        self._evaluated: float | None = None
        self._stopped = False
        self._streams_before = sys.stdout, sys.stderr
        self._console = Console(
            file=cast(TextIO, stream), force_terminal=True, force_interactive=True, force_jupyter=False
        )
        self._live = Live(
            console=self._console,
            get_renderable=self._render,
            refresh_per_second=REFRESHES_PER_SECOND,
            vertical_overflow="crop",
            # What is piped elsewhere goes there, not to the screen.
            redirect_stdout=_is_terminal(sys.stdout),
            redirect_stderr=_is_terminal(sys.stderr),
        )
        _displays.add(self)

    def start(self, header: Sequence[str]) -> None:
        """Print the header's lines and draw the view below them."""
        for line in header:
            self.note(line)
        self._since = perf_counter()
        self._streams_before = sys.stdout, sys.stderr
        self._live.start(refresh=True)

    def write(self, progress: Progress) -> None:
        """Leave the latest figures for the next refresh."""
        self._since = perf_counter()
        self._progress = progress
        if progress.return_mean is not None:
            self._returns.add(progress.return_mean)
        self._evaluated = progress.metrics.get("eval/mean_reward", self._evaluated)

    def note(self, text: str) -> None:
        """Print a line above the view."""
        self._console.print(Text(text))

    def close(self) -> None:
        """Draw the last figures, leave them standing and give the terminal back."""
        if not self._stopped:
            self._stopped = True
            self._live.stop()

    def _render(self) -> RenderableType:
        # Asked of our own stream and each time: rich asks the standard ones, and people resize windows.
        self._console.size = ConsoleDimensions(*self._stream.columns_and_lines())
        try:
            return panel(self._snapshot(), self._console.width)
        except Exception as error:
            # A run must outlive its picture.
            return Text(f"display: {error}", no_wrap=True)

    def _snapshot(self) -> Snapshot:
        progress = self._progress
        waited = 0.0 if self._stopped and progress else perf_counter() - self._since
        if self._stopped:
            title = "done" if progress and progress.env_steps >= progress.total_steps else "stopped"
        else:
            title = f"now: {self._phase()}"
        return Snapshot(
            progress=progress,
            waited=waited,
            title=title,
            returns=self._returns.values,
            evaluated=self._evaluated,
        )

    def leave_child(self) -> None:
        """In a forked child, print straight: the view's lock may be held by a thread that is not there."""
        if self._live.is_started:
            sys.stdout, sys.stderr = self._streams_before


_displays: weakref.WeakSet[LiveDisplay] = weakref.WeakSet()


def _leave_child() -> None:
    for display in _displays:
        display.leave_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_child)


def _is_terminal(stream: TextIO | None) -> bool:
    # None when there is no console at all, as under pythonw.
    return stream is not None and stream.isatty()
