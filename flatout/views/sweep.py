"""sweep.html: the history of a sweep, what mattered, every setting against the result, and parallel coordinates.

Drawn as SVG in the page itself, with the styles of report.html; hovering shows a trial's number, value and settings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from typing import Any

from flatout.views.figures import number, seconds_text

WIDTH, HEIGHT, LEFT, BOTTOM = 1060, 260, 64, 26
SLICE_WIDTH, SLICE_HEIGHT = 250, 150
MOST_SLICES, MOST_AXES = 24, 10
FEW_TRIALS = 20
"""With fewer, what seems to matter is mostly chance."""
STYLE = """
.scroll svg { display: block; width: 100%; height: auto; overflow: visible; }
svg text { font-size: 11.5px; fill: var(--soft); font-variant-numeric: tabular-nums; paint-order: stroke;
  stroke: var(--card); stroke-width: 3px; }
.grid { stroke: var(--faint); } .axis { stroke: var(--line); }
.done { fill: var(--accent); } .pruned { fill: none; stroke: var(--third); } .failed { fill: var(--bad); }
.best { fill: var(--second); } .front { fill: none; stroke: var(--second); stroke-width: 2; }
.line { fill: none; stroke: var(--accent); stroke-opacity: .35; stroke-width: 1.3; }
.line.top { stroke: var(--second); stroke-opacity: .95; stroke-width: 2; }
.slices { display: grid; grid-template-columns: repeat(auto-fill, minmax(230px, 1fr)); gap: 14px; margin-top: 10px; }
.slices h3 { font-size: 13px; font-weight: 600; }
table.best-runs { border-collapse: collapse; margin-top: 10px; width: 100%; }
table.best-runs td:last-child, table.best-runs th:last-child { width: 60%; }
table.best-runs td, table.best-runs th { text-align: left; padding: 4px 12px 4px 0; border-bottom: 1px solid var(--faint);
  vertical-align: top; }
table.best-runs th { width: auto; }
@media (max-width: 720px) {
  .scroll { overflow-x: auto; } .scroll svg { min-width: 700px; } .slices .scroll { overflow: visible; } .slices svg { min-width: 0; }
  svg text { font-size: 15px; } .slices svg text { font-size: 9.5px; }
  table.best-runs tr { display: grid; grid-template-columns: auto 1fr; } table.best-runs th:last-child { display: none; }
  table.best-runs td:last-child { grid-column: 1 / 3; width: auto; } table.best-runs td:not(:last-child) { border: 0; }
}
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialPoint:
    """One trial."""

    number: int
    state: str
    """done, pruned or failed."""
    value: float | None
    """None for a failed one, and for one that did not reach the target."""
    params: Mapping[str, Any]

    @property
    def title(self) -> str:
        """What hovering shows."""
        values = "\n".join(f"{name} {_text(value)}" for name, value in self.params.items())
        return f"trial {self.number}, {self.state}: {number(self.value)}\n{values}"


@dataclass(frozen=True, kw_only=True)
class SweepPage:
    """Everything that the page shows."""

    name: str
    verdict: str
    what: str
    """The objective: `return` or `seconds to the target`."""
    maximizes: bool
    trials: Sequence[TrialPoint]
    importances: Mapping[str, float]
    candidates: Sequence[tuple[str, str, str]]
    """Name, result over new seeds, settings."""
    command: str = ""
    status: str = "finished"
    best: int | None = None
    """Number of the winning trial."""
    logs: frozenset[str] = field(default_factory=frozenset)
    """Settings whose axes are logarithmic."""
    choices: frozenset[str] = field(default_factory=frozenset)
    """Settings with a few values, which are drawn at equal distances."""

    @property
    def known(self) -> list[TrialPoint]:
        """Trials with a value."""
        return [it for it in self.trials if it.value is not None]


def sweep_page(page: SweepPage) -> str:
    """The page of a sweep."""
    css = files("flatout.views").joinpath("page.css").read_text(encoding="utf-8") + STYLE
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(result)}</td><td>{escape(settings)}</td></tr>"
        for name, result, settings in page.candidates
    )
    candidates = (
        f"<table class='best-runs'><tr><th>candidate</th><th>result</th><th>settings</th></tr>{rows}</table>"
    )
    sections = [
        (
            "Result",
            (candidates if rows else "")
            + (f"<p><code>{escape(page.command)}</code></p>" if page.command else ""),
        ),
        ("History", _history(page)),
        ("What mattered", _bars(page)),
        ("Every setting against the result", _slices(page)),
        ("Trials as lines, the best tenth on top", _parallel(page)),
    ]
    body = "".join(f"<section><h2>{title}</h2>{content}</section>" for title, content in sections if content)
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><meta name='viewport' "
        f"content='width=device-width, initial-scale=1'><meta name='color-scheme' content='light dark'><title>{escape(page.name)}</title><style>{css}</style></head>"
        f"<body><header><p class='brand'>flatout <span>sweep</span></p><h1>{escape(page.name)} "
        f"<span class='status {page.status}'>{page.status}</span></h1><p id='verdict'>{escape(page.verdict)}</p></header>"
        f"<main>{body}</main></body></html>"
    )


