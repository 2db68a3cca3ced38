"""The monitor's screen: gauges of the machine, then the runs, in as much detail as there is room for."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from flatout.timing import Phase
from flatout.views import live
from flatout.views.figures import count, duration, mean_and_std, percent, rate, share_done, told
from flatout.views.monitor import Job, MonitorState, Strip
from flatout.views.run_table import run_table
from flatout.views.text import numbers

WIDEST = 140
_SILENT_SECONDS = 10.0
"""A run without news for this long may be in a long iteration, or stuck."""
_LANES = (6, 2, 1, 0)
"""Lanes shown per run, from the most detail to the least; after that a run is one line."""
_COLOURS = {"running": "green", "ended": "cyan", "killed": "red", "gone": "red"}
LABEL_CELLS = 13
_GAUGE_LABEL_CELLS = 9
_BUSY_CELLS = 11
_LONGEST = 120

# Capitals are work, small letters waiting and overhead. Green: updates, red: the learner waits, blue: envs, grey: idle.
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


def cells_for(columns: int) -> int:
    """Cells of a strip in a terminal of that width."""
    return max(8, min(_LONGEST, _inner(columns) - LABEL_CELLS - _BUSY_CELLS))


def screen(
    state: MonitorState, columns: int, lines: int | None = None, waits: bool = False
) -> RenderableType:
    """The whole screen in at most `lines` lines; `waits`: the monitor keeps looking for runs."""
    width = min(columns, WIDEST)
    top = gauges(state, width)
    if state.note:
        top.append(Text(f"{state.note}{'; waiting' if waits else ''}", "bold"))
    if state.runs:
        # The heading and its line, and a line to spare for a long name.
        room = None if lines is None else max(2, lines - len(top) - 3)
        return Group(*top, Text(), run_table(state.runs, width, room))
    for most in _LANES:
        jobs = [_lines(job, _inner(columns), most) for job in state.jobs]
        if lines is None or len(top) + sum(len(job) + 2 for job in jobs) <= lines:
            panels = [_panel(job, body, width) for job, body in zip(state.jobs, jobs, strict=True)]
            return Group(*top, *panels)
    return Group(*top, *_briefly(state.jobs, width, max(1, (lines or 0) - len(top))))


def _inner(columns: int) -> int:
    return min(columns, WIDEST) - 4


def _panel(job: Job, lines: list[Text], width: int) -> Panel:
    n_collectors = job.collectors or 0.0
    collectors = f"{count(n_collectors)} collectors" if n_collectors > 1 else ""
    overlap = "overlap" if job.overlap else ""
    about = [job.env, job.algo.upper(), job.device, job.executor, collectors, overlap]
    title = Text.assemble((job.name, "bold"), " · ", _state(job), style="not dim")
    room = width - 9 - title.cell_len
    for word in live.fitting([*map(Text, about)], room, " · "):
        title.append(" · ").append_text(word)
    return live.framed(lines, title, width)


def _state(job: Job) -> Text:
    text = job.outcome or job.status if job.status == "ended" else job.status
    state = Text(text if text != "unknown" else "not started", _COLOURS.get(job.status, "yellow"))
    if job.seconds_silent is not None and job.seconds_silent > _SILENT_SECONDS:
        state.append(f", no news for {duration(job.seconds_silent)}", "yellow")
    return state


def _lines(job: Job, width: int, most_lanes: int) -> list[Text]:
    """The rows of a run, without those of which nothing is known."""
    if job.env_steps is None and not job.strips:
        return [Text(live.FIRST_ROLLOUT if job.status == "running" else "nothing recorded")]
    lines = [Text(live.FIRST_ROLLOUT)] if job.env_steps is None else _figure_lines(job, job.env_steps, width)
    if most_lanes and job.strips:
        lines += _strip_lines(job, width, most_lanes)
    if job.idle:
        lines += _idle_lines(job, width)
    return lines


def _figure_lines(job: Job, env_steps: float, width: int) -> list[Text]:
    elapsed = None if job.wall_seconds is None else job.wall_seconds + (job.seconds_silent or 0.0)
    returns = live.return_figures(job.return_mean, job.return_std, job.returns, min(24, width // 4))
    returns.append(live.figure("episodes", told("{}", job.episodes, count)))
    speed = [
        Text.from_markup(told("[bold]{}[/] steps/s", job.steps_per_second, rate)),
        live.figure("learner busy", told("{}", job.learner_busy, percent), "bold"),
    ]
    rows = {"return": returns} | ({"speed": speed} if any(speed) else {})
    return [
        live.steps_row(env_steps, job.total_steps or 0, job.seconds_left, elapsed, width, "  "),
        *(live.row(label, figures, width, "   ", LABEL_CELLS) for label, figures in rows.items()),
    ]


def _idle_lines(job: Job, width: int) -> list[Text]:
    """The learner's idle share of the time shown, and its two largest causes, in at most two lines."""
    causes = [f"{percent(share)} {cause}" for cause, share in list(job.idle.items())[:2] if share >= 0.005]
    text = percent(sum(job.idle.values())) + (f": {', '.join(causes)}" if causes else "")
    lines = textwrap.wrap(text, max(20, width - LABEL_CELLS), max_lines=2, placeholder=" …")
    labelled = zip(("idle", ""), lines, strict=False)
    return [Text.assemble((f"{label:<{LABEL_CELLS}}", "dim"), line) for label, line in labelled]


