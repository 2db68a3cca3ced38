"""What a person sees while a run trains: a live view in a terminal, plain lines elsewhere, or nothing.

Everything goes to standard error, which leaves standard output to `--json`.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Protocol, TextIO

from flatout.runlog.metrics import Progress
from flatout.runlog.recorder import Sink
from flatout.views.figures import (
    count,
    duration,
    mean_and_std,
    number,
    percent,
    rate,
    seconds_left,
    share_done,
)

# One character for one, so that no line grows past the terminal's edge.
_ASCII = str.maketrans("±·–—…°╭╮╰╯│─━╸╺▁▂▃▄▅▆▇█", "~|--. ++++|-=-- .:-=+*#")


class SafeStream(io.TextIOBase):
    """Writes to `stream` until it breaks, in ASCII where it takes no more than that."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._broken = False
        encoding = (getattr(stream, "encoding", None) or "utf-8").lower()
        self._code = "utf-8" if encoding.startswith("utf") else "ascii"

    def write(self, text: str) -> int:
        """Write `text`; once the stream has failed, do nothing."""
        if self._code == "ascii":
            text = text.translate(_ASCII)
        # Both ways, because a file name in a note may hold what no encoding takes.
        self._attempt(self._stream.write, text.encode(self._code, "replace").decode(self._code))
        return len(text)

    def flush(self) -> None:
        """Flush the stream, if it still takes anything."""
        self._attempt(self._stream.flush)

    def isatty(self) -> bool:
        """Whether a person may be looking: the stream is a terminal that can move its cursor."""
        try:
            return self._stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
        except ValueError:
            return False

    def columns_and_lines(self) -> tuple[int, int]:
        """The terminal's size now; 80 × 24 when it does not say."""
        try:
            size = os.get_terminal_size(self._stream.fileno())
        except (OSError, ValueError):
            return 80, 24
        return size.columns or 80, size.lines or 24

    def _attempt(self, call: Callable[..., object], *args: str) -> None:
        if self._broken:
            return
        try:
            call(*args)
        except BlockingIOError:
            # The terminal is behind, not gone: this frame is lost, the next may fit.
            return
        except (OSError, ValueError):
            self._broken = True


class Display(Sink, Protocol):
    """Shows a run to a person; none of its methods raises, whatever the terminal does."""

    def start(self, header: Sequence[str]) -> None:
        """Print the header's lines and begin."""


def make_display(
    stream: TextIO | None = None, quiet: bool = False, phase: Callable[[], str] = lambda: ""
) -> Display:
    """The display that suits `stream` (standard error unless given); `phase` says what the learner does now."""
    if quiet:
        return QuietDisplay()
    safe = SafeStream(stream or sys.stderr)
    if not safe.isatty():
        return PlainDisplay(safe)
    # Here and not at the top: a run without a terminal need not wait for rich.
    from flatout.views.live import LiveDisplay

    return LiveDisplay(safe, phase)


class QuietDisplay:
    """Shows nothing."""

    def start(self, header: Sequence[str]) -> None:
        """Print nothing."""

    def write(self, progress: Progress) -> None:
        """Take the figures and forget them."""

    def note(self, text: str) -> None:
        """Print nothing."""

    def close(self) -> None:
        """Do nothing."""


class PlainDisplay:
    """Prints a line now and then: seldom enough for a log file, often enough to see that it goes."""

    first_seconds = 1.0
    """The first line comes with the first figures after this long."""

    least_seconds = 5.0
    """Lines are at least this far apart …"""

    most_seconds = 60.0
    """… and come after 10 % of the steps or this long, whichever is sooner."""

    def __init__(self, stream: SafeStream) -> None:
        self._stream = stream
        self._latest: Progress | None = None
        self._shown: Progress | None = None

    def start(self, header: Sequence[str]) -> None:
        """Print the header's lines."""
        for line in header:
            self.note(line)

    def write(self, progress: Progress) -> None:
        """Print a line if the last one is old enough."""
        self._latest = progress
        if self._is_due(progress):
            self._show(progress)

    def note(self, text: str) -> None:
        """Print `text`."""
        self._stream.write(text + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Print the last figures unless they are printed."""
        if self._latest is not None and self._latest is not self._shown:
            self._show(self._latest)

    def _is_due(self, progress: Progress) -> bool:
        if self._shown is None:
            return progress.seconds >= self.first_seconds
        waited = progress.seconds - self._shown.seconds
        walked = progress.env_steps - self._shown.env_steps
        return waited >= self.least_seconds and (
            waited >= self.most_seconds or walked >= 0.1 * progress.total_steps
        )

    def _show(self, progress: Progress) -> None:
        self._shown = progress
        self.note(plain_line(progress))


def plain_line(progress: Progress) -> str:
    """A run's state in one line of text."""
    steps, total, speed = progress.env_steps, progress.total_steps, progress.steps_per_second
    fields = [
        f"{percent(share_done(steps, total)):>6}",
        f"{count(steps)} steps",
        f"{rate(speed)} steps/s",
        f"return {mean_and_std(progress.return_mean, progress.return_std)}",
        f"learner busy {percent(progress.learner_busy)}",
    ]
    if "eval/mean_reward" in progress.metrics:
        fields.append(f"evaluated {number(progress.metrics['eval/mean_reward'])}")
    if steps < total:
        fields.append(f"{duration(seconds_left(steps, total, speed))} left")
    return "  ".join(fields)
