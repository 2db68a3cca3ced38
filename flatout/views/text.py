"""A run's report for the terminal: at most 15 lines, the verdict first.

In: a run's folder or its records, and findings. Out: text; what is not known is left out or told.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from flatout.perf.finding import Finding
from flatout.runlog.summary import summary_lines
from flatout.views.figures import percent, rate
from flatout.views.records import RunRecords, read_run
from flatout.views.verdict import busy_seconds, idle_base, verdict

_LABEL_CELLS = 14
_MOST_LINES = 15
_SHOWN = ("run", "target", "pipeline", "executor", "recovered")
"""Lines of the summary that the verdict does not tell already."""


def report_text(run: Path | RunRecords, findings: Sequence[Finding] | None = None, width: int = 100) -> str:
    """The verdict, where the time went, the first two findings, what is missing, and the folder."""
    records = read_run(run) if isinstance(run, Path) else run
    findings = records.findings if findings is None else findings
    told = dict(summary_lines(records.summary))
    lines = [
        ("time went to", _times(records)),
        *((f"{i}. to change", _finding(finding)) for i, finding in enumerate(findings[:2], start=1)),
        *((label, told.get(label, "")) for label in _SHOWN),
    ]
    head = _wrap(verdict(records), width, _MOST_LINES // 3)
    missing = _row("missing", "; ".join(records.problems), width, 2)
    tail = [*missing, f"{'folder':<{_LABEL_CELLS}}{records.path}"]
    body: list[str] = []
    for label, text in lines:
        rows = _row(label, text, width, 2)
        if len(head) + len(body) + len(rows) + len(tail) <= _MOST_LINES:
            body += rows
    return "\n".join([*head, *body, *tail])


def _times(records: RunRecords) -> str:
    base = idle_base(records)
    if base <= 0:
        return ""
    busy = {"updates": sum(busy_seconds(records).values())}
    parts = sorted((busy | records.idle).items(), key=lambda item: -item[1])
    return ", ".join(
        f"{cause} {percent(seconds / base)}" for cause, seconds in parts if seconds / base >= 0.005
    )


def _finding(finding: Finding) -> str:
    flags = f" ({' '.join(finding.flags)})" if finding.flags else ""
    return f"{finding.what}: {finding.change}{flags}{_predicted(finding)}"


def _predicted(finding: Finding) -> str:
    if finding.gain is None:
        return ""
    speed = f", {rate(finding.steps_per_second)} steps/s" if finding.steps_per_second is not None else ""
    return f": about {finding.gain:.1f} × the speed{speed}"


def _row(label: str, text: str, width: int, most: int) -> list[str]:
    if not text:
        return []
    wrapped = _wrap(text, max(20, width - _LABEL_CELLS), most)
    return [f"{label if i == 0 else '':<{_LABEL_CELLS}}{line}" for i, line in enumerate(wrapped)]


def _wrap(text: str, width: int, most: int) -> list[str]:
    """Lines that keep a figure and its unit together."""
    glued = text.replace(" %", "\N{NO-BREAK SPACE}%").replace(" steps/s", "\N{NO-BREAK SPACE}steps/s")
    lines = textwrap.wrap(glued, width, max_lines=most, placeholder=" …")
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]
