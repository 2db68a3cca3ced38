"""Measures what a run would be made of: env steps, acting, updates; and a moment of the real run.

In: an agent. Out: costs and settings for the simulation. What is measured never touches the run's own envs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter, thread_time
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from flatout.agent import Agent
from flatout.buffers.rollout import Rollout
from flatout.collect.collector import Collector
from flatout.envs.check import EnvInfo
from flatout.envs.spaces import ActionLayout
from flatout.envs.wrappers import blocking
from flatout.executors.base import EnvSet, make_executor
from flatout.learning.compile import Recipe, kept, load
from flatout.learning.learner import Learner
from flatout.models.policy import ActorCritic, PolicyNet
from flatout.perf.choose import COROUTINE_SECONDS, random_row
from flatout.perf.costs import Costs, Points, Settings, UpdateCost
from flatout.perf.planning import acting_seconds, fastest, launch_seconds
from flatout.perf.simulate import Forecast, learn_seconds, simulate
from flatout.runlog.metrics import Progress
from flatout.timing import LEARN_PHASES, Phase, PhaseClock

ENV_SECONDS = 3.0
MAX_ENVS = 32
"""Envs that are stepped to see whether one is slower than the others."""
SAMPLES = 400
USUAL = ("train/clip_fraction", "train/approx_kl", "train/kl_settled")
"""Metrics that a diagnosis looks at."""
EXTRA = (Phase.CHECKPOINT, Phase.EVALUATE, Phase.RECORD)
PASSING_SECONDS = 60e-6
"""A step's way through a thread, without what the collector does for it."""
TINY = 8
"""Rows of the smallest minibatch that is timed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """What a moment of the real run gave."""

    steps_per_second: float
    learner_busy: float
    collect_rate: float | None
    learn_rate: float | None
    phases: dict[str, float]
    """Share of its time of each phase."""
    extra_seconds: float
    """Of an iteration, for checkpoints, evaluation and records."""
    summary: dict[str, Any]
    metrics: dict[str, float]


def measure_costs(agent: Agent, tell: Callable[[str], None] = lambda _: None) -> Costs:
    """What env, policy and learner cost on this machine."""
    info, config = agent._env_info(), agent.config
    tell("stepping envs")
    if info.batched:
        wait, compute, slowness = [0.0], [0.0], [1.0]
    else:
        wait, compute, slowness = step_times(info, agent.policy.action, config.n_envs, config.seed)
    tell("acting")
    sizes = sorted({1, 8, max(config.n_envs // 2, 1), config.n_envs, 4 * config.n_envs})
    acting = tuple((n, acting_seconds(agent.policy, n)) for n in sizes)
    tell("learning")
    update, compiled, advantage = update_costs(agent)
    costs = Costs(
        wait=tuple(wait),
        compute=tuple(compute),
        slowness=tuple(slowness),
        act=_rising(acting),
        update=update,
        compiled=compiled,
        advantage=advantage,
        passing=COROUTINE_SECONDS if info.is_async else PASSING_SECONDS,
    )
    if info.batched or info.is_async or costs.waits:
        return costs
    return _with_store(costs, agent, info)


def step_times(
    info: EnvInfo, action: ActionLayout, n_envs: int, seed: int
) -> tuple[list[float], list[float], list[float]]:
    """Waiting and computing seconds of steps, resets at episode ends included; and how slow each env is."""
    envs: list[gym.Env[Any, Any]] = []
    began = perf_counter()
    try:
        while len(envs) < min(n_envs, MAX_ENVS) and (not envs or perf_counter() - began < ENV_SECONDS):
            envs.append(blocking(info.factory))
            envs[-1].reset(seed=seed + len(envs))
        return _time_steps(envs, action, seed)
    finally:
        for env in envs:
            env.close()


def _time_steps(
    envs: list[gym.Env[Any, Any]], action: ActionLayout, seed: int
) -> tuple[list[float], list[float], list[float]]:
    rng = np.random.default_rng(seed)
    wall: list[list[float]] = [[] for _ in envs]
    cpu: list[list[float]] = [[] for _ in envs]
    began, n_rounds = perf_counter(), max(SAMPLES // len(envs), 12)
    for _ in range(n_rounds):
        for i, env in enumerate(envs):
            choice = action.to_env(random_row(action, rng))[0]
            at, used = perf_counter(), thread_time()
            _, _, terminated, truncated, _ = env.step(choice)
            if terminated or truncated:
                env.reset()
            cpu[i].append(thread_time() - used)
            wall[i].append(perf_counter() - at)
        if perf_counter() - began > ENV_SECONDS and len(wall[-1]) >= 2:
            break
    means = np.array([np.mean(times) for times in wall])
    usual = float(np.median(means))
    # A step's own noise is no slowness: only an env that stands out counts as slow.
    slowness = [float(m / usual) if m > 2 * usual else 1.0 for m in means]
    normal = [i for i, slow in enumerate(slowness) if slow == 1.0]
    compute = [c for i in normal for c in cpu[i]]
    waited = [max(w - c, 0.0) for i in normal for w, c in zip(wall[i], cpu[i], strict=True)]
    if sum(waited) < 0.3 * sum(compute):  # it computes; what it seems to wait is the machine's noise
        compute, waited = [w + c for w, c in zip(waited, compute, strict=True)], [0.0] * len(compute)
    return waited, compute, slowness


def update_costs(agent: Agent) -> tuple[UpdateCost, UpdateCost | None, float]:
    """One update, eager, and compiled or by hand if there is such a one; and the advantage of one transition."""
    config, policy = agent.config, agent.policy
    learner = config.descriptor.make_learner(
        policy.model, config.algorithm, n_envs=config.n_envs, seed=0, clock=PhaseClock()
    )
    size = config.algorithm.batch_size
    n_cores = agent._machine.cores
    threads, before = learner.threads(n_cores), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        launch = launch_seconds(policy, config)
        eager = update_cost(learner, launch, TINY, size, min(4 * size, max(config.total_batch, size)))
        compiled = None
        spec = config.learner_spec(policy.obs, policy.action)
        path = kept(Recipe(spec=spec, device="cpu", precision="fp32", n_threads=threads))
        batch = learner.example_batch(size)
        fast: Callable[[], Any] | None = None
        if config.compile == "auto" and learner.use_fused():
            fast = partial(learner.update.step, batch)
        elif path.exists():
            fast = partial(load(path), *learner.update.inputs(batch))
        if fast is not None:
            with learner.update.preserving_state():
                seconds = fastest(fast, 8)
            compiled = UpdateCost(python=min(0.05e-3, seconds), rows=((size, seconds),))
        value = 0.0
        if not config.algorithm.USES_REPLAY:  # which stores a rollout and learns from samples alone
            n = min(config.total_batch, 4096)
            obs = learner.example_batch(n).obs
            value = fastest(lambda: _values(policy.model, obs)) / n
    finally:
        torch.set_num_threads(before)
    return eager, compiled, 1.5 * value


def update_cost(learner: Learner[Any], launch: float, *sizes: int) -> UpdateCost:
    """One eager update with minibatches of such sizes, of which `launch` seconds are launching it."""
    points = tuple((n, _update_seconds(learner, n)) for n in sorted(set(sizes)))
    return UpdateCost(python=min(launch, points[-1][1]), rows=_rising(points))


@torch.no_grad()
def _values(model: PolicyNet, obs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return model.value(obs) if isinstance(model, ActorCritic) else model.policy(obs)


def _update_seconds(learner: Learner[Any], n_rows: int) -> float:
    """Of one eager update; nothing is learned."""
    batch = learner.example_batch(n_rows)
    update = learner.update
    update.parts.n_rows = max(update.parts.n_rows, n_rows)
    times: list[float] = []
    began = perf_counter()
    with update.preserving_state():
        while len(times) < 12 and perf_counter() - began < 1.0:
            at = perf_counter()
            update.step(batch)
            times.append(perf_counter() - at)
    return statistics.median(times[1:] or times)


def _with_store(costs: Costs, agent: Agent, info: EnvInfo) -> Costs:
    """Costs whose steps and storing are those of a real collector with a few envs in one process."""
    n_envs = min(agent.config.n_envs, 8)
    policy = agent.policy
    envs = EnvSet(info.factory, policy.obs, np.arange(n_envs), 0, replayable=False)
    executor = make_executor("serial", envs)
    clock = PhaseClock()
    collector = Collector(executor, policy.model, policy.action, device=policy.device, seed=0, clock=clock)
    try:
        executor.reset()
        seconds = n_envs * costs.step_seconds
        n_steps = int(min(max(1.0 / seconds, 4), 256))
        rollout = Rollout.alloc(policy.obs, policy.action, n_steps, n_envs)
        collector.collect(rollout)
        clock.restart({})
        collector.collect(rollout)
    finally:
        executor.close()
    spent = clock.read()
    per_step = spent[Phase.ENV] / n_steps / n_envs
    factor = per_step / costs.step_seconds
    store = (spent.get(Phase.STORE, 0.0) + spent[Phase.ACT]) / n_steps - costs.act[0][1]
    if not 0.2 < factor < 5:
        return costs
    return replace(
        costs,
        compute=tuple(c * factor for c in costs.compute),
        wait=tuple(w * factor for w in costs.wait),
        store=max(store, 5e-6),
    )


def _scaled(cost: UpdateCost, factor: float) -> UpdateCost:
    return UpdateCost(python=cost.python * factor, rows=tuple((n, s * factor) for n, s in cost.rows))


def _rising(points: Points) -> Points:
    """The points with seconds that never fall as rows rise, whatever the noise."""
    out: list[tuple[int, float]] = []
    for rows, seconds in points:
        out.append((rows, max(seconds, out[-1][1] if out else 0.0)))
    return tuple(out)


def settings_of(agent: Agent) -> Settings:
    """The settings of the agent's trainer as it would run."""
    trainer, config = agent._started(), agent.config
    plan = trainer.plan
    n_params = agent.policy.n_params
    n_cores = agent._machine.cores
    n_taken = plan.n_collectors if trainer.overlap and plan.in_subprocesses else 0
    return Settings(
        n_envs=config.n_envs,
        n_steps=config.algorithm.n_steps,
        batch_size=config.algorithm.batch_size,
        n_epochs=config.algorithm.epochs,
        train_ratio=getattr(config.algorithm, "train_ratio", None),
        executor=plan.kind,
        n_collectors=plan.n_collectors,
        in_subprocesses=plan.in_subprocesses,
        n_workers=plan.n_workers,
        overlap=trainer.overlap,
        compiled=trainer.compiled,
        n_cores=n_cores,
        learn_threads=trainer.learner.threads(n_cores, n_taken),
        on_device=agent.policy.device.type == "cuda",
        n_params=n_params,
    )


