"""A soak test: workers and subprocess collectors are killed at random; nothing may leak.

`python -m benchmarks.soak [--minutes 10] [--kills 200]` prints file descriptors, threads and memory at the start
and at the end, and fails if they have grown.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import signal
import threading
from dataclasses import replace
from time import perf_counter, sleep

import numpy as np
import psutil
import torch

import flatout
from benchmarks.collecting import collector_job
from flatout.collect.subprocess import SubprocessCollectors
from flatout.executors.base import RestartBudget, step
from flatout.executors.process import ProcessExecutor

N_ENVS, N_STEPS = 16, 32


def usage() -> dict[str, float]:
    """What this process and its children hold now."""
    gc.collect()
    me = psutil.Process()
    children = me.children(recursive=True)
    return {
        "file descriptors": me.num_fds(),
        "threads": me.num_threads(),
        "memory, MB": round(me.memory_info().rss / 1e6, 1),
        "child processes": len(children),
        "children's memory, MB": round(sum(c.memory_info().rss for c in children) / 1e6, 1),
        "/dev/shm entries": len(os.listdir("/dev/shm")),
    }


def main() -> None:
    """Work, kill, compare."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--kills", type=int, default=200)
    args = parser.parse_args()
    torch.set_num_threads(1)
    agent = flatout.PPO("CartPole-v1", preset="auto", n_envs=N_ENVS, seed=1)
    policy = agent.policy
    budget = RestartBudget(10_000)
    job = collector_job(agent)
    job = replace(job, envs=replace(job.envs, budget=budget))
    children = SubprocessCollectors(job, policy.model, 2, n_steps=N_STEPS, timeout=20)
    workers = ProcessExecutor(job.envs, n_workers=2, step_timeout=20)
    children.reset()
    workers.reset()
    killed: list[int] = []
    done = threading.Event()

    def kill_at_random() -> None:
        rng = random.Random(1)
        pause = args.minutes * 60 / args.kills
        while len(killed) < args.kills:
            sleep(rng.uniform(0.5, 1.5) * pause)
            pid = rng.choice(children.pids + workers.pids)
            try:
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
            except ProcessLookupError:
                continue
        done.set()

    n_steps = 0
    before: dict[str, float] = {}
    killer = threading.Thread(target=kill_at_random)
    began = perf_counter()
    while not done.is_set():
        children.collect(children.rollouts[0])
        for _ in range(N_STEPS):
            step(workers, np.zeros(N_ENVS, np.int64))
        n_steps += 2 * N_ENVS * N_STEPS
        if not before and perf_counter() - began > 5:  # warm
            before = usage()
            killer.start()
    killer.join()
    for _ in range(20):
        children.collect(children.rollouts[0])
        for _ in range(N_STEPS):
            step(workers, np.zeros(N_ENVS, np.int64))
    after = usage()
    print(
        f"{n_steps:,} env steps, {len(killed)} kills, {budget.n_restarts} restarts, {perf_counter() - began:.0f} s"
    )
    for name, value in before.items():
        print(f"{name}: {value:g} at the start, {after[name]:g} at the end")
    children.close()
    workers.close()
    before["threads"] += 1  # the killer, counted at the start or not
    grown = [name for name in before if after[name] > before[name] * (1.1 if "memory" in name else 1.0)]
    if grown:
        raise SystemExit(f"grown: {', '.join(grown)}")


if __name__ == "__main__":
    main()
