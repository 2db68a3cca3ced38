"""report.html: one page that opens offline, with the verdict first; styles, script and data are inside the page.

The data stays small however long the run was: curves have a bounded number of points, lanes are drawn in bins, and
single spans only where there is room.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
import numpy.typing as npt

from flatout.perf.case import Finding
from flatout.runlog.files import plural, write_text
from flatout.runlog.records import RunRecords, read_run
from flatout.runlog.spans import Floats, Lane, Spans, is_idle, timeline
from flatout.views.figures import joined, mean_and_std, percent, plain, rate, seconds_text, told
from flatout.views.text import busy_seconds, learner_wall, numbers, run_findings, summary_lines, verdict

_TINY = 0.005
"""Causes of idle time below this share are shown together."""
MOST_POINTS = 1000
MOST_LANES = 12
MOST_SPANS = 5000
N_WINDOWS = 5
"""Windows of time shown span by span when there are too many spans to show all."""
_N_BINS = 400
_N_TIMES = 150
_SMOOTH = 0.04
"""Each point of a curve over time is a mean over this share of the run before and after it."""


def write_report(folder: Path, findings: Sequence[Finding] | None = None) -> Path:
    """Write report.html into a run's folder."""
    path = folder / "report.html"
    write_text(path, report_page(read_run(folder), findings))
    return path


CSP = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
"""Of a page with everything inside it: nothing is loaded."""


def report_page(records: RunRecords, findings: Sequence[Finding] | None = None) -> str:
    """The page of a run, complete in one file."""
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{CSP}">\n<style>\n{asset("page.css")}\n</style>'
    )
    scripts = f"<script>\n{asset('charts.js')}{asset('page.js')}\n</script>"
    return page_of_run(records, records.path.resolve().name, findings, head=head, scripts=scripts)


def page_of_run(
    records: RunRecords,
    name: str,
    findings: Sequence[Finding] | None = None,
    *,
    head: str,
    scripts: str,
    nav: str = "",
    recording: str = "",
) -> str:
    """The page of a run; `head` and `scripts` bring the styles and the scripts."""
    data = json.dumps(drawn(records), separators=(",", ":"), allow_nan=False)
    parts = {
        **page_parts(records, findings),
        "name": escape(name),
        "settings": _table(_flat(records.config)),
        "machine": _table(_flat(records.system)),
        "head": head,
        "scripts": scripts,
        "nav": nav,
        "recording": recording,
        # Escaped, `<` cannot end the script; JSON reads it back unchanged.
        "data": data.replace("<", "\\u003c"),
    }
    return Template(asset("page.html")).substitute(parts)


def drawn(records: RunRecords) -> dict[str, Any]:
    """What the charts of the page show."""
    return {"curve": curve(records), "time": over_time(records), "gantt": gantt(records.spans)}


def page_parts(records: RunRecords, findings: Sequence[Finding] | None = None) -> dict[str, str]:
    """The parts of the page that change while a run trains, as HTML."""
    status = escape(str(records.summary.get("status", "unknown")))
    return {
        "status": f'<span class="status {status}">{status}</span>',
        "identity": escape(dict(summary_lines(records.summary)).get("run", "")),
        "verdict": escape(verdict(records)),
        "tiles": _tiles(records),
        "idle": _idle(records),
        "findings": _findings(run_findings(records) if findings is None else findings),
        "missing": _missing(records),
        "figures": _table(summary_lines(records.summary)),
    }


def asset(name: str) -> str:
    """A file of this package."""
    return files("flatout.views").joinpath(name).read_text(encoding="utf-8")


def _tiles(records: RunRecords) -> str:
    mean, std, speed, n = numbers(
        records.summary, "return_mean", "return_std", "steps_per_second", "episodes"
    )
    busy, device, wall = numbers(records.summary, "learner_busy", "device_utilization", "wall_seconds")
    tiles = (
        ("return", told("{}", mean, lambda mean: mean_and_std(mean, std)), _last(n)),
        ("steps/s", told("{}", speed, rate), "env steps per second of wall time"),
        ("learner busy", told("{}", busy, percent), "share of the time in update work"),
        ("device utilisation", told("{}", device, percent), "any kernel ran; not how full"),
        ("wall time", told("{}", wall, seconds_text), "learning, from its start to its end"),
    )
    return "".join(
        f'<div class="tile"><dt>{label}</dt><dd>{escape(value)}</dd><small>{note}</small></div>'
        for label, value, note in tiles
        if value
    )


def _last(n_episodes: float | None) -> str:
    """The episodes that a return is the mean of."""
    return (
        "last 100 episodes" if n_episodes is None or n_episodes >= 100 else plural(int(n_episodes), "episode")
    )


