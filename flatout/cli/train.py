"""`flatout train ENV`, `flatout resume RUN` and `flatout evaluate RUN`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from flatout.cli import devices
from flatout.cli import parser as cli
from flatout.cli.settings import RESUMABLE, add_settings, given_settings, parse_settings
from flatout.errors import FlatoutError
from flatout.integrations.loggers import require_loggers
from flatout.runlog.files import plural
from flatout.runlog.folder import RunFolder, default_run_name

if TYPE_CHECKING:
    from flatout.agent import Agent
    from flatout.executors.episodes import LastEpisodes
    from flatout.training.evaluation import Evaluation

GIVEN_BACK = ("network", "optimizer", "learning_rate_schedule", "clip_range_schedule")
"""Code of the user's own, which may be elsewhere when a run is resumed."""


def train(argv: Sequence[str]) -> int:
    """Train an agent; returns the exit code."""
    parser = cli.env_parser(
        "train",
        "Train an agent. Settings that you do not give come from the recipe of the env, or from --preset.",
    )
    parser.flag("--run-name", "name of the run's folder (ENV-ALGO-seedN-DATE)", metavar="NAME")
    cli.add_runs_dir(parser)
    parser.flag("--resume", "resume the run if it exists")
    parser.flag("--overwrite", "replace the run if it exists")
    parser.flag(
        "--seeds",
        "a run for each of N seeds from --seed on, and their mean and spread",
        type=int,
        metavar="N",
    )
    _add_at_once(parser)
    _add_devices(parser)
    _add_output_flags(parser)
    args, config, given = parse_settings(parser, argv)
    require_loggers(config.log)
    if args.resume and args.overwrite:
        raise FlatoutError("--resume and --overwrite exclude each other; pass one of them")
    if args.resume and not args.run_name:
        raise FlatoutError("--resume needs --run-name, the run to resume")
    if args.seeds is not None:
        from flatout.cli import seeds

        if _launches(args):
            raise FlatoutError("--seeds and --devices exclude each other; pass one of them")
        return seeds.train(args, config, given)
    if _launches(args):
        name = args.run_name or default_run_name(
            config.env, config.descriptor.name, config.seed, datetime.now()
        )
        return _launch(["train", *argv, "--run-name", name], args)
    is_restarted = devices.is_restarted()
    if (
        (args.resume or is_restarted)
        and args.run_name
        and _exists(args.runs_dir / args.run_name, is_restarted)
    ):
        return _resume(args.runs_dir / args.run_name, given, args)

    from flatout.agent import Agent

    agent = Agent(
        args.env,
        config_file=args.config,
        run_name=args.run_name,
        runs_dir=args.runs_dir,
        overwrite=args.overwrite or is_restarted,
        trust=args.trust,
        **given,
    )
    return _learn(agent, args)


def resume(argv: Sequence[str]) -> int:
    """Resume a run; returns the exit code."""
    parser = cli.run_parser("resume", "Continue a run, or the runs of --seeds, from the newest checkpoint.")
    _add_at_once(parser)
    _add_devices(parser)
    _add_output_flags(parser)
    cli.add_trust(parser)
    add_settings(parser, argv, only=(*RESUMABLE, *GIVEN_BACK))
    args = parser.parse(argv)
    if _launches(args):
        return _launch(["resume", *argv], args)
    return _resume(cli.run_path(args.run, args.runs_dir), given_settings(args), args)


def _add_at_once(parser: cli.Parser) -> None:
    text = "runs of --seeds side by side (as many as there are cores for, after the first)"
    parser.flag("--at-once", text, type=int, metavar="N")


def _add_devices(parser: cli.Parser) -> None:
    parser.flag(
        "--devices",
        "train on N devices of this machine, with a process for each: the envs and every minibatch are split (1)",
        type=int,
        metavar="N",
    )
    parser.flag(
        "--max-restarts",
        "with --devices: how often to go on from the newest checkpoint after a process was lost (3)",
        type=int,
        default=3,
        metavar="N",
    )
    parser.flag(
        "--rank-timeout",
        "on several devices: seconds that one process waits for the others (600)",
        type=float,
        metavar="SECONDS",
    )


