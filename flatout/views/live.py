"""The live view in a terminal: a panel that a thread redraws four times a second.

The training loop only leaves its latest figures here. A narrow terminal shows fewer figures per row.
"""

from __future__ import annotations

import math
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TextIO, cast

from rich import box
from rich.console import Console, ConsoleDimensions, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from flatout.runlog.recorder import Progress
from flatout.views import figures as fmt
from flatout.views.stream import SafeStream

REFRESHES_PER_SECOND = 4
FIRST_ROLLOUT = "collecting the first rollout"
WIDEST = 100
LEVELS = "▁▂▃▄▅▆▇█"
_LABEL_CELLS = 9
_ROOMY = 80
_FIRST_CELLS = 16

# Signs of healthy learning, most important first; a run shows those that its algorithm has.
# Metric, label, short label, format.
_UPDATE_FIGURES: tuple[tuple[str, str, str, Callable[[float], str]], ...] = (
    ("train/approx_kl", "KL", "KL", fmt.number),
    ("train/clip_fraction", "clipped", "clip", fmt.percent),
    ("train/entropy_loss", "entropy", "entropy", lambda loss: fmt.number(-loss)),
    ("train/explained_variance", "explained variance", "EV", fmt.number),
    ("rollout/exploration_rate", "explore", "explore", fmt.percent),
    ("train/loss", "loss", "loss", fmt.number),
    ("train/learning_rate", "learning rate", "lr", fmt.number),
)


class LiveDisplay:
    """Shows a run's state in place; notes and what the env prints scroll above it."""

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
            # Redirected output goes to its file, not to the screen.
            redirect_stdout=_is_terminal(sys.stdout),
            redirect_stderr=_is_terminal(sys.stderr),
        )
        _displays.add(self)

    def start(self, header: Sequence[str]) -> None:
        """Print the header and draw the view below it."""
        for line in header:
            self.note(line)
        self._since = perf_counter()
        self._streams_before = sys.stdout, sys.stderr
        self._live.start(refresh=True)

    def write(self, progress: Progress) -> None:
        """Keep the latest figures for the next refresh."""
        self._since = perf_counter()
        self._progress = progress
        if progress.return_mean is not None:
            self._returns.add(progress.return_mean)
        self._evaluated = progress.metrics.get("eval/mean_reward", self._evaluated)

    def note(self, text: str) -> None:
        """Print a line above the view."""
        self._console.print(Text(text))

    def close(self) -> None:
        """Draw the last figures and release the terminal."""
        if not self._stopped:
            self._stopped = True
            self._live.stop()

    def _render(self) -> RenderableType:
        # Each time, as windows are resized; of our own stream, as rich asks the standard ones.
        self._console.size = ConsoleDimensions(*self._stream.columns_and_lines())
        width = min(self._console.width, WIDEST)
        try:
            return framed(self._lines(width - 4), Text(self._title(), "cyan"), width)
        except Exception as error:  # a display problem must not end a run
            return Text(f"display: {error}", no_wrap=True)

    def _title(self) -> str:
        """The learner's current phase, or how the run ended."""
        if not self._stopped:
            return f"now: {self._phase()}"
        progress = self._progress
        return "done" if progress and progress.env_steps >= progress.total_steps else "stopped"

    def _lines(self, width: int) -> list[Text]:
        progress = self._progress
        # Seconds since the latest figures, or since the start.
        waited = 0.0 if self._stopped and progress else perf_counter() - self._since
        if progress is None:
            return [Text(f"{FIRST_ROLLOUT}: {fmt.duration(waited)}")]
        steps, total = progress.env_steps, progress.total_steps
        left = None if progress.seconds_left is None else progress.seconds_left - waited
        gap = "   " if width >= _ROOMY else "  "
        rows = {
            "return": self._return_figures(progress, width),
            "speed": _speed_figures(progress),
            "update": _update_figures(progress, width),
        }
        if width >= _ROOMY:
            # Align the rows in columns, so that they do not move as figures grow.
            for first in (figures[0] for figures in rows.values() if figures):
                first.pad_right(max(0, _FIRST_CELLS - first.cell_len))
        elapsed = progress.seconds + waited
        return [
            steps_row(steps, total, left if steps < total else None, elapsed, width, gap),
            *(row(label, figures, width, gap, _LABEL_CELLS) for label, figures in rows.items()),
        ]

    def _return_figures(self, progress: Progress, width: int) -> list[Text]:
        cells = min(20, width // 4)
        return [
            *return_figures(progress.return_mean, progress.return_std, self._returns.values, cells),
            figure("evaluated", fmt.told("{}", self._evaluated)),
            figure("length", fmt.told("{}", progress.length_mean)),
            figure("episodes", fmt.count(progress.episodes)),
        ]


_displays: weakref.WeakSet[LiveDisplay] = weakref.WeakSet()


def _leave_child() -> None:
    """In a forked child, print directly: the view's lock may be held by a thread of the parent."""
    for display in _displays:
        if display._live.is_started:
            sys.stdout, sys.stderr = display._streams_before


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_child)


