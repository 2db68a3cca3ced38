"""Measures steps of an env, in envs of its own, and ranks the executors for `make_vec`. Loads no torch."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import count
from time import perf_counter, thread_time
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np

from flatout.device.machine import usable_cores
from flatout.envs.make import EnvFactory, blocking
from flatout.envs.spaces import MASK_KEY, ActionLayout, Array
from flatout.envs.validate import has_mask, sample_action
from flatout.perf.costs import Costs, Settings
from flatout.perf.decide import Request, decide

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

QUICK_SECONDS = 100e-6
"""Steps below this are timed many at once."""
NOISE_SHARE = 0.3
"""Waiting below this share of computing is the machine's noise."""
MAKE_VEC_STEPS = 1_000_000
"""Env steps for which starting processes has to pay in `make_vec`, which is not told how many there will be."""
_UNKNOWN = count()


def time_steps(
    factory: EnvFactory,
    action: ActionLayout,
    *,
    seed: int,
    n_envs: int = 1,
    max_steps: int = 300,
    max_seconds: float = 1.0,
    make: Callable[..., Any] = blocking,
) -> Costs:
    """Step envs of its own with random allowed actions for a moment, in turn: the costs of stepping, resets included."""
    envs: list[gym.Env[Any, Any]] = []
    masks: list[Any] = []
    rng = np.random.default_rng(seed)
    began = perf_counter()
    try:
        while not envs or (len(envs) < n_envs and perf_counter() - began < max_seconds):
            envs.append(make(factory))
            envs[-1].action_space.seed(seed)
            masks.append(_mask(envs[-1], *envs[-1].reset(seed=seed + len(envs) - 1)))
        wait, compute = _time_each(envs, masks, action, rng, max_steps, max_seconds)
        means = [sum(w + c) / len(w) for w, c in zip(wait, compute, strict=True)]
        usual = statistics.median(means)  # NumPy's would load numpy.ma, for 50 ms
        slowness = [m / usual if m > 2 * usual else 1.0 for m in means]
        normal = [i for i, slow in enumerate(slowness) if slow == 1.0]
        waits, computes = ([s for i in normal for s in times[i]] for times in (wait, compute))
        if sum(waits) < NOISE_SHARE * sum(computes):
            computes = [w + c for w, c in zip(waits, computes, strict=True)]
            waits = [0.0] * len(computes)
            mean = statistics.fmean(computes)
            if mean < QUICK_SECONDS:
                env = envs[normal[0]]
                # With a mask an action is only known once the step before is taken.
                many = _time_many(env, action, rng) if masks[normal[0]] is None else mean
                waits, computes = [0.0], [min(mean, many)]
    finally:
        for env in envs:
            env.close()
    picklable = True
    try:
        cloudpickle.dumps(factory)
    except Exception:
        picklable = False
    return Costs(wait=tuple(waits), compute=tuple(computes), slowness=tuple(slowness), picklable=picklable)


def _time_each(
    envs: list[gym.Env[Any, Any]],
    masks: list[Any],
    action: ActionLayout,
    rng: np.random.Generator,
    max_steps: int,
    max_seconds: float,
) -> tuple[list[list[float]], list[list[float]]]:
    """Waiting and computing seconds of each step of each env."""
    wait: list[list[float]] = [[] for _ in envs]
    compute: list[list[float]] = [[] for _ in envs]
    began = perf_counter()
    for nth in range(max(max_steps // len(envs), 12)):
        if nth >= 2 and perf_counter() - began > max_seconds:
            break
        for i, env in enumerate(envs):
            if masks[i] is None or action.continuous:
                choice = action.to_env(random_action(action, rng))[0]
            else:
                choice = sample_action(env.action_space, masks[i], nth)
            wall, used, slept = perf_counter(), thread_time(), _times_slept()
            obs, _, terminated, truncated, info = env.step(choice)
            if terminated or truncated:
                obs, info = env.reset()
            computed = thread_time() - used
            # A step that never gave its core away has not waited: other processes took the time it lacks.
            waited = perf_counter() - wall - computed if _times_slept() > slept else 0.0
            wait[i].append(max(waited, 0.0))
            compute[i].append(computed)
            masks[i] = _mask(env, obs, info)
    return wait, compute


def _mask(env: gym.Env[Any, Any], obs: Any, info: dict[str, Any]) -> Any:
    """Which actions are allowed now; None without a mask."""
    return obs[MASK_KEY] if has_mask(env.observation_space) else info.get(MASK_KEY)


def _time_many(env: gym.Env[Any, Any], action: ActionLayout, rng: np.random.Generator) -> float:
    """Mean seconds of a quick step: a clock around each would be a good part of it, and the first ones are slow."""
    choices = [action.to_env(random_action(action, rng))[0] for _ in range(300)]
    began = thread_time()
    for choice in choices:
        _, _, terminated, truncated, _ = env.step(choice)
        if terminated or truncated:
            env.reset()
    return (thread_time() - began) / len(choices)


def _times_slept() -> int:
    """How often this thread has given its core away by itself; where the system does not count, always once more."""
    if not hasattr(resource, "RUSAGE_THREAD"):
        return next(_UNKNOWN)
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def random_action(action: ActionLayout, rng: np.random.Generator) -> Array:
    """A batch of one random action, as a policy would give it."""
    if action.continuous:
        return rng.uniform(-1, 1, (1, action.size)).astype(np.float32)
    return np.array([[rng.integers(n) for n in action.nvec]])


def rank_kinds(costs: Costs, n_envs: int) -> tuple[list[str], list[str]]:
    """Kinds of executor for `make_vec`, fastest first, and a note on why the first is the first."""
    if costs.fault:  # workers survive an env that ends its process
        return ["process", "serial"], [f"the env could not be measured ({costs.fault}); using process"]
    settings = Settings(n_envs=n_envs, n_steps=128, batch_size=1, n_cores=usable_cores())
    request = Request(timesteps=MAKE_VEC_STEPS, overlap="off", subprocess_collectors=False)
    found = decide(request, settings, costs)
    best = found.ways[0]
    return [way.executor for way in found.ways], [f"executor {best.executor}: {found.reasons[best]}"]
