"""Measures acting and updates besides env steps, and decides how a trainer runs."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from flatout.collect.groups import MIN_ENVS
from flatout.config.fields import replace as replace_fields
from flatout.config.run_config import RunConfig
from flatout.device.accelerator import (
    can_capture,
    choose_precision,
    is_accelerator,
    synchronize,
    use_device,
)
from flatout.device.machine import remembered
from flatout.device.shared import no_processes
from flatout.envs.check import EnvInfo
from flatout.learning.compile import Recipe, cached_path, is_available, load
from flatout.learning.learner import TINY_BATCH, Learner
from flatout.learning.update import GraphBackend
from flatout.models.actor import make_actor
from flatout.models.config import NetworkConfig
from flatout.models.policy import Policy
from flatout.perf.costs import COMPILED_PYTHON, Costs, Points, Settings, UpdateCost, rising
from flatout.perf.decide import Decision, Request, decide
from flatout.perf.demand import run_settings
from flatout.perf.simulate import ladder
from flatout.perf.trial import try_steps
from flatout.timing import PhaseClock

NARROW = 8
"""Units per layer of a network whose update is nothing but launching operations."""
SMALLEST_BATCH = 64
"""Of off-policy learning, where it is measured which batch suits a card."""
NOTABLY_MORE = 1.3
"""A batch of twice the size must learn from this many times as many samples a second."""
MAX_SECONDS = 0.5
"""For timing one thing before a run begins."""


def acting_times(policy: Policy, sizes: Iterable[int]) -> Points:
    """Seconds of acting by number of observations."""
    return rising(tuple((n, acting_seconds(policy, n)) for n in sorted(set(sizes))))


def acting_seconds(policy: Policy, n_obs: int) -> float:
    """Seconds the policy takes to act on `n_obs` observations."""
    actor = make_actor(policy.model, n_obs, policy.device)
    actor.bind()
    noise = np.zeros((n_obs, policy.action.noise_size), np.float32)
    actions = np.zeros((n_obs, policy.action.size), policy.action.dtype)
    obs, log_prob, times = policy.model.obs.alloc(n_obs), np.zeros(n_obs, np.float32), []
    with on_threads(1):
        for _ in range(7):
            began = perf_counter()
            actor.begin(obs, noise, actions, log_prob)
            actor.finish()
            times.append(perf_counter() - began)
    return statistics.median(times)


def faster_device(policy: Policy, n_envs: int) -> torch.device:
    """The device on which the policy acts faster on this many envs: its own, or the CPU."""
    if policy.device.type == "cpu":
        return policy.device
    return min(policy, copied_to_cpu(policy), key=lambda it: acting_seconds(it, n_envs)).device


def copied_to_cpu(policy: Policy) -> Policy:
    """The same policy on the CPU."""
    cpu = torch.device("cpu")
    return replace(policy, model=copy.deepcopy(policy.model).to(cpu), device=cpu)


@contextmanager
def on_threads(n_threads: int) -> Iterator[None]:
    """Let torch use so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(n_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def fastest(call: Callable[[], Any], device: torch.device, n_times: int = 4) -> float:
    """Seconds of the fastest of some calls on a device, of two if they are long: the one that nothing else disturbed."""
    synchronize(device)
    times: list[float] = []
    while len(times) < n_times and (len(times) < 2 or sum(times) < MAX_SECONDS):
        began = perf_counter()
        call()
        synchronize(device)
        times.append(perf_counter() - began)
    return min(times)


@dataclass(frozen=True, slots=True)
class UpdateProbe:
    """Times updates of a learner without learning anything."""

    config: RunConfig
    policy: Policy
    learner: Learner[Any]
    precision: str = "fp32"

    @classmethod
    def of_copy(cls, config: RunConfig, policy: Policy) -> UpdateProbe:
        """With a learner of its own."""
        precision = choose_precision(config.precision, policy.device, policy.n_params)
        learner = config.descriptor.make_learner(
            policy.model,
            config.algorithm,
            n_envs=config.n_envs,
            seed=0,
            clock=PhaseClock(),
            precision=precision,
        )
        learner.update.parts.n_rows = config.part_size
        if config.compile == "auto" and config.accumulate == 1:
            learner.use_fused()
        return cls(config, policy, learner, precision)

    def form(self, n_threads: int) -> str:
        """The backend of the run's updates: `graph`, `fused`, `compiled` (if that is in the cache) or `eager`."""
        backend = self.learner.update.backend
        if self.config.algorithm.optimizer is not None:
            return backend
        if can_capture(self.policy.device) and self.config.compile != "off":
            return "graph"
        off = self.config.compile == "off" or self.config.accumulate > 1
        if backend != "eager" or off or self.policy.device.type != "cpu":
            return backend
        return "compiled" if is_available() and self._compiled_path(n_threads).exists() else "eager"

    def _compiled_path(self, n_threads: int) -> Path:
        spec = self.config.learner_spec(self.policy.obs, self.policy.action)
        return cached_path(Recipe(spec=spec, device="cpu", precision=self.precision, n_threads=n_threads))

    def seconds(self, n_threads: int) -> UpdateCost:
        """The update as the run does it."""
        return self.fast(n_threads) or self.eager(n_threads, self.config.algorithm.batch_size)

    def fast(self, n_threads: int) -> UpdateCost | None:
        """The update by a backend other than eager; None if there is none."""
        size, update, form = self.config.algorithm.batch_size, self.learner.update, self.form(n_threads)
        if form == "eager":
            return None
        batch = self.learner.example_batch(size)
        if form == "graph":
            return self._captured(batch, n_threads)
        step: Callable[[], Any] = partial(update.step, batch)
        if form == "compiled" and update.backend == "eager":
            step = partial(load(self._compiled_path(n_threads)), *update.inputs(batch))
        with on_threads(n_threads), update.preserving_state():
            seconds = fastest(step, update.device)
        return UpdateCost(python=min(COMPILED_PYTHON, seconds), points=((size, seconds),))

    def _captured(self, batch: Any, n_threads: int) -> UpdateCost | None:
        """The update as a graph on a device; None if it cannot be captured."""
        update = self.learner.update
        with on_threads(n_threads), update.preserving_state():
            try:
                graph = GraphBackend(update, lambda: batch, batch)
            except RuntimeError:  # such as a kernel that reads back, or out of memory; the run notes it
                return None
            seconds = fastest(graph.replay, update.device)
        return UpdateCost(python=min(COMPILED_PYTHON, seconds), points=((len(batch), seconds),))

    def eager(self, n_threads: int, *sizes: int, launch: float = 0.0) -> UpdateCost:
        """The eager update, for minibatches of these sizes; `launch`: seconds of launching it, if known."""
        update, points = self.learner.update, []
        n_samples = update.parts.n_rows
        try:
            for size in sorted(set(sizes)):
                batch = self.learner.example_batch(size)
                if n_samples >= update.batch_size:  # else minibatches are split, as in the run
                    update.parts.n_rows = max(n_samples, size)
                with on_threads(n_threads), update.preserving_state():
                    points.append((size, fastest(partial(update.eager_step, batch), update.device)))
        finally:
            update.parts.n_rows = n_samples
        rest = rising(tuple(points))
        return UpdateCost(python=min(launch, rest[-1][1]), points=rest)

    def launch_seconds(self) -> float:
        """Seconds of launching an update: of a network as deep, but so narrow that it computes next to nothing."""
        config, policy = self.config, self.policy
        narrow = replace(config.network, network_arch=(NARROW,) * len(config.network.network_arch))
        spec = replace(config.learner_spec(policy.obs, policy.action), network=narrow)
        learner = spec.make_learner(str(policy.device), "fp32")
        batch = learner.example_batch(TINY_BATCH)
        return fastest(partial(learner.update.eager_step, batch), learner.device, 8)


def measured_batch_size(config: RunConfig, policy: Policy) -> int:
    """The largest batch up to the config's that learns from notably more samples a second than one of half its size."""
    use_device(policy.device)

    def samples_per_second(size: int) -> float:
        probe = UpdateProbe.of_copy(replace_fields(config, {"batch_size": size}), policy)
        return size / probe.seconds(1).seconds(size)

    best, rate = SMALLEST_BATCH, 0.0
    for size in ladder(SMALLEST_BATCH, config.algorithm.batch_size):
        now = samples_per_second(size)
        if now < NOTABLY_MORE * rate:  # unless something else had the core just then
            now = max(now, samples_per_second(size))
        if now < NOTABLY_MORE * rate:
            break
        best, rate = size, now
    return best


def network_facts(network: NetworkConfig) -> list[Any]:
    """What the time of acting and of an update depends on."""
    own, critic = network.network, network.vf_arch
    more = [] if own is None and critic is None else [str(own), own and own.source_hash(), critic]
    return [*network.network_arch, *more]


def needs_step_times(config: RunConfig) -> bool:
    """Whether such a run is planned by the time of an env's step."""
    return config.executor in ("auto", "thread", "process", "ray") or config.overlap == "auto"


def plan_run(
    probe: UpdateProbe,
    env: EnvInfo,
    n_cores: int,
    timesteps: int,
    overlapped: bool | None = None,
    costs: Costs | None = None,
) -> Decision:
    """How to run so many env steps. `overlapped`: how the run began, if it is resumed. `costs`: if they are known."""
    config, policy, learner = probe.config, probe.policy, probe.learner
    kind = "batched" if env.batched else "async" if env.is_async else ""
    measured: dict[str, Any] = dict.fromkeys(("step_seconds", "compute_share", "launch_seconds"))
    settings = settings_of(config, policy, n_cores)
    if not kind and not needs_step_times(config) and config.executor not in ("batched", "async"):
        return replace(_as_asked(config, settings), measured=measured)
    if kind or not needs_step_times(config):
        costs = None
    else:
        costs = costs or try_steps(env.factory, policy.action, timeout=config.step_timeout, seed=config.seed)
        least = 1 if costs.waits else max(config.n_envs // n_cores, 1)
        n_envs = config.n_envs
        sizes = {least, n_envs, max(n_envs // 2, 1)}
        costs = replace(costs, act=acting_times(policy, sizes))
        if is_accelerator(policy.device):
            on_cpu, there = acting_times(copied_to_cpu(policy), sizes), dict(costs.act)
            if not costs.waits and n_envs >= MIN_ENVS:  # two groups take turns on the device
                there[n_envs] = 2 * there[n_envs // 2] + costs.store
            act = tuple((n, min(there[n], seconds)) for n, seconds in on_cpu)
            costs = replace(costs, act=act, act_apart=on_cpu)
        measured |= {name: getattr(costs, name) for name in ("step_seconds", "compute_share", "picklable")}

    def with_updates() -> Costs:
        """The costs with those of updates, in the form that the run will use."""
        assert costs is not None
        alone, beside = (learner.threads(n_cores, n_taken) for n_taken in (0, 1))
        size, cost = config.algorithm.batch_size, {n: probe.seconds(n) for n in {alone, beside}}
        if costs.waits and probe.form(alone) == "eager":  # envs on threads share Python's lock with it
            launch = probe.launch_seconds()
            cost = {n: replace(it, python=min(launch, it.seconds(size))) for n, it in cost.items()}
        measured["launch_seconds"] = cost[alone].python if costs.waits else None
        return replace(costs, update=cost[alone], beside=cost[beside] if beside != alone else None)

    def remember(measure: Callable[[], float]) -> float:
        """The gain of overlap, measured once for everything it depends on; `rule` is that of working it out."""
        it = config.algorithm
        memory = [policy.model.state_size] if policy.model.state_size else []
        facts = {
            "rule": 8,
            "env": [config.env, config.env_kwargs, config.executor],
            "algorithm": [config.algo, config.n_envs, it.n_steps, it.batch_size, *memory],
            "updates": config.updates_per_iteration,
            "network": network_facts(config.network),
            "cores": n_cores,
            "compile": [config.compile, config.accumulate],
            "update": probe.form(learner.threads(n_cores, 1)),
        }
        return remembered(facts, measure)

    request = Request(
        timesteps=timesteps,
        executor=config.executor,
        n_collectors=config.n_collectors,
        n_workers=config.n_workers,
        overlap=config.overlap,
        env=kind,
        where="in NumPy" if env.batched == "numpy" else f"as tensors on {env.device}",
        began_overlapped=overlapped,
    )
    if costs is not None and costs.fault:
        return _plan_untimed(request, settings, costs.fault)
    updates = None if settings.on_device else with_updates
    return replace(
        decide(request, settings, costs, with_updates=updates, remember=remember), measured=measured
    )


def _as_asked(config: RunConfig, settings: Settings) -> Decision:
    """The run of a user who asked for both an executor and overlap: there is nothing to decide."""
    way = replace(settings, executor=config.executor, overlap=config.overlap == "on")
    reasons = {way: f"asked for with --executor {config.executor}"}
    overlap_reason = f"asked for with --overlap {config.overlap}"
    return Decision(ways=[way], reasons=reasons, overlap=way.overlap, overlap_reason=overlap_reason)


def _plan_untimed(request: Request, settings: Settings, fault: str) -> Decision:
    """How to run envs that failed when their steps were timed: in workers, which survive that, unless asked otherwise."""
    executor = request.executor
    if executor == "auto":
        executor = "process" if settings.n_envs > 1 and not no_processes() else "serial"
    overlap = request.overlap
    if overlap == "auto":
        overlap = "on" if request.began_overlapped else "off"
    kinds = dict.fromkeys((executor, "serial"))
    decisions = [decide(replace(request, executor=kind, overlap=overlap), settings) for kind in kinds]
    ways = list(dict.fromkeys(way for decision in decisions for way in decision.ways))
    reasons = dict.fromkeys(ways, f"its steps could not be timed: {fault}")
    why = decisions[0].overlap_reason if request.overlap != "auto" else "its steps could not be timed"
    return replace(decisions[0], ways=ways, reasons=reasons, overlap_reason=why)


def settings_of(config: RunConfig, policy: Policy, n_cores: int) -> Settings:
    """The settings of a run as far as they decide its speed, with one env after the other in one process."""
    on_device = policy.device.type != "cpu"
    return run_settings(config, n_params=policy.model.n_multiplies, n_cores=n_cores, on_device=on_device)
