"""Updates of the Nature CNN beside Stable-Baselines3's. What is learned from frames is benchmarks/pong.py's.

`python -m benchmarks.pixels [--seeds 3]` → docs/benchmarks.md. Every run is a fresh process; the libraries alternate, seed by
seed. The env shows noise, so nothing but Stable-Baselines3 is needed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from time import perf_counter
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from benchmarks.page import conditions, table, write_section

PPO: dict[str, Any] = {"n_envs": 8, "n_steps": 128, "batch_size": 256, "n_epochs": 4, "learning_rate": 2.5e-4}
PPO_STEPS = 4 * 1024
DQN: dict[str, Any] = {
    "batch_size": 32,
    "learning_starts": 1000,
    "learning_rate": 1e-4,
    "buffer_size": 10_000,
}
DQN_STEPS = 2_000
WIDTH = 64
"""Units of the one layer after the CNN."""


class Noise(gym.Env[Any, Any]):
    """Random stacks of four frames, of Atari's size; a step takes next to no time."""

    observation_space = spaces.Box(0, 255, (4, 84, 84), np.uint8)
    action_space = spaces.Discrete(6)

    def __init__(self) -> None:
        self._frames = np.random.default_rng(0).integers(0, 256, (32, 4, 84, 84)).astype(np.uint8)
        self._t = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._t = 0
        return self._frames[0], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._t += 1
        return self._frames[self._t % 32], float(action == 1), self._t % 100 == 0, False, {}


def flatout_update(algo: str, seed: int) -> dict[str, float]:
    """Updates/s, of the updates alone and with everything else that learning does."""
    import flatout

    settings, n_steps = (PPO, PPO_STEPS) if algo == "ppo" else (DQN, DQN_STEPS)
    if algo == "dqn":
        settings = settings | {"n_envs": 1, "n_steps": 4, "train_ratio": 0.25, "double": False}
    agent = flatout.Agent(
        Noise, algo=algo, preset="auto", network_arch=(WIDTH,), overlap="off", seed=seed, **settings
    )
    agent.learn(n_steps)
    phases, updates = agent.summary["phases"], agent.summary["updates"]
    rest = sum(phases.get(name, 0.0) for name in ("stage", "advantage"))
    return _rates(updates, phases["update"], phases["update"] + rest, agent.summary["wall_seconds"], n_steps)


def sb3_update(algo: str, seed: int) -> dict[str, float]:
    """The same in Stable-Baselines3, which computes values while it acts."""
    import stable_baselines3
    from stable_baselines3.common.env_util import make_vec_env

    settings, n_steps = (dict(PPO), PPO_STEPS) if algo == "ppo" else (dict(DQN), DQN_STEPS)
    envs = make_vec_env(Noise, n_envs=settings.pop("n_envs", 1), seed=seed)
    if algo == "dqn":
        settings |= {"train_freq": 4, "gradient_steps": 1}
    agent: Any = getattr(stable_baselines3, algo.upper())(
        "CnnPolicy", envs, policy_kwargs={"net_arch": [WIDTH]}, seed=seed, device="cpu", **settings
    )
    train, spent = agent.train, [0.0]

    def timed(*args: Any, **kwargs: Any) -> None:
        began = perf_counter()
        train(*args, **kwargs)
        spent[0] += perf_counter() - began

    agent.train = timed
    began = perf_counter()
    agent.learn(n_steps)
    per_update = PPO["n_envs"] * PPO["n_steps"] // PPO["batch_size"] if algo == "ppo" else 1
    return _rates(agent._n_updates * per_update, spent[0], spent[0], perf_counter() - began, n_steps)


def _rates(updates: int, seconds: float, learning: float, wall: float, n_steps: int) -> dict[str, float]:
    return {
        "updates": updates / seconds,
        "learning": updates / learning,
        "steps": n_steps / wall,
    }


def run(library: str, algo: str, seed: int) -> dict[str, float]:
    """One run in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.pixels", "--one", library, algo, str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{library} {algo}: {done.stderr.strip().splitlines()[-1]}")
    rates: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return rates


def update_section(n_seeds: int) -> str:
    """The table of updates/s."""
    rows = []
    for algo in ("ppo", "dqn"):
        found: dict[str, list[dict[str, float]]] = {"sb3": [], "flatout": []}
        for seed in range(1, n_seeds + 1):
            for library in found:
                found[library].append(run(library, algo, seed))
                print(algo, library, found[library][-1], flush=True)
        median = {
            library: {key: statistics.median(it[key] for it in runs) for key in runs[0]}
            for library, runs in found.items()
        }
        ours, theirs = median["flatout"], median["sb3"]
        for key, what in (
            ("updates", "updates/s"),
            ("learning", "updates/s, with values"),
            ("steps", "env steps/s of the run"),
        ):
            ratio = ours[key] / theirs[key]
            rows.append(
                [f"{algo.upper()}, {what}", f"{theirs[key]:.2f}", f"{ours[key]:.2f}", f"{ratio:.2f} ×"]
            )
    return (
        "## The Nature CNN on a CPU\n"
        "4 × 84 × 84 bytes, PPO with minibatches of 256 (8 envs × 128 steps, 4 epochs), DQN with 32 (an update every 4 "
        "steps, no double Q), the same settings in both libraries.\n\n"
        + table(["", "Stable-Baselines3", "flatout", "ratio"], rows)
        + f"\n\nMedian of {n_seeds} runs, each in a process of its own, alternating. {conditions()}"
    )


def main() -> None:
    """Run both and write the section."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        library, algo, seed = args.one
        print(json.dumps((flatout_update if library == "flatout" else sb3_update)(algo, int(seed))))
        return
    write_section("pixels", update_section(args.seeds))


if __name__ == "__main__":
    main()
