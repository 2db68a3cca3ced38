"""Learning curves of several groups of runs as one SVG, and the page of `flatout compare` around it.

Colours are written out instead of CSS variables, which programs other than browsers do not know.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from html import escape
from importlib.resources import files

from flatout.runlog.files import plural
from flatout.views import compare
from flatout.views import figures as fmt
from flatout.views.compare import Floats, Group
from flatout.views.report import CSP

LIGHT = ("#1f5fd6", "#c2570c", "#18794e", "#8a3fc7", "#c0342b", "#0e7f8c", "#a15c00", "#b8327f")
DARK = ("#6ea3ff", "#f59a56", "#4cc38a", "#b98af0", "#ff7a70", "#45c4d0", "#e6b540", "#ee86c0")
WIDTH, CHART, HEIGHT, GAP = 1060, 516, 290, 28
LEFT, BOTTOM, RIGHT, TOP = 58, 44, 8, 10
KEY_LINE = 22


def _style() -> str:
    def colours(values: Sequence[str]) -> str:
        return "".join(
            f".curves .c{i} {{ stroke: {value}; }} .curves .f{i} {{ fill: {value}; }} .d{i} {{ background: {value}; }} "
            for i, value in enumerate(values)
        )

    return (
        ".curves text { font: 12px system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif; fill: #5c626e; } "
        ".curves .name { font-size: 13px; fill: #16181d; } .curves .env { font-size: 16px; font-weight: 650; fill: #16181d; } "
        ".curves .paper { fill: #ffffff; } .curves .grid { stroke: #e4e4df; } .curves .axis { stroke: #cfd0ca; } "
        ".curves .mean { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; } "
        f".curves .band {{ opacity: .16; }} {colours(LIGHT)}"
        "@media (prefers-color-scheme: dark) { .curves text { fill: #9aa2b1; } .curves .name, .curves .env { fill: #eceef2; } "
        f".curves .paper {{ fill: #181b21; }} .curves .grid {{ stroke: #272b33; }} .curves .axis {{ stroke: #3a404b; }} {colours(DARK)}}}"
    )


def curves_svg(by_env: Mapping[str, Sequence[Group]]) -> str:
    """A file of its own: the curves of each env below those of the last."""
    top, parts = 20.0, []
    for env, groups in by_env.items():
        inside, height = _section(groups, env)
        parts.append(f'<g transform="translate(20 {top:.0f})">{inside}</g>')
        top += height + 24
    width, height = WIDTH + 40, round(top - 4)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="curves" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f'<style>{_style()}</style><rect class="paper" width="100%" height="100%"/>{"".join(parts)}</svg>\n'
    )


def compare_page(by_env: Mapping[str, Sequence[Group]], target: float | None = None) -> str:
    """The page: verdict, curves, table and runs of each env."""
    css = files("flatout.views").joinpath("page.css").read_text(encoding="utf-8") + _style() + PAGE_STYLE
    n_runs = sum(len(group.runs) for groups in by_env.values() for group in groups)
    title = escape(", ".join(by_env))
    sections = "".join(_page_section(env, groups, target) for env, groups in by_env.items())
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">'
        f'<meta http-equiv="Content-Security-Policy" content="{CSP}"><link rel="icon" href="data:,">'
        f"<title>{title} · flatout</title><style>\n{css}\n</style></head>\n"
        f'<body><header><p class="brand">flatout <span>comparison</span></p><h1>{title}</h1>'
        f'<p class="identity">{n_runs} runs</p></header>\n<main>{sections}</main></body></html>\n'
    )


PAGE_STYLE = """
svg.curves { display: block; width: 100%; height: auto; margin-top: 10px; }
table.groups { font-variant-numeric: tabular-nums; }
table.groups th, table.groups td { width: auto; padding-right: 18px; white-space: nowrap; }
table.groups td:last-child { white-space: normal; min-width: 190px; }
table.groups i { display: inline-block; width: 11px; height: 11px; border-radius: 99px; margin-right: 7px; }
.verdict { margin: 8px 0 4px; font-size: 17px; } details { margin-top: 8px; font-size: 14px; }
.both { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 0 28px; }
@media (max-width: 720px) { .curves text { font-size: 17px; } }
"""


def _page_section(env: str, groups: Sequence[Group], target: float | None) -> str:
    charts = "".join(
        f'<svg class="curves" viewBox="0 0 {CHART} {HEIGHT}" role="img">{drawing}</svg>'
        for drawing in _charts(groups)
    )
    notes = "".join(f'<p class="hint">{escape(text)}</p>' for text in compare.notes(groups))
    verdict = compare.verdict(groups)
    rows = compare.table(groups, target)
    runs = [
        (fmt.printable(run.path), run.row.status, fmt.number(run.return_at(group.at_steps)))
        for group in groups
        for run in group.runs
    ]
    return (
        f"<section><h2>{escape(env)}</h2>"
        + (f'<p class="verdict">{escape(verdict)}</p>' if verdict else "")
        + '<p class="hint">Mean return of the last 100 episodes; bands are the standard deviation over seeds. Over wall time a '
        "run that has ended keeps its last return.</p>"
        f'<div class="both">{charts}</div>'
        f"{_table(list(rows[0]), [list(row.values()) for row in rows], dots=True)}"
        '<p class="hint">IQM: interquartile mean, of the middle half of the seeds. The interval is bootstrapped over seeds.</p>'
        f"{notes}<details><summary>{plural(len(runs), 'run')}</summary>"
        f"{_table(['run', 'status', 'return'], runs)}</details></section>"
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], *, dots: bool = False) -> str:
    lines = ["".join(f"<th>{escape(heading)}</th>" for heading in head)]
    for nth, row in enumerate(rows):
        dot = f'<i class="d{nth % len(LIGHT)}"></i>' if dots else ""
        lines.append("".join(f"<td>{'' if i else dot}{escape(text)}</td>" for i, text in enumerate(row)))
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table class="groups">{body}</table></div>'


def _charts(groups: Sequence[Group]) -> list[str]:
    """The curves over env steps, and over wall time."""
    axes = (("steps", "env steps", short), ("seconds", "wall time", _clock))
    return [chart([group.curve(by) for group in groups], label, show) for by, label, show in axes]


def _section(groups: Sequence[Group], title: str) -> tuple[str, float]:
    """The name of an env, what its colours mean, its two charts, and the height of it all."""
    top, parts = 30.0, [f'<text class="env" x="0" y="16">{escape(title)}</text>']
    for nth, group in enumerate(groups):
        parts.append(f'<circle class="f{nth % len(LIGHT)}" cx="6" cy="{top + 7:.0f}" r="5"/>')
        words = f"{group.label}{_seeds(group)}{f': {group.differs}' if group.differs else ''}"
        parts.append(f'<text class="name" x="18" y="{top + 11:.0f}">{escape(words)}</text>')
        top += KEY_LINE
    for nth, drawing in enumerate(_charts(groups)):
        parts.append(f'<g transform="translate({nth * (CHART + GAP)} {top:.0f})">{drawing}</g>')
    return "".join(parts), top + HEIGHT


def _seeds(group: Group) -> str:
    return f", {len(group.runs)} seeds" if len(group.runs) > 1 else ""


def chart(
    curves: Sequence[tuple[Floats, Floats, Floats]],
    label: str,
    show: Callable[[float, float], str],
    dotted: Collection[int] = (),
) -> str:
    """Means with bands around them over axes, CHART × HEIGHT; those of `dotted` as single points."""
    known = [curve for curve in curves if len(curve[0])]
    if not known:
        return f'<text x="{LEFT}" y="40">No episode has ended yet.</text>'
    x1 = max(float(x[-1]) for x, _, _ in known) or 1.0
    low = min(float((y - spread).min()) for _, y, spread in known)
    high = max(float((y + spread).max()) for _, y, spread in known)
    room = 0.04 * (high - low) or abs(high) * 0.1 or 1.0
    low, high = low - room, high + room

    def at_x(value: float) -> float:
        return LEFT + (CHART - LEFT - RIGHT) * value / x1

    def at_y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * (value - low) / (high - low)

    def path(x: Floats, y: Floats) -> str:
        return "L".join(f"{at_x(a):.1f} {at_y(b):.1f}" for a, b in zip(x.tolist(), y.tolist(), strict=True))

    parts = []
    step, marks = ticks(low, high, 6)
    for mark in marks:
        place = f"{at_y(mark):.1f}"
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{CHART - RIGHT}" y1="{place}" y2="{place}"/>')
        parts.append(
            f'<text x="{LEFT - 8}" y="{at_y(mark) + 4:.1f}" text-anchor="end">{short(mark, step)}</text>'
        )
    base = HEIGHT - BOTTOM
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{CHART - RIGHT}" y1="{base}" y2="{base}"/>')
    step, marks = ticks(0.0, x1, 5)
    for mark in marks:
        anchor = "end" if at_x(mark) > CHART - 30 else "middle"
        text = escape(show(mark, step))
        parts.append(f'<text x="{at_x(mark):.1f}" y="{base + 17}" text-anchor="{anchor}">{text}</text>')
    middle = (LEFT + CHART - RIGHT) / 2
    parts.append(f'<text x="{middle:.0f}" y="{base + 36}" text-anchor="middle">{label}</text>')
    for nth, (x, y, spread) in enumerate(curves):
        if len(x) and spread.any():
            around = f"M{path(x, y + spread)}L{path(x[::-1], (y - spread)[::-1])}Z"
            parts.append(f'<path class="band f{nth % len(LIGHT)}" d="{around}"/>')
    for nth, (x, y, _) in enumerate(curves):
        if nth in dotted:
            for a, b in zip(x.tolist(), y.tolist(), strict=True):
                parts.append(f'<circle class="f{nth}" cx="{at_x(a):.1f}" cy="{at_y(b):.1f}" r="4"/>')
        elif len(x):
            dash = ' stroke-dasharray="6 4"' if nth >= len(LIGHT) else ""
            parts.append(f'<path class="mean c{nth % len(LIGHT)}"{dash} d="M{path(x, y)}"/>')
    return "".join(parts)


def ticks(low: float, high: float, count: int) -> tuple[float, list[float]]:
    """About `count` round numbers between two others, and their distance."""
    rough = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * nice for nice in (1, 2, 5, 10) if power * nice >= 0.999 * rough)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-6)
    return step, [nth * step for nth in range(first, last + 1)]


def short(value: float, step: float) -> str:
    """`250`, `12.5 k`, `1.2 M`, with the digits that tell two ticks apart."""
    for size, unit in ((1e6, " M"), (1e4, " k")):
        if abs(value) >= size:
            unit_size = 1e6 if unit == " M" else 1e3
            return f"{value / unit_size:,.{_decimals(step / unit_size)}f}{unit}"
    return f"{value:,.{_decimals(step)}f}"


def _decimals(step: float) -> int:
    return min(6, max(0, math.ceil(-math.log10(step) - 1e-9)))


def _clock(seconds: float, step: float) -> str:
    """`20 s`, `2:30`, `1:02:03`."""
    if seconds < 60 or step < 1:
        return f"{seconds:,.{_decimals(step)}f} s"
    whole = round(seconds)
    minutes, rest = whole // 60, f"{whole % 60:02d}"
    return f"{minutes}:{rest}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest}"
