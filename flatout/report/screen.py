"""The monitor's screen: gauges of the machine, then the runs, in as much detail as there is room for.

In: a Moment and a terminal's size. Out: rich renderables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from flatout.meter.lines import number
from flatout.records.figures import count, duration, mean_and_std, percent, rate, share_done
from flatout.records.view import bar, figure, fitting, sparkline
from flatout.report.job import Job
from flatout.report.monitor import Moment
from flatout.report.strips import LABEL_CELLS, strip_cells, strip_lines

WIDEST = 140
_SILENT_SECONDS = 5.0
_GAUGE_LABEL = 9
_LANES = (6, 2, 1, 0)
"""How many lanes a job shows, from the most detail to the least; below that it is a line."""
_LEVELS = " ▁▂▃▄▅▆▇█"
_COLOURS = {"running": "green", "ended": "cyan", "killed": "red", "gone": "red"}


def cells_for(columns: int) -> int:
    """How many cells a strip has in a terminal of that width."""
    return strip_cells(_inner(columns))


def screen(moment: Moment, columns: int, lines: int | None = None, waits: bool = False) -> RenderableType:
    """Everything, in at most so many lines; `waits`: it goes on looking for runs."""
    width = min(columns, WIDEST)
    top = _gauges(moment, width)
    if moment.note:
        top.append(Text(f"{moment.note}{'; waiting' if waits else ''}", "bold"))
    for most in _LANES:
        jobs = [_lines(job, _inner(columns), most) for job in moment.jobs]
        if lines is None or len(top) + sum(len(job) + 2 for job in jobs) <= lines:
            panels = [_panel(job, body, width) for job, body in zip(moment.jobs, jobs, strict=True)]
            return Group(*top, *panels)
    return Group(*top, *_briefly(moment.jobs, width, max(1, (lines or 0) - len(top))))


def _inner(columns: int) -> int:
    return min(columns, WIDEST) - 4


def _gauges(moment: Moment, width: int) -> list[Text]:
    share = share_done(moment.memory, moment.memory_total)
    used = f"{_gigabytes(moment.memory)} of {_gigabytes(moment.memory_total)} ({percent(share)})"
    return [
        *_cores(moment.cores, width),
        _gauge("memory", share, Text(used), width),
        *([Text(moment.no_gpu, "dim", no_wrap=True, overflow="ellipsis")] if moment.no_gpu else []),
        *(_gpu(device, gpu, width) for device, gpu in moment.gpus.items()),
    ]


def _cores(loads: list[float], width: int) -> list[Text]:
    """A bar for each core or, where there are many, a block of its height."""
    per_line = max(1, (width - _GAUGE_LABEL) // 22)
    if len(loads) > 2 * per_line:
        mean = f" {percent(sum(loads) / len(loads))}"
        blocks = "".join(_LEVELS[round(8 * share_done(load, 1.0))] for load in loads)
        room = max(1, width - _GAUGE_LABEL - len(mean))
        parts = [blocks[i : i + room] for i in range(0, len(blocks), room)]
        parts[-1] += mean
        return [_labelled("cores" if i == 0 else "", Text(part)) for i, part in enumerate(parts)]
    n_lines = -(-len(loads) // per_line)
    per_line = -(-len(loads) // max(1, n_lines))
    room = (width - _GAUGE_LABEL) // max(1, per_line)
    bars = [Text.assemble(bar(min(load, 1.0), room - 8), f" {percent(load):<7}") for load in loads]
    starts = range(0, len(bars), per_line)
    return [_labelled("cores" if i == 0 else "", Text().join(bars[i : i + per_line])) for i in starts]


def _gpu(device: str, gpu: Mapping[str, Any], width: int) -> Text:
    """What the card told last; what it does not tell is left out."""
    known = {name: value for name in gpu if (value := number(gpu[name])) is not None}
    memory, total, load = known.get("memory"), known.get("memory_total"), known.get("utilization")
    figures = []
    if load is not None:
        figures.append(Text(f"{percent(load)} utilised"))
    if memory is not None:
        figures.append(Text(_gigabytes(memory) + (f" of {_gigabytes(total)}" if total else "")))
    for name, unit in (("power", "W"), ("temperature", "°C")):
        if name in known:
            figures.append(Text(f"{known[name]:.0f} {unit}"))
    reasons = gpu.get("throttled")
    if isinstance(reasons, list) and reasons:
        figures.insert(1, Text(f"slowed by {', '.join(map(str, reasons))}", "bold red"))
    shown = Text("  ").join(fitting(figures, width - _GAUGE_LABEL - 8, "  "))
    return _gauge(device or "GPU", load or 0.0, shown, width)


def _gauge(label: str, share: float, text: Text, width: int) -> Text:
    room = max(4, min(width // 2, width - _GAUGE_LABEL - text.cell_len - 2))
    return _labelled(label, Text.assemble(bar(share_done(share, 1.0), room), "  ", text))


def _labelled(label: str, text: Text) -> Text:
    return Text.assemble((f"{label:<{_GAUGE_LABEL}}", "dim"), text, no_wrap=True, overflow="crop")


def _panel(job: Job, lines: list[Text], width: int) -> Panel:
    about = [job.env, job.algo.upper(), job.device, job.executor, "overlap" if job.overlap else ""]
    title = Text.assemble((job.name, "bold"), " · ", _state(job))
    room = width - 6 - title.cell_len
    words = [Text(word) for word in about if word]
    return Panel(
        Text("\n", no_wrap=True, overflow="crop").join(lines),
        title=Text.assemble(
            title, *(part for word in fitting(words, room - 3, "   ") for part in (" · ", word))
        ),
        title_align="left",
        box=box.ROUNDED,
        border_style="dim",
        width=width,
    )


def _state(job: Job) -> Text:
    text = job.outcome or job.status if job.status == "ended" else job.status
    state = Text(text if text != "unknown" else "not begun", _COLOURS.get(job.status, "yellow"))
    if job.seconds_silent is not None and job.seconds_silent > _SILENT_SECONDS:
        state.append(f", silent for {duration(job.seconds_silent)}", "yellow")
    return state


def _lines(job: Job, width: int, most_lanes: int) -> list[Text]:
    """The rows of a job, each left out where nothing is known."""
    if job.env_steps is None and not job.strips:
        text = "the first rollout is on its way" if job.status == "running" else "it has told nothing"
        return [Text(text)]
    lines = [_steps(job, width), _return(job, width)]
    if most_lanes:
        lines += strip_lines(job, width, most_lanes)
    if job.idle:
        lines.append(
            _sentence("idle", ", ".join(f"{percent(s)} {c}" for c, s in list(job.idle.items())[:2]), width)
        )
    if job.finding is not None:
        lines.append(_sentence("to change", f"{job.finding['what']} {job.finding['change']}", width))
    return [line for line in lines if line.plain.strip()]


def _steps(job: Job, width: int) -> Text:
    if job.env_steps is None:
        return Text("the first rollout is on its way")
    share = share_done(job.env_steps, job.total_steps or 0)
    of_total = f" of {count(job.total_steps)} ({percent(share)})" if job.total_steps else " env steps"
    figures = [Text.assemble((count(job.env_steps), "bold"), of_total)]
    if job.seconds_left is not None:
        figures.append(Text(f"{duration(job.seconds_left)} left"))
    if job.wall_seconds is not None:
        figures.append(Text(f"{duration(job.wall_seconds + (job.seconds_silent or 0.0))} gone", "dim"))
    shown = fitting(figures, width - 10, "  ")
    room = width - sum(text.cell_len + 2 for text in shown)
    return Text("  ").join([bar(share, max(4, room)), *shown])


def _return(job: Job, width: int) -> Text:
    figures = [Text(mean_and_std(job.return_mean, job.return_std), "bold green")]
    if curve := sparkline(job.returns, min(24, width // 5)):
        figures.append(Text(curve, "green"))
    if job.steps_per_second is not None:
        figures.append(Text.assemble((rate(job.steps_per_second), "bold"), " steps/s"))
    if job.learner_busy is not None:
        figures.append(figure("learner busy", percent(job.learner_busy)))
    if job.episodes is not None:
        figures.append(figure("episodes", count(job.episodes)))
    shown = fitting(figures, width - LABEL_CELLS, "   ")
    return Text.assemble((f"{'return':<{LABEL_CELLS}}", "dim"), Text("   ").join(shown))


def _sentence(label: str, text: str, width: int) -> Text:
    line = Text.assemble((f"{label:<{LABEL_CELLS}}", "dim"), text)
    line.truncate(width, overflow="ellipsis")
    return line


def _briefly(jobs: list[Job], width: int, lines: int) -> list[Text]:
    """A line for each job, and how many there is no room for."""
    shown = jobs if len(jobs) <= lines else jobs[: lines - 1]
    texts = [_brief(job, width) for job in shown]
    n_more = len(jobs) - len(shown)
    return [*texts, Text(f"… {n_more} more; name a run to see it alone", "dim")] if n_more else texts


def _brief(job: Job, width: int) -> Text:
    figures = [Text.assemble((job.name, "bold"), " · ", _state(job))]
    if job.env_steps is not None:
        figures.append(Text(percent(share_done(job.env_steps, job.total_steps or 0))))
    figures.append(figure("return", mean_and_std(job.return_mean, job.return_std)))
    if job.steps_per_second is not None:
        figures.append(Text(f"{rate(job.steps_per_second)} steps/s"))
    if job.learner_busy is not None:
        figures.append(figure("busy", percent(job.learner_busy)))
    return Text("  ", no_wrap=True, overflow="crop").join(fitting(figures, width, "  "))


def _gigabytes(n_bytes: float) -> str:
    return f"{n_bytes / 2**30:.1f} GB"
