"""`flatout train ENV`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flatout.cli.output import add_output_flags, learn_and_tell
from flatout.cli.parser import Parser, add_settings, settings
from flatout.cli.resume import resume
from flatout.config.run_config import resolve
from flatout.device.machine import usable_cores
from flatout.errors import FlatoutError


def run(argv: Sequence[str]) -> int:
    """Parse, train, print; returns the exit code."""
    parser = Parser(
        prog="flatout train",
        description="Train an agent. Settings not given come from the env's recipe, or from --preset.",
    )
    parser.add_argument(
        "env", nargs="?", metavar="ENV", help="a Gymnasium id, module:Id, or path/to/file.py:factory"
    )
    parser.add_argument("--config", type=Path, metavar="FILE.json", help="settings from a run's config.json")
    parser.add_argument("--run-name", metavar="NAME", help="the run's folder; made up unless given")
    parser.add_argument(
        "--runs-dir", type=Path, default=Path("runs"), metavar="DIR", help="where runs are kept"
    )
    parser.add_argument("--resume", action="store_true", help="go on if the run exists")
    parser.add_argument("--overwrite", action="store_true", help="replace the run if it exists")
    add_output_flags(parser)
    add_settings(parser)
    args = parser.parse(argv)
    given = settings(args)
    # Refuse what can be refused before torch is loaded: a typo should not cost two seconds.
    resolve(args.env, given, device="cpu", n_cores=usable_cores(), file=args.config)
    if args.resume and args.overwrite:
        raise FlatoutError("--resume and --overwrite exclude each other; pass one of them")
    if args.resume and not args.run_name:
        raise FlatoutError("--resume goes on with the run named by --run-name; pass that too")
    if args.resume and (args.runs_dir / args.run_name).exists():
        return resume(args.runs_dir / args.run_name, given, args)

    from flatout.agent import Agent

    agent = Agent(
        args.env,
        config_file=args.config,
        run_name=args.run_name,
        runs_dir=args.runs_dir,
        overwrite=args.overwrite,
        **given,
    )
    return learn_and_tell(agent, args)
