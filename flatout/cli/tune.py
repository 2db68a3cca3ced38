"""`flatout tune ENV`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from flatout.cli.parser import Parser, add_settings, settings
from flatout.config.run_config import read_file, resolve
from flatout.device.machine import usable_cores
from flatout.errors import FlatoutError


def run(argv: Sequence[str]) -> int:
    """Parse, try, print, save; returns the exit code."""
    parser = Parser(
        prog="flatout tune",
        description="Find the fastest way to run an env here: reckons every way, runs the promising ones, saves the best.",
    )
    parser.add_argument(
        "env", nargs="?", metavar="ENV", help="a Gymnasium id, module:Id, or path/to/file.py:factory"
    )
    parser.add_argument("--config", type=Path, metavar="FILE.json", help="settings from a run's config.json")
    parser.add_argument("--budget", type=float, default=60.0, metavar="SECONDS", help="time to spend (60)")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="where to save (tuned-ENV.json)")
    parser.add_argument(
        "--allow-learning-changes",
        action="store_true",
        help="let minibatches change too, and so what is learned",
    )
    add_settings(parser)
    args = parser.parse(argv)
    given = settings(args)
    if args.budget < 10:
        raise FlatoutError(f"--budget is {args.budget:g}; a trial takes some seconds, give at least 10")
    config = resolve(args.env, given, device="cpu", n_cores=usable_cores(), file=args.config)
    if args.config is not None:
        given = {k: v for k, v in read_file(args.config).items() if k != "env"} | given
    out = args.out or Path(f"tuned-{_file_name(config.env)}.json")
    if not out.parent.is_dir():
        raise FlatoutError(f"--out {out}: there is no folder {out.parent}")

    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from flatout.advice.tune import save, tune

    columns = (BarColumn(30), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(
        *columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    ) as bar:
        task = bar.add_task("starting", total=1.0)
        tuned = tune(
            args.env or config.env,
            budget=args.budget,
            allow_learning_changes=args.allow_learning_changes,
            tell=lambda what, share: bar.update(task, description=what, completed=share),
            **given,
        )
    save(tuned, out)
    print(tuned)
    print(f"saved   {out}: flatout train --config {out}")
    return 0


def _file_name(env: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in env.rpartition("/")[2])
