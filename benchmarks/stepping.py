"""Stepping envs, beside the peers: every kind of env cost, each measurement in a fresh process, alternating.

`python -m benchmarks.stepping [--rounds 5] [--seconds 2]` → docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import gymnasium as gym
import numpy as np

from benchmarks.envs import Await, Burn, Wait, loops_for
from benchmarks.page import conditions, table, write_section

CARTPOLE = 32
BURN = 16
WAIT = 32
AWAIT = 1024


def rate(step_all: Callable[[], int], seconds: float) -> float:
    """Env steps a second of `step_all`, which returns how many it took; a quarter of the time to warm up."""
    until = perf_counter() + seconds / 4
    while perf_counter() < until:
        step_all()
    n, began = 0, perf_counter()
    while perf_counter() - began < seconds:
        n += step_all()
    return n / (perf_counter() - began)


def single(make: Callable[[], gym.Env[Any, Any]], seconds: float) -> float:
    """One env, stepped and reset by hand."""
    env = make()
    env.reset(seed=1)
    action = env.action_space.sample()

    def step_all() -> int:
        _, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            env.reset()
        return 1

    return rate(step_all, seconds)


def flatout_vec(env: Any, n_envs: int, executor: str, seconds: float, **options: Any) -> float:
    """`flatout.make_vec`, stepped with random actions as a Gymnasium vector env."""
    import flatout

    envs = flatout.make_vec(env, n_envs=n_envs, executor=executor, **options)
    out = _gym_rate(envs, n_envs, seconds)
    envs.close()
    return out


def flatout_ready(env: Any, n_envs: int, executor: str, seconds: float) -> float:
    """The same through send and recv: whichever envs are ready get the next action."""
    import flatout

    envs = flatout.make_vec(env, n_envs=n_envs, executor=executor)
    envs.reset(seed=1)
    rng = np.random.default_rng(0)
    n_actions = int(envs.single_action_space.n)  # type: ignore[attr-defined]
    envs.send(rng.integers(n_actions, size=n_envs))

    def step_all() -> int:
        rows = envs.recv().rows
        envs.send(rng.integers(n_actions, size=len(rows)), rows)
        return len(rows)

    out = rate(step_all, seconds)
    envs.close()
    return out


def _gym_rate(envs: Any, n_envs: int, seconds: float) -> float:
    envs.reset(seed=1)
    rng = np.random.default_rng(0)
    actions = rng.integers(2, size=(512, n_envs))
    t = 0

    def step_all() -> int:
        nonlocal t
        t += 1
        envs.step(actions[t % 512])
        return n_envs

    return rate(step_all, seconds)


def gym_vec(kind: str, make: Callable[[], gym.Env[Any, Any]], n_envs: int, seconds: float) -> float:
    """Gymnasium's own vector envs."""
    cls = gym.vector.SyncVectorEnv if kind == "sync" else gym.vector.AsyncVectorEnv
    envs = cls([make] * n_envs)
    out = _gym_rate(envs, n_envs, seconds)
    envs.close()
    return out


def sb3_vec(kind: str, make: Callable[[], gym.Env[Any, Any]], n_envs: int, seconds: float) -> float:
    """Stable-Baselines3's vector envs."""
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

    envs = (DummyVecEnv if kind == "dummy" else SubprocVecEnv)([make] * n_envs)
    envs.reset()
    rng = np.random.default_rng(0)

    def step_all() -> int:
        envs.step(rng.integers(2, size=n_envs))
        return n_envs

    out = rate(step_all, seconds)
    envs.close()
    return out


def envpool_vec(seconds: float) -> float:
    """EnvPool's CartPole, written in C++."""
    import envpool

    envs = envpool.make_gymnasium("CartPole-v1", num_envs=CARTPOLE)
    envs.reset()
    rng = np.random.default_rng(0)

    def step_all() -> int:
        envs.step(rng.integers(2, size=CARTPOLE).astype(np.int32))
        return CARTPOLE

    return rate(step_all, seconds)


def collectors(source: Any, n_envs: int, n_children: int, seconds: float) -> float:
    """Rollouts of 32 steps with a 64-64 policy acting: in this process (0 children) or in children."""
    import torch

    import flatout
    from benchmarks.collecting import child_job
    from flatout.buffers.rollout import Rollout
    from flatout.collect.child import ChildCollectors
    from flatout.collect.collector import Collector
    from flatout.executors.serial import SerialExecutor
    from flatout.trace.phases import PhaseClock

    torch.set_num_threads(1)
    agent = flatout.PPO(source, preset="auto", network_arch=(64, 64), n_envs=n_envs, seed=1)
    policy, factory = agent.policy, agent._env_info().factory
    clock = PhaseClock()
    if n_children:
        children = ChildCollectors(child_job(agent), policy.model, n_children, n_steps=32, clock=clock)
        children.reset()
        collect = partial(children.collect, children.rollout)
    else:
        executor = SerialExecutor(factory, policy.obs, np.arange(n_envs), 1)
        executor.reset()
        here = Collector(
            executor, policy.model, policy.action, device=torch.device("cpu"), seed=1, clock=clock
        )
        collect = partial(here.collect, Rollout.alloc(policy.obs, policy.action, 32, n_envs))

    def step_all() -> int:
        collect()
        return 32 * n_envs

    out = rate(step_all, seconds)
    if n_children:
        children.close()
    return out


