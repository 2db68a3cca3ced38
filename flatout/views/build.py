"""report.html: one page that opens offline, with the verdict first and everything drawn from the run's records.

In: a run's folder and findings. Out: HTML with its styles, script and data inside.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from flatout.perf.finding import Finding
from flatout.runlog.folder import write_text
from flatout.runlog.lines import number
from flatout.runlog.summary import summary_lines
from flatout.views.data import page_data
from flatout.views.figures import mean_and_std, percent, rate
from flatout.views.records import RunRecords, read_run
from flatout.views.verdict import busy_seconds, idle_base, seconds_text, verdict

_TINY = 0.005
"""Causes of idleness below this share are shown together."""


def write_report(folder: Path, findings: Sequence[Finding] | None = None) -> Path:
    """Write report.html into a run's folder, whole or not at all."""
    path = folder / "report.html"
    write_text(path, build_report(folder, findings))
    return path


def build_report(folder: Path, findings: Sequence[Finding] | None = None) -> str:
    """The page of a run."""
    return report_page(read_run(folder), findings)


def report_page(records: RunRecords, findings: Sequence[Finding] | None = None) -> str:
    """The page of a run whose records are read."""
    data = json.dumps(page_data(records), separators=(",", ":"), allow_nan=False)
    parts = {
        "name": escape(records.path.resolve().name),
        "identity": escape(dict(summary_lines(records.summary)).get("run", "")),
        "status": escape(str(records.summary.get("status", "unknown"))),
        "verdict": escape(verdict(records)),
        "tiles": _tiles(records),
        "idle": _idle(records),
        "findings": _findings(records.findings if findings is None else findings),
        "missing": _missing(records),
        "settings": _table(_flat(records.config)),
        "machine": _table(_flat(records.system)),
        "figures": _table(summary_lines(records.summary)),
        "css": _asset("page.css"),
        "js": _asset("page.js"),
        # `<` cannot end the script this way, and JSON reads it back as it was.
        "data": data.replace("<", "\\u003c"),
    }
    return Template(_asset("page.html")).substitute(parts)


def _asset(name: str) -> str:
    return files("flatout.views").joinpath(name).read_text(encoding="utf-8")


def _tiles(records: RunRecords) -> str:
    summary = records.summary
    figures = {key: number(summary.get(key)) for key in summary}
    mean, speed, busy = (figures.get(key) for key in ("return_mean", "steps_per_second", "learner_busy"))
    device, wall = figures.get("device_utilization"), figures.get("wall_seconds")
    tiles = (
        (
            "return",
            None if mean is None else mean_and_std(mean, figures.get("return_std")),
            "last 100 episodes",
        ),
        ("steps/s", None if speed is None else rate(speed), "env steps per second of wall time"),
        ("learner busy", None if busy is None else percent(busy), "share of the time in update work"),
        ("device utilisation", None if device is None else percent(device), "any kernel ran; not how full"),
        ("wall time", None if wall is None else seconds_text(wall), "learning, from its start to its end"),
    )
    return "".join(
        f'<div class="tile"><dt>{label}</dt><dd>{escape(value)}</dd><small>{note}</small></div>'
        for label, value, note in tiles
        if value is not None
    )


def _idle(records: RunRecords) -> str:
    base = idle_base(records)
    if base <= 0:
        return '<p class="none">No phases are recorded.</p>'
    rows = [("updates", sum(busy_seconds(records).values()), "busy")]
    rows += [(cause, seconds, "idle") for cause, seconds in records.idle.items() if seconds >= _TINY * base]
    if (rest := sum(seconds for seconds in records.idle.values() if seconds < _TINY * base)) > 0:
        rows.append(("everything else", rest, "idle"))
    return "".join(
        f'<div class="bar {kind}"><span>{escape(cause)}</span>'
        f'<i><b style="width:{min(100, 100 * seconds / base):.2f}%"></b></i>'
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
    parts = []
    if finding.gain is not None:
        parts.append(f"{finding.gain:.2g} × the speed")
    if finding.steps_per_second is not None:
        parts.append(f"{rate(finding.steps_per_second)} steps/s")
    if finding.learner_busy is not None:
        parts.append(f"learner busy {percent(finding.learner_busy)}")
    return f'<p class="predicted">predicted: {", ".join(parts)}</p>' if parts else ""


def _missing(records: RunRecords) -> str:
    faults = f"<pre>{escape(records.faults[-4000:])}</pre>" if records.faults else ""
    items = "".join(f"<li>{escape(problem)}</li>" for problem in records.problems)
    text = f"<ul>{items}</ul>" if items else ""
    if faults:
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
