"""Lockstep training speed beside Stable-Baselines3, alternating, in fresh processes.

`python -m benchmarks.lockstep [--rounds 5] [--steps 60000]` → docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from time import perf_counter

from benchmarks.page import conditions, table, write_section

N_ENVS, N_STEPS, BATCH, EPOCHS = 32, 32, 256, 4


def run_flatout(n_steps: int) -> dict[str, float]:
    """Steps/s of flatout's lockstep, and the return it ends with."""
    import flatout

    agent = flatout.PPO(
        "CartPole-v1",
        preset="auto",
        n_envs=N_ENVS,
        n_steps=N_STEPS,
        batch_size=BATCH,
        n_epochs=EPOCHS,
        network_arch=(64, 64),
        seed=1,
    )
    agent.learn(2 * N_ENVS * N_STEPS)  # warm up
    began = perf_counter()
    agent.learn(n_steps)
    seconds = perf_counter() - began
    return {"steps_per_second": n_steps / seconds, "return": agent.summary["return_mean"]}


def run_sb3(n_steps: int, n_threads: int | None = None) -> dict[str, float]:
    """The same settings in Stable-Baselines3, on its own defaults for everything else."""
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    if n_threads:
        torch.set_num_threads(n_threads)
    envs = make_vec_env("CartPole-v1", n_envs=N_ENVS, seed=1)
    agent = PPO(
        "MlpPolicy",
        envs,
        n_steps=N_STEPS,
        batch_size=BATCH,
        n_epochs=EPOCHS,
        policy_kwargs={"net_arch": [64, 64]},
        device="cpu",
        seed=1,
    )
    agent.learn(2 * N_ENVS * N_STEPS)
    began = perf_counter()
    agent.learn(n_steps, reset_num_timesteps=False)
    seconds = perf_counter() - began
    returns = [info["r"] for info in agent.ep_info_buffer or ()]
    return {"steps_per_second": n_steps / seconds, "return": float(statistics.mean(returns))}


RUNNERS: dict[str, Callable[[int], dict[str, float]]] = {
    "flatout, lockstep": run_flatout,
    "Stable-Baselines3": run_sb3,
    "Stable-Baselines3, torch on one thread": partial(run_sb3, n_threads=1),
}


def in_a_process(name: str, n_steps: int) -> dict[str, float]:
    """One measurement in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.lockstep", "--one", name, "--steps", str(n_steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    out: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(f"{name}: {out['steps_per_second']:,.0f} steps/s", flush=True)
    return out


def main() -> None:
    """Alternate the two and write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=61_440)
    parser.add_argument("--one", choices=list(RUNNERS))
    args = parser.parse_args()
    if args.one:
        print(json.dumps(RUNNERS[args.one](args.steps)))
        return
    speeds: dict[str, list[float]] = {name: [] for name in RUNNERS}
    for _ in range(args.rounds):
        for name in RUNNERS:
            speeds[name].append(in_a_process(name, args.steps)["steps_per_second"])
    ours = speeds["flatout, lockstep"]
    rows = []
    for name, theirs in speeds.items():
        ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
        rows.append([name, f"{statistics.median(theirs):,.0f}", f"{ratio:.2f}"])
    text = (
        "## Training speed, lockstep\n\n"
        f"`python -m benchmarks.lockstep`: PPO on CartPole-v1, {N_ENVS} envs × {N_STEPS} steps, batch {BATCH}, "
        f"{EPOCHS} epochs, two 64-64 networks, {args.steps:,} env steps; {args.rounds} rounds, alternating, a "
        f"fresh process each; median of the ratios.\n{conditions()}\n\n"
        + table(["", "env steps/s, median", "flatout is faster by"], rows)
    )
    write_section("lockstep", text)


if __name__ == "__main__":
    main()
