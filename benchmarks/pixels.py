"""Learning from frames beside Stable-Baselines3: updates of the Nature CNN, and the curve of Pong.

`python -m benchmarks.pixels [--cases update,pong] [--seeds 3] [--steps 200000] [--env ALE/Pong-v5]` → docs/benchmarks.md.
Every run is a fresh process; the libraries alternate, seed by seed. The updates' env shows noise, so nothing but
Stable-Baselines3 is needed; Pong needs flatout[atari] or flatout[envpool].
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


def flatout_pong(env: str, seed: int, n_steps: int) -> dict[str, Any]:
    """The learning curve of the recipe: env steps, seconds, mean return of the last 100 episodes."""
    import flatout

    curve: list[tuple[int, float, float]] = []

    def note(progress: Any) -> bool:
        mean = float("nan") if progress.return_mean is None else progress.return_mean
        curve.append((progress.env_steps, progress.seconds, mean))
        return True

    agent = flatout.PPO(env, seed=seed)
    agent.learn(n_steps, callback=note)
    rate = agent.summary["updates"] / agent.summary["phases"]["update"]
    return {"curve": curve, "updates": rate, "wall": agent.summary["wall_seconds"]}


def sb3_pong(env: str, seed: int, n_steps: int) -> dict[str, Any]:
    """The same settings in Stable-Baselines3, with the same preprocessing by Gymnasium and frames stacked by SB3."""
    import ale_py
    from gymnasium.wrappers import AtariPreprocessing
    from stable_baselines3 import PPO as Peer
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecFrameStack

    gym.register_envs(ale_py)
    game = env.replace("envpool:", "ALE/")

    def make() -> gym.Env[Any, Any]:
        return AtariPreprocessing(gym.make(game, frameskip=1), grayscale_newaxis=True)

    curve: list[tuple[int, float, float]] = []
    began = perf_counter()

    class Note(BaseCallback):  # type: ignore[misc, unused-ignore]
        def _on_step(self) -> bool:
            return True

        def _on_rollout_end(self) -> None:
            returns = [episode["r"] for episode in self.model.ep_info_buffer or ()]
            mean = float(np.mean(returns)) if returns else float("nan")
            curve.append((self.num_timesteps, perf_counter() - began, mean))

    envs = VecFrameStack(make_vec_env(make, n_envs=8, seed=seed), 4)
    agent = Peer(
        "CnnPolicy",
        envs,
        n_steps=128,
        batch_size=256,
        n_epochs=4,
        learning_rate=lambda left: 2.5e-4 * left,
        clip_range=lambda left: 0.1 * left,
        ent_coef=0.01,
        seed=seed,
        device="cpu",
    )
    agent.learn(n_steps, callback=Note())
    return {"curve": curve, "wall": perf_counter() - began}


def run(library: str, case: str, *arguments: str) -> Any:
    """One run in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.pixels", "--one", library, case, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{library} {case}: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def one(library: str, case: str, arguments: list[str]) -> Any:
    """What a child process measures."""
    if case == "pong":
        env, seed, n_steps = arguments
        return (flatout_pong if library == "flatout" else sb3_pong)(env, int(seed), int(n_steps))
    return (flatout_update if library == "flatout" else sb3_update)(case, int(arguments[0]))


def update_section(n_seeds: int) -> str:
    """The table of updates/s."""
    rows = []
    for algo in ("ppo", "dqn"):
        found: dict[str, list[dict[str, float]]] = {"sb3": [], "flatout": []}
        for seed in range(1, n_seeds + 1):
            for library in found:
                found[library].append(run(library, algo, str(seed)))
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


def pong_section(env: str, n_seeds: int, n_steps: int) -> str:
    """The table of returns over steps."""
    rows = []
    for seed in range(1, n_seeds + 1):
        for library in ("sb3", "flatout"):
            found = run(library, "pong", env, str(seed), str(n_steps))
            marks = [
                found["curve"][int(share * (len(found["curve"]) - 1))] for share in (0.25, 0.5, 0.75, 1.0)
            ]
            returns = [f"{mean:.1f} ({steps / 1e3:.0f} k)" for steps, _, mean in marks]
            rows.append([library, str(seed), *returns, f"{found['wall']:.0f} s"])
            print(rows[-1], flush=True)
    return (
        f"## {env}\nPPO at equal settings: mean return of the last 100 episodes (env steps), and the wall time.\n\n"
        + table(["", "seed", "25 %", "50 %", "75 %", "100 %", "wall"], rows)
        + f"\n\n{conditions()}"
    )


def main() -> None:
    """Run the cases and write their sections."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", default="update")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--env", default="ALE/Pong-v5")
    parser.add_argument("--one", nargs="+")
    args = parser.parse_args()
    if args.one:
        library, case, *arguments = args.one
        print(json.dumps(one(library, case, arguments)))
        return
    for case in args.cases.split(","):
        if case == "update":
            write_section("pixels", update_section(args.seeds))
        else:
            write_section("pong", pong_section(args.env, args.seeds, args.steps))


if __name__ == "__main__":
    main()