def _launches(args: argparse.Namespace) -> bool:
    """Whether this process starts others that train; those have --devices on their command lines too."""
    if args.rank_timeout is not None:
        if not 0 < args.rank_timeout < float("inf"):
            raise FlatoutError(
                f"--rank-timeout is {args.rank_timeout:g}; it must be a positive number of seconds"
            )
        os.environ["FLATOUT_RANK_TIMEOUT"] = str(args.rank_timeout)
    return args.devices not in (None, 1) and "FLATOUT_RENDEZVOUS" not in os.environ


def _launch(argv: Sequence[str], args: argparse.Namespace) -> int:
    def tell(line: str) -> None:
        if not args.quiet:
            print(line, file=sys.stderr, flush=True)

    return devices.launch(argv, args.devices, args.max_restarts, tell)


def _exists(path: Path, is_restarted: bool) -> bool:
    """Whether there is a run to go on with, as rank 0 sees it; after a restart it needs a checkpoint."""

    def exists() -> bool:
        if not is_restarted:
            return path.exists()
        return devices.is_of_this_run(path / "config.json") and any(path.glob("checkpoints/step-*"))

    return devices.from_first(exists)


def _resume(path: Path, given: dict[str, Any], args: argparse.Namespace) -> int:
    if not devices.is_first():
        return _learn(_resumed(None, given, args), args)
    if (path / "summary.json").exists() and not (path / "config.json").exists():
        from flatout.cli import seeds

        if seeds.is_group(path):
            return seeds.resume(path, args, given)
    folder = RunFolder.open(path)
    folder.claim()
    try:
        return _learn(_resumed(folder, given, args), args)
    finally:
        folder.lock.release()


def _resumed(folder: RunFolder | None, given: dict[str, Any], args: argparse.Namespace) -> Agent:
    """The agent of a run's newest checkpoint, which goes on in the run's folder; None: rank 0 has it."""
    from flatout.agent import Agent
    from flatout.config.fields import replace
    from flatout.training.checkpoint import Checkpoint, CheckpointFolder

    def newest() -> tuple[Path, Checkpoint, list[str]]:
        assert folder is not None, "rank 0 has it"
        return CheckpointFolder(folder.checkpoints).newest()

    _, checkpoint, skipped = devices.from_first(newest)
    typed = [str(word) for word in (getattr(args, "env", None), *given.values()) if word]
    code = {name: given[name] for name in GIVEN_BACK if ":" in str(given.get(name))}
    agent = Agent.from_checkpoint(checkpoint, trust=args.trust, typed=typed, code=code)
    changed = replace(agent.config, given)
    if others := [name for name in given if name not in RESUMABLE and _differs(agent.config, changed, name)]:
        flag = others[0].replace("_", "-")
        raise FlatoutError(f"--{flag} cannot change when a run is resumed; start a new run for it")
    agent.config = changed
    done = checkpoint.state["progress"]["env_steps"]
    if done >= changed.timesteps:
        raise FlatoutError(
            f"run '{folder.path.name if folder else ''}' is finished: {done:,} of {changed.timesteps:,} env steps; "
            "pass a larger --timesteps to continue it"
        )
    agent.resume_into(folder, skipped)
    return agent


def _differs(before: Any, after: Any, name: str) -> bool:
    parts = ((before, after), (before.algorithm, after.algorithm), (before.network, after.network))
    return any(getattr(a, name, None) != getattr(b, name, None) for a, b in parts)


def _add_output_flags(parser: cli.Parser) -> None:
    parser.flag("--quiet", "print only errors")
    parser.flag("--json", "print the summary as JSON on the last line")


