"""`flatout evaluate RUN`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from flatout.cli.parser import Parser, add_run, run_path, settings
from flatout.errors import FlatoutError


def evaluate(argv: Sequence[str]) -> int:
    """Play episodes with a trained agent and print their mean return; returns the exit code."""
    parser = Parser(
        prog="flatout evaluate", description="Mean return of a trained agent over whole episodes."
    )
    add_run(parser, "a run's folder, its name in --runs-dir, or a .flatout file")
    parser.add_argument("--episodes", type=int, default=100, metavar="N", help="number of episodes (100)")
    parser.add_argument("--seed", type=int, metavar="N", help="seed of the envs (differs from training)")
    text = "keywords for the env that differ from training"
    parser.add_argument("--env-kwargs", metavar="JSON", default=argparse.SUPPRESS, help=text)
    parser.add_argument("--best", action="store_true", help="load the best checkpoint, not the newest")
    text = "sample actions instead of taking the most likely one"
    parser.add_argument("--stochastic", action="store_true", help=text)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    args = parser.parse(argv)
    if args.episodes < 1:
        raise FlatoutError(f"--episodes is {args.episodes}; it must be at least 1")
    env_kwargs = settings(args).get("env_kwargs")
    path = run_path(args.run, args.runs_dir)
    if args.best:
        path = path / "checkpoints" / "best.flatout"

    from flatout.agent import load

    agent = load(path)
    result = agent.evaluate(
        args.episodes, deterministic=not args.stochastic, seed=args.seed, env_kwargs=env_kwargs
    )
    if args.json:
        keys = {"return_mean": result.return_mean, "return_std": result.return_std}
        print(json.dumps(keys | {"length_mean": result.length_mean, "episodes": len(result.returns)}))
    else:
        print(
            f"{agent.config.env}: return {result.return_mean:,.1f} ± {result.return_std:,.1f} over "
            f"{len(result.returns)} episodes, {result.length_mean:,.1f} steps each"
        )
    return 0
