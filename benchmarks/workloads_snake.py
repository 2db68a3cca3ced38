"""Snake compared with Jumanji's: env steps/s by number of games, and whole training.

`python -m benchmarks.workloads_snake [--quick]` prints the tables; `run` gives their lines.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch

from benchmarks.page import table
from benchmarks.stepping import Way, alternate

SIZES = (256, 4096, 16384)
SCAN = 64
"""Steps that Jumanji's games take in one compiled call."""
PLAYED = 64
"""Rows of random actions, used over and over."""


def snake_games(n_games: int, **kwargs: Any) -> tuple[Callable[[], int], Callable[[], None]]:
    """flatout's games with random actions, observations included; one core."""
    from flatout.workloads.snake import SnakeGames

    torch.set_num_threads(1)
    games = SnakeGames(n_games, "cpu", **kwargs)
    games.reset(seed=1)
    actions = torch.randint(4, (PLAYED, n_games), generator=torch.Generator().manual_seed(1))
    t = 0

    def step_all() -> int:
        nonlocal t
        t += 1
        games.step(actions[t % PLAYED])
        return n_games

    return step_all, lambda: None


def jumanji_games(n_games: int) -> tuple[Callable[[], int], Callable[[], None]]:
    """Jumanji's Snake-v1 (12 × 12), compiled, on all cores; observations are kept alive as those of flatout are."""
    jax: Any = import_module("jax")
    jumanji: Any = import_module("jumanji")
    env = import_module("jumanji.wrappers").VmapAutoResetWrapper(jumanji.make("Snake-v1"))
    state, first = jax.jit(env.reset)(jax.random.split(jax.random.PRNGKey(0), n_games))

    def one(carry: Any, actions: Any) -> Any:
        state, now = env.step(carry[0], actions)
        return (state, now.observation), now.reward

    def many(carry: Any, key: Any) -> Any:
        return jax.lax.scan(one, carry, jax.random.randint(key, (SCAN, n_games), 0, 4))[0]

    many_compiled = jax.jit(many)
    carry, n_calls = (state, first.observation), 0

    def step_all() -> int:
        nonlocal carry, n_calls
        n_calls += 1
        carry = jax.block_until_ready(many_compiled(carry, jax.random.PRNGKey(n_calls)))
        return SCAN * n_games

    return step_all, lambda: None


def stepping(quick: bool) -> list[str]:
    """Env steps alone."""
    rounds, seconds = (2, 0.2) if quick else (9, 0.5)
    ways: dict[str, Way] = {}
    for n in SIZES:
        ways[f"10 × 10, vector, {n:,}"] = partial(snake_games, n)
        ways[f"10 × 10, planes, {n:,}"] = partial(snake_games, n, obs="planes")
        ways[f"12 × 12, planes, {n:,}"] = partial(snake_games, n, obs="planes", height=12, width=12)
    for n in SIZES[:2]:
        ways[f"Jumanji, {n:,}"] = partial(jumanji_games, n)
    speeds = alternate(ways, rounds, seconds)

    def cell(name: str) -> str:
        values = speeds.get(name)
        return f"{statistics.median(values) / 1e6:.2f} M" if values else "–"

    rows = [
        [f"flatout, {kind}", *(cell(f"{kind}, {n:,}") for n in SIZES)]
        for kind in ("10 × 10, vector", "10 × 10, planes", "12 × 12, planes")
    ]
    rows.append(["Jumanji Snake-v1, 12 × 12 (JAX)", *(cell(f"Jumanji, {n:,}") for n in SIZES)])
    rows.append(["12 × 12: flatout ÷ Jumanji", *(_ratio(speeds, n) for n in SIZES)])
    small, large = (speeds[f"10 × 10, vector, {n:,}"] for n in (SIZES[0], SIZES[-1]))
    flat = statistics.median(a / b for a, b in zip(small, large, strict=True))
    return [
        *table(["env steps/s, random actions", *(f"{n:,} games" for n in SIZES)], rows).splitlines(),
        "",
        f"A step of a game costs {flat:.2f} times as much with {SIZES[-1]:,} games as with {SIZES[0]}.",
    ]


def _ratio(speeds: dict[str, list[float]], n: int) -> str:
    theirs = speeds.get(f"Jumanji, {n:,}")
    if not theirs:
        return "–"
    ours = speeds[f"12 × 12, planes, {n:,}"]
    return f"{statistics.median(a / b for a, b in zip(ours, theirs, strict=True)):.1f} ×"


def training(quick: bool) -> list[str]:
    """`flatout train snake --algo ppo`: steps/s, once with the compiled update made and kept, then measured."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--quiet", "--json", "--runs-dir", folder]
        if not quick:
            _train([*flags, "--compile", "on", "--timesteps", "10000"])
        runs = [
            _train([*flags, "--seed", str(seed), "--timesteps", "200000" if quick else "3000000"])
            for seed in range(1 if quick else 3)
        ]
    rows = [
        [
            str(run["seed"]),
            f"{run['env_steps']:,}",
            f"{run['steps_per_second']:,.0f}",
            f"{run['collect_rate']:,.0f}",
            f"{run['learn_rate']:,.0f}",
            f"{run['return_mean']:.1f}",
        ]
        for run in runs
    ]
    header = [
        "seed",
        "env steps",
        "steps/s",
        "collecting alone",
        "learning alone",
        "food eaten, last 100 games",
    ]
    return table(header, rows).splitlines()


def _train(flags: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "flatout", "train", "snake", "--algo", "ppo", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    out: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return out


def run(quick: bool) -> list[str]:
    """The Markdown lines of Snake's tables."""
    trained = training(quick)  # first: JAX, once loaded, keeps threads
    return [*stepping(quick), "", "`flatout train snake --algo ppo`, 256 games:", "", *trained]


if __name__ == "__main__":
    print("\n".join(run("--quick" in sys.argv)))
