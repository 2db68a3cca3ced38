"""Measures an agent for `doctor` and `tune`: the costs of its env, policy and learner, and a few seconds of the real run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from flatout.agent import Agent
from flatout.perf.costs import COROUTINE_SECONDS, THREAD_SECONDS, Costs, Settings, at, learn_seconds
from flatout.perf.planner import UpdateProbe, acting_times, settings_of
from flatout.perf.probe import time_steps
from flatout.perf.simulate import Forecast, simulate
from flatout.runlog.recorder import Progress
from flatout.timing import LEARN_PHASES, PhaseClock

ENV_SECONDS = 3.0
MAX_ENVS = 32
"""Envs that are stepped to see whether one is slower than the others."""
SAMPLES = 400
METRICS = ("train/clip_fraction", "train/approx_kl", "train/kl_settled")
"""Metrics that findings look at."""
EXTRA_PHASES = ("checkpoint", "evaluate", "record")
TINY = 8
"""The smallest minibatch that is timed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkResult:
    """Some seconds of the real run."""

    steps_per_second: float
    learner_busy: float
    collect_rate: float | None
    learn_rate: float | None
    phases: dict[str, float]
    """Share of wall time by phase."""
    extra_seconds: float
    """Checkpoints, evaluation and records, per iteration."""
    summary: dict[str, Any]
    metrics: dict[str, float]
    """Medians over iterations of the metrics that findings look at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """An agent's costs and settings, corrected by a short benchmark of the real run."""

    costs: Costs
    settings: Settings
    picklable: bool
    forecast: Forecast
    """The simulation's, for these costs and settings."""
    result: BenchmarkResult
    seconds: float
    """What the benchmark took."""


def measure(agent: Agent, seconds: float, tell: Callable[[str], None] = lambda _: None) -> Measured:
    """Measure everything that predictions need; the agent trains for about so many seconds."""
    costs, picklable = measure_costs(agent, tell)
    tell("starting the run")
    settings = trainer_settings(agent)
    tell(f"running it for {seconds:.0f} s")
    began = perf_counter()
    result = short_benchmark(agent, seconds)
    took = perf_counter() - began
    settings = replace(
        settings, compiled=bool(result.summary["compiled"]), extra_seconds=result.extra_seconds
    )
    costs, forecast = fit_costs(costs, settings, result)
    return Measured(
        costs=costs, settings=settings, picklable=picklable, forecast=forecast, result=result, seconds=took
    )


