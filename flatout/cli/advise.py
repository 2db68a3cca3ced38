"""`flatout doctor ENV` and `flatout tune ENV`: how fast an env can be trained on this machine."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flatout.cli.parser import Parser, env_parser
from flatout.cli.settings import parse_settings
from flatout.config.run_config import read_file
from flatout.errors import FlatoutError


def doctor(argv: Sequence[str]) -> int:
    """Measure and print a diagnosis; returns the exit code."""
    parser = env_parser(
        "doctor",
        "Measure the env, the policy and the learner for 10 to 20 s, and report where the time would go and what to "
        "change.",
    )
    text = "predict the speed on another machine or with other settings"
    parser.flag("--what-if", text, metavar="gpu=a100,cores=32,n_envs=256")
    parser.flag("--json", "print the diagnosis as JSON")
    env, given, args = _parse(parser, argv)

    def tell(what: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[K{what}", end="", file=sys.stderr, flush=True)

    tell("doctor: starting …")

    from flatout.advice.doctor import doctor, parse_what_if

    if args.what_if:
        parse_what_if(args.what_if)

    found = doctor(env, what_if=args.what_if, tell=lambda what: tell(f"doctor: {what} …"), **given)
    tell("")
    print(json.dumps(found.to_json()) if args.json else str(found))
    return 0


def tune(argv: Sequence[str]) -> int:
    """Find the fastest settings, print and save them; returns the exit code."""
    parser = env_parser(
        "tune",
        "Find the fastest settings for an env on this machine: predict all of them, measure the best, and save the "
        "fastest.",
    )
    parser.flag("--budget", "time to spend (60)", type=float, default=60.0, metavar="SECONDS")
    parser.flag("--out", "file to save to (tuned-ENV.json)", type=Path, metavar="FILE.json")
    parser.flag("--allow-learning-changes", "also try other minibatch sizes, which changes what is learned")
    env, given, args = _parse(parser, argv)
    if args.budget < 10:
        raise FlatoutError(f"--budget is {args.budget:g}; a trial takes some seconds, give at least 10")
    file_name = re.sub(r"[^\w.-]", "-", env.rpartition("/")[2])
    out = args.out or Path(f"tuned-{file_name}.json")
    if not out.parent.is_dir():
        raise FlatoutError(f"--out {out}: there is no folder {out.parent}")

    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from flatout.advice.tune import save, tune

    columns = (BarColumn(30), TimeElapsedColumn(), TextColumn("{task.description}"))
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("starting", total=1.0)
        tuned = tune(
            env,
            budget=args.budget,
            allow_learning_changes=args.allow_learning_changes,
            tell=lambda what, share: bar.update(task, description=what, completed=share),
            **given,
        )
    save(tuned, out)
    print(tuned)
    print(f"saved   {out}: flatout train --config {out}")
    return 0


def _parse(parser: Parser, argv: Sequence[str]) -> tuple[str, dict[str, Any], argparse.Namespace]:
    """The env and the settings, from the command line and --config."""
    args, config, given = parse_settings(parser, argv)
    if args.config is not None:
        known = read_file(args.config, given | {"env": args.env or config.env}, args.trust)
        given = {name: value for name, value in known.items() if name != "env"} | given
    return args.env or config.env, given, args
