"""`flatout runs [DIR]`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from flatout.cli.parser import Parser
from flatout.errors import FlatoutError
from flatout.views.runs import RunIndex, newest_first


def runs(argv: Sequence[str]) -> int:
    """List the runs of a folder; returns the exit code."""
    parser = Parser(
        "runs",
        "List the runs of a folder, running ones first, then the newest: status, env steps, return, speed, learner busy, and "
        "how long ago they last wrote. Runs of --seeds and trials of sweeps are listed with their folder.",
    )
    text = "folder that contains the runs (runs)"
    parser.flag("dir", text, nargs="?", type=Path, default=Path("runs"), metavar="DIR")
    parser.flag("--json", "print the runs as JSON")
    args = parser.parse(argv)
    rows = newest_first(RunIndex(folder_of_runs(args.dir)).read().values())
    if args.json:
        print(json.dumps([asdict(row) for row in rows]))
    elif not rows:
        print(f"no runs in {os.path.join(args.dir, '')}")
    else:
        from flatout.views.jobs import console_for
        from flatout.views.run_table import run_table
        from flatout.views.stream import SafeStream

        console = console_for(SafeStream(sys.stdout), least_columns=1000)
        console.print(run_table(rows, console.width))
    return 0


def folder_of_runs(path: Path) -> Path:
    """The folder, refused if it is a run itself or does not exist."""
    if (path / "config.json").is_file():
        raise FlatoutError(f"{path} is a run; name the folder that contains it: {path.resolve().parent}")
    if not path.is_dir():
        is_file = path.exists()
        problem = "is a file; name the folder" if is_file else "does not exist; name the folder"
        raise FlatoutError(f"{path} {problem} that contains the runs")
    return path
