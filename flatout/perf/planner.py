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

from flatout.config.run_config import RunConfig
from flatout.device.machine import remembered
from flatout.envs.check import EnvInfo
from flatout.learning.compile import Recipe, cached_path, load
from flatout.learning.learner import TINY_BATCH, Learner
from flatout.models.actor import make_actor
from flatout.models.policy import Policy
from flatout.perf.costs import COMPILED_PYTHON, Costs, Points, Settings, UpdateCost, rising
from flatout.perf.decide import Decision, Request, decide
from flatout.perf.probe import StepTimes, time_steps
from flatout.perf.simulate import FEW_ENV_STEPS

NARROW = 8
"""Units per layer of a network whose update is nothing but launching operations."""
MAX_SECONDS = 0.5
"""For timing one thing before a run begins."""


def acting_times(policy: Policy, sizes: Iterable[int]) -> Points:
    """Seconds of acting by number of observations."""
    return rising(tuple((n, acting_seconds(policy, n)) for n in sorted(set(sizes))))


def acting_seconds(policy: Policy, n_obs: int) -> float:
    """Seconds the policy takes to act on `n_obs` observations."""
    actor = make_actor(policy.model, n_obs, policy.device)
    noise = np.zeros((n_obs, policy.action.noise_size), np.float32)
    actions, log_prob = (
        np.zeros((n_obs, policy.action.size), policy.action.dtype),
        np.zeros(n_obs, np.float32),
    )
    obs = policy.obs.alloc(n_obs)
    times = []
    with on_threads(1):
        for _ in range(7):
            began = perf_counter()
            actor.act(obs, noise, actions, log_prob)
            times.append(perf_counter() - began)
    return statistics.median(times)


def faster_device(policy: Policy, n_envs: int) -> torch.device:
    """The device on which the policy acts faster on this many envs: its own, or the CPU."""
    cpu = torch.device("cpu")
    if policy.device.type == "cpu":
        return cpu
    copied = replace(policy, model=copy.deepcopy(policy.model).to(cpu), device=cpu)
    return cpu if acting_seconds(copied, n_envs) < acting_seconds(policy, n_envs) else policy.device


