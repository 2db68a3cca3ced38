"""`flatout jobs` beside all runs at once and one after the other; what `flatout sweep` found beside the defaults.

`python -m benchmarks.scaling jobs [--rounds 3]` → docs/benchmarks.md: the makespan of six runs of different sizes, the
three ways in turn.
`python -m benchmarks.scaling card [--rounds 3]` → docs/benchmarks.md: small runs that share a simulated card, one, two, four and as many as
`flatout jobs` chooses.
`python -m benchmarks.scaling trials [--rounds 3]` → trials per minute of a sweep, one and two at a time, in turn; all do the same work.
`python -m benchmarks.scaling sweep runs/sweep-… [--seeds 5]` → the time to the target of best.json and of the defaults,
seeds that the sweep has not used, in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
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


CARD = "rtx4070"
SMALL = 'env = "benchmarks.envs:Wait"\ndevice = "sim"\nn_envs = 32\nn_steps = 64\nbatch_size = 512\nn_epochs = 10\nnetwork_arch = [256, 256]\ntimesteps = 1_000_000_000\n'
"""Every job's settings: a run whose envs wait 10 ms a step, so that it needs little of the card and of the cores."""
ON_EVERY_START = f"""
import json, os, sys, threading, time
if sys.argv[0] == "-m" or "flatout" in sys.argv[0]:
    import simcard
    simcard.install("timed", "{CARD}", 1)
    def note():
        while True:
            time.sleep(0.5)
            with open(os.path.join(os.environ["CARD_NOTES"], f"{{os.getpid()}}.new"), "w") as file:
                json.dump([time.time(), simcard.counters().busy_seconds], file)
            os.replace(file.name, file.name[:-4])
    threading.Thread(target=note, daemon=True).start()
"""
"""A sitecustomize.py: every process has the card, and notes how long its kernels have occupied it."""
STEADY_SECONDS = 45.0
"""So long the number of runs that `flatout jobs` chooses must have been the same."""
COUNTED_SECONDS = 15.0


def on_a_card(at_once: int | None) -> tuple[int, float, float]:
    """Small runs that share the card: how many run side by side, their total steps/s and the card's busy share."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "notes").mkdir()
        (folder / "sitecustomize.py").write_text(ON_EVERY_START)
        jobs = [f'[[job]]\nname = "small{i}"\n{SMALL}' for i in range(at_once or 8)]
        (folder / "small.toml").write_text("\n".join(jobs))
        root = str(Path(__file__).parents[1])
        env = os.environ | {"PYTHONPATH": f"{folder}:{root}", "CARD_NOTES": f"{folder}/notes"}
        env |= {"SIMCARD_SHARED": f"{folder}/card"}
        words = [*FLATOUT, "jobs", "small.toml", "--trust", "--quiet"]
        words += [] if at_once is None else ["--at-once", str(at_once)]
        queue = subprocess.Popen(words, cwd=folder, env=env)
        try:
            _wait_until_steady(folder, at_once, queue)
            before = _progress(folder), _busy(folder)
            time.sleep(COUNTED_SECONDS)
            after = _progress(folder), _busy(folder)
        finally:
            queue.send_signal(signal.SIGINT)
            queue.wait()
    rates = [(steps - before[0][run][1]) / (at - before[0][run][0]) for run, (at, steps) in after[0].items()]
    busy = sum((s - before[1][pid][1]) / (at - before[1][pid][0]) for pid, (at, s) in after[1].items())
    return len(rates), sum(rates), busy


def _progress(folder: Path) -> dict[str, tuple[float, int]]:
    """When each run's progress was written, and its env steps."""
    found = {}
    for path in folder.glob("runs/*/progress.json"):
        now = json.loads(path.read_text())
        if now.get("env_steps"):
            found[path.parent.name] = (float(now["updated"]), int(now["env_steps"]))
    return found


def _busy(folder: Path) -> dict[str, tuple[float, float]]:
    """When each process noted how long it has used the card, and that."""
    return {path.name: tuple(json.loads(path.read_text())) for path in folder.glob("notes/*[0-9]")}


def _wait_until_steady(folder: Path, at_once: int | None, queue: subprocess.Popen[bytes]) -> None:
    """Until all runs train, or as many as are chosen."""
    n, since = 0, time.time()
    while True:
        time.sleep(1)
        assert queue.poll() is None, "the queue has ended"
        if len(_progress(folder)) != n:
            n, since = len(_progress(folder)), time.time()
        enough = (
            n == at_once and time.time() - since > 10
            if at_once
            else n and time.time() - since > STEADY_SECONDS
        )
        if enough:
            return


def card(args: argparse.Namespace) -> None:
    """Measure and write the section."""
    found: dict[str, list[tuple[int, float, float]]] = {}
    for _ in range(args.rounds):
        for at_once in (1, 2, 4, None):
            name = "as many as it chooses" if at_once is None else str(at_once)
            found.setdefault(name, []).append(on_a_card(at_once))
            print(name, found[name][-1], flush=True)
    rows = [
        [
            name,
            ", ".join(str(n) for n, _, _ in measured),
            f"{statistics.median(rate for _, rate, _ in measured):,.0f}",
            f"{statistics.median(busy for _, _, busy in measured):.1%}",
        ]
        for name, measured in found.items()
    ]
    text = table(["side by side", "runs, by round", "env steps/s in total", "card busy"], rows)
    intro = (
        f"## Small runs on one simulated {CARD}\n`python -m benchmarks.scaling card`: PPO, 32 envs that wait 10 ms a step, batches of 512, "
        "256-256, by `flatout jobs --at-once N` on two cores. Without MPS processes take turns on a card, which the simulated one does too."
    )
    write_section("jobs card", f"{intro}\n\n{text}\n\n{conditions()}")


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
    shared = verbs.add_parser("card")
    shared.add_argument("--rounds", type=int, default=3)
    shared.set_defaults(run=card)
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
