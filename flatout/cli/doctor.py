"""`flatout doctor ENV`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from flatout.cli.parser import Parser, add_settings, settings
from flatout.config.run_config import read_file, resolve
from flatout.device.machine import usable_cores


def run(argv: Sequence[str]) -> int:
    """Parse, measure, print; returns the exit code."""
    parser = Parser(
        prog="flatout doctor",
        description="Where would the time go, and what to change: measures env, policy and learner for about 20 s.",
    )
    parser.add_argument(
        "env", nargs="?", metavar="ENV", help="a Gymnasium id, module:Id, or path/to/file.py:factory"
    )
    parser.add_argument("--config", type=Path, metavar="FILE.json", help="settings from a run's config.json")
    parser.add_argument(
        "--what-if", metavar="gpu=a100,cores=32,n_envs=256", help="what another machine or setting would give"
    )
    parser.add_argument("--json", action="store_true", help="print the diagnosis as JSON")
    add_settings(parser)
    args = parser.parse(argv)
    given = settings(args)
    config = resolve(args.env, given, device="cpu", n_cores=usable_cores(), file=args.config)
    if args.config is not None:
        given = {k: v for k, v in read_file(args.config).items() if k != "env"} | given

    from flatout.advice.doctor import doctor, parse_what_if

    if args.what_if:
        parse_what_if(args.what_if)

    def tell(what: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[Kdoctor: {what} …", end="", file=sys.stderr, flush=True)

    found = doctor(args.env or config.env, what_if=args.what_if, tell=tell, **given)
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)
    print(json.dumps(found.to_json()) if args.json else str(found))
    return 0