def run_a_moment(agent: Agent, seconds: float) -> Moment:
    """Train for about so long after a first iteration, at least two more, and say what came of it."""
    seen: list[tuple[float, Progress]] = []

    def watch(progress: Progress) -> bool:
        seen.append((perf_counter(), progress))
        return seen[-1][0] - seen[0][0] < seconds or len(seen) < 3

    compilation = agent._started(10**9).learner.compilation
    if compilation is not None:
        compilation.only_kept = True
    agent.learn(10**9, callback=watch)
    (first_at, first), (last_at, last) = seen[0], seen[-1]
    wall = max(last_at - first_at, 1e-9)
    summary = agent.summary
    spent = {name: s - first.phases.get(name, 0.0) for name, s in last.phases.items()}
    busy = sum(spent.get(name, 0.0) for name in LEARN_PHASES)
    return Moment(
        steps_per_second=(last.env_steps - first.env_steps) / wall,
        learner_busy=busy / wall,
        collect_rate=summary["collect_rate"],
        learn_rate=(last.env_steps - first.env_steps) / busy if busy > 0 else None,
        phases={name: s / wall for name, s in spent.items()},
        extra_seconds=sum(spent.get(name, 0.0) for name in EXTRA) / max(last.iteration - first.iteration, 1),
        summary=summary,
        metrics=_usual([progress.metrics for _, progress in seen]),
    )