class _Axis:
    """Places values on a line from 0 to 1: numbers by size, choices and others by their order."""

    def __init__(self, values: Sequence[Any], *, log: bool = False, by_order: bool = False) -> None:
        are_numbers = all(isinstance(it, int | float) and not isinstance(it, bool) for it in values)
        self.is_number = are_numbers and not by_order
        self._log = log and self.is_number and min(values) > 0
        kinds = sorted(set(values), key=lambda it: (0, it) if are_numbers else (len(str(it)), str(it)))
        self._order = {value: nth for nth, value in enumerate(kinds)}
        if self.is_number:
            self._low, self._high = self._scaled(kinds[0]), self._scaled(kinds[-1])

    def at(self, value: Any) -> float:
        """Where a value is."""
        if not self.is_number:
            return (self._order[value] + 0.5) / len(self._order)
        if self._high <= self._low:
            return 0.5
        return (self._scaled(value) - self._low) / (self._high - self._low)

    def ticks(self, most: int = 5, *, at_values: bool = True) -> list[tuple[float, str]]:
        """Places and texts of marks: at the values themselves if these are few, else at equal distances."""
        if not self.is_number or (len(self._order) <= most and at_values) or len(self._order) == 1:
            values, found = list(self._order), list[tuple[float, str]]()
            for it in values[:: -(-len(values) // (most + 3))]:
                if not (self.is_number and found and self.at(it) - found[-1][0] < 1 / (most + 1)):
                    found.append((self.at(it), _text(it)))
            return found
        places = [nth / (most - 1) for nth in range(most)]
        inside = [self._low + place * (self._high - self._low) for place in places]
        return [
            (place, _text(float(10**it if self._log else it)))
            for place, it in zip(places, inside, strict=True)
        ]

    def _scaled(self, value: float) -> float:
        return math.log10(value) if self._log else float(value)


def _text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value).lower() if isinstance(value, bool) else str(value)
    return number(float(value)).removesuffix(".0") if isinstance(value, float) else f"{value:,}"


def _value_axis(page: SweepPage) -> _Axis:
    values = [it.value for it in page.known if it.value is not None]
    return _Axis(values, log=not page.maximizes)


def _svg(width: int, height: int, inside: str) -> str:
    return f"<div class='scroll'><svg viewBox='0 0 {width} {height}' role='img'>{inside}</svg></div>"


def _frame(width: int, height: int, left: int, axis: _Axis) -> str:
    """Horizontal lines with their values."""
    lines = []
    for place, text in axis.ticks(at_values=False):
        y = _y(place, height)
        lines.append(f"<line class='grid' x1='{left}' x2='{width}' y1='{y:.1f}' y2='{y:.1f}'/>")
        lines.append(f"<text x='{left - 8}' y='{y + 4:.1f}' text-anchor='end'>{escape(text)}</text>")
    return "".join(lines)


def _y(place: float, height: int) -> float:
    return 8 + (1 - place) * (height - BOTTOM - 16)


def _dot(x: float, y: float, point: TrialPoint, page: SweepPage) -> str:
    kind = "best" if point.number == page.best else point.state
    radius = 5 if kind == "best" else 3.4
    return f"<circle class='{kind}' cx='{x:.1f}' cy='{y:.1f}' r='{radius}'><title>{escape(point.title)}</title></circle>"


def _history(page: SweepPage) -> str:
    """The value of each trial, and the best so far."""
    if not page.known:
        return "<p class='none'>No trial has a result yet.</p>"
    axis, last = _value_axis(page), max(it.number for it in page.trials)

    def x(number: int) -> float:
        return LEFT + 10 + number / max(last, 1) * (WIDTH - LEFT - 20)

    dots = "".join(_dot(x(it.number), _y(axis.at(it.value), HEIGHT), it, page) for it in page.known)
    better: Callable[[float, float], float] = max if page.maximizes else min
    path, best = "", None
    for it in page.known:
        if it.state != "done" or it.value is None:
            continue
        before, best = best, it.value if best is None else better(best, it.value)
        y = _y(axis.at(best), HEIGHT)
        path += f"M{x(it.number):.1f} {y:.1f}" if before is None else f"H{x(it.number):.1f}V{y:.1f}"
    path += f"H{x(last):.1f}" if path else ""
    marks = "".join(
        f"<text x='{x(n):.1f}' y='{HEIGHT - 6}' text-anchor='middle'>{n}</text>"
        for n in range(0, last + 1, max(1, -(-last // 10)))
    )
    counts = [
        f"{sum(it.state == state for it in page.trials)} {state}" for state in ("done", "pruned", "failed")
    ]
    missed = sum(it.state == "done" and it.value is None for it in page.trials)
    hint = f"{', '.join(counts)}" + (
        f"; {missed} did not reach the target and are not drawn" if missed else ""
    )
    inside = _frame(WIDTH, HEIGHT, LEFT, axis) + f"<path class='front' d='{path}'/>" + dots + marks
    return (
        f"<p class='hint'>{escape(page.what)} by trial, and the best so far: {hint}. Rings were pruned.</p>"
        + _svg(WIDTH, HEIGHT, inside)
    )


def _bars(page: SweepPage) -> str:
    importances, n = page.importances, len(page.known)
    equal = len(importances) > 1 and max(importances.values()) - min(importances.values()) < 1e-6
    if not importances or equal:
        return "<p class='none'>Too few trials to tell.</p>"
    most = max(importances.values()) or 1.0
    rows = "".join(
        f"<div class='bar busy'><span>{escape(name)}</span><svg><rect width='{100 * share / most:.1f}%'/></svg>"
        f"<em>{100 * share:.0f} %</em></div>"
        for name, share in importances.items()
    )
    few = f" {n} trials say little about it." if n < FEW_TRIALS else ""
    hint = f"How much a setting decides whether a trial is among the best (PED-ANOVA).{few}"
    return f"<p class='hint'>{hint}</p><div class='bars'>{rows}</div>"


def _names(page: SweepPage, most: int) -> list[str]:
    """Settings, the most important first."""
    seen = dict.fromkeys(name for it in page.known for name in it.params)
    return [*dict.fromkeys([*(n for n in page.importances if n in seen), *seen])][:most]


def _slices(page: SweepPage) -> str:
    axis = _value_axis(page) if page.known else None
    return (
        f"<div class='slices'>{''.join(_slice(page, name, axis) for name in _names(page, MOST_SLICES))}</div>"
        if axis
        else ""
    )


def _axis(page: SweepPage, name: str, points: Sequence[TrialPoint]) -> _Axis:
    """The axis of a setting."""
    values = [it.params[name] for it in points if name in it.params] or [0]
    return _Axis(values, log=name in page.logs, by_order=name in page.choices)


def _slice(page: SweepPage, name: str, axis: _Axis | None) -> str:
    points = [it for it in page.known if name in it.params]
    assert axis is not None
    across = _axis(page, name, points)
    width, left = SLICE_WIDTH, 44

    def x(place: float) -> float:
        return left + 8 + place * (width - left - 28)  # room for half of the last number

    dots = "".join(
        _dot(x(across.at(it.params[name])), _y(axis.at(it.value), SLICE_HEIGHT), it, page) for it in points
    )
    marks = "".join(
        f"<text x='{x(place):.1f}' y='{SLICE_HEIGHT - 6}' text-anchor='middle'>{escape(text)}</text>"
        for place, text in across.ticks(3)
    )
    inside = _frame(width, SLICE_HEIGHT, left, axis) + dots + marks
    return f"<div><h3>{escape(name)}</h3>{_svg(width, SLICE_HEIGHT, inside)}</div>"


def _parallel(page: SweepPage) -> str:
    """A line for each finished trial through the values of its settings, to its result."""
    done = [it for it in page.known if it.state == "done"]
    names = _names(page, MOST_AXES)
    if len(done) < 2 or not names:
        return ""
    height, columns = 300, [*names, page.what]
    axes = [_axis(page, name, done) for name in names]
    axes.append(_value_axis(page))
    gap = (WIDTH - 120) / (len(columns) - 1)

    def x(nth: int) -> float:
        return 40 + nth * gap

    def y(place: float) -> float:
        return 34 + (1 - place) * (height - 60)

    ranked = sorted(
        done, key=lambda it: it.value or 0.0, reverse=not page.maximizes
    )  # the best are drawn last
    lines = ""
    for nth, it in enumerate(ranked):
        values = [it.params.get(name) for name in names]
        places = [(i, axes[i].at(v)) for i, v in enumerate(values) if v is not None]
        places.append((len(names), axes[-1].at(it.value)))
        path = "M" + "L".join(f"{x(i):.1f} {y(place):.1f}" for i, place in places)
        top = " top" if nth >= len(ranked) - max(len(ranked) // 10, 1) else ""
        lines += f"<path class='line{top}' d='{path}'><title>{escape(it.title)}</title></path>"
    frame = ""
    for nth, (name, axis) in enumerate(zip(columns, axes, strict=True)):
        frame += f"<line class='axis' x1='{x(nth):.1f}' x2='{x(nth):.1f}' y1='{y(0):.1f}' y2='{y(1):.1f}'/>"
        frame += (
            f"<text x='{x(nth):.1f}' y='{14 + 11 * (nth % 2)}' text-anchor='middle'>{escape(name)}</text>"
        )
        frame += "".join(
            f"<text x='{x(nth) + 4:.1f}' y='{y(place) + 4:.1f}'>{escape(text)}</text>"
            for place, text in axis.ticks(4)
        )
    return _svg(WIDTH, height, lines + frame)


def value_text(value: float | None, *, maximizes: bool) -> str:
    """A value of the objective in words."""
    if value is None or not math.isfinite(value):
        return "not reached" if not maximizes else "–"
    return f"return {number(value)}" if maximizes else seconds_text(value)