def _learn(agent: Agent, args: argparse.Namespace) -> int:
    """Learn to the configured total, print the report, and return the exit code."""
    from flatout.training.stop import ignoring_signals

    agent.began_at = psutil.Process().create_time()  # start-up includes the imports
    try:
        agent.run(None, None, progress_bar=not args.quiet)
        terminal_is_gone = agent.stop_signal is not None and agent.stop_signal.name == "SIGHUP"
        prints = devices.is_first() and not terminal_is_gone
        if not args.quiet and prints:
            print(agent.report())
        if args.json and prints:
            print(json.dumps(agent.summary))
    finally:
        with ignoring_signals():
            agent.close()
    return 1 if not agent.is_saved else 0 if agent.stop_signal is None else 128 + agent.stop_signal


def evaluate(argv: Sequence[str]) -> int:
    """Play episodes with a trained agent and print their mean return; returns the exit code."""
    parser = cli.run_parser(
        "evaluate",
        "Mean return of a trained agent over whole episodes.",
        "a run's folder, its name in --runs-dir, or a .flatout file",
    )
    parser.flag("--episodes", "number of episodes (100)", type=int, default=100, metavar="N")
    parser.flag("--eval-max-steps", "cut longer episodes (as in training)", type=int, metavar="N")
    parser.flag("--seed", "seed of the envs (differs from training)", type=int, metavar="N")
    text = "keywords for the env that differ from training"
    parser.flag("--env-kwargs", text, metavar="JSON", default=argparse.SUPPRESS)
    parser.flag("--best", "load the best checkpoint, not the newest")
    parser.flag("--stochastic", "sample actions instead of taking the most likely one")
    parser.flag("--json", "print the result as JSON")
    parser.flag("--network", "where its own network is now, if elsewhere", metavar="FILE.py:NAME")
    cli.add_trust(parser)
    args = parser.parse(argv)
    for name, value in (("--episodes", args.episodes), ("--eval-max-steps", args.eval_max_steps)):
        if value is not None and value < 1:
            raise FlatoutError(f"{name} is {value}; it must be at least 1")
    env_kwargs = given_settings(args).get("env_kwargs")
    path = cli.run_path(args.run, args.runs_dir)
    if args.best:
        path = path / "checkpoints" / "best.flatout"
    cli.check_exists(path)

    from flatout.agent import load
    from flatout.views.figures import mean_and_std

    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: print(f"note: {message}", file=sys.stderr)
        code = {"network": args.network} if args.network is not None else {}
        agent = load(path, trust=args.trust, **code)
        limit = agent.config.eval_max_steps if args.eval_max_steps is None else args.eval_max_steps
        if sys.stderr.isatty() and not args.json:
            episodes = plural(args.episodes, "episode")
            print(f"playing {episodes} of at most {limit:,} steps …", file=sys.stderr)
        result = agent.evaluate(
            args.episodes,
            deterministic=not args.stochastic,
            seed=args.seed,
            env_kwargs=env_kwargs,
            max_steps=args.eval_max_steps,
        )
    if args.json:
        keys: dict[str, Any] = {"return_mean": result.return_mean, "return_std": result.return_std}
        keys |= {"length_mean": result.length_mean, "episodes": len(result.returns)}
        keys |= {"episodes_cut": result.n_cut, "training_return_mean": agent.training_returns.mean}
        print(json.dumps(keys))
    else:
        cut = ""
        if result.n_cut:
            cut = f"; {result.n_cut} of them were cut after {limit:,} steps (--eval-max-steps)"
        print(
            f"{agent.config.env}: return {mean_and_std(result.return_mean, result.return_std)} over "
            f"{plural(len(result.returns), 'episode')}, {result.length_mean:,.1f} steps each{cut}"
        )
        if not args.stochastic and not env_kwargs:
            _compare(result, agent.training_returns)
    return 0


def _compare(result: Evaluation, training: LastEpisodes) -> None:
    """Say so if the deterministic policy is much better or worse than the sampled one was in training."""
    from flatout.views.figures import mean_and_std
    from flatout.views.text import differ_much

    deterministic = result.return_mean, result.return_std, len(result.returns)
    if differ_much(deterministic, (training.mean, training.std, len(training))):
        print(
            f"note: in training, where actions are sampled, the return was {mean_and_std(training.mean, training.std)}; "
            "--stochastic evaluates that policy"
        )
