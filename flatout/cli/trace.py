"""`flatout trace RUN`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flatout.cli.parser import Parser
from flatout.cli.resume import run_path
from flatout.errors import FlatoutError
from flatout.runlog.folder import RunFolder, write_text
from flatout.runlog.samples import read_samples
from flatout.runlog.spans import read_spans
from flatout.views.chrome_trace import trace_json


def run(argv: Sequence[str]) -> int:
    """Parse, write the trace, say where it is; returns the exit code."""
    parser = Parser(
        prog="flatout trace", description="What every part of a run did when, as a Perfetto/Chrome trace."
    )
    parser.add_argument("run", metavar="RUN", help="the run's folder, or its name in --runs-dir")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write it (RUN/trace.json)")
    parser.add_argument(
        "--runs-dir", type=Path, default=Path("runs"), metavar="DIR", help="where runs are kept"
    )
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
