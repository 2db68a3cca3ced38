"""DQN beside Stable-Baselines3, Snake at speed, and the recipes' returns.

`python -m benchmarks.dqn [--cases speed,snake,returns] [--seeds 3]` → docs/benchmarks.md. Every run is a fresh process; the
libraries alternate, seed by seed; returns, which no speed is read from, are learned two at a time on a core each.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import perf_counter
from typing import Any

from benchmarks.page import conditions, table, write_section

SPEED_STEPS, RATIO, BATCH, NET = 20_000, 0.5, 64, (256, 256)
SNAKE_STEPS, ENOUGH_FOOD = 4_000_000, 20
BARS = {
    "CartPole-v1": (490.0, 500.0),
    "Acrobot-v1": (-85.0, -76.6),
    "MountainCar-v0": (-110.0, -100.8),
    "LunarLander-v3": (150.0, 154.0),
}
"""The median return that a recipe has to reach within its steps, and what rl-zoo reports for DQN at as many."""


def flatout_speed(seed: int) -> dict[str, Any]:
    """Env steps/s of a whole run, and updates/s of its learner."""
    import flatout

    settings: dict[str, Any] = {"n_envs": 8, "n_steps": 32, "batch_size": BATCH, "train_ratio": RATIO}
    settings |= {"learning_starts": 1000, "double": False, "target_update_interval": 10_000}
    agent = flatout.DQN("CartPole-v1", preset="auto", network_arch=NET, seed=seed, **settings)
    agent.learn(SPEED_STEPS)
    summary = agent.summary
    return {
        "steps_per_second": summary["steps_per_second"],
        "updates_per_second": summary["updates"] / summary["phases"]["update"],
    }


def sb3_speed(seed: int) -> dict[str, Any]:
    """The same in Stable-Baselines3."""
    from stable_baselines3 import DQN

    agent: Any = DQN(
        "MlpPolicy",
        "CartPole-v1",
        batch_size=BATCH,
        train_freq=256,
        gradient_steps=int(256 * RATIO),
        learning_starts=1000,
        buffer_size=100_000,
        policy_kwargs={"net_arch": list(NET)},
        seed=seed,
        device="cpu",
    )
    train, busy, n_updates = agent.train, 0.0, 0

    def timed(gradient_steps: int, batch_size: int = 100) -> None:
        nonlocal busy, n_updates
        began = perf_counter()
        train(gradient_steps, batch_size)
        busy, n_updates = busy + perf_counter() - began, n_updates + gradient_steps

    agent.train = timed
    began = perf_counter()
    agent.learn(SPEED_STEPS)
    return {
        "steps_per_second": SPEED_STEPS / (perf_counter() - began),
        "updates_per_second": n_updates / busy,
    }


def snake_speed(seed: int, algo: str) -> dict[str, Any]:
    """Snake's recipe: seconds and env steps to a mean of 20 food, steps/s, and the food at the end."""
    import flatout
    from flatout.runlog.recorder import Progress

    soonest: dict[str, float] = {}

    def watch(progress: Progress) -> None:
        if (progress.return_mean or 0.0) >= ENOUGH_FOOD:
            soonest.setdefault("steps", progress.env_steps)
            soonest.setdefault("seconds", progress.seconds)

    kinds = {"DQN": flatout.DQN, "PQN": flatout.PQN, "PPO": flatout.PPO}
    agent = kinds[algo]("snake", seed=seed).learn(SNAKE_STEPS, watch)
    speed = agent.summary["steps_per_second"]
    return soonest | {"steps_per_second": speed, "food": agent.evaluate(100).return_mean}


def recipe_return(seed: int, env: str) -> dict[str, Any]:
    """A recipe's return after its own number of steps."""
    import flatout

    agent = flatout.DQN(env, seed=seed).learn()
    keep = ("env_steps", "wall_seconds")
    return {"return": agent.evaluate(100).return_mean} | {key: agent.summary[key] for key in keep}


RUNS: dict[str, Callable[[int], dict[str, Any]]] = {
    "speed/flatout": flatout_speed,
    "speed/Stable-Baselines3": sb3_speed,
    **{f"snake/{algo}": partial(snake_speed, algo=algo) for algo in ("DQN", "PQN", "PPO")},
    **{f"returns/{env}": partial(recipe_return, env=env) for env in BARS},
}


