"""Measures an agent for `doctor` and `tune`: the costs of its env, policy and learner, and a few seconds of the real run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from time import perf_counter
from typing import Any

from flatout.agent import Agent
from flatout.device.accelerator import use_device
from flatout.errors import EnvError
from flatout.perf.case import EXTRA_PHASES, Case, Measured, on_device_clock
from flatout.perf.costs import COROUTINE_SECONDS, THREAD_SECONDS, Costs, Points, Settings, at, learn_seconds
from flatout.perf.planner import UpdateProbe, acting_times, settings_of
from flatout.perf.simulate import simulate
from flatout.perf.trial import try_steps
from flatout.runlog.recorder import Progress
from flatout.timing import ACT, ENV, LEARN_PHASES, STORE

ENV_SECONDS = 3.0
MAX_ENVS = 32
"""Envs that are stepped to see whether one is slower than the others."""
SAMPLES = 400
METRICS = ("train/clip_fraction", "train/approx_kl", "train/kl_settled")
"""Metrics that findings look at."""
TINY = 8
"""The smallest minibatch that is timed."""
LONG_SECONDS = 20.0
"""Learning from a rollout that takes longer than this is measured with shorter rollouts and a single epoch …"""
FEW_STEPS = 64
"""… of about so many steps."""


def measure(agent: Agent, seconds: float, tell: Callable[[str], None] = lambda _: None) -> Case:
    """Measure everything that predictions need; the agent trains for about so many seconds.

    The costs are corrected by what the real run shows.
    """
    config, costs = agent.config, measure_costs(agent, tell)
    shorter = shorter_iteration(agent, costs)
    run = agent.changed(shorter) if shorter else agent
    tell("starting the run")
    settings = run.trainer().plan
    with_what = "".join(f", with {name.replace('_', ' ')} {value}" for name, value in shorter.items())
    tell(f"running it for {seconds:.0f} s{with_what}")
    result, agent.summary = short_benchmark(run, seconds), run.summary
    extra = sum(result.phases.get(name, 0.0) for name in EXTRA_PHASES)
    extra_seconds = extra * settings.total_batch / result.steps_per_second
    settings = replace(settings, compiled=bool(run.summary["compiled"]), extra_seconds=extra_seconds)
    costs = fit_costs(costs, settings, result, run.summary)
    if shorter:
        run.close()
        whole = replace(settings, n_steps=config.algorithm.n_steps, n_epochs=config.algorithm.epochs)
        result, settings = _of_whole(result, costs, settings, whole), whole
    return Case(
        **vars(result),
        costs=costs,
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


def shorter_iteration(agent: Agent, costs: Costs) -> dict[str, int]:
    """Settings for a run with shorter iterations, if one would take minutes here; else none."""
    config = agent.config
    settings = settings_of(config, agent.policy, agent.machine.cores)
    settings = replace(settings, compiled=costs.compiled is not None)
    if settings.train_ratio is not None or learn_seconds(costs, settings) < LONG_SECONDS:
        return {}
    whole = math.lcm(config.n_envs, settings.batch_size) // config.n_envs
    n_steps = whole * max(FEW_STEPS // whole, 1)
    return {"n_epochs": 1, "n_steps": min(n_steps, settings.n_steps)}


def _of_whole(result: Measured, costs: Costs, measured: Settings, whole: Settings) -> Measured:
    """What a run with whole iterations would show, by what one with shorter ones has shown."""
    short, long = simulate(costs, measured), simulate(costs, whole)
    speed = result.steps_per_second * long.steps_per_second / short.steps_per_second
    busy = min(result.learner_busy * long.learner_busy / short.learner_busy, 1.0)
    return replace(result, steps_per_second=speed, learner_busy=busy, metrics={})


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


def fit_costs(costs: Costs, settings: Settings, result: Measured, summary: Mapping[str, Any]) -> Costs:
    """The costs corrected by what a real lockstep run shows: the overhead around updates, and how long a step takes
    together with all that a collector, a thread or a worker adds to it."""
    rate = summary["collect_rate"]
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
    elif settings.in_subprocesses:
        f = min(max(simulate(costs, settings).collect_rate / rate, 0.5), 3.0)
        slower = replace(costs, store=costs.store * f, act=_times(costs.act, f))
        changed = [replace(slower, compute=tuple(c * f for c in costs.compute))]
    else:
        changed = [_as_clocked(costs, settings, summary)]
    return min([costs, *changed], key=lambda it: abs(math.log(simulate(it, settings).collect_rate / rate)))


def _as_clocked(costs: Costs, settings: Settings, summary: Mapping[str, Any]) -> Costs:
    """The costs of a time step by the clock of the only collector."""
    (lane,) = (lane for name, lane in summary["lanes"].items() if name.startswith("collector"))
    n_times = summary["env_steps"] / settings.n_envs
    act, env, store = (lane.get(phase, 0.0) / n_times for phase in (ACT, ENV, STORE))
    # Besides the network, acting is noise and the like, which stay here wherever the policy acts.
    around = min(max(act - at(costs.act, settings.n_envs), 0.0), costs.store)
    f = env / (settings.n_envs * costs.step_seconds)
    return replace(
        costs,
        wait=tuple(s * f for s in costs.wait),
        compute=tuple(s * f for s in costs.compute),
        act=_times(costs.act, (act - around) / at(costs.act, settings.n_envs)),
        store=store + around,
    )


def _times(points: Points, factor: float) -> Points:
    return tuple((n, seconds * factor) for n, seconds in points)
