"""`flatout jobs` beside all runs at once and one after the other; what `flatout sweep` found beside the defaults.

`python -m benchmarks.scaling jobs [--rounds 3]` → docs/benchmarks.md: the makespan of six runs of different sizes, the
three ways in turn.
`python -m benchmarks.scaling trials [--rounds 3]` → trials per minute of a sweep, one and two at a time, in turn; all do the same work.
`python -m benchmarks.scaling sweep runs/sweep-… [--seeds 5]` → the time to the target of best.json and of the defaults,
seeds that the sweep has not used, in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.page import conditions, table, write_section

SIX = """
[[job]]
name = "cartpole"
env = "CartPole-v1"
timesteps = 200_000
[[job]]
name = "pendulum"
env = "Pendulum-v1"
timesteps = 100_000
[[job]]
name = "acrobot"
env = "Acrobot-v1"
timesteps = 150_000
[[job]]
name = "lander"
env = "LunarLander-v3"
timesteps = 300_000
[[job]]
name = "wide"
env = "CartPole-v1"
network_arch = [256, 256]
timesteps = 50_000
[[job]]
name = "dqn"
env = "CartPole-v1"
algo = "dqn"
timesteps = 30_000
"""
FLATOUT = [sys.executable, "-m", "flatout"]


def in_a_queue(folder: Path) -> float:
    """Seconds of `flatout jobs`."""
    (folder / "six.toml").write_text(SIX)
    began = perf_counter()
    subprocess.run([*FLATOUT, "jobs", "six.toml", "--quiet"], cwd=folder, check=True)
    return perf_counter() - began


def commands() -> list[list[str]]:
    """The same runs as commands."""
    words = []
    for job in tomllib.loads(SIX)["job"]:
        name, env = job.pop("name"), job.pop("env")
        flags = [
            f"--{key.replace('_', '-')}={','.join(map(str, v)) if isinstance(v, list) else v}"
            for key, v in job.items()
        ]
        words.append([*FLATOUT, "train", env, "--run-name", name, "--quiet", *flags])
    return words


def all_at_once(folder: Path) -> float:
    """Seconds until the last of the runs has ended, all begun at the same time."""
    began = perf_counter()
    running = [subprocess.Popen(words, cwd=folder) for words in commands()]
    assert [process.wait() for process in running] == [0] * len(running)
    return perf_counter() - began


def one_after_the_other(folder: Path) -> float:
    """Seconds of the runs in turn, each with the whole machine."""
    began = perf_counter()
    for words in commands():
        subprocess.run(words, cwd=folder, check=True)
    return perf_counter() - began


WAYS = {"flatout jobs": in_a_queue, "all at once": all_at_once, "one after the other": one_after_the_other}


def makespans(n_rounds: int) -> dict[str, list[float]]:
    """Seconds of each way, the ways in turn."""
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for nth in range(n_rounds):
        for way in [*WAYS][nth % 3 :] + [*WAYS][: nth % 3]:
            with tempfile.TemporaryDirectory() as folder:
                seconds[way].append(WAYS[way](Path(folder)))
            print(f"{way}: {seconds[way][-1]:.1f} s", flush=True)
    return seconds


def jobs(args: argparse.Namespace) -> None:
    """Measure and write the section."""
    seconds = makespans(args.rounds)
    rows = [
        [way, f"{statistics.median(s):.1f} s", ", ".join(f"{it:.1f}" for it in s)]
        for way, s in seconds.items()
    ]
    text = table(["six runs of different sizes", "makespan, median", "seconds"], rows)
    intro = (
        "## Six runs on two cores\n`python -m benchmarks.scaling jobs`: the time until the last of six runs has ended, by "
        "`flatout jobs`, all begun at once, and one after the other."
    )
    write_section("jobs", f"{intro}\n\n{text}\n\n{conditions()}")


def trials(args: argparse.Namespace) -> None:
    """Measure a sweep of equal trials with one and with two at a time, and print both."""
    words = "sweep Pendulum-v1 --algo ppo --trials 6 --sampler random --candidates 1 --new-seeds 1 --quiet --timesteps".split()
    ratios = []
    for nth in range(args.rounds):
        seconds: dict[int, float] = {}
        for at_once in (1, 2) if nth % 2 else (2, 1):
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, "space.toml").write_text("learning_rate = {low = 9e-4, high = 1e-3}\n")
                ways = ["--space", "space.toml", "--at-once", str(at_once)]
                began = perf_counter()
                subprocess.run([*FLATOUT, *words, str(args.timesteps), *ways], cwd=folder, check=True)
                seconds[at_once] = perf_counter() - began
        ratios.append(seconds[1] / seconds[2])
        print(f"one at a time {seconds[1]:.1f} s, two {seconds[2]:.1f} s: {ratios[-1]:.2f} ×", flush=True)
    print(f"two trials at a time: {statistics.median(ratios):.2f} × one (median)")


def seconds_to_target(words: Sequence[str], seed: int) -> float:
    """The time to the target of one run; infinite if it was not reached."""
    with tempfile.TemporaryDirectory() as folder:
        argv = [*FLATOUT, "train", *words, f"--seed={seed}", "--runs-dir", folder, "--quiet", "--json"]
        done = subprocess.run(argv, capture_output=True, text=True, check=True)
    reached = json.loads(done.stdout.splitlines()[-1])["target_reached_seconds"]
    return float("inf") if reached is None else float(reached)


def sweep(args: argparse.Namespace) -> None:
    """Measure the found config and the defaults in turn, and print both."""
    found: dict[str, Any] = json.loads((args.folder / "sweep.json").read_text())
    same = [found["env"], "--algo", found["algo"], f"--timesteps={found['timesteps']}"]
    same += [f"--target-return={found['target_return']}"]
    best = json.loads(Path(found["config"]).read_text())
    same += [f"--eval-every={best['eval_every']}", f"--eval-episodes={best['eval_episodes']}"]
    ways = {"found": ["--config", found["config"]], "defaults": [*same, "--preset", "auto"], "recipe": same}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for seed in range(1000, 1000 + args.seeds):
        for way, words in ways.items():
            seconds[way].append(seconds_to_target(words, seed))
            print(f"{way}, seed {seed}: {seconds[way][-1]:.1f} s", flush=True)
    for way, values in seconds.items():
        print(
            f"{way}: median {statistics.median(values):.1f} s of {len(values)} seeds to {found['target_return']:g}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    verbs = parser.add_subparsers(required=True)
    queue = verbs.add_parser("jobs")
    queue.add_argument("--rounds", type=int, default=3)
    queue.set_defaults(run=jobs)
    pairs = verbs.add_parser("trials")
    pairs.add_argument("--rounds", type=int, default=3)
    pairs.add_argument("--timesteps", type=int, default=200_000)
    pairs.set_defaults(run=trials)
    search = verbs.add_parser("sweep")
    search.add_argument("folder", type=Path)
    search.add_argument("--seeds", type=int, default=5)
    search.set_defaults(run=sweep)
    args = parser.parse_args()
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    args.run(args)


if __name__ == "__main__":
    main()
