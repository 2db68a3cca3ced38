"""Stepping envs compared with peers, for every kind of env cost.

The ways of a case are all opened in one process and then alternate in short turns, so that a slow moment of the
machine meets all of them. `python -m benchmarks.stepping [--rounds 15] [--seconds 0.5]` → docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from time import perf_counter, process_time
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np

from benchmarks.envs import Await, Burn, Wait, loops_for
from benchmarks.page import conditions, table, write_section

CARTPOLE = 32
BURN = 16
WAIT = 32
AWAIT = 1024
ROLLOUT = 256

Way: TypeAlias = Callable[[], tuple[Callable[[], int], Callable[[], None]]]
"""Opens envs; gives what steps them, returning how many steps that were, and what closes them."""


def rate(step_all: Callable[[], int], seconds: float, clock: Callable[[], float] = perf_counter) -> float:
    """Env steps a second, of wall time or of another clock, over one turn; a fifth of it first to warm up."""
    until = perf_counter() + seconds / 5
    while perf_counter() < until:
        step_all()
    n, began, until = 0, clock(), perf_counter() + seconds
    while perf_counter() < until:
        n += step_all()
    return n / (clock() - began)


def single(make: Callable[[], gym.Env[Any, Any]]) -> tuple[Callable[[], int], Callable[[], None]]:
    """One env, stepped and reset directly."""
    env = make()
    env.reset(seed=1)
    action = env.action_space.sample()

    def step_all() -> int:
        _, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            env.reset()
        return 1

    return step_all, env.close


def flatout_vec(
    env: Any, n_envs: int, executor: str, **options: Any
) -> tuple[Callable[[], int], Callable[[], None]]:
    """`flatout.make_vec`, stepped with random actions as a Gymnasium vector env."""
    import flatout

    return _gym(flatout.make_vec(env, n_envs=n_envs, executor=executor, **options))


def flatout_ready(
    env: Any, n_envs: int, executor: str, **options: Any
) -> tuple[Callable[[], int], Callable[[], None]]:
    """The same through send and recv: whichever envs are ready get the next action."""
    import flatout

    envs = flatout.make_vec(env, n_envs=n_envs, executor=executor, **options)
    envs.reset(seed=1)
    rng = np.random.default_rng(0)
    n_actions = int(envs.single_action_space.n)  # type: ignore[attr-defined]
    envs.send(rng.integers(n_actions, size=n_envs))

    def step_all() -> int:
        rows = envs.recv().rows
        envs.send(rng.integers(n_actions, size=len(rows)), rows)
        return len(rows)

    return step_all, envs.close


def _gym(envs: Any) -> tuple[Callable[[], int], Callable[[], None]]:
    n_envs = int(envs.num_envs)
    envs.reset(seed=1)
    actions = np.random.default_rng(0).integers(2, size=(512, n_envs))
    t = 0

    def step_all() -> int:
        nonlocal t
        t += 1
        envs.step(actions[t % 512])
        return n_envs

    return step_all, envs.close


def gym_vec(
    kind: str, make: Callable[[], gym.Env[Any, Any]], n_envs: int
) -> tuple[Callable[[], int], Callable[[], None]]:
    """Gymnasium's own vector envs."""
    cls = gym.vector.SyncVectorEnv if kind == "sync" else gym.vector.AsyncVectorEnv
    return _gym(cls([make] * n_envs))


def sb3_vec(
    kind: str, make: Callable[[], gym.Env[Any, Any]], n_envs: int
) -> tuple[Callable[[], int], Callable[[], None]]:
    """Stable-Baselines3's vector envs."""
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

    envs = (DummyVecEnv if kind == "dummy" else SubprocVecEnv)([make] * n_envs)
    envs.reset()
    rng = np.random.default_rng(0)

    def step_all() -> int:
        envs.step(rng.integers(2, size=n_envs))
        return n_envs

    return step_all, envs.close


def envpool_vec() -> tuple[Callable[[], int], Callable[[], None]]:
    """EnvPool's CartPole, written in C++."""
    import envpool

    envs = envpool.make_gymnasium("CartPole-v1", num_envs=CARTPOLE)
    envs.reset()
    rng = np.random.default_rng(0)

    def step_all() -> int:
        envs.step(rng.integers(2, size=CARTPOLE).astype(np.int32))
        return CARTPOLE

    return step_all, lambda: None


