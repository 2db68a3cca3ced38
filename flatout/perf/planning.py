"""How a run will be run: which way the envs are stepped, and whether collecting and learning go side by side.

In: settings, an env, a policy and a learner on this machine. Out: ways to try in this order, measured, with reasons.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable
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
from flatout.executors.base import Plan
from flatout.learning.compile import Recipe, kept, load
from flatout.learning.learner import TINY_BATCH, Learner
from flatout.models.actor import make_actor
from flatout.models.policy import Policy
from flatout.perf.choose import Probe, children, only_plan, plans, probe
from flatout.perf.overlap import AROUND, Work, decide_overlap, share_cores

ENOUGH_SECONDS = 0.5
"""For timing one thing before a run begins."""
COMPILED_SECONDS = 0.25e-3
"""What launching a compiled update takes."""
NARROW = 8
"""Units a layer of a network whose update is nothing but launching operations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """How to run it."""

    ways: list[Plan]
    """To try in this order."""
    overlap: bool
    reason: str
    """Why to overlap, or why not."""
    probe: Probe | None
    """What was measured of the env; None where there was nothing to choose."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Planning:
    """What deciding takes."""

    config: RunConfig
    env: EnvInfo
    policy: Policy
    learner: Learner[Any]
    n_cores: int
    n_steps: int
    """Env steps the run is for."""
    precision: str

    def decide(self, overlapped: bool | None = None) -> Decision:
        """The ways, best first, and whether to overlap. `overlapped`: how the run began, if it goes on."""
        config, env, on_gpu = self.config, self.env, self.policy.device.type == "cuda"
        n_iterations = self.n_steps // config.total_batch
        only = only_plan(env, config.executor, config.n_envs)
        measured: Probe | None = None
        if not env.batched and not env.is_async and (only is None or config.overlap == "auto"):
            act = partial(acting_seconds, self.policy)
            measured = probe(env.factory, self.policy.action, act, seed=config.seed)
        ranked: list[Plan] = [] if only is None else [only]
        if measured is not None and only is None:
            ranked = plans(
                measured,
                n_envs=config.n_envs,
                n_cores=self.n_cores,
                timesteps=self.n_steps,
                only=config.executor,
                children_ok=not on_gpu,
                n_workers=config.n_workers,
            )
        waits = env.is_async or (measured is not None and measured.waits and config.executor != "serial")
        spare = measured is not None and self._can_have_children(measured)
        work = self._work(measured) if measured is not None and (spare or (waits and not on_gpu)) else None

        def gain() -> float:
            if work is None or on_gpu:
                return math.inf  # nothing was measured: an async env, or a learner that is out of the way
            return remembered(self._facts(), lambda: work.gain(ranked[0]))

        overlap, reason = decide_overlap(
            config.overlap,
            batched=bool(env.batched),
            waits=waits,
            on_gpu=on_gpu,
            can_have_children=spare,
            n_updates=int(n_iterations * config.updates_per_iteration),
            n_iterations=n_iterations,
            gain=gain,
        )
        if config.overlap == "auto" and overlapped is not None:
            overlap, reason = overlapped, "as the run began"
        if measured is not None and config.n_collectors and self._can_have_children(measured):
            asked = children(measured, config.n_envs, config.n_collectors)
            ranked = [replace(asked, reason=f"asked for with --n-collectors {config.n_collectors}"), *ranked]
        elif overlap and work is not None and not work.measured.waits:
            ranked = share_cores(ranked, work)
        return Decision(ways=ranked, overlap=overlap, reason=reason, probe=measured)

    def _can_have_children(self, measured: Probe) -> bool:
        config = self.config
        spare = self.n_cores > 1 and config.n_envs > 1 and self.policy.device.type != "cuda"
        return measured.picklable and config.executor == "auto" and spare

    def _work(self, measured: Probe) -> Work:
        config = self.config
        beside, alone = (self.learner.threads(self.n_cores, n_taken) for n_taken in (1, 0))
        n_updates = config.updates_per_iteration
        seconds = {n: AROUND * n_updates * self._update_seconds(n) for n in {beside, alone}}
        lock = self._lock_seconds(beside) if measured.waits else 0.0
        return Work(
            measured=measured,
            n_envs=config.n_envs,
            n_steps=config.algorithm.n_steps,
            n_cores=self.n_cores,
            learn_seconds=seconds[beside],
            learn_threads=beside,
            alone_seconds=seconds[alone],
            lock_seconds=min(n_updates * lock, seconds[beside]),
        )

    def _facts(self) -> dict[str, Any]:
        """What the gain of overlap depends on, apart from the machine's mood; `rule`: of how it is worked out."""
        config = self.config
        it = config.algorithm
        shape: list[Any] = [config.n_envs, it.n_steps, it.batch_size]
        shape += [it.updates_per_iteration(config.total_batch), it.USES_REPLAY]
        network = list(config.network.network_arch)
        return {
            "rule": 7,
            "env": [config.env, config.env_kwargs, config.executor],
            "shape": shape,
            "network": network,
            "cores": self.n_cores,
            "compile": config.compile,
            "compiled": self._compiled(self.learner.threads(self.n_cores, 1)) is not None,
        }

    def _update_seconds(self, n_threads: int) -> float:
        """Seconds of one update on so many threads, compiled if one is kept; nothing is learned."""
        batch, path = self.learner.example_batch(self.config.algorithm.batch_size), self._compiled(n_threads)
        before = torch.get_num_threads()
        torch.set_num_threads(n_threads)
        try:
            if path is None:
                with self.learner.update.preserving_state():
                    return fastest(lambda: self.learner.update.step(batch))
            step, inputs = load(path), self.learner.update.inputs(batch)
            return fastest(lambda: step(*inputs))
        finally:
            torch.set_num_threads(before)

    def _lock_seconds(self, n_threads: int) -> float:
        """Seconds of an update with Python's lock."""
        return COMPILED_SECONDS if self._compiled(n_threads) else launch_seconds(self.policy, self.config)

    def _compiled(self, n_threads: int) -> Path | None:
        """The compiled update that is kept for so many threads, if one is and may be used."""
        policy = self.policy
        if (
            self.config.compile == "off"
            or policy.device.type != "cpu"
            or self.learner.update.backend == "fused"
        ):
            return None
        spec = self.config.learner_spec(policy.obs, policy.action)
        path = kept(Recipe(spec=spec, device="cpu", precision=self.precision, n_threads=n_threads))
        return path if path.exists() else None


