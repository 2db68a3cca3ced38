"""Recurrent PPO: CartPole and Pendulum without velocities beside sb3-contrib at equal settings, and recall after 30 steps.

`python -m benchmarks.recurrent [--cases cartpole,pendulum,recall] [--seeds 1,2,3] [--steps N]` prints a table. Every run
has a process of its own, flatout's and the peer's in turn. The peer is left out where sb3-contrib is not installed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from time import perf_counter
from typing import Any

import gymnasium as gym
import numpy as np

from benchmarks.page import table

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


def flatout_run(case: Case, seed: int, steps: int, memory: bool = True) -> dict[str, Any]:
    """Train with flatout, with or without a memory."""
    import flatout

    settings = case.settings | ({"memory": f"lstm:{case.width}"} if memory else {})
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
    "flatout": flatout_run,
    "sb3-contrib": peer_run,
    "flatout, plain PPO": lambda case, seed, steps: flatout_run(case, seed, steps, memory=False),
}


def in_a_process(who: str, name: str, seed: int, steps: int) -> dict[str, Any]:
    """One run in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.recurrent", "--one", who, name, str(seed), str(steps)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    out: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"{name}, {who}, seed {seed}: {out['return']:.2f} in {out['seconds']:.0f} s", flush=True)
    return out


def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--steps", type=int, default=0, help="0: the case's own")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        who, name, seed, steps = args.one
        print(json.dumps(RUNS[who](CASES[name], int(seed), int(steps))))
        return
    who = [it for it in RUNS if it != "sb3-contrib" or find_spec("sb3_contrib")]
    rows = []
    for name in args.cases.split(","):
        steps = args.steps or CASES[name].steps
        found: dict[str, list[dict[str, Any]]] = {it: [] for it in who}
        for seed in args.seeds.split(","):
            for it in who:
                found[it].append(in_a_process(it, name, int(seed), steps))
        for it, runs in found.items():
            returns = " ".join(f"{run['return']:.2f}" for run in runs)
            speed = statistics.median(steps / run["seconds"] for run in runs)
            rows.append([name, it, f"{steps:,}", returns, f"{speed:,.0f}"])
    print(table(["env", "", "steps", "return by seed", "steps/s"], rows))


if __name__ == "__main__":
    main()