def _briefly(jobs: list[Job], width: int, lines: int) -> list[Text]:
    """One line per run, and the number of runs without room."""
    shown = jobs if len(jobs) <= lines else jobs[: lines - 1]
    texts = [_brief(job, width) for job in shown]
    n_more = len(jobs) - len(shown)
    return [*texts, Text(f"… {n_more} more; name a run to see it alone", "dim")] if n_more else texts


def _brief(job: Job, width: int) -> Text:
    figures = [
        Text.assemble((job.name, "bold"), " · ", _state(job)),
        Text(told("{}", job.env_steps, lambda steps: percent(share_done(steps, job.total_steps or 0)))),
        live.figure("return", mean_and_std(job.return_mean, job.return_std)),
        Text(told("{} steps/s", job.steps_per_second, rate)),
        live.figure("busy", told("{}", job.learner_busy, percent)),
    ]
    return Text("  ", no_wrap=True, overflow="crop").join(live.fitting(figures, width, "  "))


def _strip_lines(job: Job, width: int, most: int) -> list[Text]:
    """The first lanes, a line for the others, and the legend."""
    shown, rest = job.strips[:most], job.strips[most:]
    lines = [_strip_line(strip) for strip in shown]
    if rest:
        least, most_busy = (percent(busiest(strip.busy for strip in rest)) for busiest in (min, max))
        busy = least if least == most_busy else f"{least} to {most_busy}"
        lines.append(Text(f"{'':<{LABEL_CELLS}}… {len(rest)} more, busy {busy}", "dim"))
    return [*lines, *_legend(job, shown, width)]


def _strip_line(strip: Strip) -> Text:
    cells = [_PHASES.get(phase, _OTHER) if phase else ("·", "dim") for phase in strip.cells]
    label = strip.lane if strip.clock == "host" else f"{strip.lane} clock"
    return Text.assemble(
        (f"{label:<{LABEL_CELLS}}"[:LABEL_CELLS], "dim"), *cells, f"  busy {percent(strip.busy)}"
    )


def _legend(job: Job, strips: Sequence[Strip], width: int) -> list[Text]:
    """The time shown and the letters used, with shorter words or in two lines where it is narrow."""
    seen = Counter(phase for strip in strips for phase in strip.cells if phase)
    room = width - LABEL_CELLS
    for meanings in (_MEANINGS, {}):
        words = [
            Text.assemble(_PHASES.get(phase, _OTHER), f" {meanings.get(phase, phase)}")
            for phase, _ in seen.most_common()
        ]
        if len(first := live.fitting(words, room, "  ")) == len(words):
            break
    second = live.fitting(words[len(first) :], room, "  ")
    span = f"last {job.seconds_shown:.0f} s" if job.status == "running" else duration(job.seconds_shown)
    rows = [(span, first), ("", second)] if second else [(span, first)]
    return [live.row(label, shown, width, "  ", LABEL_CELLS) for label, shown in rows]