def collectors(
    source: Any, n_envs: int, n_children: int, n_steps: int = ROLLOUT
) -> tuple[Callable[[], int], Callable[[], None]]:
    """Rollouts with a 64-64 policy acting: in this process (0 children) or in children."""
    import torch

    import flatout
    from benchmarks.collecting import collector_job
    from flatout.buffers.rollout import Rollout
    from flatout.collect.collector import Collector
    from flatout.collect.subprocess import SubprocessCollectors
    from flatout.executors.base import EnvSet
    from flatout.executors.serial import SerialExecutor
    from flatout.timing import PhaseClock

    torch.set_num_threads(1)
    agent = flatout.PPO(source, preset="auto", network_arch=(64, 64), n_envs=n_envs, seed=1)
    policy, factory, clock = agent.policy, agent.env_info().factory, PhaseClock()
    if n_children:
        children = SubprocessCollectors(collector_job(agent), policy.model, n_children, n_steps=n_steps)
        children.reset()
        collect, close = partial(children.collect, children.rollouts[0]), children.close
    else:
        executor = SerialExecutor(EnvSet(factory, policy.obs, np.arange(n_envs), 1))
        executor.reset()
        here = Collector(executor, policy.model, device=torch.device("cpu"), seed=1, clock=clock)
        collect = partial(here.collect, Rollout.alloc(policy.obs, policy.action, n_steps, n_envs))
        close = executor.close

    def step_all() -> int:
        collect()
        return n_steps * n_envs

    return step_all, close


def apart(way: Way, n_calls: int) -> tuple[Callable[[], int], Callable[[], None]]:
    """The machine's limit: the same work in two independent processes, `n_calls` at a time."""
    context = get_context("spawn")
    ends = [context.Pipe() for _ in range(2)]
    processes = [
        context.Process(target=_apart, args=(theirs, way, n_calls), daemon=True) for _, theirs in ends
    ]
    for process in processes:
        process.start()

    def step_all() -> int:
        for ours, _ in ends:
            ours.send_bytes(b"go")
        return sum(int(ours.recv_bytes()) for ours, _ in ends)

    def close() -> None:
        for process in processes:
            process.kill()

    return step_all, close


def _apart(connection: Connection, way: Way, n_calls: int) -> None:
    step_all, _ = way()
    while connection.recv_bytes():
        connection.send_bytes(str(sum(step_all() for _ in range(n_calls))).encode())


def make_cartpole() -> gym.Env[Any, Any]:
    """CartPole as Gymnasium's users make it."""
    return gym.make("CartPole-v1")


