"""Pong from frames: DQN's learning curve beside Stable-Baselines3's, at equal settings and env steps.

`python -m benchmarks.pong [--steps 250000] [--seeds 1] [--libraries flatout,sb3]` → docs/benchmarks.md. Both learn from the
same env code, ale-py with Gymnasium's preprocessing. Every run is a process of its own; a peer's imports no flatout. Results
are kept as they come, and commands for different libraries may run side by side: returns do not depend on what else the
machine does. Speed is benchmarks/pixels.py's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym

from benchmarks.kept import FOLDER, add, read
from benchmarks.page import conditions, table, write_section

RESULTS = FOLDER / "pong.json"
IMAGE = Path(__file__).parents[1] / "docs" / "images" / "pong.svg"
SETTINGS: dict[str, Any] = {
    "batch_size": 32,
    "buffer_size": 50_000,
    "learning_starts": 5_000,
    "learning_rate": 1e-4,
    "target_update_interval": 1_000,
    "exploration_fraction": 0.2,
    "exploration_final_eps": 0.02,
}
"""Those of both libraries, with an update every 4 env steps, returns of 3 steps and the Nature CNN."""
LIBRARIES = {"flatout": "flatout", "sb3": "Stable-Baselines3"}
WINDOW = 20
"""Episodes of training in a mean of the curve."""


class Noted(gym.Wrapper[Any, Any, Any, Any]):
    """Notes for every episode how many steps there have been, and its return."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self.begin()

    def begin(self) -> None:
        """Forget what was before training, such as the steps of a check."""
        self.episodes: list[tuple[int, float]] = []
        self._n_steps, self._return = 0, 0.0

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        self._return = 0.0
        return self.env.reset(**options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        self._n_steps += 1
        self._return += float(reward)
        if terminated or truncated:
            self.episodes.append((self._n_steps, self._return))
            print(f"{self._n_steps:,}: {self._return:.0f}", file=sys.stderr, flush=True)
        return obs, reward, terminated, truncated, info


def pong(channel: bool) -> Noted:
    """The game as 84 × 84 grey pictures, every action for four frames."""
    import ale_py
    from gymnasium.wrappers import AtariPreprocessing

    gym.register_envs(ale_py)
    game = gym.make("ALE/Pong-v5", frameskip=1, repeat_action_probability=0.0)
    return Noted(AtariPreprocessing(game, grayscale_newaxis=channel))


def flatout_run(seed: int, steps: int) -> list[tuple[int, float]]:
    """Train flatout's DQN."""
    import flatout

    env = pong(channel=False)
    how: dict[str, Any] = {"n_envs": 1, "n_steps": 4, "train_ratio": 0.25, "multi_step": 3, "double": False}
    how |= {"frame_stack": 4, "atari": False, "network_arch": (), "preset": "auto", "overlap": "off"}
    how["executor"] = "serial"
    agent = flatout.DQN(env, seed=seed, **SETTINGS, **how)
    print(*agent.header(), sep="\n", file=sys.stderr)
    env.begin()
    agent.learn(steps)
    return env.episodes


def sb3_run(seed: int, steps: int) -> list[tuple[int, float]]:
    """Train Stable-Baselines3's DQN."""
    import torch
    from stable_baselines3 import DQN
    from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack

    torch.set_num_threads(1)
    env = pong(channel=True)
    how: dict[str, Any] = {
        "train_freq": 4,
        "gradient_steps": 1,
        "n_steps": 3,
        "policy_kwargs": {"net_arch": []},
    }
    stacked = VecFrameStack(DummyVecEnv([lambda: env]), 4)
    DQN("CnnPolicy", stacked, seed=seed, device="cpu", **SETTINGS, **how).learn(steps)
    return env.episodes


RUNS = {"flatout": flatout_run, "sb3": sb3_run}


def in_a_process(library: str, seed: int, steps: int) -> dict[str, Any]:
    """One run in a fresh process, whose episodes are shown as they end."""
    command = [sys.executable, "-m", "benchmarks.pong", "--one", library, str(seed), str(steps)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return {"episodes": json.loads(done.stdout.splitlines()[-1])}


def mean_until(episodes: list[tuple[int, float]], step: float) -> float:
    """The mean return of the last episodes that had ended by this env step."""
    ended = [value for at, value in episodes if at <= step]
    return statistics.fmean(ended[-WINDOW:]) if ended else float("nan")


def draw(runs: dict[str, dict[str, Any]]) -> None:
    """The curves as a picture."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.5))
    for (library, name), colour in zip(LIBRARIES.items(), ("tab:orange", "tab:blue"), strict=True):
        for i, run in enumerate(run for key, run in runs.items() if key.startswith(library)):
            at = [step for step, _ in run["episodes"]]
            axes.plot(
                at, [mean_until(run["episodes"], it) for it in at], color=colour, label="" if i else name
            )
    axes.set(xlabel="env steps", ylabel=f"return, mean of {WINDOW} episodes")
    axes.legend()
    figure.tight_layout()
    figure.savefig(IMAGE)


def section(runs: dict[str, dict[str, Any]], steps: int) -> str:
    """The table of returns over env steps."""
    marks = [steps * share // 5 for share in range(1, 6)]
    rows = [
        [LIBRARIES[library], seed, *(f"{mean_until(run['episodes'], at):.1f}" for at in marks)]
        for key, run in runs.items()
        for library, seed in [key.split()]
    ]
    header = ["", "seed", *(f"{at // 1000} k" for at in marks)]
    return (
        f"## Pong from frames\n`python -m benchmarks.pong`: DQN at equal settings (Nature CNN, batch 32, an update every 4 steps, "
        f"3-step returns); mean return of the last {WINDOW} episodes of training by env steps, a core for each run. {conditions()}\n\n"
        f"{table(header, rows)}\n\n![Learning curves of Pong](images/{IMAGE.name})"
    )


def main() -> None:
    """Run what is missing and write the section."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--libraries", default=",".join(LIBRARIES))
    parser.add_argument("--seeds", default="1")
    parser.add_argument("--steps", type=int, default=250_000)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        library, seed, steps = args.one
        print(json.dumps(RUNS[library](int(seed), int(steps))))
        return
    for seed in args.seeds.split(","):
        for library in args.libraries.split(","):
            key = f"{library} {seed}"
            if key not in read(args.results):
                add(args.results, key, in_a_process(library, int(seed), args.steps))
    if args.results == RESULTS:
        runs = read(RESULTS)
        draw(runs)
        write_section("pong", section(runs, args.steps))


if __name__ == "__main__":
    main()
