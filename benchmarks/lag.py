"""Returns with overlap (lag 1) and in lockstep for as many env steps, five seeds, plotted.

`python -m benchmarks.lag [--seeds 5] [--jobs 2] [--keep FILE]` → docs/benchmarks.md and docs/images/lag.svg. Nothing is
timed, so runs may share the machine; what is in the kept file is not run again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.page import PAGE, conditions, table, write_section

ENVS = {"CartPole-v1": 100_000, "Acrobot-v1": 300_000, "LunarLander-v3": 1_000_000, "Pendulum-v1": 100_000}
"""Env steps: the recipe's, or fewer where its million would say nothing new."""
MODES = {"lockstep": "off", "overlap": "on"}


def train_one(env: str, mode: str, seed: int) -> dict[str, Any]:
    """The deterministic policy's return at the end of one run."""
    import flatout

    agent = flatout.PPO(env, seed=seed, overlap=MODES[mode], executor="serial", compile="off")
    agent.learn(ENVS[env])
    return {"return": agent.evaluate(50).return_mean, "fell_back": agent.summary["overlap"]["fell_back"]}


def in_a_process(env: str, mode: str, seed: int) -> dict[str, Any]:
    """`train_one` in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.lag", "--one", env, mode, str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    out: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"{env} {mode} seed {seed}: {out['return']:.1f}{' fell back' * out['fell_back']}", flush=True)
    return out


def main() -> None:
    """Run everything, write the table and the plot."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--one", nargs=3)
    args = parser.parse_args()
    if args.one:
        env, mode, seed = args.one
        print(json.dumps(train_one(env, mode, int(seed))))
        return
    keys = [(env, mode, seed) for env in ENVS for seed in range(1, args.seeds + 1) for mode in MODES]
    results: dict[tuple[str, str, int], dict[str, Any]] = {}
    if args.keep and args.keep.exists():
        results = {tuple(key): value for key, value in map(json.loads, args.keep.read_text().splitlines())}

    def run(key: tuple[str, str, int]) -> None:
        results[key] = in_a_process(*key)
        if args.keep:
            with args.keep.open("a") as file:
                file.write(json.dumps([key, results[key]]) + "\n")

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(run, [key for key in keys if key not in results]))
    rows = []
    for env in ENVS:
        cells, medians = [], {}
        for mode in MODES:
            returns = [results[env, mode, seed]["return"] for seed in range(1, args.seeds + 1)]
            medians[mode] = statistics.median(returns)
            cells += [f"**{medians[mode]:.1f}** ({min(returns):.1f} to {max(returns):.1f})"]
        n_back = sum(results[env, "overlap", seed]["fell_back"] for seed in range(1, args.seeds + 1))
        rows.append([env, f"{ENVS[env]:,}", *cells, f"{n_back} of {args.seeds}"])
    plot(results, args.seeds)
    header = [
        "env",
        "env steps",
        "lockstep: median (spread)",
        "overlap: median (spread)",
        "fell back to lockstep",
    ]
    text = (
        f"## Returns with and without overlap\n\n`python -m benchmarks.lag`: the recipes with overlap (lag 1) and without (lockstep) for as many env steps, "
        f"{args.seeds} seeds; return of the deterministic policy over 50 episodes.\n{conditions()}\n\n"
        f"{table(header, rows)}\n\n![Returns of every seed in lockstep and overlap](images/lag.svg)"
    )
    write_section("lag", text)


def plot(results: dict[tuple[str, str, int], dict[str, Any]], n_seeds: int) -> None:
    """docs/images/lag.svg: every seed's return, both modes."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    figure, grid = plt.subplots(1, len(ENVS), figsize=(10, 3))
    for axes, env in zip(grid.flat, ENVS, strict=True):
        for x, (mode, color) in enumerate((("lockstep", "tab:orange"), ("overlap", "tab:blue"))):
            returns = [results[env, mode, seed]["return"] for seed in range(1, n_seeds + 1)]
            offsets = [x + 0.06 * (i - (n_seeds - 1) / 2) for i in range(n_seeds)]
            axes.plot(offsets, returns, "o", color=color, alpha=0.8)
            axes.hlines(statistics.median(returns), x - 0.25, x + 0.25, color=color)
        axes.set_title(env)
        axes.set_xticks(range(2), list(MODES))
        axes.set_xlim(-0.5, 1.5)
        axes.grid(alpha=0.3, axis="y")
    grid[0].set_ylabel("return, 50 episodes")
    figure.tight_layout()
    figure.savefig(PAGE.parent / "images" / "lag.svg")


if __name__ == "__main__":
    main()
