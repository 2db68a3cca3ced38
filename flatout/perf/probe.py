"""Measures what a run will spend its time on: steps of the env, acting, updates. The run's own envs and learner are untouched."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from time import perf_counter, thread_time
from typing import TYPE_CHECKING, Any

import cloudpickle
import gymnasium as gym
import numpy as np

from flatout.config.run_config import RunConfig
from flatout.envs.make import EnvFactory
from flatout.envs.spaces import ActionLayout, Array
from flatout.envs.wrappers import blocking
from flatout.perf.costs import Points, UpdateCost, rising

if TYPE_CHECKING:  # a report is written without torch
    import torch

    from flatout.learning.learner import Learner
    from flatout.models.policy import Policy

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

QUICK_SECONDS = 100e-6
"""Steps below this are timed many at once."""
NOISE_SHARE = 0.3
"""Waiting below this share of computing is the machine's noise."""
COMPILED_PYTHON = 0.05e-3
"""Seconds of a compiled or fused update that hold Python's lock."""
NARROW = 8
"""Units per layer of a network whose update is nothing but launching operations."""
MAX_SECONDS = 0.5
"""For timing one thing before a run begins."""
_UNKNOWN = count()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Measured steps of one or several envs."""

    wait: tuple[float, ...]
    """Seconds of each step in which nothing was computed."""
    compute: tuple[float, ...]
    """Seconds of the same steps on a core, resets at episode ends included."""
    slowness: tuple[float, ...] = (1.0,)
    """Each env's mean step time ÷ the median env's; 1 unless it is more than twice as slow."""
    picklable: bool = True
    """Whether the env can be made in another process."""


def time_steps(
    factory: EnvFactory,
    action: ActionLayout,
    *,
    seed: int,
    n_envs: int = 1,
    max_steps: int = 300,
    max_seconds: float = 1.0,
) -> StepTimes:
    """Step envs of its own with random actions for a moment, in turn, and time each step."""
    envs: list[gym.Env[Any, Any]] = []
    rng = np.random.default_rng(seed)
    began = perf_counter()
    try:
        while not envs or (len(envs) < n_envs and perf_counter() - began < max_seconds):
            envs.append(blocking(factory))
            envs[-1].reset(seed=seed + len(envs) - 1)
        wait, compute = _time_each(envs, action, rng, max_steps, max_seconds)
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
                waits, computes = [0.0], [min(mean, _time_many(envs[normal[0]], action, rng))]
    finally:
        for env in envs:
            env.close()
    return StepTimes(
        wait=tuple(waits),
        compute=tuple(computes),
        slowness=tuple(slowness),
        picklable=_is_picklable(factory),
    )


def _time_each(
    envs: list[gym.Env[Any, Any]],
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
            choice = action.to_env(random_action(action, rng))[0]
            wall, used, slept = perf_counter(), thread_time(), _times_slept()
            _, _, terminated, truncated, _ = env.step(choice)
            if terminated or truncated:
                env.reset()
            computed = thread_time() - used
            # A step that never gave its core away has not waited: other processes took the time it lacks.
            waited = perf_counter() - wall - computed if _times_slept() > slept else 0.0
            wait[i].append(max(waited, 0.0))
            compute[i].append(computed)
    return wait, compute


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


def _is_picklable(factory: EnvFactory) -> bool:
    try:
        cloudpickle.dumps(factory)
    except Exception:
        return False
    return True


def acting_times(policy: Policy, sizes: Iterable[int]) -> Points:
    """Seconds of acting by number of observations."""
    return rising(tuple((n, acting_seconds(policy, n)) for n in sorted(set(sizes))))


def acting_seconds(policy: Policy, n_obs: int) -> float:
    """Seconds the policy takes to act on `n_obs` observations."""
    from flatout.models.actor import make_actor

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
    import torch

    cpu = torch.device("cpu")
    if policy.device.type == "cpu":
        return cpu
    copied = replace(policy, model=copy.deepcopy(policy.model).to(cpu), device=cpu)
    return cpu if acting_seconds(copied, n_envs) < acting_seconds(policy, n_envs) else policy.device


@contextmanager
def on_threads(n_threads: int) -> Iterator[None]:
    """Let torch use so many threads."""
    import torch

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
        from flatout.learning.compile import Recipe, cached_path

        spec = self.config.learner_spec(self.policy.obs, self.policy.action)
        return cached_path(Recipe(spec=spec, device="cpu", precision=self.precision, n_threads=n_threads))

    def fast(self, n_threads: int) -> UpdateCost | None:
        """The update by a backend other than eager; None if there is none."""
        from flatout.learning.compile import load

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
        from flatout.learning.learner import TINY_BATCH

        config, policy = self.config, self.policy
        narrow = replace(config.network, network_arch=(NARROW,) * len(config.network.network_arch))
        spec = replace(config.learner_spec(policy.obs, policy.action), network=narrow)
        learner = spec.make_learner(str(policy.device), "fp32")
        batch = learner.example_batch(TINY_BATCH)
        return fastest(partial(learner.update.eager_step, batch), 8)
