"""`flatout train ENV --seeds N`: a run for each seed in a folder of its own, and their mean and spread.

Every run is a `flatout train` or `flatout resume` in a process of its own. The first run is alone, so that its measurements
before the run are undisturbed; the others overlap collecting and learning, or not, as the first one did, and as many of them
run side by side as there are cores for.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import fmean, stdev
from time import perf_counter, sleep
from typing import Any

from flatout.cli.settings import RESUMABLE
from flatout.config.run_config import RunConfig
from flatout.device.machine import usable_cores
from flatout.errors import FlatoutError
from flatout.runlog.files import number, read_json, write_json
from flatout.runlog.folder import default_run_name
from flatout.scale.processes import POLL_SECONDS, Processes, as_flags
from flatout.views.figures import count, mean_and_std, rate, seconds_text
from flatout.views.jobs import outcome

KEPT = (
    "status error device env_steps wall_seconds steps_per_second episodes return_mean return_std eval_return_mean "
    "target_reached_seconds target_reached_steps"
).split()
"""Of each run's summary."""


@dataclass
class Group:
    """The runs of several seeds in one folder."""

    path: Path
    seeds: Sequence[int]
    tell: Callable[[str], None]
    processes: Processes = field(default_factory=Processes)
    _codes: dict[int, int] = field(default_factory=dict)

    def run_of(self, seed: int) -> Path:
        """The folder of a seed's run."""
        return self.path / f"seed-{seed}"

    def summary_of(self, seed: int) -> dict[str, Any]:
        """A run's summary; empty if it has none yet."""
        return read_json(self.run_of(seed) / "summary.json")

    def run(self, words: Mapping[int, Callable[[], list[str]]], at_once: int) -> None:
        """Run these command lines, by seed, so many at once, until all have ended or a signal comes."""
        left, processes = list(words), self.processes
        while processes.running or (left and processes.stopped_by is None):
            while left and len(processes.running) < at_once and processes.stopped_by is None:
                seed = left.pop(0)
                processes.start(str(seed), [*words[seed](), "--quiet"])
            sleep(POLL_SECONDS)
            for name, code in processes.ended().items():
                self._codes[int(name)] = code or 0
                self.tell(f"seed {name}: {outcome(self.summary_of(int(name)), code or 0)}")

    def failed_at_once(self, seed: int) -> int:
        """The exit code of a run that did not begin; 0 if it did."""
        return 0 if self.run_of(seed).exists() else self._codes.get(seed, 0)

    def end(self, wall_seconds: float, args: argparse.Namespace) -> int:
        """Write the group's summary.json, print it, and return the exit code."""
        summary = self.summarize(wall_seconds)
        write_json(self.path / "summary.json", summary)
        self.tell(table(summary))
        if args.json:
            print(json.dumps(summary))
        if self.processes.stopped_by is not None:
            return 128 + self.processes.stopped_by
        return int(any(self._codes.values()))

    def summarize(self, wall_seconds: float) -> dict[str, Any]:
        """The summary: mean and spread over seeds, and the runs' own figures."""
        summaries = {seed: self.summary_of(seed) for seed in self.seeds}
        known = next((summary for summary in summaries.values() if summary), {})
        runs = [
            {"seed": seed, "folder": str(self.run_of(seed)), **{key: summary.get(key) for key in KEPT}}
            for seed, summary in summaries.items()
        ]
        statuses = {str(run["status"]) for run in runs}
        is_stopped = self.processes.stopped_by is not None or statuses & {"stopped", "None"}
        status = "failed" if "failed" in statuses else "stopped" if is_stopped else "finished"
        spreads: dict[str, Any] = {}
        for key, name in (
            ("return_mean", "return"),
            ("eval_return_mean", "eval_return"),
            ("steps_per_second", "steps_per_second"),
            ("target_reached_seconds", "target_reached_seconds"),
            ("target_reached_steps", "target_reached_steps"),
        ):
            spreads |= spread(name, [run[key] for run in runs])
        about = {key: known.get(key) for key in ("env", "algo", "preset", "device", "target_return")}
        return {"status": status, **about, "seeds": list(self.seeds), "wall_seconds": wall_seconds} | (
            spreads | {"runs": runs}
        )


def spread(name: str, values: Sequence[Any]) -> dict[str, Any]:
    """Mean, standard deviation over seeds (n - 1), least, most, and of how many seeds; None without values."""
    known = [value for it in values if (value := number(it)) is not None]
    return {
        f"{name}_mean": fmean(known) if known else None,
        f"{name}_std": stdev(known) if len(known) > 1 else None,
        f"{name}_min": min(known, default=None),
        f"{name}_max": max(known, default=None),
        f"{name}_seeds": len(known),
    }