def _is_terminal(stream: TextIO | None) -> bool:
    # None without a console, as under pythonw.
    return stream is not None and stream.isatty()


class History:
    """Evenly spaced values of a series of any length, in bounded memory."""

    def __init__(self, capacity: int = 128) -> None:
        self.values: list[float] = []
        self._capacity = capacity
        self._stride = 1
        self._seen = 0

    def add(self, value: float) -> None:
        """Add a value; when full, every second one is dropped."""
        if self._seen % self._stride == 0:
            self.values.append(value)
            if len(self.values) == self._capacity:
                # A new list: the display's thread may be reading the old one.
                self.values = self.values[::2]
                self._stride *= 2
        self._seen += 1


def framed(lines: Sequence[Text], title: Text, width: int) -> Panel:
    """Lines in a frame with a title."""
    text = Text("\n", no_wrap=True, overflow="crop").join(lines)
    return Panel(text, title=title, title_align="left", box=box.ROUNDED, border_style="dim", width=width)


def steps_row(
    steps: float, total: float, left: float | None, elapsed: float | None, width: int, gap: str
) -> Text:
    """The progress bar, and as many figures of time and steps as fit beside it."""
    share = fmt.share_done(steps, total)
    of_total = f" of {fmt.count(total)} ({fmt.percent(share)})" if total else " env steps"
    figures = [
        Text.assemble((fmt.count(steps), "bold"), of_total),
        Text(fmt.told("{} left", left, fmt.duration)),
        Text(fmt.told("{} elapsed", elapsed, fmt.duration), "dim"),
    ]
    shown = fitting(figures, width - 10, gap)
    bar_cells = width - sum(figure.cell_len + len(gap) for figure in shown)
    return Text(gap).join([bar(share, max(bar_cells, 4)), *shown])


def return_figures(mean: float | None, std: float | None, curve: Sequence[float], cells: int) -> list[Text]:
    """The mean return, and its curve over the run."""
    return [Text(fmt.mean_and_std(mean, std), "bold green"), Text(sparkline(curve, cells), "green")]


def _speed_figures(progress: Progress) -> list[Text]:
    figures = [
        Text.assemble((fmt.rate(progress.steps_per_second), "bold"), " steps/s"),
        figure("learner busy", fmt.percent(progress.learner_busy)),
    ]
    wall = sum(progress.phases.values())
    largest = sorted(progress.phases.items(), key=lambda item: -item[1])[:3]
    shares = [(name, seconds / wall) for name, seconds in largest if wall > 0 and seconds / wall >= 0.005]
    for nth, (name, share) in enumerate(shares):
        figures.append(figure(name if nth else f"time in {name}", fmt.percent(share)))
    return figures


def _update_figures(progress: Progress, width: int) -> list[Text]:
    metrics = progress.metrics
    return [
        figure(
            label if width >= _ROOMY else short,
            show(metrics[name]),
            "" if math.isfinite(metrics[name]) else "bold red",
        )
        for name, label, short, show in _UPDATE_FIGURES
        if name in metrics
    ]


def bar(share: float, cells: int) -> Text:
    """A progress bar that is readable without colours: thick is done, thin is left."""
    halves = round(2 * cells * share)
    done = "━" * (halves // 2) + "╸" * (halves % 2)
    return Text.assemble((done, "cyan"), ("─" * (cells - len(done)), "dim"))


def sparkline(values: Sequence[float], cells: int) -> str:
    """The series as blocks, scaled from its minimum to its maximum."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2 or cells < 2:
        return ""
    cells = min(cells, len(finite))
    picked = [finite[round(i * (len(finite) - 1) / (cells - 1))] for i in range(cells)]
    low, high = min(picked), max(picked)
    scale = (len(LEVELS) - 1) / (high - low) if high > low else 0.0
    return "".join(LEVELS[round((value - low) * scale)] for value in picked)


def figure(label: str, value: str, style: str = "") -> Text:
    """A value after its label; empty without a value."""
    return Text.assemble((f"{label} ", "dim"), (value, style)) if value else Text()


def row(label: str, figures: Sequence[Text], width: int, gap: str, label_cells: int) -> Text:
    """A label and as many figures as fit beside it."""
    shown = fitting(figures, width - label_cells, gap)
    return Text.assemble((f"{label:<{label_cells}}"[:label_cells], "dim"), Text(gap).join(shown))


def fitting(figures: Sequence[Text], width: int, gap: str) -> list[Text]:
    """The first figures that fit side by side, without empty ones."""
    shown: list[Text] = []
    used = 0
    for figure in filter(None, figures):
        used += figure.cell_len + (len(gap) if shown else 0)
        if used > width:
            break
        shown.append(figure)
    return shown
