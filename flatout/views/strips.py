"""Lanes as strips of letters: one cell per bin of time, read by letter or by colour.

In: the strips of a job and a width. Out: lines of styled text, with their legend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.text import Text

from flatout.timing import Phase
from flatout.views.figures import duration, percent
from flatout.views.job import Job, Strip
from flatout.views.view import fitting

LABEL_CELLS = 13
_BUSY_CELLS = 11
_LONGEST = 120

# Capitals are work, small letters are waiting and overhead. Of the colours, green is what the learner is there for,
# red is its waiting, blue is collecting, grey is nothing to do.
_PHASES: dict[str, tuple[str, str]] = {
    Phase.UPDATE: ("U", "black on green"),
    Phase.ADVANTAGE: ("V", "black on green"),
    Phase.WAIT: ("w", "white on red"),
    Phase.STAGE: ("g", "black on magenta"),
    Phase.COMPILE: ("c", "white on magenta"),
    Phase.RECORD: ("r", "black on yellow"),
    Phase.EVALUATE: ("e", "black on yellow"),
    Phase.CHECKPOINT: ("k", "black on yellow"),
    Phase.PUBLISH: ("p", "black on white"),
    Phase.START: ("b", "bright_white on bright_black"),
    Phase.ACT: ("A", "black on cyan"),
    Phase.ENV: ("E", "white on blue"),
    Phase.TAIL: ("t", "white on magenta"),
    Phase.STORE: ("S", "black on white"),
    Phase.SLOT: ("l", "bright_white on bright_black"),
}
_OTHER = ("?", "reverse")
_MEANINGS: dict[str, str] = {
    Phase.WAIT: "wait for data",
    Phase.SLOT: "wait for the learner",
    Phase.TAIL: "wait for the slowest env",
}


def strip_cells(width: int) -> int:
    """How many cells a strip has in a job of that width."""
    return max(8, min(_LONGEST, width - LABEL_CELLS - _BUSY_CELLS))


def strip_lines(job: Job, width: int, most: int) -> list[Text]:
    """The first lanes, what is not shown of the others, and the legend."""
    if not job.strips:
        return []
    shown, rest = job.strips[:most], job.strips[most:]
    lines = [_line(strip) for strip in shown]
    if rest:
        lines.append(_rest(rest))
    return [*lines, *_legend(job, shown, width)]


def _line(strip: Strip) -> Text:
    cells = [_PHASES.get(phase, _OTHER) if phase else ("·", "dim") for phase in strip.cells]
    label = strip.lane if strip.clock == "host" else f"{strip.lane} clock"
    return Text.assemble(
        (f"{label:<{LABEL_CELLS}}"[:LABEL_CELLS], "dim"), *cells, f"  busy {percent(strip.busy)}"
    )


def _rest(strips: Sequence[Strip]) -> Text:
    low, high = min(strip.busy for strip in strips), max(strip.busy for strip in strips)
    busy = percent(low) if percent(low) == percent(high) else f"{percent(low)} to {percent(high)}"
    return Text(f"{'':<{LABEL_CELLS}}… {len(strips)} more, busy {busy}", "dim")


def _legend(job: Job, strips: Sequence[Strip], width: int) -> list[Text]:
    """The letters that can be seen, in fewer words or two lines where it is narrow, and how much time is shown."""
    seen = [phase for strip in strips for phase in strip.cells if phase]
    phases = sorted(set(seen), key=lambda phase: -seen.count(phase))
    room = width - LABEL_CELLS
    words = [_explained(phase, _MEANINGS) for phase in phases]
    if len(first := fitting(words, room, "  ")) < len(words):
        words = [_explained(phase, {}) for phase in phases]
        first = fitting(words, room, "  ")
    second = fitting(words[len(first) :], room, "  ")
    span = f"last {job.seconds_shown:.0f} s" if job.status == "running" else duration(job.seconds_shown)
    rows = [(span, first), ("", second)] if second else [(span, first)]
    return [
        Text.assemble((f"{label:<{LABEL_CELLS}}"[:LABEL_CELLS], "dim"), Text("  ").join(shown))
        for label, shown in rows
    ]


def _explained(phase: str, meanings: Mapping[str, str]) -> Text:
    return Text.assemble(_PHASES.get(phase, _OTHER), f" {meanings.get(phase, phase)}")
