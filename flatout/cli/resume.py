"""`flatout resume RUN`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flatout.cli.output import add_output_flags, learn_and_tell
from flatout.cli.parser import Parser
from flatout.errors import FlatoutError
from flatout.runlog.folder import RunFolder

RESUMABLE = ("timesteps", "target_return", "eval_every", "eval_episodes", "checkpoint_every")
"""Settings that may change on the way; anything else would make it another run."""


def run(argv: Sequence[str]) -> int:
    """Parse, go on, print; returns the exit code."""
    parser = Parser(prog="flatout resume", description="Go on from the newest checkpoint of a run.")
    parser.add_argument("run", metavar="RUN", help="the run's folder, or its name in --runs-dir")
    parser.add_argument(
        "--runs-dir", type=Path, default=Path("runs"), metavar="DIR", help="where runs are kept"
    )
    for name, text in (
        ("timesteps", "train to this many env steps in all"),
        ("target-return", "stop when the mean return of the last 100 episodes reaches this"),
        ("eval-every", "evaluate every so many env steps"),
        ("checkpoint-every", "save a checkpoint every so many env steps"),
    ):
        parser.add_argument(f"--{name}", metavar="N", default=argparse.SUPPRESS, help=text)
    add_output_flags(parser)
    args = parser.parse(argv)
    given = {name: getattr(args, name) for name in RESUMABLE if name in args}
    return resume(run_path(args.run, args.runs_dir), given, args)


def run_path(run: str, runs_dir: Path) -> Path:
    """The folder that a run's path or name means."""
    path = Path(run)
    return path if path.exists() or len(path.parts) > 1 else runs_dir / run


def resume(path: Path, given: dict[str, Any], args: argparse.Namespace) -> int:
    """Go on with the run in `path`, with those settings changed that may change."""
    folder = RunFolder.open(path)

    from flatout.agent import Agent
    from flatout.config.fields import replace
    from flatout.training.checkpoint import CheckpointFolder

    _, checkpoint, skipped = CheckpointFolder(folder.checkpoints).newest()
    agent = Agent.from_checkpoint(checkpoint)
    changed = replace(agent.config, given)
    if others := [name for name in given if name not in RESUMABLE and _differs(agent.config, changed, name)]:
        raise FlatoutError(
            f"--{others[0].replace('_', '-')} cannot change when a run goes on; start a new run for it"
        )
    agent.config = changed
    done = checkpoint.state["progress"]["env_steps"]
    if done >= changed.timesteps:
        raise FlatoutError(
            f"run '{path.name}' is finished: {done:,} of {changed.timesteps:,} env steps; "
            f"pass --timesteps with more to go on"
        )
    agent.resume_into(folder, skipped)
    return learn_and_tell(agent, args)


def _differs(before: Any, after: Any, name: str) -> bool:
    parts = ((before, after), (before.algorithm, after.algorithm), (before.network, after.network))
    return any(getattr(a, name, None) != getattr(b, name, None) for a, b in parts)
