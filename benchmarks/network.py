"""Collectors behind a network: predicted and measured steps/s with injected latency and bandwidth, and a table on paper.

`python -m benchmarks.network` → docs/benchmarks.md: real runs of `--executor ray` on this machine. Before an actor collects
it waits for as long as parameters would take to come, and afterwards for as long as its rollout would take to go. Most envs
sleep, and so does the learner, as one does that waits for a card: the machine's load matters less then. Costs are measured
right before each run, without any delay.
`python -m benchmarks.network --paper` → how many collectors feed one A100 and eight H100s.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import gymnasium as gym
import numpy as np

from benchmarks.accelerator import ROOT
from benchmarks.envs import Burn, Wait, loops_for
from benchmarks.page import conditions, table, write_section

CLOSE = 0.20
SECONDS = 5.0
RESULTS = ROOT / "benchmarks" / "results" / "network.json"
COMMON: dict[str, Any] = {
    "n_envs": 8,
    "n_steps": 16,
    "batch_size": 64,
    "n_epochs": 1,
    "preset": "auto",
    "seed": 1,
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One run."""

    step_ms: float
    """That an env waits; 0: it computes for 300 µs."""
    latency_ms: float
    n_collectors: int = 2
    overlap: str = "off"
    mbit: float = float("inf")
    learn_ms: float = 100.0
    """That the learner waits for its card."""


SETTINGS = [
    Setting(step_ms=5, latency_ms=0),
    Setting(step_ms=5, latency_ms=5),
    Setting(step_ms=5, latency_ms=20, overlap="on"),
    Setting(step_ms=5, latency_ms=100),
    Setting(step_ms=5, latency_ms=100, overlap="on"),
    Setting(step_ms=5, latency_ms=20, n_collectors=4, overlap="on", learn_ms=400),
    Setting(step_ms=20, latency_ms=0, n_collectors=4, overlap="on"),
    Setting(step_ms=20, latency_ms=20, n_collectors=4),
    Setting(step_ms=20, latency_ms=100, n_collectors=4, overlap="on"),
    Setting(step_ms=1, latency_ms=20),
    Setting(step_ms=1, latency_ms=100, overlap="on"),
    Setting(step_ms=5, latency_ms=5, mbit=2),
    Setting(step_ms=20, latency_ms=20, n_collectors=1, overlap="on", mbit=2),
    Setting(step_ms=0, latency_ms=20),
]


def env_of(step_ms: float) -> Any:
    """A factory of envs that wait so long, or compute."""
    if not step_ms:
        return Burn

    def make() -> gym.Env[Any, Any]:
        return Wait(step_ms / 1e3, step_ms / 4e3)

    return make


def delayed(before: float, after: float) -> Any:
    """An actor that collects as one does on another machine: its parameters come late, and so does its rollout."""
    from flatout.collect.ray_actors import CollectorActor

    class Delayed(CollectorActor):
        def collect(self, values: Any, n_steps: int, traced: bool) -> Any:
            time.sleep(before)
            answer = super().collect(values, n_steps, traced)
            time.sleep(after)
            return answer

    return Delayed


def echoes(ray: Any, n: int) -> list[Any]:
    """Actors that answer at once."""

    class Echo:
        def collect(self, values: Any, n_bytes: int) -> Any:
            return np.zeros(n_bytes, np.uint8)

    return [ray.remote(num_cpus=0.1)(Echo).remote() for _ in range(n)]


