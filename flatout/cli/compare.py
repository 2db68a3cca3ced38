"""`flatout compare RUN …`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from flatout.cli import parser as cli
from flatout.errors import FlatoutError
from flatout.runlog.files import plural, write_text
from flatout.views.compare import Group, find_runs, interquartile_mean, notes, read_groups, table, verdict


def compare(argv: Sequence[str]) -> int:
    """Compare runs in a table and as curves; returns the exit code."""
    parser = cli.Parser(
        "compare",
        "Compare runs: learning curves over env steps and over wall time, and the interquartile mean return over seeds with "
        "its bootstrap interval. Runs that differ only in their seeds are one group; runs of different envs are shown apart.",
    )
    text = "runs, or folders of runs such as those of --seeds"
    parser.flag("runs", text, nargs="+", metavar="RUN")
    cli.add_runs_dir(parser)
    parser.flag("--out", "a .svg (curves) or .html (curves and table) file", type=Path, metavar="FILE")
    parser.flag("--steps", "compare returns after N env steps (at the end)", type=float, metavar="N")
    parser.flag("--target-return", "also compare the wall time to this return", type=float, metavar="R")
    parser.flag("--json", "print the groups as JSON")
    args = parser.parse(argv)
    if args.out is not None and args.out.suffix.lower() not in (".svg", ".html"):
        raise FlatoutError(f"--out {args.out}: name a .svg or .html file")
    paths = find_runs([cli.run_path(name, args.runs_dir) for name in args.runs])
    by_env = read_groups(paths, args.steps)
    if args.out is not None:
        from flatout.views.curves import compare_page, curves_svg

        is_page = args.out.suffix.lower() == ".html"
        write_text(args.out, compare_page(by_env, args.target_return) if is_page else curves_svg(by_env))
    if args.json:
        print(json.dumps(_figures(by_env)))
        return 0
    if len(by_env) > 1:
        print(f"{len(by_env)} envs, shown apart: returns of different envs cannot be compared")
    for env, groups in by_env.items():
        _print(env, groups, args.target_return)
    if args.out is not None:
        print(f"{args.out}: {plural(len(paths), 'run')}, {os.path.getsize(args.out) / 1e3:.0f} kB")
    return 0


def _print(env: str, groups: Sequence[Group], target: float | None) -> None:
    from rich import box
    from rich.table import Table

    from flatout.views.jobs import console_for
    from flatout.views.stream import SafeStream

    rows = table(groups, target)
    shown = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in rows[0]:
        is_text = heading in ("runs", "differs in")
        shown.add_column(
            heading, justify="left" if is_text else "right", overflow="fold", no_wrap=not is_text
        )
    for row in rows:
        shown.add_row(*row.values())
    print(env)
    console_for(SafeStream(sys.stdout), least_columns=200).print(shown, markup=False)
    for line in (verdict(groups), *(f"note: {text}" for text in notes(groups))):
        if line:
            print(line)


def _figures(by_env: Mapping[str, Sequence[Group]]) -> list[dict[str, object]]:
    return [
        {
            "env": env,
            "label": group.label,
            "runs": [str(run.path) for run in group.runs],
            "returns": group.returns.tolist(),
            "iqm": float(interquartile_mean(group.returns)) if len(group.returns) else None,
            "interval": group.interval,
            "differs_in": group.differs,
        }
        for env, groups in by_env.items()
        for group in groups
    ]