@contextmanager
def on_threads(n_threads: int) -> Iterator[None]:
    """Let torch use so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(n_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def fastest(call: Callable[[], Any], n_times: int = 4) -> float:
    """Seconds of the fastest of some calls, of two if they are long: the one that nothing else disturbed."""
    times: list[float] = []
    while len(times) < n_times and (len(times) < 2 or sum(times) < MAX_SECONDS):
        began = perf_counter()
        call()
        times.append(perf_counter() - began)
    return min(times)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateProbe:
    """Times updates of a learner without learning anything."""

    config: RunConfig
    policy: Policy
    learner: Learner[Any]
    precision: str = "fp32"

    def form(self, n_threads: int) -> str:
        """The backend of the run's updates: `fused`, `compiled` (if that is in the cache) or `eager`."""
        backend = self.learner.update.backend
        if backend != "eager" or self.config.compile == "off" or self.policy.device.type != "cpu":
            return backend
        return "compiled" if self._compiled_path(n_threads).exists() else "eager"

    def _compiled_path(self, n_threads: int) -> Path:
        spec = self.config.learner_spec(self.policy.obs, self.policy.action)
        return cached_path(Recipe(spec=spec, device="cpu", precision=self.precision, n_threads=n_threads))

    def fast(self, n_threads: int) -> UpdateCost | None:
        """The update by a backend other than eager; None if there is none."""
        size, update, form = self.config.algorithm.batch_size, self.learner.update, self.form(n_threads)
        if form == "eager":
            return None
        batch = self.learner.example_batch(size)
        step: Callable[[], Any] = partial(update.step, batch)
        if form == "compiled" and update.backend == "eager":
            step = partial(load(self._compiled_path(n_threads)), *update.inputs(batch))
        with on_threads(n_threads), update.preserving_state():
            seconds = fastest(step)
        return UpdateCost(python=min(COMPILED_PYTHON, seconds), points=((size, seconds),))

    def eager(self, n_threads: int, *sizes: int, launch: float | None = None) -> UpdateCost:
        """The eager update, for minibatches of these sizes; `launch`: seconds of launching it, if known."""
        update, points = self.learner.update, []
        n_samples = update.parts.n_rows
        try:
            for size in sorted(set(sizes)):
                batch = self.learner.example_batch(size)
                update.parts.n_rows = max(n_samples, size)
                with on_threads(n_threads), update.preserving_state():
                    points.append((size, fastest(partial(update.eager_step, batch))))
        finally:
            update.parts.n_rows = n_samples
        rest = rising(tuple(points))
        return UpdateCost(python=min(launch or 0.0, rest[-1][1]), points=rest)

    def launch_seconds(self) -> float:
        """Seconds of launching an update: of a network as deep, but so narrow that it computes next to nothing."""
        config, policy = self.config, self.policy
        narrow = replace(config.network, network_arch=(NARROW,) * len(config.network.network_arch))
        spec = replace(config.learner_spec(policy.obs, policy.action), network=narrow)
        learner = spec.make_learner(str(policy.device), "fp32")
        batch = learner.example_batch(TINY_BATCH)
        return fastest(partial(learner.update.eager_step, batch), 8)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlanner:
    """Measures what a decision about a run needs, and decides."""

    config: RunConfig
    env: EnvInfo
    policy: Policy
    learner: Learner[Any]
    n_cores: int
    n_steps: int
    """Env steps the run is for."""
    precision: str

    def decide(self, overlapped: bool | None = None) -> Decision:
        """How to run. `overlapped`: how the run began, if it is resumed."""
        config, env = self.config, self.env
        kind = "batched" if env.batched else "async" if env.is_async else ""
        measured: dict[str, Any] = {"step_seconds": None, "compute_share": None, "launch_seconds": None}
        costs: Costs | None = None
        picklable = True
        if not kind and (config.executor in ("auto", "thread", "process") or config.overlap == "auto"):
            steps = time_steps(env.factory, self.policy.action, seed=config.seed)
            picklable = steps.picklable
            costs = self._costs(steps)
            measured |= {"step_seconds": costs.step_seconds, "compute_share": costs.compute_share}
            measured["picklable"] = picklable

        def with_updates() -> Costs:
            assert costs is not None
            full = self._with_updates(costs)
            measured["launch_seconds"] = full.update.python if costs.waits else None
            return full

        request = Request(
            timesteps=self.n_steps,
            executor=config.executor,
            n_collectors=config.n_collectors,
            n_workers=config.n_workers,
            overlap=config.overlap,
            env=kind,
            where="in NumPy" if env.batched == "numpy" else f"as tensors on {env.device}",
            picklable=picklable,
            began_overlapped=overlapped,
        )
        settings = settings_of(config, self.policy, self.n_cores)
        found = decide(
            request,
            settings,
            costs,
            with_updates=None if settings.on_device else with_updates,
            remember=self._remember,
            max_env_steps=FEW_ENV_STEPS,
        )
        return replace(found, measured=measured)

    def _costs(self, steps: StepTimes) -> Costs:
        """Steps and acting."""
        n_envs = self.config.n_envs
        costs = Costs(wait=steps.wait, compute=steps.compute, act=((1, 0.0),))
        least = 1 if costs.waits else max(n_envs // self.n_cores, 1)
        return replace(costs, act=acting_times(self.policy, {least, n_envs}))

    def _with_updates(self, costs: Costs) -> Costs:
        """The costs with those of updates, in the form that the run will use."""
        alone, beside = (self.learner.threads(self.n_cores, n_taken) for n_taken in (0, 1))
        size, timed = self.config.algorithm.batch_size, self._updates()
        cost = {n: timed.fast(n) or timed.eager(n, size) for n in {alone, beside}}
        if costs.waits and timed.form(alone) == "eager":  # envs on threads share Python's lock with it
            launch = timed.launch_seconds()
            cost = {n: replace(it, python=min(launch, it.seconds(size))) for n, it in cost.items()}
        return replace(costs, update=cost[alone], beside=cost[beside] if beside != alone else None)

    def _updates(self) -> UpdateProbe:
        return UpdateProbe(
            config=self.config, policy=self.policy, learner=self.learner, precision=self.precision
        )

    def _remember(self, measure: Callable[[], float]) -> float:
        """The gain of overlap, measured once for everything it depends on; `rule` is that of working it out."""
        config, it = self.config, self.config.algorithm
        facts = {
            "rule": 8,
            "env": [config.env, config.env_kwargs, config.executor],
            "algorithm": [config.algo, config.n_envs, it.n_steps, it.batch_size],
            "updates": config.updates_per_iteration,
            "network": list(config.network.network_arch),
            "cores": self.n_cores,
            "compile": config.compile,
            "update": self._updates().form(self.learner.threads(self.n_cores, 1)),
        }
        return remembered(facts, measure)


def settings_of(config: RunConfig, policy: Policy, n_cores: int) -> Settings:
    """The settings of a run as far as they decide its speed, with one env after the other in one process."""
    algorithm = config.algorithm
    settings = Settings(
        n_envs=config.n_envs,
        n_steps=algorithm.n_steps,
        batch_size=algorithm.batch_size,
        n_epochs=algorithm.epochs,
        n_cores=n_cores,
        on_device=policy.device.type == "cuda",
        n_params=policy.n_params,
    )
    n_updates = config.updates_per_iteration
    if n_updates == settings.n_updates:
        return settings
    return replace(settings, train_ratio=n_updates / config.total_batch)
