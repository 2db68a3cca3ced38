"""Mission: collecting compared with a single env, and how often a trained agent succeeds.

`python -m benchmarks.workloads_mission [--quick] [--runs RUN …]`: the speed table, or the success rates of runs.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.page import table
from benchmarks.stepping import Way, alternate, apart
from flatout.workloads.mission import Mission
from flatout.workloads.mission.game import N_ACTIONS
from flatout.workloads.mission.mission import SOLVED

HELD_OUT = 1_000_003
"""Seed of the episodes that agents are judged by; training draws its maps from other seeds."""
N_CORES = 2


def success_rate(run: str | Path, n_episodes: int = 200, seed: int = HELD_OUT) -> float:
    """The share of episodes on unseen maps that a run's agent, acting greedily, ends with success."""
    import flatout

    result = flatout.load(run).evaluate(n_episodes, seed=seed)
    return float(np.mean(np.array(result.returns) > SOLVED))


def random_rate(level: int, n_episodes: int = 200, seed: int = HELD_OUT) -> float:
    """The same of random allowed actions."""
    env, rng = Mission(level=level), np.random.default_rng(seed)
    n_won = 0
    for episode in range(n_episodes):
        obs, info = env.reset(seed=seed + episode)
        ended = False
        while not ended:
            obs, _, terminated, truncated, info = env.step(_random(obs["action_mask"], rng))
            ended = terminated or truncated
        n_won += info["success"]
    return n_won / n_episodes


def _random(mask: Any, rng: np.random.Generator) -> Any:
    scores = mask * rng.random(len(mask))
    return np.array([int(part.argmax()) for part in np.split(scores, np.cumsum(N_ACTIONS)[:-1])])


def single_env(level: int) -> tuple[Callable[[], int], Callable[[], None]]:
    """One env stepped with random allowed actions, resets included."""
    env, rng = Mission(level=level), np.random.default_rng(0)
    obs, _ = env.reset(seed=1)

    def step_all() -> int:
        nonlocal obs
        obs, _, terminated, truncated, _ = env.step(_random(obs["action_mask"], rng))
        if terminated or truncated:
            obs, _ = env.reset()
        return 1

    return step_all, env.close


def collecting(level: int, chosen: dict[str, str]) -> tuple[Callable[[], int], Callable[[], None]]:
    """Rollouts of the recipe, collected the way that flatout chooses."""
    import flatout
    from flatout.training.stop import StopRequest

    agent = flatout.PPO("flatout/Mission-v0", env_kwargs={"level": level}, seed=1)
    trainer = agent.trainer()
    chosen["reason"] = f"{trainer.plan.executor}: {trainer.plan_reason}"
    n = agent.config.total_batch

    def step_all() -> int:
        trainer.collector.collect(trainer.pipeline.rollouts[0], StopRequest().now)
        return n

    return step_all, trainer.close


def run(quick: bool) -> list[str]:
    """The Markdown lines of Mission's part."""
    lines = []
    for level in (1,) if quick else (1, 2):
        lines += _speed(level, rounds=3 if quick else 11, seconds=0.7 if quick else 1.5)
    n_episodes = 50 if quick else 200
    rates = ", ".join(f"level {level} {random_rate(level, n_episodes):.1%}" for level in (1, 2))
    return [*lines, "", f"Share of {n_episodes} episodes in which random allowed actions succeed: {rates}."]


def _speed(level: int, rounds: int, seconds: float) -> list[str]:
    chosen: dict[str, str] = {}
    ways: dict[str, Way] = {
        "one env, stepped directly": partial(single_env, level),
        "flatout, collecting with the recipe's policy": partial(collecting, level, chosen),
        "two independent processes": partial(apart, partial(single_env, level), 256),
    }
    speeds = alternate(ways, rounds, seconds)
    single, flat, control = speeds.values()
    rows = [
        [
            name,
            f"{statistics.median(values):,.0f}",
            f"{_ratio(values, single) / N_CORES:.0%}",
            f"{_ratio(values, control):.0%}",
        ]
        for name, values in zip(ways, (single, flat, control), strict=True)
    ]
    header = [
        f"level {level}",
        "env steps/s",
        f"of {N_CORES} × one env",
        "of two independent processes",
    ]
    return ["", *table(header, rows).splitlines(), "", f"flatout chose {chosen['reason']}."]


def _ratio(values: list[float], base: list[float]) -> float:
    return statistics.median(v / b for v, b in zip(values, base, strict=True))


def main() -> None:
    """Print the table, or the success rates of the runs that are given."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--runs", nargs="*", default=[])
    parser.add_argument("--episodes", type=int, default=200)
    args = parser.parse_args()
    for name in args.runs:
        print(
            f"{name}: success {success_rate(name, args.episodes):.1%} of {args.episodes} episodes", flush=True
        )
    if not args.runs:
        print("\n".join(run(args.quick)))


if __name__ == "__main__":
    main()