def train(args: argparse.Namespace, config: RunConfig, given: Mapping[str, Any]) -> int:
    """Train every seed; returns the exit code."""
    if args.seeds < 1:
        raise FlatoutError(f"--seeds is {args.seeds}; it must be at least 1")
    if args.at_once is not None and args.at_once < 1:
        raise FlatoutError(f"--at-once is {args.at_once}; it must be at least 1")
    seeds = range(config.seed, config.seed + args.seeds)
    name = args.run_name or default_run_name(
        config.env, config.descriptor.name, config.seed, datetime.now()
    ).replace(f"-seed{config.seed}-", f"-seeds{seeds[0]}-{seeds[-1]}-")
    group = Group(args.runs_dir / name, seeds, _teller(args))
    if group.path.exists() and not args.overwrite:
        if not args.resume:
            raise FlatoutError(
                f"run {name!r} exists in {args.runs_dir}/; pass --resume to continue it, --overwrite to replace it, "
                "or another --run-name"
            )
        return _go_on(group, args, given)
    words = _words(args, given)
    group.path.mkdir(parents=True, exist_ok=True)
    write_json(group.path / "summary.json", {"status": "running", "seeds": list(seeds)})
    group.tell(f"{args.seeds} runs in {group.path}: the first alone, then the others side by side")
    group.tell(f"to watch them: flatout monitor {group.path}")
    began, first = perf_counter(), seeds[0]
    with group.processes.forwarding_signals():
        group.run({first: lambda: [*words, *_place(group, first)]}, 1)
        if code := group.failed_at_once(first):
            if not args.overwrite:
                shutil.rmtree(group.path)
            return code
        _others(group, seeds[1:], first, args, ["--trust"])  # its config was just written by this command
    return group.end(perf_counter() - began, args)


def resume(path: Path, args: argparse.Namespace, given: Mapping[str, Any]) -> int:
    """Continue the runs of a group that have not finished; returns the exit code."""
    seeds = [int(seed) for seed in read_json(path / "summary.json")["seeds"]]
    return _go_on(Group(path, seeds, _teller(args)), args, given)


def is_group(path: Path) -> bool:
    """Whether a folder holds the runs of several seeds."""
    return not (path / "config.json").exists() and "seeds" in read_json(path / "summary.json")


def _go_on(group: Group, args: argparse.Namespace, given: Mapping[str, Any]) -> int:
    changes = {name: value for name, value in given.items() if name in RESUMABLE}
    begun = [seed for seed in group.seeds if (group.run_of(seed) / "config.json").exists()]
    if not begun:
        raise FlatoutError(f"no run in {group.path} has begun; start it again with --overwrite")
    unfinished = [
        seed for seed in begun if "timesteps" in changes or group.summary_of(seed).get("status") != "finished"
    ]
    flags = [*as_flags(changes), *(["--trust"] if args.trust else [])]
    began = perf_counter()
    with group.processes.forwarding_signals():
        at_once = _at_once(group, begun[0], args)
        group.run(
            {seed: lambda seed=seed: ["resume", str(group.run_of(seed)), *flags] for seed in unfinished},  # type: ignore[misc]
            at_once,
        )
        _others(group, [seed for seed in group.seeds if seed not in begun], begun[0], args, flags)
    return group.end(perf_counter() - began, args)


def _others(
    group: Group, seeds: Sequence[int], first: int, args: argparse.Namespace, flags: Sequence[str]
) -> None:
    """Train these seeds as the first one was trained."""
    config = group.run_of(first) / "config.json"

    def words(seed: int) -> list[str]:
        on = (group.summary_of(first).get("overlap") or {}).get("on")
        same = [] if on is None else ["--overlap", "on" if on else "off"]
        more = ["--overwrite"] if getattr(args, "overwrite", False) else []
        return ["train", "--config", str(config), *same, *flags, *more, *_place(group, seed)]

    group.run({seed: lambda seed=seed: words(seed) for seed in seeds}, _at_once(group, first, args))  # type: ignore[misc]


def _at_once(group: Group, first: int, args: argparse.Namespace) -> int:
    """How many runs like the first one this machine has cores for; one on an accelerator."""
    if args.at_once is not None:
        return int(args.at_once)
    summary = group.summary_of(first)
    executor, overlap = summary.get("executor") or {}, summary.get("overlap") or {}
    if summary.get("device") != "cpu":
        return 1
    workers = executor.get("workers") or 0
    n_busy = executor.get("collectors", 1) if executor.get("children") else max(workers, 1)
    return max(usable_cores() // (n_busy + bool(overlap.get("on"))), 1)


def _words(args: argparse.Namespace, given: Mapping[str, Any]) -> list[str]:
    """The command line of one run, without what differs between seeds."""
    words = ["train", *([args.env] if args.env else [])]
    words += ["--config", str(args.config)] if args.config else []
    words += ["--trust"] if args.trust else []
    words += ["--overwrite"] if args.overwrite else []
    return [*words, *as_flags({name: value for name, value in given.items() if name != "seed"})]


def _place(group: Group, seed: int) -> list[str]:
    return ["--seed", str(seed), "--runs-dir", str(group.path), "--run-name", group.run_of(seed).name]


def _teller(args: argparse.Namespace) -> Callable[[str], None]:
    return (lambda _: None) if args.quiet else (lambda line: print(line, flush=True))


def table(summary: Mapping[str, Any]) -> str:
    """The runs of a group and their mean, as lines."""
    rows = [("seed", "return", "episodes", "env steps", "time", "steps/s")]
    for run in summary["runs"]:
        episodes, steps, seconds, speed = (
            number(run[key]) for key in ("episodes", "env_steps", "wall_seconds", "steps_per_second")
        )
        rows.append(
            (
                str(run["seed"]),
                mean_and_std(number(run["return_mean"]), number(run["return_std"])),
                count(episodes or 0),
                count(steps or 0),
                seconds_text(seconds or 0.0),
                rate(speed or 0.0),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
    mean, std, n_seeds = summary["return_mean"], summary["return_std"], summary["return_seeds"]
    if mean is None:
        return "\n".join([*lines, "no episode ended in any run"])
    least, most = mean_and_std(summary["return_min"], None), mean_and_std(summary["return_max"], None)
    total = f"return {mean_and_std(mean, std)} over {n_seeds} seeds, from {least} to {most}"
    return "\n".join([*lines, f"{total}, in {seconds_text(summary['wall_seconds'])}"])