def launch_seconds(policy: Policy, config: RunConfig) -> float:
    """Seconds that launching an update takes: of a network as deep, so narrow that it computes next to nothing."""
    narrow = replace(config.network, network_arch=(NARROW,) * len(config.network.network_arch))
    spec = replace(config.learner_spec(policy.obs, policy.action), network=narrow)
    learner = spec.make_learner(str(policy.device), "fp32")
    batch = learner.example_batch(TINY_BATCH)
    return fastest(lambda: learner.update.step(batch), 8)


def fastest(call: Callable[[], Any], n_times: int = 4) -> float:
    """Seconds of the fastest of some calls, of two where they are long: the one that nothing else disturbed."""
    times: list[float] = []
    while len(times) < n_times and (len(times) < 2 or sum(times) < ENOUGH_SECONDS):
        began = perf_counter()
        call()
        times.append(perf_counter() - began)
    return min(times)


def faster_device(policy: Policy, n_envs: int) -> torch.device:
    """Where the policy acts faster on this many envs: on its own device, or as a copy on the CPU."""
    cpu = torch.device("cpu")
    if policy.device.type == "cpu":
        return cpu
    copied = replace(policy, model=copy.deepcopy(policy.model).to(cpu), device=cpu)
    return cpu if acting_seconds(copied, n_envs) < acting_seconds(policy, n_envs) else policy.device


def acting_seconds(policy: Policy, n_rows: int) -> float:
    """Seconds the policy takes to act on `n_rows` observations, measured."""
    actor = make_actor(policy.model, n_rows, policy.device)
    noise = np.zeros((n_rows, policy.action.noise_size), np.float32)
    rows, log_prob = np.zeros((n_rows, policy.action.size), policy.action.dtype), np.zeros(n_rows, np.float32)
    obs = policy.obs.alloc(n_rows)
    times = []
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for _ in range(7):
        began = perf_counter()
        actor.act(obs, noise, rows, log_prob)
        times.append(perf_counter() - began)
    torch.set_num_threads(n_threads)
    return statistics.median(times)