CASES: dict[str, dict[str, Way]] = {
    f"1a. {CARTPOLE} × CartPole, random actions, one process": {
        "Gymnasium Sync": partial(gym_vec, "sync", make_cartpole, CARTPOLE),
        "flatout serial": partial(flatout_vec, "CartPole-v1", CARTPOLE, "serial"),
        "SB3 Dummy": partial(sb3_vec, "dummy", make_cartpole, CARTPOLE),
        "EnvPool (C++ env)": envpool_vec,
    },
    f"1b. {CARTPOLE} × CartPole, a 64-64 policy acting, rollouts of {ROLLOUT} steps": {
        "flatout, one process": partial(collectors, "CartPole-v1", CARTPOLE, 0),
        "flatout, 2 subprocess collectors": partial(collectors, "CartPole-v1", CARTPOLE, 2),
        "two independent processes": partial(apart, partial(collectors, "CartPole-v1", CARTPOLE // 2, 0), 1),
        "2 subprocess collectors, rollouts of 32 steps": partial(collectors, "CartPole-v1", CARTPOLE, 2, 32),
    },
    f"2. {BURN} × an env that computes 300 µs": {
        "one env, stepped directly": partial(single, Burn),
        "flatout process": partial(flatout_ready, Burn, BURN, "process"),
        "flatout, 2 subprocess collectors": partial(collectors, Burn, BURN, 2, 64),
        "two independent processes": partial(apart, partial(single, Burn), 512),
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


def alternate(ways: dict[str, Way], rounds: int, seconds: float) -> dict[str, list[float]]:
    """Steps/s of each way in every round; a way whose package is not installed has none."""
    opened = {}
    for name, way in ways.items():
        try:
            opened[name] = way()
        except ImportError as error:
            print(f"{name}: {error}", flush=True)
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, (step_all, _) in opened.items():
            speeds[name].append(rate(step_all, seconds))
    for _, close in opened.values():
        close()
    return speeds


SIZES = (8, 64, 256, 1024)


def cost_by_size(rounds: int, seconds: float) -> str:
    """CPU time per env step against the number of envs."""
    batched = partial(gym.make_vec, "CartPole-v1", vectorization_mode="vector_entry_point")
    kinds: dict[str, Callable[[int], Way]] = {
        "serial (CartPole)": lambda n: partial(flatout_vec, "CartPole-v1", n, "serial"),
        "async (waits 10 ± 5 ms)": lambda n: partial(flatout_ready, Await, n, "async"),
        "batched (CartPole in NumPy)": lambda n: partial(batched_rollouts, partial(batched, num_envs=n), n),
    }
    rows = []
    for name, way_of in kinds.items():
        opened = [way_of(n)() for n in SIZES]
        costs: list[list[float]] = [[] for _ in SIZES]
        for _ in range(rounds):
            for out, (step_all, _) in zip(costs, opened, strict=True):
                out.append(1e6 / rate(step_all, seconds, process_time))
        for _, close in opened:
            close()
        ratio = statistics.median(last / first for first, last in zip(costs[0], costs[-1], strict=True))
        cells = [f"{statistics.median(values):.1f} µs" for values in costs]
        rows.append([name, *cells, f"{ratio:.2f}"])
    header = ["", *(f"{n:,} envs" for n in SIZES), f"{SIZES[-1]:,} ÷ {SIZES[0]}"]
    return "**4. CPU time per env step, by number of envs**\n\n" + table(header, rows)


def batched_rollouts(factory: Callable[[], Any], n_envs: int) -> tuple[Callable[[], int], Callable[[], None]]:
    """Rollouts of a batched env with a 64-64 policy acting."""
    import flatout
    from flatout.training.stop import StopRequest

    agent = flatout.PPO(
        factory, preset="auto", n_envs=n_envs, n_steps=32, batch_size="auto", network_arch=(64, 64), seed=1
    )
    trainer = agent.trainer()

    def step_all() -> int:
        trainer.collector.collect(trainer.pipeline.rollouts[0], StopRequest().now)
        return 32 * n_envs

    return step_all, trainer.close


def main() -> None:
    """Alternate the ways of each case and write the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--cases", default="")
    args = parser.parse_args()
    os.environ["BURN_LOOPS"] = str(loops_for(300.0))
    parts = []
    for case, ways in CASES.items():
        if not case.startswith(args.cases):
            continue
        speeds = alternate(ways, args.rounds, args.seconds)
        first = next(iter(ways))
        rows = [[name, *_cells(speeds[name], speeds[first])] for name in ways]
        parts.append(f"**{case}**\n\n" + table(["", "env steps/s", f"÷ {first}", "range of the ratio"], rows))
        print(parts[-1], flush=True)
    if "5".startswith(args.cases):
        parts.append(cost_by_size(args.rounds, args.seconds))
        print(parts[-1], flush=True)
    if args.cases:
        return
    intro = (
        f"## Stepping\n\n`python -m benchmarks.stepping`: all rows of a table in one process, taking turns "
        f"of {args.seconds:g} s, {args.rounds} rounds. Medians; ratios are taken within a round.\n{conditions()}\n\n"
    )
    write_section("stepping", intro + "\n\n".join(parts))


def _cells(values: list[float], base: list[float]) -> list[str]:
    if not values:
        return ["not installed", "", ""]
    ratios = [v / b for v, b in zip(values, base, strict=True)]
    return [
        f"{statistics.median(values):,.0f}",
        f"{statistics.median(ratios):.2f}",
        f"{min(ratios):.2f} to {max(ratios):.2f}",
    ]


if __name__ == "__main__":
    main()