def run_case(case: str, seeds: int, n_at_once: int = 1) -> dict[str, list[dict[str, Any]]]:
    """Every run of a case for every seed, alternating, each in a process of its own."""
    names = [name for name in RUNS if name.startswith(f"{case}/")]
    env = os.environ | ({"OMP_NUM_THREADS": "1"} if n_at_once > 1 else {})

    def run(name: str, seed: int) -> dict[str, Any]:
        command = [sys.executable, "-m", "benchmarks.dqn", "--one", name, "--seed", str(seed)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        print(name, seed, result, flush=True)
        return result

    with ThreadPoolExecutor(n_at_once) as pool:
        runs = [(name, pool.submit(run, name, seed)) for seed in range(1, seeds + 1) for name in names]
    out: dict[str, list[dict[str, Any]]] = {name.partition("/")[2]: [] for name in names}
    for name, future in runs:
        out[name.partition("/")[2]].append(future.result())
    return out


def speed(seeds: int) -> str:
    """Env steps/s and updates/s at an equal train ratio."""
    results = run_case("speed", seeds)
    rows = []
    for name, runs in results.items():
        cells = []
        for key in ("steps_per_second", "updates_per_second"):
            ratios = [a[key] / b[key] for a, b in zip(results["flatout"], runs, strict=True)]
            cells += [f"{statistics.median(r[key] for r in runs):,.0f}", f"{statistics.median(ratios):.2f}"]
        rows.append([name, *cells])
    header = ["", "env steps/s", "flatout ÷ this", "updates/s", "flatout ÷ this"]
    return (
        f"## DQN: speed\n\nCartPole-v1, network {NET[0]}-{NET[1]}, batch {BATCH}, {RATIO} updates per env step, "
        f"{SPEED_STEPS:,} env steps, {seeds} seeds; medians, and the median of the ratios.\n\n{table(header, rows)}"
    )


def snake(seeds: int) -> str:
    """Snake at its recipes' settings."""
    rows = []
    for name, runs in run_case("snake", seeds).items():
        keys = ("seconds", "steps", "steps_per_second", "food")
        seconds, steps, speed, food = (
            statistics.median(run.get(key, math.inf) for run in runs) for key in keys
        )
        reached = [f"{seconds:.1f} s", f"{steps:,.0f}"] if steps < math.inf else ["not reached", ""]
        rows.append([name, *reached, f"{speed:,.0f}", f"{food:.1f}"])
    header = [
        "",
        f"time to {ENOUGH_FOOD} food",
        f"env steps to {ENOUGH_FOOD} food",
        "env steps/s",
        "food at the end",
    ]
    return (
        f"## Snake: DQN, PQN and PPO\n\n256 games, each algorithm's recipe, {SNAKE_STEPS:,} env steps, {seeds} seeds; medians. "
        f"Food is the mean over the last 100 games of training; at the end, over 100 games of evaluation.\n\n{table(header, rows)}"
    )


def returns(seeds: int) -> str:
    """The recipes' returns."""
    rows = []
    for env, runs in run_case("returns", seeds, n_at_once=2).items():
        got = [run["return"] for run in runs]
        bar, zoo = BARS[env]
        median = statistics.median(got)
        verdict = "reached" if median >= bar else "MISSED"
        steps, every = f"{runs[0]['env_steps']:,}", ", ".join(f"{r:.1f}" for r in got)
        rows.append([env, steps, every, f"**{median:.1f}**", f"{bar:g} ({verdict})", f"{zoo:g}"])
    header = ["env", "env steps", "returns of the seeds", "median", "goal", "rl-zoo's DQN"]
    return (
        "## DQN: returns\n\n100 episodes of the greedy policy on unseen seeds. rl-zoo's column is the one run that rl-zoo "
        f"reports, on LunarLander-v2 instead of v3.\n\n{table(header, rows)}"
    )


def main() -> None:
    """Run the cases asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cases", default="speed,snake,returns")
    parser.add_argument("--one")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(RUNS[args.one](args.seed)))
        return
    cases: dict[str, Callable[[int], str]] = {"speed": speed, "snake": snake, "returns": returns}
    for case in args.cases.split(","):
        write_section(
            f"dqn-{case}",
            f"{cases[case](args.seeds)}\n\n`python -m benchmarks.dqn --cases {case}`. {conditions()}",
        )


if __name__ == "__main__":
    main()
