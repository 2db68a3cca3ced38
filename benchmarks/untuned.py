"""Envs without a recipe: flatout's defaults against Stable-Baselines3's defaults, at equal env steps.

`python -m benchmarks.untuned [--envs Taxi-v4,…] [--seeds 1,2,3]` → docs/untuned.md. The envs were chosen before anything was
tuned on them. Every run is a process of its own, a peer's process imports no flatout, and the two libraries take turns.
Results are kept in results/untuned.json as they come: the same command continues where it was stopped.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import gymnasium as gym
import numpy as np

from benchmarks.page import conditions, table

RESULTS = Path(__file__).parent / "results" / "untuned.json"
PAGE = Path(__file__).parents[1] / "docs" / "untuned.md"
BEGIN, END = "<!-- results -->", "<!-- /results -->"
ENVS = {
    "Taxi-v4": 100_000,
    "CliffWalking-v1": 100_000,
    "FrozenLake-v1": 100_000,
    "FrozenLake8x8-v1": 200_000,
    "Blackjack-v1": 100_000,
    "BipedalWalkerHardcore-v3": 300_000,
    "InvertedPendulum-v5": 100_000,
    "InvertedDoublePendulum-v5": 200_000,
    "Reacher-v5": 200_000,
    "Pusher-v5": 200_000,
    "Swimmer-v5": 200_000,
    "Ant-v5": 300_000,
    "HumanoidStandup-v5": 200_000,
}
"""Env steps by env; the last seven need the package mujoco."""
EPISODES, MAX_STEPS, EVAL_SEED = 50, 1000, 12345
LIBRARIES = ("flatout", "sb3")


def run_flatout(env: str, seed: int, steps: int) -> dict[str, Any]:
    """Train and evaluate flatout's defaults."""
    import flatout

    agent = flatout.Agent(env, seed=seed).learn(steps)
    returns = {
        kind: agent.evaluate(
            EPISODES, deterministic=kind == "deterministic", max_steps=MAX_STEPS, seed=EVAL_SEED
        ).return_mean
        for kind in ("deterministic", "sampled")
    }
    summary = agent.summary
    return returns | {
        "algo": summary["algo"],
        "env_steps": summary["env_steps"],
        "seconds": summary["wall_seconds"],
    }


def run_sb3(env: str, seed: int, steps: int, algo: str) -> dict[str, Any]:
    """Train and evaluate the defaults of Stable-Baselines3's algorithm of the same name."""
    kind = getattr(importlib.import_module("stable_baselines3"), algo.upper())
    model = kind("MlpPolicy", env, seed=seed, device="cpu")
    began = perf_counter()
    model.learn(steps)
    seconds = perf_counter() - began
    made = gym.make(env)
    returns = {
        name: statistics.fmean(
            episode(model, made, EVAL_SEED + i, name == "deterministic") for i in range(EPISODES)
        )
        for name in ("deterministic", "sampled")
    }
    return returns | {"algo": algo, "env_steps": model.num_timesteps, "seconds": seconds}


def episode(model: Any, env: gym.Env[Any, Any], seed: int, deterministic: bool) -> float:
    """The return of one episode, cut after MAX_STEPS."""
    obs, _ = env.reset(seed=seed)
    total = 0.0
    for _ in range(MAX_STEPS):
        action, _ = model.predict(obs, deterministic=deterministic)
        scalar = int(np.asarray(action)) if isinstance(env.action_space, gym.spaces.Discrete) else action
        obs, reward, terminated, truncated, _ = env.step(scalar)
        total += float(reward)
        if terminated or truncated:
            break
    return total


def measure(env: str, seed: int, steps: int, library: str, algo: str) -> dict[str, Any] | None:
    """One run in a process of its own; None if it fails, which is shown."""
    command = [sys.executable, "-m", "benchmarks.untuned", "--one", library, env, str(seed), str(steps), algo]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{library} {env} seed {seed} failed: {done.stderr.strip().splitlines()[-1]}", flush=True)
        return None
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(
        f"{library} {env} seed {seed}: {result['deterministic']:.1f} in {result['seconds']:.0f} s", flush=True
    )
    return result


def main() -> None:
    """Run what is missing, and write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--envs", default=",".join(ENVS))
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--steps", type=int, default=0, help="env steps of every env, to try the benchmark")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--one", nargs=5)
    args = parser.parse_args()
    if args.one:
        library, env, seed, steps, algo = args.one
        if library == "flatout":
            print(json.dumps(run_flatout(env, int(seed), int(steps))))
        else:
            print(json.dumps(run_sb3(env, int(seed), int(steps), algo)))
        return
    known: dict[str, dict[str, Any]] = json.loads(args.results.read_text()) if args.results.exists() else {}
    for env in args.envs.split(","):
        for seed in map(int, args.seeds.split(",")):
            algo = "ppo"
            for library in LIBRARIES:
                key = f"{env} {library} {seed}"
                if key not in known:
                    result = measure(env, seed, args.steps or ENVS[env], library, algo)
                    if result is None:
                        break
                    known[key] = result
                    args.results.parent.mkdir(exist_ok=True)
                    args.results.write_text(json.dumps(known, indent=2) + "\n")
                algo = known[key]["algo"]
    if args.results == RESULTS:
        write_page(known)


def write_page(known: dict[str, dict[str, Any]]) -> None:
    """The table of all results so far, in docs/untuned.md."""
    header = [
        "env",
        "env steps",
        "flatout",
        "Stable-Baselines3",
        "not below",
        "above",
        "wall time, share of SB3's",
    ]
    rows = [row for env in ENVS if (row := _row(env, known)) is not None]
    text = f"{conditions()}\n\n{table(header, rows)}"
    before, rest = PAGE.read_text().split(BEGIN, 1)
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END, 1)[1]}")
    print(text)


def _row(env: str, known: dict[str, dict[str, Any]]) -> list[str] | None:
    ours, theirs = (
        [v for k, v in known.items() if k.startswith(f"{env} {library} ")] for library in LIBRARIES
    )
    if not ours or not theirs:
        return None
    a, b = ([it["deterministic"] for it in runs] for runs in (ours, theirs))
    noise = max(statistics.pstdev(a), statistics.pstdev(b))
    gap = statistics.median(a) - statistics.median(b)
    time = statistics.median(it["seconds"] for it in ours) / statistics.median(it["seconds"] for it in theirs)
    cells = [f"{statistics.median(it):.1f} ({', '.join(f'{r:.1f}' for r in it)})" for it in (a, b)]
    verdicts = ["yes" if gap >= -noise else "NO", "yes" if gap > noise else "no"]
    return [f"{env} ({ours[0]['algo']})", f"{ours[0]['env_steps']:,}", *cells, *verdicts, f"{time:.2f}"]


if __name__ == "__main__":
    main()
