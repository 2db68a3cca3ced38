"""The runs of a folder as a table in the terminal: printed by `flatout runs`, live in `flatout monitor DIR`."""

from __future__ import annotations

from collections.abc import Sequence
from time import time

from rich import box
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from flatout.runlog.files import plural
from flatout.views import figures as fmt
from flatout.views.runs import RunRow

STYLES = {
    "running": "bold cyan",
    "finished": "green",
    "failed": "bold red",
    "killed": "bold red",
    "stopped": "yellow",
}
_LEFT_OUT = ("algo", "learner busy", "steps/s", "age", "env")
"""Columns that a narrow terminal does not show, the first of these first."""
_LEAST_NAME, _GAP = 20, 2


def run_table(rows: Sequence[RunRow], width: int, most: int | None = None) -> Table:
    """A line for each run, at most `most`; names are never shortened, so that they can be copied."""
    shown = rows if most is None or len(rows) <= most else rows[: max(0, most - 1)]
    now = time()
    cells = [_cells(row, now) for row in shown]
    widths = {
        name: max([cell_len(name), *(cell_len(row[name]) for row in cells)]) for name in _cells(_NONE, now)
    }
    for name in _LEFT_OUT:
        if min(widths["run"], _LEAST_NAME) + sum(list(widths.values())[1:]) + _GAP * len(widths) > width:
            del widths[name]
    table = Table(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), caption_justify="left"
    )
    for name in widths:
        is_text = name in ("run", "env", "algo", "status")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=name != "run", overflow="fold")
    for row, texts in zip(shown, cells, strict=True):
        styles = {"status": STYLES.get(row.status, "dim"), "run": "bold" if row.status == "running" else ""}
        table.add_row(*(Text(texts[name], styles.get(name, "")) for name in widths))
    if len(shown) < len(rows):
        table.caption = f"… {plural(len(rows) - len(shown), 'more run')}"
    return table


_NONE = RunRow(name="", status="")


def _cells(row: RunRow, now: float) -> dict[str, str]:
    return {
        "run": fmt.printable(row.name),
        "env": fmt.printable(row.env).removeprefix("flatout/"),
        "algo": fmt.printable(row.algo),
        "status": fmt.printable(row.status),
        "env steps": _steps(row),
        "return": fmt.mean_and_std(row.return_mean, row.return_std) if row.return_mean is not None else "",
        "steps/s": fmt.told("{}", row.steps_per_second, fmt.rate),
        "learner busy": fmt.told("{}", row.learner_busy, fmt.percent),
        "age": fmt.age(now - row.time),
    }


def _steps(row: RunRow) -> str:
    """The env steps, and for a run that has not finished the share of what was asked for."""
    if row.env_steps is None:
        return ""
    if row.status == "finished" or not row.total_steps:
        return fmt.count(row.env_steps)
    return f"{fmt.count(row.env_steps)} ({fmt.percent(fmt.share_done(row.env_steps, row.total_steps))})"
