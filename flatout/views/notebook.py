"""What a notebook shows of a run: its learning curve as SVG, and texts of flatout as HTML.

Everything is readable on light and on dark pages, and nothing is loaded from elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path

import numpy as np

from flatout.runlog.files import write_text
from flatout.runlog.recorder import Progress
from flatout.runlog.records import EVALUATED, read_metrics
from flatout.views import figures as fmt

BLUE, ORANGE, GREY = "#3b82d6", "#d9822b", "#808590"
"""Readable on light and on dark: a notebook's theme is not that of the browser."""
STYLE = (
    f".curves text {{ font: 12px system-ui, sans-serif; fill: {GREY}; }} .curves line {{ stroke: {GREY}; }} "
    f".curves .grid {{ stroke-opacity: .25; }} .curves .mean {{ fill: none; stroke: {BLUE}; stroke-width: 2; }} "
    f".curves circle {{ fill: {ORANGE}; }} .curves .k0 {{ fill: {BLUE}; }} .curves .k1 {{ fill: {ORANGE}; }}"
)
MAX_POINTS = 1000
_STEPS, _RETURN = "time/total_timesteps", "rollout/ep_rew_mean"
NEW_LINE = "\n"

Point = tuple[float, float]


class Curve:
    """The mean return of the last 100 episodes, and evaluations, over env steps; a sink of a run, in bounded memory."""

    def __init__(self) -> None:
        self.returns: list[Point] = []
        self.evaluations: list[Point] = []
        self._least_steps = 0.0

    @staticmethod
    def read(path: Path) -> Curve:
        """The curve in a metrics.csv; empty if there is none."""
        curve = Curve()
        try:
            columns = read_metrics(path, (_STEPS, _RETURN, EVALUATED))
        except OSError:
            return curve
        for name, points in ((_RETURN, curve.returns), (EVALUATED, curve.evaluations)):
            if _STEPS in columns and name in columns:
                known = np.isfinite(columns[_STEPS]) & np.isfinite(columns[name])
                points += zip(columns[_STEPS][known].tolist(), columns[name][known].tolist(), strict=True)
        return curve

    def cut(self, most_steps: float) -> None:
        """Drop what a run that goes on from `most_steps` env steps learns again."""
        self.returns = [point for point in self.returns if point[0] <= most_steps]
        self.evaluations = [point for point in self.evaluations if point[0] <= most_steps]

    def write(self, progress: Progress) -> None:
        """Add a point, if the last one is far enough away."""
        steps = progress.env_steps
        if EVALUATED in progress.metrics:
            self.evaluations.append((steps, progress.metrics[EVALUATED]))
        if progress.return_mean is None or steps - self._last_steps() < self._least_steps:
            return
        self.returns.append((steps, progress.return_mean))
        if len(self.returns) > MAX_POINTS:
            self.returns = self.returns[1::2]
            self._least_steps = 2 * steps / MAX_POINTS

    def note(self, text: str) -> None:
        """Notes are not drawn."""

    def close(self) -> None:
        """Nothing is held open."""

    def _last_steps(self) -> float:
        return self.returns[-1][0] if self.returns else float("-inf")


class Plot:
    """A learning curve, drawn where a notebook shows it; `save` writes it to a file."""

    def __init__(self, curve: Curve, title: str) -> None:
        self._curve, self._title = curve, title
        self.svg = curve_svg(curve, title)
        """The drawing."""

    def save(self, path: str | Path) -> None:
        """Write the drawing to an .svg file."""
        write_text(Path(path), self.svg)

    def _repr_svg_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        points = self._curve.returns
        ends = f", return {fmt.number(points[0][1])} … {fmt.number(points[-1][1])}" if points else ""
        return f"learning curve of {self._title}{ends}; a notebook shows it, .save('curve.svg') writes it"


def curve_svg(curve: Curve, title: str) -> str:
    """The mean return over env steps as a line, evaluations as points."""
    from flatout.views.curves import CHART, HEIGHT, chart, short

    named = {"mean return of the last 100 episodes": curve.returns, "evaluations": curve.evaluations}
    arrays = [np.array(points, float).reshape(-1, 2).T for points in named.values()]
    drawing = chart([(x, y, np.zeros(len(x))) for x, y in arrays], "env steps", short, dotted=(1,))
    keys = "".join(
        f'<text class="k{nth}" x="{CHART - 100 * (1 - nth)}" y="{HEIGHT + 16}" text-anchor="end">{words}</text>'
        for nth, (words, points) in enumerate(named.items())
        if points
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="curves" viewBox="0 0 {CHART} {HEIGHT + 42}" width="{CHART}" '
        f'style="max-width:100%;height:auto" role="img"><style>{STYLE}</style><title>{escape(title)}</title>'
        f'<text x="0" y="14">{escape(title)}</text><g transform="translate(0 20)">{drawing}{keys}</g></svg>'
    )


class HtmlText(str):
    """A text of flatout, which a notebook shows as HTML."""

    def _repr_html_(self) -> str:
        return text_html(self)


def text_html(text: str) -> str:
    """Lines of the form `label  value` as a table, others as paragraphs; an indented line continues the last one."""
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("  ") and lines and lines[-1]:
            is_wrapped = line.startswith("    ")
            lines[-1] += f"{' ' if is_wrapped else NEW_LINE}{line.strip()}"
        else:
            lines.append(line.rstrip())
    parts, in_table = [], False
    for line in lines:
        label, gap, value = line.partition("  ")
        if bool(gap) != in_table:
            in_table = bool(gap)
            parts.append("<table>" if in_table else "</table>")
        if gap:
            parts.append(_row(label, value))
        elif line:
            parts.append(f"<p>{'<br>'.join(map(escape, line.split(NEW_LINE)))}</p>")
    return f"<div>{''.join(parts)}{'</table>' if in_table else ''}</div>"


def table_html(title: str, rows: Iterable[tuple[str, str]], after: str = "") -> str:
    """A heading over a table of labels and values, without those that are empty."""
    body = "".join(_row(label, value) for label, value in rows if value)
    return f"<div><b>{escape(title)}</b><table>{body}</table>{after}</div>"


def _row(label: str, value: str) -> str:
    head, cell = 'style="text-align:left;white-space:nowrap"', 'style="text-align:left"'
    return f"<tr><th {head}>{escape(label)}</th><td {cell}>{escape(value.strip())}</td></tr>"