def _idle(records: RunRecords) -> str:
    base = learner_wall(records)
    if base <= 0:
        return '<p class="none">No phases are recorded.</p>'
    rows = [("updates", busy_seconds(records), "busy")]
    rows += [(cause, seconds, "idle") for cause, seconds in records.idle.items() if seconds >= _TINY * base]
    if (rest := sum(seconds for seconds in records.idle.values() if seconds < _TINY * base)) > 0:
        rows.append(("everything else", rest, "idle"))
    return "".join(
        f'<div class="bar {kind}"><span>{escape(cause)}</span>'
        f'<svg><rect width="{min(100, 100 * seconds / base):.2f}%"/></svg>'
        f"<em>{percent(seconds / base)}<small>{seconds_text(seconds)}</small></em></div>"
        for cause, seconds, kind in rows
    )


def _findings(findings: Sequence[Finding]) -> str:
    if not findings:
        return ""
    items = "".join(
        f"<li><h3>{escape(f.what)}</h3><p>{escape(f.evidence)}</p><p><strong>{escape(f.change)}</strong>"
        + (f" <code>{escape(' '.join(f.flags))}</code>" if f.flags else "")
        + f"</p>{_predicted(f)}</li>"
        for f in findings
    )
    return f'<section id="findings"><h2>What to change</h2><ol>{items}</ol></section>'


def _predicted(finding: Finding) -> str:
    known = joined(
        ", ",
        told("{} × the speed", finding.gain, "{:.2g}".format),
        told("{} steps/s", finding.steps_per_second, rate),
        told("learner busy {}", finding.learner_busy, percent),
    )
    return f'<p class="predicted">predicted: {known}</p>' if known else ""


def _missing(records: RunRecords) -> str:
    items = "".join(f"<li>{escape(problem)}</li>" for problem in records.problems)
    text = f"<ul>{items}</ul>" if items else ""
    if records.faults:
        faults = f"<pre>{escape(records.faults[-4000:])}</pre>"
        text += f"<details><summary>Envs were lost and rebuilt (faults.log)</summary>{faults}</details>"
    return f'<section id="missing"><h2>What is missing or went wrong</h2>{text}</section>' if text else ""


def _table(rows: Iterable[tuple[str, object]]) -> str:
    cells = "".join(f"<tr><th>{escape(key)}</th><td>{escape(_shown(value))}</td></tr>" for key, value in rows)
    return f"<table>{cells}</table>" if cells else '<p class="none">Not recorded.</p>'


def _flat(value: Mapping[str, Any], prefix: str = "") -> list[tuple[str, object]]:
    """Nested settings as one list, with dotted names."""
    rows: list[tuple[str, object]] = []
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            rows += _flat(item, f"{prefix}{key}.")
        else:
            rows.append((f"{prefix}{key}", item))
    return rows


def _shown(value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool) and value >= 100_000:
        return f"{value:,}"
    return "–" if value is None or value in ([], {}) else json.dumps(value, ensure_ascii=False)


def curve(records: RunRecords) -> dict[str, Any]:
    """The learning curve: env steps, seconds, mean return of the last 100 episodes, evaluations."""
    columns = [
        records.metrics.get(name, np.zeros(0))
        for name in ("time/total_timesteps", "time/time_elapsed", "rollout/ep_rew_mean", "eval/mean_reward")
    ]
    if len({len(column) for column in columns}) != 1:
        return {"steps": [], "seconds": [], "return": [], "eval": []}
    steps, seconds, returns, evaluated = columns
    kept = _spread(np.flatnonzero(np.isfinite(steps) & np.isfinite(seconds)), MOST_POINTS)
    # Evaluations are rare: all of them are kept.
    tested = _spread(np.flatnonzero(np.isfinite(evaluated) & np.isfinite(steps)), MOST_POINTS)
    return {
        "steps": plain(steps[kept]),
        "seconds": plain(seconds[kept], 3),
        "return": plain(returns[kept], 4),
        "eval": [plain(column[tested], 4) for column in (steps, seconds, evaluated)],
    }


def over_time(records: RunRecords) -> dict[str, Any]:
    """Steps/s, learner busy, the card's utilisation and power, and the machine's load over wall time.

    Each point is a mean around its time.
    """
    seconds, samples = records.metrics.get("time/time_elapsed", np.zeros(0)), records.samples
    times = np.concatenate([seconds, samples.t])
    end = float(np.max(times, where=np.isfinite(times), initial=records.spans.end))
    if end <= 0:
        return {"t": [], "rate": [], "busy": [], "gpu": [], "power": [], "cores": []}
    t = np.linspace(0, end, _N_TIMES)
    return {
        "t": plain(t, 3),
        "rate": plain(_rate(seconds, records.metrics.get("time/total_timesteps", np.zeros(0)), t), 1),
        "busy": plain(_busy(records.spans.lanes.get("learner"), t), 4),
        "gpu": plain(_means(samples.t, samples.gpu["utilization"], t), 4) if samples.gpu else [],
        "power": plain(_means(samples.t, samples.gpu["power"], t), 1) if samples.gpu else [],
        "cores": plain(_means(samples.t, samples.cores_in_use(), t), 4),
    }


