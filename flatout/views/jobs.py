"""Jobs side by side, as a table: live in a terminal, printed by `flatout jobs status`; elsewhere a line for each change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, cast

from rich import box
from rich.console import Console, ConsoleDimensions, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from flatout.runlog.files import number, read_json
from flatout.runlog.records import run_status
from flatout.views import figures as fmt
from flatout.views.live import bar
from flatout.views.stream import SafeStream

STYLES = {"running": "bold cyan", "finished": "green", "failed": "bold red", "stopped": "yellow"}


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRow:
    """A job and how far its run is."""

    name: str
    state: str
    env: str
    error: str = ""
    cores: tuple[int, ...] = ()
    env_steps: float | None = None
    total_steps: float | None = None
    steps_per_second: float | None = None
    return_mean: float | None = None
    return_std: float | None = None
    seconds: float | None = None
    seconds_left: float | None = None

    @property
    def share(self) -> float:
        """Of its env steps that are done."""
        if self.state == "finished":
            return 1.0
        return fmt.share_done(self.env_steps or 0.0, self.total_steps or 0.0)


def job_row(
    name: str, state: str, env: str, run: Path, *, error: str = "", cores: tuple[int, ...] = ()
) -> JobRow:
    """The row of a job, with what its run has written."""
    _, known = run_status(run) if state != "waiting" or run.exists() else ("", {})
    names = ("env_steps", "steps_per_second", "return_mean", "return_std")
    figures = {key: number(known.get(key)) for key in names}
    total = known.get("total_steps") or read_json(run / "config.json").get("timesteps")  # a summary has none
    seconds, left = number(known.get("wall_seconds")), number(known.get("seconds_left"))
    return JobRow(
        name=name,
        state=state,
        env=env,
        error=error,
        cores=cores,
        total_steps=number(total),
        seconds=seconds,
        seconds_left=left,
        **figures,
    )


def outcome(summary: Mapping[str, Any], code: int | None) -> str:
    """How a run ended, in one line."""
    if not summary:
        return f"failed with exit code {code}"
    mean, std, steps, seconds = (
        number(summary.get(key)) for key in ("return_mean", "return_std", "env_steps", "wall_seconds")
    )
    result = "no episode ended" if mean is None else f"return {fmt.mean_and_std(mean, std)}"
    return (
        f"{summary.get('status')}, {result}, {fmt.count(steps or 0)} env steps in "
        f"{fmt.seconds_text(seconds or 0.0)}"
    )


def job_table(rows: Sequence[JobRow], title: str = "") -> Group:
    """The jobs as a table, and below it why jobs failed."""
    table = Table(
        box=box.SIMPLE_HEAD, title=title or None, title_justify="left", title_style="", pad_edge=False
    )
    for heading in ("job", "env", "state", "", "env steps", "return", "steps/s", "left", "cores"):
        numeric = heading in ("env steps", "return", "steps/s", "left", "cores")
        widest = 28 if heading in ("job", "env") else None
        table.add_column(heading, justify="right" if numeric else "left", no_wrap=True, max_width=widest)
    for row in rows:
        table.add_row(*_cells(row))
    return Group(table, *(Text(f"{row.name}: {row.error}", "red") for row in rows if row.error))


def _cells(row: JobRow) -> list[str | Text]:
    left = row.seconds_left if row.state == "running" else None
    return [
        row.name,
        row.env.rpartition("/")[2],
        Text(row.state, STYLES.get(row.state, "dim")),
        bar(row.share, 12) if row.env_steps is not None or row.state == "running" else "",
        fmt.told("{}", row.env_steps, fmt.count),
        fmt.mean_and_std(row.return_mean, row.return_std) if row.return_mean is not None else "",
        fmt.told("{}", row.steps_per_second, fmt.rate),
        fmt.told("{}", left, fmt.duration),
        ",".join(map(str, row.cores)) if row.state == "running" else "",
    ]


def console_for(stream: SafeStream, least_columns: int = 120) -> Console:
    """A console of the stream's own size; one that is not a terminal is not narrow."""
    console = Console(file=cast(TextIO, stream), force_jupyter=False, highlight=False)
    width, height = stream.columns_and_lines()
    console.size = ConsoleDimensions(width if stream.isatty() else max(width, least_columns), height)
    return console


class JobsDisplay:
    """Shows jobs while they run: a table in a terminal, a line for each change elsewhere."""

    def __init__(self, stream: TextIO, *, quiet: bool = False) -> None:
        self._stream, self._quiet = SafeStream(stream), quiet
        self._console = console_for(self._stream)
        self._live: Live | None = None
        self._states: dict[str, str] = {}

    def __enter__(self) -> JobsDisplay:
        if self._stream.isatty() and not self._quiet:
            self._live = Live(console=self._console, auto_refresh=False, vertical_overflow="crop")
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    @property
    def is_live(self) -> bool:
        """Whether a table is drawn."""
        return self._live is not None

    def note(self, text: str) -> None:
        """Print a line."""
        if not self._quiet:
            self._console.print(Text(text), soft_wrap=True)

    def show(self, rows: Sequence[JobRow], title: str = "") -> None:
        """Draw the table, or print what has changed."""
        if self._live is not None:
            self._console.size = ConsoleDimensions(*self._stream.columns_and_lines())
            self._live.update(job_table(rows, title), refresh=True)
            return
        for row in rows:
            before = self._states.get(row.name, "waiting")
            self._states[row.name] = row.state
            if row.state != before:
                self.note(_line(row))


def _line(row: JobRow) -> str:
    if row.state == "running":
        return f"{row.name}: runs" + (f" on core {','.join(map(str, row.cores))}" if row.cores else "")
    if row.error:
        return f"{row.name}: {row.state}: {row.error}"
    figures = {"status": row.state, "return_mean": row.return_mean, "return_std": row.return_std}
    return f"{row.name}: {outcome(figures | {'env_steps': row.env_steps, 'wall_seconds': row.seconds}, None)}"
