"""The recipes' returns: every env with a recipe, three seeds, 100 deterministic episodes each.

`python -m benchmarks.returns [--envs CartPole-v1,…] [--seeds 1,2,3] [--jobs 2]` → docs/benchmarks.md; envs that are
not run again keep their results.
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

from benchmarks.page import conditions, table, write_section

RESULTS = Path(__file__).parent / "results" / "returns.json"
BARS = {
    "CartPole-v1": 490.0,
    "Acrobot-v1": -80.0,
    "MountainCar-v0": -115.0,
    "LunarLander-v3": 230.0,
    "Pendulum-v1": -200.0,
    "flatout/Crawl-v0": 15.0,
    "flatout/Snake-v0": 20.0,
}
"""The median return that a recipe has to reach within its steps."""
ZOO = {
    "CartPole-v1": 500.0,
    "Acrobot-v1": -73.5,
    "MountainCar-v0": -110.4,
    "LunarLander-v3": 242.0,
    "Pendulum-v1": -172.0,
}
"""What rl-zoo reports for one run of PPO with as many steps, on LunarLander-v2 instead of v3."""


def train_one(env: str, seed: int) -> dict[str, Any]:
    """Train the recipe and evaluate it."""
    import flatout

    agent = flatout.PPO(env, seed=seed).learn()
    result = agent.evaluate(100)
    keep = ("env_steps", "wall_seconds", "steps_per_second")
    return {"return": result.return_mean} | {key: agent.summary[key] for key in keep}


def in_a_process(env: str, seed: int) -> dict[str, Any]:
    """`train_one` in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.returns", "--one", env, str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    out: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"{env} seed {seed}: {out['return']:.1f} in {out['wall_seconds']:.0f} s", flush=True)
    return out


def main() -> None:
    """Run everything and write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--envs", default=",".join(BARS))
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--one", nargs=2)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(train_one(args.one[0], int(args.one[1]))))
        return
    envs, seeds = args.envs.split(","), [int(s) for s in args.seeds.split(",")]
    with ThreadPoolExecutor(args.jobs) as pool:
        futures = {(env, seed): pool.submit(in_a_process, env, seed) for env in envs for seed in seeds}
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    known |= {env: {str(seed): futures[env, seed].result() for seed in seeds} for env in envs}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(known, indent=2) + "\n")
    write_table(known)


def write_table(known: dict[str, dict[str, dict[str, Any]]]) -> None:
    """The table of all results that are known, measured now or before."""
    rows = []
    for env in BARS:
        if env not in known:
            continue
        returns = [result["return"] for result in known[env].values()]
        median = statistics.median(returns)
        verdict = "reached" if median >= BARS[env] else "MISSED"
        rows.append(
            [
                env,
                f"{next(iter(known[env].values()))['env_steps']:,}",
                ", ".join(f"{r:.1f}" for r in returns),
                f"**{median:.1f}**",
                f"{BARS[env]:g} ({verdict})",
                f"{ZOO[env]:g}" if env in ZOO else "–",
            ]
        )
    header = ["env", "env steps", "returns of the seeds", "median", "goal", "rl-zoo's PPO"]
    text = (
        "## Returns of the recipes\n\n"
        f"`python -m benchmarks.returns`: `flatout train ENV` without flags, then 100 episodes of the "
        "deterministic policy on unseen seeds. rl-zoo's column is the one run that rl-zoo reports for its tuned PPO at as many "
        f"steps, on LunarLander-v2 instead of v3.\n{conditions()}\n\n{table(header, rows)}"
    )
    write_section("returns", text)


if __name__ == "__main__":
    main()