def gantt(spans: Spans) -> dict[str, Any]:
    """The lanes in bins over the whole run, and span by span where there is room."""
    lanes = [_idle_last(lane) for lane in list(spans.lanes.values())[:MOST_LANES]]
    phases = list(dict.fromkeys(phase for lane in lanes for phase in lane.phases))
    windows = _windows(lanes)
    n_bins = min(_N_BINS, 20_000 // max(1, sum(len(lane.phases) for lane in lanes)))
    edges = np.linspace(0, spans.end or 1.0, n_bins + 1)
    return {
        "end": spans.end,
        "phases": phases,
        "left_out": len(spans.lanes) - len(lanes),
        "windows": windows,
        "lanes": [
            {
                "name": lane.name,
                "clock": lane.clock,
                "phases": [phases.index(phase) for phase in lane.phases],
                "bins": [plain(100 * column, 0) for column in timeline(lane, edges).T],
                "detail": [_detail(lane, phases, *window) for window in windows],
            }
            for lane in lanes
        ],
    }


def _idle_last(lane: Lane) -> Lane:
    """The lane with its busy phases first: they are drawn at the bottom, the idle ones above."""
    order = sorted(range(len(lane.phases)), key=lambda column: is_idle(lane.name, lane.phases[column]))
    phases = tuple(lane.phases[column] for column in order)
    return replace(lane, phases=phases, seconds=lane.seconds[:, order])


def _windows(lanes: list[Lane]) -> list[tuple[float, float]]:
    """The windows shown span by span: the whole run, or a few windows spread over it."""
    if not lanes or sum(len(lane.start) for lane in lanes) <= MOST_SPANS:
        return [(0.0, max((float(lane.end[-1]) for lane in lanes), default=0.0))]
    starts = np.sort(np.concatenate([lane.start for lane in lanes]))
    size = MOST_SPANS // N_WINDOWS
    # Spread by count, not by time: where there are many spans, they are fine.
    first = np.linspace(0, len(starts) - size - 1, N_WINDOWS).astype(int)
    windows = [(float(starts[i]), float(starts[i + size])) for i in first]
    return [(begin, end) for begin, end in windows if end > begin]


def _detail(lane: Lane, phases: list[str], begin: float, end: float) -> dict[str, Any]:
    """The spans in a window: start and length in µs, and the phase, or the milliseconds of several."""
    inside = np.flatnonzero((lane.start >= begin) & (lane.end <= end + 1e-9))
    start = np.rint(1e6 * (lane.start[inside] - begin)).astype(int)
    stop = np.rint(1e6 * (lane.end[inside] - begin)).astype(int)
    columns = np.array([phases.index(phase) for phase in lane.phases], int)
    seconds = lane.seconds[inside]
    several = (seconds > 0).sum(axis=1) > 1
    main = columns[seconds.argmax(axis=1)] if len(inside) else np.zeros(0, int)
    mixed = {str(i): plain(1e3 * seconds[i], 3) for i in np.flatnonzero(several)}
    lists = {"start": start.tolist(), "length": (stop - start).tolist(), "phase": main.tolist()}
    return lists | {"mixed": mixed}


def _per_second(times: Floats, sums: Floats, t: Floats) -> Floats:
    """The growth per second of cumulative sums around each time; NaN outside their range."""
    half = _SMOOTH * (t[-1] - t[0])
    low, high = np.maximum(t - half, times[0]), np.minimum(t + half, times[-1])
    covered = (high > low) & (t >= times[0]) & (t <= times[-1])
    gained = np.interp(high, times, sums) - np.interp(low, times, sums)
    rates: Floats = np.divide(gained, high - low, out=np.full(len(t), np.nan), where=covered)
    return rates


def _rate(seconds: Floats, steps: Floats, t: Floats) -> Floats:
    known = np.isfinite(seconds) & np.isfinite(steps)
    if not known.any():
        return np.zeros(0)
    times, sums = np.append(0.0, seconds[known]), np.append(0.0, steps[known])
    order = np.argsort(times, kind="stable")
    return _per_second(times[order], sums[order], t)


def _busy(lane: Lane | None, t: Floats) -> Floats:
    if lane is None:
        return np.zeros(0)
    times = np.column_stack((lane.start, lane.end)).ravel()
    columns = [i for i, phase in enumerate(lane.phases) if not is_idle(lane.name, phase)]
    return np.minimum(1.0, _per_second(times, lane.until(times)[:, columns].sum(axis=1), t))


def _means(times: Floats, values: Floats, t: Floats) -> Floats:
    """The mean of the values around each time; empty if none is known."""
    known = np.isfinite(values) & np.isfinite(times)
    if not known.any():
        return np.zeros(0)
    times, sums = times[known], np.append(0.0, np.cumsum(values[known]))
    half = _SMOOTH * (t[-1] - t[0])
    low, high = np.searchsorted(times, t - half), np.searchsorted(times, t + half, side="right")
    means: Floats = np.divide(
        sums[high] - sums[low], high - low, out=np.full(len(t), np.nan), where=high > low
    )
    return means


def _spread(indices: npt.NDArray[np.intp], most: int) -> npt.NDArray[np.intp]:
    """At most `most` of the indices, evenly spread, including the last."""
    chosen = np.linspace(0, len(indices) - 1, min(len(indices), most)).astype(int)
    return np.asarray(indices[chosen], np.intp)
