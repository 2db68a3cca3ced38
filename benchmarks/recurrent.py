"""Recurrent PPO: CartPole and Pendulum without velocities beside sb3-contrib at equal settings, and recall after 30 steps.

`python -m benchmarks.recurrent [--cases cartpole,pendulum,recall] [--seeds 1,2,3] [--steps N]` writes its section of
docs/benchmarks.md. Every run has a process of its own, flatout's and the peer's in turn. The peer is left out where
sb3-contrib is not installed. `--kept FILE` appends every run to a file and does not repeat those that are in it, so the
benchmark can be run in pieces; `--limit N` ends after so many new runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

import gymnasium as gym
import numpy as np

from benchmarks.page import conditions, table, write_section

EPISODES = 100


class WithoutVelocity(gym.ObservationWrapper[Any, Any, Any]):
    """Observations without these entries."""

    def __init__(self, env: gym.Env[Any, Any], hidden: tuple[int, ...]) -> None:
        super().__init__(env)
        space: Any = env.observation_space
        self._shown = [i for i in range(space.shape[0]) if i not in hidden]
        self.observation_space = gym.spaces.Box(space.low[self._shown], space.high[self._shown])

    def observation(self, observation: Any) -> Any:
        return observation[self._shown]


class Recall(gym.Env[Any, Any]):
    """Shows one of four cues in the first observation; 30 steps later the action that matches it earns 1, the optimum."""

    DELAY, N_CUES = 30, 4
    observation_space = gym.spaces.Box(0, 1, (N_CUES + 1,))
    action_space = gym.spaces.Discrete(N_CUES)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self._t, self._cue = 0, int(self.np_random.integers(self.N_CUES))
        return np.eye(self.N_CUES + 1, dtype=np.float32)[self._cue], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward = float(self._t == self.DELAY and action == self._cue)
        self._t += 1
        obs = np.zeros(self.N_CUES + 1, np.float32)
        obs[-1] = self._t == self.DELAY
        return obs, reward, self._t > self.DELAY, False, {}


def cartpole() -> gym.Env[Any, Any]:
    """CartPole that shows positions only."""
    return WithoutVelocity(gym.make("CartPole-v1"), (1, 3))


def pendulum() -> gym.Env[Any, Any]:
    """Pendulum that shows the angle only."""
    return WithoutVelocity(gym.make("Pendulum-v1"), (2,))


@dataclass(frozen=True, kw_only=True)
class Case:
    """An env and settings that both libraries have."""

    env: Callable[[], gym.Env[Any, Any]]
    steps: int
    n_envs: int
    width: int = 64
    settings: dict[str, Any] = field(default_factory=dict)


CASES = {
    "cartpole": Case(
        env=cartpole,
        steps=100_000,
        n_envs=8,
        settings={
            "n_steps": 128,
            "batch_size": 256,
            "n_epochs": 10,
            "learning_rate": 1e-3,
            "gamma": 0.98,
            "gae_lambda": 0.9,
        },
    ),
    "pendulum": Case(
        env=pendulum,
        steps=200_000,
        n_envs=8,
        settings={"n_steps": 128, "batch_size": 256, "n_epochs": 10, "learning_rate": 1e-3, "gamma": 0.9},
    ),
    "recall": Case(
        env=Recall,
        steps=200_000,
        n_envs=16,
        settings={"n_steps": 128, "batch_size": 512, "n_epochs": 4, "learning_rate": 1e-3},
    ),
}


def flatout_run(case: Case, seed: int, steps: int, memory: str = "lstm") -> dict[str, Any]:
    """Train with flatout, with a memory of this kind; "": without one."""
    import flatout

    settings = case.settings | ({"memory": f"{memory}:{case.width}"} if memory else {})
    agent = flatout.PPO(case.env, n_envs=case.n_envs, network_arch=(64,), seed=seed, **settings)
    began = perf_counter()
    agent.learn(steps)
    seconds = perf_counter() - began
    return {"return": agent.evaluate(EPISODES).return_mean, "seconds": seconds}


def peer_run(case: Case, seed: int, steps: int) -> dict[str, Any]:
    """Train with sb3-contrib."""
    import torch
    from sb3_contrib import RecurrentPPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy

    torch.set_num_threads(1)
    envs = make_vec_env(case.env, case.n_envs, seed=seed)
    policy = {"lstm_hidden_size": case.width, "net_arch": [64]}
    model = RecurrentPPO(
        "MlpLstmPolicy", envs, seed=seed, device="cpu", policy_kwargs=policy, **case.settings
    )
    began = perf_counter()
    model.learn(steps)
    seconds = perf_counter() - began
    mean: Any = evaluate_policy(model, make_vec_env(case.env, 10, seed=seed + 1000), EPISODES)[0]
    return {"return": float(mean), "seconds": seconds}


RUNS: dict[str, Callable[[Case, int, int], dict[str, Any]]] = {
    "flatout, LSTM": flatout_run,
    "sb3-contrib, LSTM": peer_run,
    "flatout, GRU": partial(flatout_run, memory="gru"),
    "flatout, no memory": partial(flatout_run, memory=""),
}
INTRO = """## Memory

