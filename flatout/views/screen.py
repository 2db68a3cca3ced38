"""The monitor's screen: gauges of the machine, then the runs, in as much detail as there is room for.

In: a Moment and a terminal's size. Out: rich renderables.
"""

from __future__ import annotations

import textwrap

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from flatout.views.figures import count, duration, mean_and_std, percent, rate, share_done
from flatout.views.gauges import gauges
from flatout.views.job import Job
from flatout.views.monitor import Moment
from flatout.views.strips import LABEL_CELLS, strip_cells, strip_lines
from flatout.views.view import bar, figure, fitting, sparkline

WIDEST = 140
_SILENT_SECONDS = 10.0
"""A run that tells nothing for this long may be in a long iteration, or stuck."""
_LANES = (6, 2, 1, 0)
"""How many lanes a job shows, from the most detail to the least; below that it is a line."""
_COLOURS = {"running": "green", "ended": "cyan", "killed": "red", "gone": "red"}


def cells_for(columns: int) -> int:
    """How many cells a strip has in a terminal of that width."""
    return strip_cells(_inner(columns))


def screen(moment: Moment, columns: int, lines: int | None = None, waits: bool = False) -> RenderableType:
    """Everything, in at most so many lines; `waits`: it goes on looking for runs."""
    width = min(columns, WIDEST)
    top = gauges(moment, width)
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


def _panel(job: Job, lines: list[Text], width: int) -> Panel:
    n_collectors = job.collectors or 0.0
    collectors = f"{count(n_collectors)} collectors" if n_collectors > 1 else ""
    overlap = "overlap" if job.overlap else ""
    about = [job.env, job.algo.upper(), job.device, job.executor, collectors, overlap]
    title = Text.assemble((job.name, "bold"), " · ", _state(job), style="not dim")
    room = width - 9 - title.cell_len
    for word in fitting([Text(word) for word in about if word], room, " · "):
        title.append(" · ").append_text(word)
    return Panel(
        Text("\n", no_wrap=True, overflow="crop").join(lines),
        title=title,
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
    lines = [_steps(job, width)]
    if job.env_steps is not None:
        lines += [_return(job, width), _speed(job, width)]
    if most_lanes:
        lines += strip_lines(job, width, most_lanes)
    if job.idle:
        lines += _sentence("idle", _idle(job), width)
    if job.finding is not None:
        lines += _sentence("to change", f"{job.finding['what']} {job.finding['change']}", width)
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
    if curve := sparkline(job.returns, min(24, width // 4)):
        figures.append(Text(curve, "green"))
    if job.episodes is not None:
        figures.append(figure("episodes", count(job.episodes)))
    return _row("return", figures, width)


def _speed(job: Job, width: int) -> Text:
    figures = []
    if job.steps_per_second is not None:
        figures.append(Text.assemble((rate(job.steps_per_second), "bold"), " steps/s"))
    if job.learner_busy is not None:
        figures.append(figure("learner busy", percent(job.learner_busy), "bold"))
    return _row("speed", figures, width) if figures else Text()


def _idle(job: Job) -> str:
    """How much of the time shown the learner was idle, and the two largest causes."""
    total = percent(sum(job.idle.values()))
    causes = [f"{percent(share)} {cause}" for cause, share in list(job.idle.items())[:2] if share >= 0.005]
    return f"{total}: {', '.join(causes)}" if causes else total


def _row(label: str, figures: list[Text], width: int) -> Text:
    shown = fitting(figures, width - LABEL_CELLS, "   ")
    return Text.assemble((f"{label:<{LABEL_CELLS}}", "dim"), Text("   ").join(shown))


def _sentence(label: str, text: str, width: int) -> list[Text]:
    """Words in at most two lines."""
    lines = textwrap.wrap(text, max(20, width - LABEL_CELLS), max_lines=2, placeholder=" …")
    return [
        Text.assemble((f"{label if i == 0 else '':<{LABEL_CELLS}}", "dim"), line)
        for i, line in enumerate(lines)
    ]


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
