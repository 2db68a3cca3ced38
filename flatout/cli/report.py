"""`flatout report RUN` and `flatout trace RUN`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from flatout.cli.parser import run_parser, run_path
from flatout.errors import FlatoutError
from flatout.runlog.files import write_text
from flatout.runlog.folder import RunFolder
from flatout.runlog.records import read_run
from flatout.runlog.samples import read_samples
from flatout.runlog.spans import read_spans
from flatout.views.chrome_trace import trace_json
from flatout.views.report import report_page
from flatout.views.text import report_text, run_findings, verdict


def report(argv: Sequence[str]) -> int:
    """Write the report page and print the text; returns the exit code."""
    parser = run_parser(
        "report", "Report what a run learned, where its time went and what to change, as a page and as text."
    )
    parser.flag("--text", "print the text, write no page")
    parser.flag("--out", "file for the page (RUN/report.html)", type=Path, metavar="FILE")
    parser.flag("--json", "print the report as JSON instead of text")
    args = parser.parse(argv)
    records = read_run(run_path(args.run, args.runs_dir))
    findings = run_findings(records)
    out = None if args.text else args.out or records.path / "report.html"
    if out is not None:
        write_text(out, report_page(records, findings))
    if args.json:
        figures = {
            "verdict": verdict(records),
            "idle_seconds": records.idle,
            "problems": records.problems,
            "findings": [asdict(finding) for finding in findings],
        }
        print(json.dumps({**records.summary, **figures, "report": out and str(out)}))
        return 0
    print(report_text(records, findings, width=min(100, shutil.get_terminal_size((100, 24)).columns)))
    if out is not None:
        print(f"{'report':<14}{out}")
    return 0


def trace(argv: Sequence[str]) -> int:
    """Write the trace and print where it is; returns the exit code."""
    parser = run_parser(
        "trace", "Write a timeline of the learner and the collectors as a Perfetto/Chrome trace."
    )
    parser.flag("--out", "file for the trace (RUN/trace.json)", type=Path, metavar="FILE")
    args = parser.parse(argv)
    folder = RunFolder.open(run_path(args.run, args.runs_dir))
    spans = read_spans(folder.spans)
    if not spans.lanes:
        raise FlatoutError(f"nothing to trace in {folder.path}: {'; '.join(spans.problems)}")
    out = args.out or folder.path / "trace.json"
    write_text(out, trace_json(folder.path.name, spans, read_samples(folder.samples)))
    for problem in spans.problems:
        print(f"note: {problem}")
    n_spans = sum(len(lane.start) for lane in spans.lanes.values())
    print(f"{out}: {n_spans:,} spans of {', '.join(spans.lanes)} over {spans.end:,.1f} s")
    print("open it at https://ui.perfetto.dev (it stays on your machine) or in chrome://tracing")
    return 0