`python -m benchmarks.recurrent`: PPO with a memory of 64 beside sb3-contrib's RecurrentPPO at equal settings. CartPole and Pendulum do not
show velocities. Recall shows one of four cues in its first observation; 30 steps later the action that matches it earns 1, the optimum, and
guessing 0.25. Returns are means of 100 episodes of the deterministic policy. Runs alternate; steps/s is the median.
"""


def in_a_process(who: str, name: str, seed: int, steps: int) -> dict[str, Any]:
    """One run in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.recurrent", "--one", who, name, str(seed), str(steps)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    out: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"{name}, {who}, seed {seed}: {out['return']:.2f} in {out['seconds']:.0f} s", flush=True)
    return out


def section(runs: dict[str, dict[str, Any]], wanted: list[tuple[str, str, int, int]]) -> str:
    """The table of the runs that were made."""
    rows: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for name, who, seed, steps in wanted:
        if (run := runs.get(json.dumps([name, who, seed, steps]))) is not None:
            rows.setdefault((name, who, steps), []).append(run)
    lines = []
    for (name, who, steps), found in rows.items():
        returns = [run["return"] for run in found]
        digits = 2 if max(map(abs, returns)) <= 1 else 0
        each = ", ".join(f"{it:.{digits}f}" for it in returns)
        speed = statistics.median(steps / run["seconds"] for run in found)
        median = f"**{statistics.median(returns):.{digits}f}**"
        lines.append([name, who, f"{steps:,}", each, median, f"{speed:,.0f}"])
    header = ["env", "", "env steps", "returns of the seeds", "median", "steps/s"]
    return f"{INTRO}{conditions()}\n\n{table(header, lines)}"


def main() -> None:
    """Run and write the section."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--who", default="", help="only rows whose name contains this")
    parser.add_argument("--steps", type=int, default=0, help="0: the case's own")
    parser.add_argument("--kept", type=Path, help="file of runs")
    parser.add_argument("--limit", type=int, default=10_000, help="new runs at most")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        who, name, seed, steps = args.one
        print(json.dumps(RUNS[who](CASES[name], int(seed), int(steps))))
        return
    libraries = [it for it in RUNS if args.who in it and ("sb3" not in it or find_spec("sb3_contrib"))]
    wanted = [
        (name, who, int(seed), args.steps or CASES[name].steps)
        for name in args.cases.split(",")
        for seed in args.seeds.split(",")
        for who in libraries
    ]
    runs: dict[str, dict[str, Any]] = {}
    if args.kept and args.kept.exists():
        runs = dict(json.loads(line) for line in args.kept.read_text().splitlines())
    missing = [it for it in wanted if json.dumps(it) not in runs]
    for name, who, seed, steps in missing[: args.limit]:
        key = json.dumps([name, who, seed, steps])
        runs[key] = in_a_process(who, name, seed, steps)
        if args.kept:
            with args.kept.open("a") as file:
                file.write(json.dumps([key, runs[key]]) + "\n")
    if len(missing) <= args.limit and not args.who:
        write_section("recurrent", section(runs, sorted(wanted, key=lambda it: list(CASES).index(it[0]))))


if __name__ == "__main__":
    main()