def store_seconds(ray: Any, actors: list[Any], param_bytes: int, rollout_bytes: int) -> tuple[float, float]:
    """Parameters and a rollout through the object store of this machine, Ray's own cost: seconds, and those on the learner's core."""
    values, times, on_core = np.zeros(param_bytes, np.uint8), [], []
    for _ in range(12):
        began, worked = time.perf_counter(), time.process_time()
        stored = ray.put(values)
        ray.get([it.collect.remote(stored, rollout_bytes // len(actors)) for it in actors])
        times.append(time.perf_counter() - began)
        on_core.append(time.process_time() - worked)
    return statistics.median(times[2:]), statistics.median(on_core[2:])


def run(setting: Setting, ray: Any, actors: list[Any]) -> dict[str, Any]:
    """Measure the costs, predict, run."""
    import flatout
    from flatout.advice.doctor import sizes
    from flatout.advice.short_benchmark import measure_costs, short_benchmark
    from flatout.collect import ray_actors
    from flatout.perf.costs import Network, UpdateCost, update_seconds
    from flatout.perf.simulate import simulate

    how: dict[str, Any] = {
        "executor": "ray",
        "n_collectors": setting.n_collectors,
        "overlap": setting.overlap,
    }
    agent = flatout.PPO(env_of(setting.step_ms), **COMMON, **how)
    network = Network(
        latency=setting.latency_ms / 1e3,
        bandwidth=setting.mbit * 1e6 / 8,
        cores=COMMON["n_envs"],
        **sizes(agent),
    )
    costs = measure_costs(agent)
    total_batch = agent.config.total_batch
    way, on_core = store_seconds(ray, actors, network.param_bytes, network.step_bytes * total_batch)
    actor = ray_actors.CollectorActor
    ray_actors.CollectorActor = delayed(  # type: ignore[misc]
        network.out_seconds(setting.n_collectors), network.back_seconds(total_batch)
    )
    try:
        trainer = agent.trainer(10**9)
        settings = replace(trainer.plan, network=network, on_device=True, compiled=costs.compiled is not None)
        learn = trainer.learner.learn

        def learn_on_a_card(*args: Any, **kwargs: Any) -> Any:
            metrics = learn(*args, **kwargs)
            time.sleep(setting.learn_ms / 1e3)
            return metrics

        trainer.learner.learn = learn_on_a_card  # type: ignore[method-assign]
        update = update_seconds(costs, settings)
        on_card = setting.learn_ms / 1e3 / settings.n_updates / costs.learn_overhead
        points = ((settings.batch_size, update + on_card),)
        costs = replace(costs, update=UpdateCost(python=update, points=points), compiled=None, beside=None)
        costs = replace(costs, ray_call=way / setting.n_collectors)
        forecast = simulate(costs, replace(settings, compiled=False))
        result = short_benchmark(agent, SECONDS)
    finally:
        ray_actors.CollectorActor = actor  # type: ignore[misc]
        agent.close()
    return {
        "predicted": forecast.steps_per_second,
        "measured": result.steps_per_second,
        "store_seconds": way,
        "call_seconds": on_core / setting.n_collectors,
        "step_seconds": costs.step_seconds,
        "load": os.getloadavg()[0],
    }


def row(setting: Setting, got: dict[str, Any]) -> list[str]:
    """A line of the table."""
    env = f"waits {setting.step_ms:g} ms" if setting.step_ms else "computes 300 µs"
    link = "-" if setting.mbit == float("inf") else f"{setting.mbit:g} Mbit/s"
    off = got["predicted"] / got["measured"] - 1
    how = [str(setting.n_collectors), setting.overlap, f"{setting.learn_ms:g} ms"]
    speeds = [f"{got['predicted']:,.0f}", f"{got['measured']:,.0f}", f"{100 * off:+.0f} %"]
    return [env, f"{setting.latency_ms:g} ms", link, *how, *speeds]


def check() -> None:
    """Run every setting and write the section."""
    from flatout.collect.ray_actors import connect, ray_module

    os.environ["BURN_LOOPS"] = str(loops_for(300.0))
    ray = ray_module()
    connect(ray, None, 8)
    actors = echoes(ray, max(it.n_collectors for it in SETTINGS))
    rows, errors, kept = [], [], []
    for setting in SETTINGS:
        got = run(setting, ray, actors[: setting.n_collectors])
        rows.append(row(setting, got))
        errors.append(abs(got["predicted"] / got["measured"] - 1))
        kept.append(asdict(setting) | got)
        print(" | ".join(rows[-1]), f"load {got['load']:.0f}, {got['call_seconds']:.2g} s a call", flush=True)
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    ray.shutdown()
    n_close = sum(error <= CLOSE for error in errors)
    loads = sorted(it["load"] for it in kept)
    header = [
        "env",
        "latency",
        "bandwidth",
        "collectors",
        "overlap",
        "learning",
        "predicted, steps/s",
        "measured",
        "error",
    ]
    text = (
        "## Collectors behind a network\n\n`python -m benchmarks.network`: `--executor ray` on this machine, 8 envs × 16 steps, with "
        "delays injected where parameters come to an actor and its rollout goes back; learning waits as if for a card. Costs are "
        f"measured right before each run, without delays. {conditions()} Other programs used the machine: its load was {loads[0]:.0f} "
        f"to {loads[-1]:.0f} on {os.cpu_count()} cores.\n\n{table(header, rows)}\n\nWithin {CLOSE:.0%}: {n_close} of {len(rows)}; median "
        f"error {100 * statistics.median(errors):.0f} %."
    )
    write_section("network", text)


CLUSTERS = {"one A100": ("a100", 1, 4096, 8192, 10), "eight H100s": ("h100", 8, 16384, 65536, 100)}
"""Card, how many, envs, batch size, and the link in Gbit/s."""
PAPER: dict[str, Any] = {"n_steps": 128, "n_epochs": 10, "network_arch": (1024, 512, 256), "preset": "auto"}
CORES, LATENCY = 32, 0.2e-3
"""Of each machine that collects, and to it."""


def paper() -> None:
    """How many collectors feed a learner, for envs of three costs."""
    import flatout
    from flatout.advice.doctor import across, sizes
    from flatout.device.cards import card
    from flatout.perf.costs import Costs, Network
    from flatout.perf.planner import acting_times, settings_of
    from flatout.perf.roofline import on_card
    from flatout.perf.simulate import simulate

    rows = []
    for learner, (name, n_cards, n_envs, batch_size, gbit) in CLUSTERS.items():
        agent = flatout.PPO(Wait, n_envs=n_envs, batch_size=batch_size, device="cpu", **PAPER)
        act = acting_times(agent.policy, (1, 8, 32, 128))
        network = Network(latency=LATENCY, bandwidth=gbit * 1e9 / 8, cores=CORES, **sizes(agent))
        for step in (10e-6, 1e-3, 100e-3):
            costs = Costs(wait=(0.0,), compute=(step,), act=act)
            settings = replace(settings_of(agent.config, agent.policy, CORES), network=network)
            costs, settings = on_card(
                agent.config, agent.policy, costs, settings, card(name), n_cards=n_cards
            )
            way = across(costs, settings, 1e9)
            got = simulate(costs, way)
            traffic = got.steps_per_second * network.step_bytes * 8 / 1e9
            env = f"{step * 1e3:g} ms" if step >= 1e-3 else f"{step * 1e6:g} µs"
            cells = [f"{way.n_collectors:,}", f"{network.n_machines(way.n_collectors):,}"]
            cells += [f"{got.steps_per_second:,.0f}", f"{got.learn_rate:,.0f}"]
            cells += [f"{100 * got.learner_busy:.0f} %", f"{traffic:.1f} of {gbit} Gbit/s"]
            rows.append([learner, env, *cells])
    header = ["learner", "env step", "collectors", f"machines of {CORES} cores", "steps/s"]
    print(table([*header, "learn rate", "learner busy", "traffic"], rows))
    print(f"acting: {act}; {network}")


def main() -> None:
    """Check the model, or answer on paper."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--paper", action="store_true")
    args = parser.parse_args()
    paper() if args.paper else check()


if __name__ == "__main__":
    main()