def measure_costs(agent: Agent, tell: Callable[[str], None] = lambda _: None) -> tuple[Costs, bool]:
    """The costs of env, policy and learner on this machine, and whether the env can be made in another process."""
    info, config, policy = agent.env_info(), agent.config, agent.policy
    tell("stepping envs")
    costs, picklable = Costs(wait=(0.0,), compute=(0.0,), act=((1, 0.0),)), True
    if not info.batched:
        steps = time_steps(
            info.factory,
            policy.action,
            seed=config.seed,
            n_envs=min(config.n_envs, MAX_ENVS),
            max_steps=SAMPLES,
            max_seconds=ENV_SECONDS,
        )
        costs = replace(costs, wait=steps.wait, compute=steps.compute, slowness=steps.slowness)
        picklable = steps.picklable
    tell("acting")
    sizes = {1, 8, max(config.n_envs // 2, 1), config.n_envs, 4 * config.n_envs}
    costs = replace(costs, act=acting_times(policy, sizes))
    tell("learning")
    learner = config.descriptor.make_learner(
        policy.model, config.algorithm, n_envs=config.n_envs, seed=0, clock=PhaseClock()
    )
    if config.compile == "auto":
        learner.use_fused()
    timed = UpdateProbe(config=config, policy=policy, learner=learner)
    n_threads, size = learner.threads(agent.machine.cores), config.algorithm.batch_size
    largest = min(4 * size, max(config.total_batch, size))
    costs = replace(
        costs,
        update=timed.eager(n_threads, TINY, size, largest, launch=timed.launch_seconds()),
        compiled=timed.fast(n_threads),
        passing=COROUTINE_SECONDS if info.is_async else THREAD_SECONDS,
    )
    return costs, picklable


def trainer_settings(agent: Agent) -> Settings:
    """The settings of the agent's trainer, which is started."""
    trainer = agent.trainer()
    plan = trainer.plan
    return replace(
        settings_of(agent.config, agent.policy, agent.machine.cores),
        executor=plan.kind,
        n_collectors=plan.n_collectors,
        in_subprocesses=plan.in_subprocesses,
        n_workers=plan.n_workers,
        overlap=trainer.overlap,
        compiled=trainer.compiled,
    )


def short_benchmark(agent: Agent, seconds: float) -> BenchmarkResult:
    """Train for about so long after a first iteration, for at least two more; nothing new is compiled."""
    seen: list[tuple[float, Progress]] = []

    def watch(progress: Progress) -> bool:
        seen.append((perf_counter(), progress))
        return seen[-1][0] - seen[0][0] < seconds or len(seen) < 3

    compilation = agent.trainer(10**9).learner.compilation
    if compilation is not None:
        compilation.only_cached = True
    agent.learn(10**9, callback=watch)
    (first_at, first), (last_at, last) = seen[0], seen[-1]
    wall = max(last_at - first_at, 1e-9)
    summary = agent.summary
    spent = {name: s - first.phases.get(name, 0.0) for name, s in last.phases.items()}
    busy = sum(spent.get(phase, 0.0) for phase in LEARN_PHASES)
    return BenchmarkResult(
        steps_per_second=(last.env_steps - first.env_steps) / wall,
        learner_busy=busy / wall,
        collect_rate=summary["collect_rate"],
        learn_rate=(last.env_steps - first.env_steps) / busy if busy > 0 else None,
        phases={name: s / wall for name, s in spent.items()},
        extra_seconds=sum(spent.get(name, 0.0) for name in EXTRA_PHASES)
        / max(last.iteration - first.iteration, 1),
        summary=summary,
        metrics=_medians([progress.metrics for _, progress in seen]),
    )


def _medians(iterations: list[Mapping[str, float]]) -> dict[str, float]:
    columns = {name: [row[name] for row in iterations if name in row] for name in METRICS}
    return {name: statistics.median(column) for name, column in columns.items() if column}


def fit_costs(costs: Costs, settings: Settings, result: BenchmarkResult) -> tuple[Costs, Forecast]:
    """The costs corrected by what a real lockstep run shows: the overhead around updates, and how long a step takes
    together with all that a collector, a thread or a worker adds to it."""
    if not result.collect_rate or not result.learn_rate or settings.overlap:
        return costs, simulate(costs, settings)
    factor = settings.total_batch / result.learn_rate / learn_seconds(costs, settings)
    costs = replace(costs, learn_overhead=costs.learn_overhead * min(max(factor, 0.5), 4.0))
    tried = [(costs, simulate(costs, settings))]
    name = {"thread": "passing", "async": "passing", "process": "handover"}.get(settings.executor)
    if name is not None:
        changed = [replace(costs, **{name: getattr(costs, name) * f}) for f in (0.5, 0.75, 1.5, 2.0, 3.0)]
    elif settings.executor == "batched":  # its steps were not timed
        own, n = at(costs.act, settings.n_envs) + costs.store, settings.n_envs
        changed = [replace(costs, compute=(max(1 / result.collect_rate - own / n, 0.0),))]
    else:
        f = min(max(tried[0][1].collect_rate / result.collect_rate, 0.5), 3.0)
        slower = replace(costs, store=costs.store * f, act=tuple((n, s * f) for n, s in costs.act))
        changed = [replace(slower, compute=tuple(c * f for c in costs.compute))]
    tried += [(it, simulate(it, settings)) for it in changed]
    rate = result.collect_rate
    return min(tried, key=lambda pair: abs(math.log(pair[1].collect_rate / rate)))