def _usual(rows: list[Mapping[str, float]]) -> dict[str, float]:
    """The medians of what a diagnosis looks at, as far as it is there."""
    columns = {name: [row[name] for row in rows if name in row] for name in USUAL}
    return {name: statistics.median(column) for name, column in columns.items() if column}


def fitted(costs: Costs, settings: Settings, moment: Moment) -> tuple[Costs, Forecast]:
    """The costs with what only a real run in lockstep shows: shuffling and committing around updates, and how long
    a step takes on its way through threads or workers."""
    if not moment.collect_rate or not moment.learn_rate or settings.overlap:
        return costs, simulate(costs, settings)
    slower = learn_seconds(costs, settings) * moment.learn_rate / settings.total_batch
    factor = min(max(1 / slower, 0.7), 2.0)
    costs = replace(
        costs,
        update=_scaled(costs.update, factor),
        compiled=costs.compiled and _scaled(costs.compiled, factor),
        advantage=costs.advantage * factor,
    )
    name = {"thread": "passing", "async": "passing", "process": "handover"}.get(settings.executor)
    if name is None:
        return costs, simulate(costs, settings)
    best, forecast, distance = costs, simulate(costs, settings), float("inf")
    for factor in (0.5, 0.75, 1.0, 1.5, 2.0, 3.0):
        tried = replace(costs, **{name: getattr(costs, name) * factor})
        outcome = simulate(tried, settings)
        off = abs(np.log(outcome.collect_rate / moment.collect_rate))
        if off < distance:
            best, forecast, distance = tried, outcome, off
    return best, forecast
