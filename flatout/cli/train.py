"""`flatout train ENV` and `flatout resume RUN`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from flatout.cli.parser import Parser, add_env, add_run, add_runs_dir, add_settings, run_path, settings
from flatout.config.run_config import resolve
from flatout.device.machine import usable_cores
from flatout.errors import FlatoutError
from flatout.runlog.folder import RunFolder

if TYPE_CHECKING:
    from flatout.agent import Agent

RESUMABLE = ("timesteps", "target_return", "eval_every", "eval_episodes", "checkpoint_every")
"""Settings that may change when a run is resumed."""


def train(argv: Sequence[str]) -> int:
    """Train an agent; returns the exit code."""
    parser = Parser(
        prog="flatout train",
        usage="flatout train ENV [flags]",
        description="Train an agent. Settings that you do not give come from the recipe of the env, or from --preset.",
    )
    add_env(parser)
    parser.add_argument("--run-name", metavar="NAME", help="name of the run's folder (ENV-ALGO-seedN-DATE)")
    add_runs_dir(parser)
    parser.add_argument("--resume", action="store_true", help="resume the run if it exists")
    parser.add_argument("--overwrite", action="store_true", help="replace the run if it exists")
    _add_output_flags(parser)
    add_settings(parser, argv)
    args = parser.parse(argv)
    given = settings(args)
    # Refuse what can be refused before torch is loaded: a typo should not cost two seconds.
    resolve(args.env, given, device="cpu", n_cores=usable_cores(), file=args.config)
    if args.resume and args.overwrite:
        raise FlatoutError("--resume and --overwrite exclude each other; pass one of them")
    if args.resume and not args.run_name:
        raise FlatoutError("--resume needs --run-name, the run to resume")
    if args.resume and (args.runs_dir / args.run_name).exists():
        return _resume(args.runs_dir / args.run_name, given, args)

    from flatout.agent import Agent

    agent = Agent(
        args.env,
        config_file=args.config,
        run_name=args.run_name,
        runs_dir=args.runs_dir,
        overwrite=args.overwrite,
        **given,
    )
    return _learn(agent, args)


def resume(argv: Sequence[str]) -> int:
    """Resume a run; returns the exit code."""
    parser = Parser(prog="flatout resume", description="Continue a run from its newest checkpoint.")
    add_run(parser)
    _add_output_flags(parser)
    add_settings(parser, argv, only=RESUMABLE)
    args = parser.parse(argv)
    return _resume(run_path(args.run, args.runs_dir), settings(args), args)


def _resume(path: Path, given: dict[str, Any], args: argparse.Namespace) -> int:
    folder = RunFolder.open(path)

    from flatout.agent import Agent
    from flatout.config.fields import replace
    from flatout.training.checkpoint import CheckpointFolder

    _, checkpoint, skipped = CheckpointFolder(folder.checkpoints).newest()
    agent = Agent.from_checkpoint(checkpoint)
    changed = replace(agent.config, given)
    if others := [name for name in given if name not in RESUMABLE and _differs(agent.config, changed, name)]:
        flag = others[0].replace("_", "-")
        raise FlatoutError(f"--{flag} cannot change when a run is resumed; start a new run for it")
    agent.config = changed
    done = checkpoint.state["progress"]["env_steps"]
    if done >= changed.timesteps:
        raise FlatoutError(
            f"run '{path.name}' is finished: {done:,} of {changed.timesteps:,} env steps; "
            "pass a larger --timesteps to continue it"
        )
    agent.resume_into(folder, skipped)
    return _learn(agent, args)


def _differs(before: Any, after: Any, name: str) -> bool:
    parts = ((before, after), (before.algorithm, after.algorithm), (before.network, after.network))
    return any(getattr(a, name, None) != getattr(b, name, None) for a, b in parts)


def _add_output_flags(parser: Parser) -> None:
    parser.add_argument("--quiet", action="store_true", help="print only errors")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON on the last line")


def _learn(agent: Agent, args: argparse.Namespace) -> int:
    """Learn to the configured total, print the report, and return the exit code."""
    agent.began_at = psutil.Process().create_time()  # start-up includes the imports
    agent.run(None, None, progress_bar=not args.quiet)
    if not args.quiet:
        print(agent.report())
    if args.json:
        print(json.dumps(agent.summary))
    return 128 + agent.stop_signal if agent.stop_signal is not None else 0
