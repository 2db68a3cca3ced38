"""What a person sees while a run trains: a live view in a terminal, one output in a notebook, plain lines elsewhere.

Lines and the live view go to standard error, which leaves standard output to `--json`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from html import escape
from time import perf_counter
from typing import Any, Protocol, TextIO

from flatout.runlog.recorder import Progress, Sink
from flatout.views import figures as fmt
from flatout.views.stream import SafeStream

UPDATE_SECONDS = 0.25
"""Time between two updates of a notebook's output."""


class Display(Sink, Protocol):
    """Shows a run to a person; its methods never raise, whatever the terminal does."""

    def start(self, header: Sequence[str]) -> None:
        """Print the header and start."""


def make_display(stream: TextIO | None = None, phase: Callable[[], str] = lambda: "") -> Display:
    """The display that suits `stream` (standard error unless given); `phase` returns the learner's current phase."""
    if stream is None and in_notebook():
        return NotebookDisplay()
    safe = SafeStream(stream or sys.stderr)
    if not safe.isatty():
        return PlainDisplay(safe)
    # Not at the top of the file: without a terminal a run does not need rich.
    from flatout.views.live import LiveDisplay

    return LiveDisplay(safe, phase)


class PlainDisplay:
    """Prints a line now and then, for terminals without a cursor and for log files."""

    first_seconds = 1.0
    """The first line is printed with the first figures after this long."""
    least_seconds = 5.0
    """Lines are at least this far apart …"""
    most_seconds = 60.0
    """… and are printed after 10 % of the steps or this long, whichever is sooner."""

    def __init__(self, stream: SafeStream) -> None:
        self._stream = stream
        self._latest: Progress | None = None
        self._shown: Progress | None = None

    def start(self, header: Sequence[str]) -> None:
        """Print the header."""
        for line in header:
            self.note(line)

    def write(self, progress: Progress) -> None:
        """Print a line if the last one is old enough."""
        self._latest = progress
        if self._is_due(progress):
            self.close()

    def note(self, text: str) -> None:
        """Print `text`."""
        self._stream.write(text + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Print the last figures, if they are not printed yet."""
        if self._latest is not None and self._latest is not self._shown:
            self._shown = self._latest
            self.note(plain_line(self._latest))

    def _is_due(self, progress: Progress) -> bool:
        if self._shown is None:
            return progress.seconds >= self.first_seconds
        waited = progress.seconds - self._shown.seconds
        n_steps = progress.env_steps - self._shown.env_steps
        is_much = waited >= self.most_seconds or n_steps >= 0.1 * progress.total_steps
        return waited >= self.least_seconds and is_much


def plain_line(progress: Progress) -> str:
    """A run's state in one line of text."""
    steps, total, speed = progress.env_steps, progress.total_steps, progress.steps_per_second
    fields = [
        f"{fmt.percent(fmt.share_done(steps, total)):>6}",
        f"{fmt.count(steps)} steps",
        f"{fmt.rate(speed)} steps/s",
        f"return {fmt.mean_and_std(progress.return_mean, progress.return_std)}",
        f"learner busy {fmt.percent(progress.learner_busy)}",
    ]
    if "eval/mean_reward" in progress.metrics:
        fields.append(f"evaluated {fmt.number(progress.metrics['eval/mean_reward'])}")
    if steps < total and progress.seconds_left is not None:
        fields.append(f"{fmt.duration(progress.seconds_left)} left")
    return "  ".join(fields)


def in_notebook() -> bool:
    """Whether a notebook's kernel runs this code."""
    shell = sys.modules.get("IPython")
    return shell is not None and hasattr(shell.get_ipython(), "kernel")


class NotebookDisplay:
    """A run in one output of a notebook, which is updated in place: a bar, a line of figures, the notes."""

    def __init__(self) -> None:
        self._header: Sequence[str] = ()
        self._notes: list[str] = []
        self._progress: Progress | None = None
        self._output: Any = None
        self._shown_at = float("-inf")

    def start(self, header: Sequence[str]) -> None:
        """Show the header."""
        self._header = [line for line in header if not line.startswith("note: ")]
        self._notes += [line for line in header if line.startswith("note: ")]
        self._show()

    def write(self, progress: Progress) -> None:
        """Show the figures, a few times a second."""
        self._progress = progress
        if perf_counter() - self._shown_at >= UPDATE_SECONDS:
            self._show()

    def note(self, text: str) -> None:
        """Show a line below the figures."""
        self._notes.append(text)
        self._show()

    def close(self) -> None:
        """Show the last figures."""
        self._show()

    def _show(self) -> None:
        self._shown_at = perf_counter()
        line = plain_line(self._progress).strip() if self._progress else "collecting the first rollout"
        done = self._progress.env_steps / self._progress.total_steps if self._progress else 0.0
        title, *more = self._header or ("flatout",)
        html = (
            f"<div><details><summary>{escape(title)}</summary>{'<br>'.join(map(escape, more))}</details>"
            f'<progress value="{done:.4f}" max="1" style="width:100%;max-width:640px"></progress><br>'
            f"{'<br>'.join(map(escape, [line, *self._notes]))}</div>"
        )
        data = {"text/plain": "\n".join([title, line, *self._notes]), "text/html": html}
        try:
            if self._output is None:
                from IPython.display import display

                self._output = display(data, raw=True, display_id=True)  # type: ignore[no-untyped-call]
            else:
                self._output.update(data, raw=True)
        except Exception:  # a display problem must not end a run
            return
