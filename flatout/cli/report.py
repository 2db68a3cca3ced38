"""`flatout report RUN`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from flatout.cli.parser import Parser
from flatout.cli.resume import run_path
from flatout.runlog.folder import write_text
from flatout.runlog.records import read_run
from flatout.views.report import report_page
from flatout.views.text import report_text, run_findings, verdict


def run(argv: Sequence[str]) -> int:
    """Parse, write the page, print the text; returns the exit code."""
    parser = Parser(
        prog="flatout report",
        description="Where a run's time went, what it learned, and what to change: a page and a text.",
    )
    parser.add_argument("run", metavar="RUN", help="the run's folder, or its name in --runs-dir")
    parser.add_argument("--text", action="store_true", help="print the text only, write no page")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write the page (RUN/report.html)")
    parser.add_argument(
        "--json", action="store_true", help="print the report's figures as JSON instead of the text"
    )
    parser.add_argument(
        "--runs-dir", type=Path, default=Path("runs"), metavar="DIR", help="where runs are kept"
    )
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
