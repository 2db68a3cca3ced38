"""Measures an agent for `doctor` and `tune`: the costs of its env, policy and learner, and a few seconds of the real run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter

from flatout.agent import Agent
from flatout.device.accelerator import use_device
from flatout.errors import EnvError
from flatout.perf.case import EXTRA_PHASES, Case, Measured, on_device_clock
from flatout.perf.costs import COROUTINE_SECONDS, THREAD_SECONDS, Costs, Settings, at, learn_seconds
from flatout.perf.planner import UpdateProbe, acting_times
from flatout.perf.simulate import simulate
from flatout.perf.trial import try_steps
from flatout.runlog.recorder import Progress
from flatout.timing import LEARN_PHASES

ENV_SECONDS = 3.0
MAX_ENVS = 32
"""Envs that are stepped to see whether one is slower than the others."""
SAMPLES = 400
METRICS = ("train/clip_fraction", "train/approx_kl", "train/kl_settled")
"""Metrics that findings look at."""
TINY = 8
"""The smallest minibatch that is timed."""


def measure(agent: Agent, seconds: float, tell: Callable[[str], None] = lambda _: None) -> Case:
    """Measure everything that predictions need; the agent trains for about so many seconds.

    The costs are corrected by what the real run shows.
    """
    config, costs = agent.config, measure_costs(agent, tell)
    tell("starting the run")
    settings = agent.trainer().plan
    tell(f"running it for {seconds:.0f} s")
    result = short_benchmark(agent, seconds)
    extra = sum(result.phases.get(name, 0.0) for name in EXTRA_PHASES)
    extra_seconds = extra * settings.total_batch / result.steps_per_second
    settings = replace(settings, compiled=bool(agent.summary["compiled"]), extra_seconds=extra_seconds)
    return Case(
        **vars(result),
        costs=fit_costs(costs, settings, result, agent.summary["collect_rate"]),
        settings=settings,
        timesteps=config.timesteps,
        network_arch=config.network.network_arch,
        eval_every=config.eval_every,
        checkpoint_every=config.checkpoint_every,
        device_utilization=agent.summary.get("device_utilization"),
    )


def measure_costs(agent: Agent, tell: Callable[[str], None] = lambda _: None) -> Costs:
    """The costs of env, policy and learner on this machine."""
    info, config, policy = agent.env_info(), agent.config, agent.policy
    use_device(policy.device)
    tell("stepping envs")
    costs = Costs(wait=(0.0,), compute=(0.0,))
    if not info.batched:
        costs = try_steps(
            info.factory,
            policy.action,
            timeout=config.step_timeout,
            seed=config.seed,
            n_envs=min(config.n_envs, MAX_ENVS),
            max_steps=SAMPLES,
            max_seconds=ENV_SECONDS,
        )
        if costs.fault:
            raise EnvError(f"{config.env}: {costs.fault}")
    tell("acting")
    sizes = {1, 8, max(config.n_envs // 2, 1), config.n_envs, 4 * config.n_envs}
    costs = replace(costs, act=acting_times(policy, sizes))
    tell("learning")
    probe = UpdateProbe.of_copy(config, policy)
    n_threads, size = probe.learner.threads(agent.machine.cores), config.algorithm.batch_size
    largest = min(4 * size, max(config.total_batch, size))
    return replace(
        costs,
        update=probe.eager(n_threads, TINY, size, largest, launch=probe.launch_seconds()),
        compiled=probe.fast(n_threads),
        passing=COROUTINE_SECONDS if info.is_async else THREAD_SECONDS,
    )


def short_benchmark(agent: Agent, seconds: float) -> Measured:
    """Train for about so long after a first iteration, for at least two more; nothing new is compiled."""
    seen: list[tuple[float, Progress, dict[str, float]]] = []
    trainer = agent.trainer(10**9)

    def watch(progress: Progress) -> bool:
        phases = on_device_clock(progress.phases, trainer.pipeline.read_lanes())
        seen.append((perf_counter(), progress, phases))
        return seen[-1][0] - seen[0][0] < seconds or len(seen) < 3

    compilation = trainer.learner.compilation
    if compilation is not None:
        compilation.only_cached = True
    agent.learn(10**9, callback=watch)
    (began, first, before), (ended, last, after) = seen[0], seen[-1]
    wall = max(ended - began, 1e-9)
    phases = {name: (s - before.get(name, 0.0)) / wall for name, s in after.items()}
    metrics = {name: [p.metrics[name] for _, p, _ in seen if name in p.metrics] for name in METRICS}
    return Measured(
        steps_per_second=(last.env_steps - first.env_steps) / wall,
        learner_busy=sum(phases.get(phase, 0.0) for phase in LEARN_PHASES),
        phases=phases,
        metrics={name: statistics.median(values) for name, values in metrics.items() if values},
    )


def fit_costs(costs: Costs, settings: Settings, result: Measured, rate: float | None) -> Costs:
    """The costs corrected by what a real lockstep run shows: the overhead around updates, and how long a step takes
    together with all that a collector, a thread or a worker adds to it. `rate`: its steps/s while nobody learns."""
    if not rate or not result.learner_busy or settings.overlap:
        return costs
    learn = settings.total_batch * result.learner_busy / result.steps_per_second
    factor = learn / learn_seconds(costs, settings)
    costs = replace(costs, learn_overhead=costs.learn_overhead * min(max(factor, 0.5), 4.0))
    name = {"thread": "passing", "async": "passing", "process": "handover"}.get(settings.executor)
    if name is not None:
        changed = [replace(costs, **{name: getattr(costs, name) * f}) for f in (0.5, 0.75, 1.5, 2.0, 3.0)]
    elif settings.executor == "batched":  # its steps were not timed
        own, n = at(costs.act, settings.n_envs) + costs.store, settings.n_envs
        changed = [replace(costs, compute=(max(1 / rate - own / n, 0.0),))]
    else:
        f = min(max(simulate(costs, settings).collect_rate / rate, 0.5), 3.0)
        slower = replace(costs, store=costs.store * f, act=tuple((n, s * f) for n, s in costs.act))
        changed = [replace(slower, compute=tuple(c * f for c in costs.compute))]
    return min([costs, *changed], key=lambda it: abs(math.log(simulate(it, settings).collect_rate / rate)))