def make_cartpole() -> gym.Env[Any, Any]:
    """CartPole as Gymnasium's users make it."""
    return gym.make("CartPole-v1")


CASES: dict[str, dict[str, Callable[[float], float]]] = {
    f"1a. {CARTPOLE} × CartPole, random actions, one process": {
        "flatout serial": partial(flatout_vec, "CartPole-v1", CARTPOLE, "serial"),
        "Gymnasium Sync": partial(gym_vec, "sync", make_cartpole, CARTPOLE),
        "SB3 Dummy": partial(sb3_vec, "dummy", make_cartpole, CARTPOLE),
        "EnvPool (C++ env)": envpool_vec,
    },
    f"1b. {CARTPOLE} × CartPole, a 64-64 policy acting": {
        "flatout, one process": partial(collectors, "CartPole-v1", CARTPOLE, 0),
        "flatout, 2 child collectors": partial(collectors, "CartPole-v1", CARTPOLE, 2),
    },
    f"2. {BURN} × an env that computes 300 µs": {
        "one env by hand": partial(single, Burn),
        "flatout process": partial(flatout_ready, Burn, BURN, "process"),
        "flatout, 2 child collectors": partial(collectors, Burn, BURN, 2),
        "Gymnasium Async": partial(gym_vec, "async", Burn, BURN),
        "SB3 Subproc": partial(sb3_vec, "subproc", Burn, BURN),
    },
    "3. envs that wait 10 ± 5 ms": {
        f"flatout thread, {WAIT} envs": partial(flatout_ready, Wait, WAIT, "thread"),
        f"flatout async, {AWAIT} envs": partial(flatout_ready, Await, AWAIT, "async"),
        f"Gymnasium Async, {WAIT} envs": partial(gym_vec, "async", Wait, WAIT),
        f"SB3 Subproc, {WAIT} envs": partial(sb3_vec, "subproc", Wait, WAIT),
    },
}


def in_a_process(case: str, name: str, seconds: float) -> float | None:
    """One measurement in a process of its own; None where the peer is not installed."""
    command = [sys.executable, "-m", "benchmarks.stepping", "--one", case, name, "--seconds", str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(f"{name}: {done.stderr.splitlines()[-1] if done.stderr else 'failed'}", flush=True)
        return None
    out: float = json.loads(done.stdout.splitlines()[-1])
    print(f"{name}: {out:,.0f} steps/s", flush=True)
    return out


def main() -> None:
    """Alternate the ways of each case and write the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--cases", default="")
    parser.add_argument("--one", nargs=2)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(CASES[args.one[0]][args.one[1]](args.seconds)))
        return
    os.environ["BURN_LOOPS"] = str(loops_for(300.0))
    parts = []
    for case, ways in CASES.items():
        if not case.startswith(args.cases):
            continue
        print(case, flush=True)
        speeds: dict[str, list[float | None]] = {name: [] for name in ways}
        for _ in range(args.rounds):
            for name in ways:
                speeds[name].append(in_a_process(case, name, args.seconds))
        first = next(iter(ways))
        rows = [[name, *_cells(speeds[name], speeds[first])] for name in ways]
        parts.append(f"**{case}**\n\n" + table(["", "env steps/s, median", f"÷ {first}"], rows))
    if args.cases:
        print("\n\n".join(parts))
        return
    intro = (
        f"## Stepping\n\n`python -m benchmarks.stepping`: {args.rounds} rounds, alternating, a fresh process each; "
        f"medians, and medians of the ratios within a round.\n{conditions()}\n\n"
    )
    write_section("stepping", intro + "\n\n".join(parts))


def _cells(values: list[float | None], base: list[float | None]) -> list[str]:
    known = [v for v in values if v is not None]
    ratios = [v / b for v, b in zip(values, base, strict=True) if v is not None and b is not None]
    if not known or not ratios:
        return ["not installed", ""]
    return [f"{statistics.median(known):,.0f}", f"{statistics.median(ratios):.2f}"]


if __name__ == "__main__":
    main()