def gauges(state: MonitorState, width: int) -> list[Text]:
    """The machine in a few lines."""
    share = share_done(state.memory, state.memory_total)
    used = f"{_gigabytes(state.memory)} of {_gigabytes(state.memory_total)} ({percent(share)})"
    return [
        *_cores(state.cores, width),
        _gauge("memory", share, Text(used), width),
        *([Text(state.no_gpu, "dim", no_wrap=True, overflow="ellipsis")] if state.no_gpu else []),
        *(line for device, gpu in state.gpus.items() for line in _gpu(device, gpu, width)),
    ]


def _cores(loads: list[float], width: int) -> list[Text]:
    """A bar per core, or a block of its height if there are many."""
    per_line = max(1, (width - _GAUGE_LABEL_CELLS) // 22)
    if len(loads) > 2 * per_line:
        mean = f" {percent(sum(loads) / len(loads))}"
        blocks = "".join(live.LEVELS[round(7 * share_done(load, 1.0))] for load in loads)
        room = max(1, width - _GAUGE_LABEL_CELLS - len(mean))
        parts = [blocks[i : i + room] for i in range(0, len(blocks), room)]
        parts[-1] += mean
        return [_labelled("cores" if i == 0 else "", Text(part)) for i, part in enumerate(parts)]
    n_lines = -(-len(loads) // per_line)
    per_line = -(-len(loads) // max(1, n_lines))
    room = (width - _GAUGE_LABEL_CELLS) // max(1, per_line)
    bars = [Text.assemble(live.bar(min(load, 1.0), room - 8), f" {percent(load):<7}") for load in loads]
    starts = range(0, len(bars), per_line)
    return [_labelled("cores" if i == 0 else "", Text().join(bars[i : i + per_line])) for i in starts]


def _gpu(device: str, gpu: Mapping[str, Any], width: int) -> list[Text]:
    """The newest sample of a card, as far as it is known."""
    load, memory, total = numbers(gpu, "utilization", "memory", "memory_total")
    power, temperature = numbers(gpu, "power", "temperature")
    texts = (
        # Not "busy": the driver counts any kernel, however little of the card it fills.
        told("{} of time in kernels", load, percent),
        told("{}" + told(" of {}", total or None, _gigabytes), memory, _gigabytes),
        told("{} W", power, "{:.0f}".format),
        told("{} °C", temperature, "{:.0f}".format),
    )
    label, name = device[: _GAUGE_LABEL_CELLS - 1].strip(), ""
    if device.startswith("GPU "):  # with the card's number and name
        label, name = " ".join(device.split()[:2]), " ".join(device.split()[2:])
    room = width - _GAUGE_LABEL_CELLS - 6
    shown = Text("  ").join(live.fitting([*map(Text, texts), Text(name, "dim")], room, "  "))
    line = _labelled(label, shown) if load is None else _gauge(label, load, shown, width)
    reasons = gpu.get("throttled")
    if not isinstance(reasons, list) or not reasons:
        return [line]
    return [line, _labelled("", Text(f"slowed by {', '.join(map(str, reasons))}", "bold red"))]


def _gauge(label: str, share: float, text: Text, width: int) -> Text:
    room = max(4, min(width // 2, width - _GAUGE_LABEL_CELLS - text.cell_len - 2))
    return _labelled(label, Text.assemble(live.bar(share_done(share, 1.0), room), "  ", text))


def _labelled(label: str, text: Text) -> Text:
    return Text.assemble((f"{label:<{_GAUGE_LABEL_CELLS}}", "dim"), text, no_wrap=True, overflow="crop")


def _gigabytes(n_bytes: float) -> str:
    return f"{n_bytes / 2**30:.1f} GB"
