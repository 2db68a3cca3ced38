"""Does `--executor auto` choose the fastest executor? Compares its choice with all others, alternating.

`python -m benchmarks.choosing [--rounds 7] [--seconds 1]` → docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import gymnasium as gym
import torch

import flatout
from benchmarks.envs import Await, Burn, Wait, loops_for
from benchmarks.page import conditions, table, write_section
from benchmarks.stepping import Way, alternate
from benchmarks.tensor_env import TensorPoles
from flatout.perf.costs import Settings
from flatout.training.stop import StopRequest
from flatout.training.trainer import Trainer

N_ENVS = 32


def batched_cartpole() -> Any:
    """Gymnasium's own CartPole in NumPy, 32 at once."""
    return gym.make_vec("CartPole-v1", N_ENVS, vectorization_mode="vector_entry_point")


ENVS: dict[str, tuple[Any, int, list[Settings]]] = {}
"""Env, its number, and the ways that can run it."""


def plan(kind: Any, **more: Any) -> Settings:
    """A way to force."""
    return Settings(n_envs=N_ENVS, n_steps=1, batch_size=1, executor=kind, **more)


SCALAR = [
    plan("serial"),
    plan("serial", n_collectors=2, in_subprocesses=True),
    plan("process", n_workers=4),
    plan("thread", n_workers=N_ENVS),
]
ENVS["trivial (CartPole)"] = ("CartPole-v1", N_ENVS, SCALAR)
ENVS["computes 300 µs"] = (Burn, N_ENVS, SCALAR)
ENVS["waits 10 ms, blocking"] = (Wait, N_ENVS, [*SCALAR, plan("process", n_workers=32)])
ENVS["waits 10 ms, async"] = (Await, N_ENVS, [plan("async")])
ENVS["batched in NumPy"] = (batched_cartpole, N_ENVS, [plan("batched")])
ENVS["batched in torch"] = (partial(TensorPoles, N_ENVS), N_ENVS, [plan("batched")])


class Forced(Trainer):
    """A trainer with a given plan."""

    forced: Settings

    def _first_that_starts(self, ranked: list[Settings], envs: Any) -> Any:
        return super()._first_that_starts([self.forced], envs)


def collecting(trainer: Trainer) -> tuple[Callable[[], int], Callable[[], None]]:
    """Collects one rollout after the other."""
    pipeline, never = trainer.pipeline, StopRequest()

    def step_all() -> int:
        trainer.collector.collect(pipeline.rollouts[0], never.now)
        return int(pipeline.rollouts[0].n_transitions)

    return step_all, trainer.close


def name_of(way: Settings) -> str:
    """A plan in a few words."""
    if way.in_subprocesses:
        return f"{way.n_collectors} subprocess collectors"
    return f"{way.executor}, {way.n_workers} workers" if way.executor == "process" else way.executor


def open_trainer(source: Any, n_envs: int, forced: Settings | None) -> Trainer:
    """A started trainer for a long run of this env."""
    n_steps = 4 if source in (Wait, Await) else 128
    agent = flatout.PPO(
        source,
        preset="auto",
        n_envs=n_envs,
        n_steps=n_steps,
        batch_size="auto",
        network_arch=(64, 64),
        seed=1,
    )
    info = agent.env_info()
    options: Any = {"n_cores": os.cpu_count(), "n_steps": 10_000_000}
    kind = type("Way", (Forced,), {"forced": forced}) if forced else Trainer
    trainer: Trainer = kind(agent.config, info, agent.policy, **options)
    return trainer


def main() -> None:
    """Choose, then compare."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0)
    args = parser.parse_args()
    os.environ["BURN_LOOPS"] = str(loops_for(300.0))
    torch.set_num_threads(1)
    rows = []
    for name, (source, n_envs, plans) in ENVS.items():
        began = perf_counter()
        chosen = open_trainer(source, n_envs, None)
        started = perf_counter() - began
        picked = name_of(chosen.plan)
        chosen.close()
        ways: dict[str, Way] = {
            name_of(p): partial(lambda *a: collecting(open_trainer(*a)), source, n_envs, p) for p in plans
        }
        speeds = alternate(ways, args.rounds, args.seconds)
        medians = {way: statistics.median(values) for way, values in speeds.items()}
        best = max(medians.values())
        others = ", ".join(f"{way} {v:,.0f}" for way, v in medians.items() if way != picked)
        share = f"{medians[picked] / best:.2f}" if picked in medians else "?"
        rows.append([name, picked, f"{medians.get(picked, 0):,.0f}", share, others, f"{started:.1f} s"])
        print(rows[-1], chosen.plan_reason, flush=True)
    header = ["env", "chosen", "env steps/s", "÷ the best", "other executors", "time to choose and start"]
    text = (
        f"## Choosing an executor\n\n`python -m benchmarks.choosing`: {N_ENVS} envs, a 64-64 policy, collecting only; {args.rounds} rounds "
        f"of {args.seconds:g} s, alternating; medians.\n{conditions()}\n\n{table(header, rows)}"
    )
    write_section("choosing", text)


if __name__ == "__main__":
    main()
