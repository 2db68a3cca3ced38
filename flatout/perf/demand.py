"""What a run needs of the machine, predicted before it begins: how fast it is, and its share of cores, memory and card.

The costs of a step are measured; those of an update follow from its size. That is exact enough to order runs and to say
how many fit side by side. Loads no torch.
"""

from __future__ import annotations

import json
import warnings
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise

from flatout.config.run_config import RunConfig, memory_needed
from flatout.envs.check import EnvInfo
from flatout.envs.make import env_factory
from flatout.envs.spaces import ActionLayout, ObsLayout
from flatout.perf.costs import Costs, Settings, UpdateCost, learn_seconds
from flatout.perf.decide import Request, decide
from flatout.perf.simulate import FEW_ENV_STEPS, simulate
from flatout.perf.trial import try_out

UPDATE_SECONDS = 0.15e-3
"""An update besides its matrix products: 0.45 ms in all for PPO with two 64-64 networks and batch 256, fused."""
FLOPS = 50e9
"""Floating-point operations a second of an update on one core: 64-64 with batch 256 reaches 45e9, 256-256 with 64 60e9."""
CARD_FLOPS = 5e12
"""The same on a card, for small networks far below its data sheet."""
CARD_UPDATE_SECONDS = 0.1e-3
PROCESS_BYTES = 450_000_000
"""Resident memory of a run before its envs, rollouts and network: Python, torch and Numba."""
UNKNOWN_STEP = 20e-6
"""A step of an env that could not be timed before the run."""
BATCHED_STEP = 2e-6
"""One env's share in a step of a batched env."""
_tried: dict[str, tuple[EnvInfo | None, Costs | None]] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """What one run takes while it has its cores for itself."""

    steps_per_second: float
    cores: float
    """Cores that it keeps busy, on average."""
    device: float = 0.0
    """Share of the time in which it keeps the accelerator busy."""
    memory: int = PROCESS_BYTES
    """Bytes of the machine's memory."""


def predict(config: RunConfig, *, n_cores: int, on_device: bool) -> Demand:
    """The demand of a run on so many cores; never raises for what is wrong with the env, which the run itself will tell."""
    info, costs = _env(config)
    n_params = _n_multiplies(config, info)
    settings = run_settings(config, n_params=n_params, n_cores=n_cores, on_device=on_device)
    work = 6.0 * settings.n_params * settings.batch_size
    update = CARD_UPDATE_SECONDS + work / CARD_FLOPS if on_device else UPDATE_SECONDS + work / FLOPS
    points = ((settings.batch_size, update),)
    costs = replace(costs, update=UpdateCost(python=0.05e-3, points=points), act=((1, 5e-6), (33, 40e-6)))
    way = _way(config, info, settings, costs)
    forecast = simulate(costs, way, FEW_ENV_STEPS)
    per_iteration = way.total_batch / forecast.steps_per_second
    learning = learn_seconds(costs, way)
    cores = 1.0
    if costs.waits or (info is not None and info.is_async):
        step = costs.passing + sum(costs.compute) / len(costs.compute)
        cores = (way.total_batch * step + (0.0 if on_device else learning)) / per_iteration
    elif on_device and not way.overlap:
        cores = 1 - learning / per_iteration
    return Demand(
        steps_per_second=forecast.steps_per_second,
        cores=min(max(cores, 0.02), float(n_cores)),
        device=min(learning / per_iteration, 1.0) if on_device else 0.0,
        memory=_memory(config, info, way),
    )


def run_settings(config: RunConfig, *, n_params: int, n_cores: int, on_device: bool) -> Settings:
    """The settings of a run as far as they decide its speed, with one env after the other in one process."""
    algorithm, total, n_updates = config.algorithm, config.total_batch, config.updates_per_iteration
    by_epochs = max(total // algorithm.batch_size, 1) * algorithm.epochs
    return Settings(
        n_envs=config.n_envs,
        n_steps=algorithm.n_steps,
        batch_size=algorithm.batch_size,
        n_epochs=algorithm.epochs,
        n_cores=n_cores,
        on_device=on_device,
        n_params=n_params,
        train_ratio=None if n_updates == by_epochs else n_updates / total,
    )


def _way(config: RunConfig, info: EnvInfo | None, settings: Settings, costs: Costs) -> Settings:
    """How the run will go."""
    kind = "" if info is None else "batched" if info.batched else "async" if info.is_async else ""
    request = Request(
        timesteps=config.timesteps,
        executor=config.executor if config.executor != "process" else "auto",
        overlap=config.overlap,
        env=kind,
    )
    with suppress(Exception):
        return decide(request, settings, costs).ways[0]
    return settings


def _env(config: RunConfig) -> tuple[EnvInfo | None, Costs]:
    """What is known of the env, and the costs of its steps; each env is tried once."""
    key = f"{config.env} {json.dumps(config.env_kwargs, sort_keys=True, default=str)}"
    if key not in _tried:
        factory = env_factory(config.env, config.env_kwargs)
        try:
            with warnings.catch_warnings(action="ignore"):
                _tried[key] = try_out(factory, seed=0, n_envs=1, timeout=config.step_timeout, timed=True)
        except Exception:
            _tried[key] = None, None
    info, costs = _tried[key]
    if costs is None or costs.fault:
        step = BATCHED_STEP if info is not None and info.batched else UNKNOWN_STEP
        costs = Costs(wait=(0.0,), compute=(step,))
    return info, costs


def _n_multiplies(config: RunConfig, info: EnvInfo | None) -> int:
    """Multiplications for one observation: those of the policy's layers and as many for the critic."""
    n_in, n_out = 64, 8
    if info is not None:
        with suppress(Exception):
            n_in = max(_obs_bytes(info) // 4, 1)
            n_out = ActionLayout(info.action_space).size
    return 2 * sum(a * b for a, b in pairwise([n_in, *config.network.network_arch, n_out]))


def _obs_bytes(info: EnvInfo) -> int:
    return sum(array.nbytes for array in ObsLayout(info.observation_space).alloc(1))


def _memory(config: RunConfig, info: EnvInfo | None, way: Settings) -> int:
    obs_bytes = 256
    if info is not None:
        with suppress(Exception):
            obs_bytes = _obs_bytes(info)
    needed = PROCESS_BYTES + memory_needed(config.total_batch, config.network.network_arch, obs_bytes)
    buffer = getattr(config.algorithm, "buffer_size", 0)
    if isinstance(buffer, int):
        needed += min(buffer, config.timesteps) * (2 * obs_bytes + 32)
    n_processes = (
        way.n_collectors if way.in_subprocesses else way.n_workers if way.executor == "process" else 0
    )
    return needed + n_processes * PROCESS_BYTES // 3
