"""Which way of running envs is fastest here: measure, estimate each way's steps/s, pick, say why.

Comes in: one env, the policy's acting time, the machine. Goes out: plans, best first; the next one is tried when
one cannot start. Choosing changes how fast a run is, never what it computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from time import perf_counter, thread_time
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np

from flatout.device.machine import usable_cores
from flatout.envs.check import EnvInfo
from flatout.envs.make import EnvFactory
from flatout.envs.spaces import ActionLayout, Array
from flatout.errors import FlatoutError, one_line
from flatout.executors.base import Kind, Plan
from flatout.executors.process import WORKERS_PER_CORE

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

START_SECONDS = 2.5
"""What the first child process costs: a fork server that imports torch."""
HANDOVER_SECONDS = 60e-6
"""A step's way to a worker process and back."""
THREAD_SECONDS = 120e-6
"""A step's way through a thread and the collector, all of it with Python's lock."""
COROUTINE_SECONDS = 35e-6
"""A step's way through the event loop."""
QUICK_SECONDS = 100e-6
"""Steps below this are timed many at once."""
SHARED = 1.25
"""How much longer work takes while the other cores are at work too: they share caches, and often a core's arithmetic."""
WORTH = 1.1
"""A way that is more complicated must promise to be this much faster."""
_UNKNOWN = count()
WAITING_SHARE = 0.5
"""An env that computes less than this share of its step time is one that waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What was measured of one env and the policy."""

    step_seconds: float
    """Mean wall time of a step, resets at episode ends included."""
    step_spread: float
    """Deviation of a step's wall time."""
    cpu_share: float
    """Thread time ÷ wall time of stepping: near 1 computes, near 0 waits."""
    reset_seconds: float
    obs_bytes: int
    picklable: bool
    act_seconds: Callable[[int], float]
    """Seconds the policy takes to act on so many observations."""

    @property
    def waits(self) -> bool:
        """Whether stepping is mostly waiting for something else."""
        return self.cpu_share < WAITING_SHARE and self.step_seconds > 200e-6


def probe(
    factory: EnvFactory,
    action: ActionLayout,
    act_seconds: Callable[[int], float],
    *,
    seed: int,
    max_steps: int = 300,
    max_seconds: float = 1.0,
) -> Probe:
    """Step one env of its own for a moment and time it; the run's envs never notice."""
    env = factory()
    try:
        rng = np.random.default_rng(seed)
        began = perf_counter()
        obs, _ = env.reset(seed=seed)
        reset_seconds = perf_counter() - began
        times: list[float] = []
        cpu = 0.0
        while len(times) < max_steps and perf_counter() - began < max_seconds:
            choice = action.to_env(random_row(action, rng))[0]
            wall, used, slept = perf_counter(), thread_time(), _times_slept()
            obs, _, terminated, truncated, _ = env.step(choice)
            if terminated or truncated:
                env.reset()
            computed = thread_time() - used
            cpu += computed
            # A step that never let go of its core has not waited: what it lacks was taken by others.
            times.append(perf_counter() - wall if _times_slept() > slept else computed)
        step_seconds = float(np.mean(times))
        if step_seconds < QUICK_SECONDS:
            step_seconds = min(step_seconds, _seconds_in_a_row(env, action, rng))
    finally:
        env.close()
    return Probe(
        step_seconds=step_seconds,
        step_spread=float(np.std(times)),
        cpu_share=min(cpu / max(sum(times), 1e-9), 1.0),
        reset_seconds=reset_seconds,
        obs_bytes=_n_bytes(obs),
        picklable=_is_picklable(factory),
        act_seconds=act_seconds,
    )


def _seconds_in_a_row(env: Any, action: ActionLayout, rng: np.random.Generator) -> float:
    """A quick step's time among many: a clock around each is a good part of it, and the first ones are slow."""
    choices = [action.to_env(random_row(action, rng))[0] for _ in range(300)]
    began = thread_time()
    for choice in choices:
        _, _, terminated, truncated, _ = env.step(choice)
        if terminated or truncated:
            env.reset()
    return (thread_time() - began) / len(choices)


def _times_slept() -> int:
    """How often this thread has given its core away by itself; where nobody counts, always once more."""
    if not hasattr(resource, "RUSAGE_THREAD"):
        return next(_UNKNOWN)
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def plans(
    measured: Probe,
    *,
    n_envs: int,
    n_cores: int,
    timesteps: int,
    only: str = "auto",
    children_ok: bool = True,
    n_workers: int = 0,
) -> list[Plan]:
    """Every way that can work, best first; `only` restricts them to one kind, `n_workers` the processes."""
    candidates = [_serial(measured, n_envs)]
    if measured.picklable and n_envs > 1:
        candidates += [_process(measured, n_envs, n_cores, n_workers)]
        if children_ok and n_cores > 1:
            candidates.append(children(measured, n_envs, n_cores))
    if measured.waits or only == "thread":
        candidates.append(_threads(measured, n_envs))
    if only != "auto":
        candidates = [plan for plan in candidates if plan.kind == only]

    def seconds(plan: Plan) -> float:
        start = START_SECONDS if plan.in_subprocesses or plan.kind == "process" else 0.0
        return timesteps / plan.steps_per_second + start

    best = min(candidates, key=seconds, default=None)
    if best is not None and only == "auto" and seconds(candidates[0]) <= seconds(best) * WORTH:
        best = candidates[0]
    ranked = sorted(candidates, key=lambda plan: (plan is not best, seconds(plan)))
    return [
        replace(plan, reason=_reason(plan, measured, n_envs, n_cores, _serial(measured, n_envs)))
        for plan in ranked
    ]


def _serial(m: Probe, n_envs: int) -> Plan:
    rate = n_envs / (n_envs * m.step_seconds + m.act_seconds(n_envs))
    return Plan(kind="serial", steps_per_second=rate)


def children(m: Probe, n_envs: int, n: int) -> Plan:
    """Up to `n` collectors in processes of their own, each on a core of its own."""
    n = min(n, n_envs)
    share = -(-n_envs // n)
    rate = n_envs / (share * m.step_seconds + m.act_seconds(share))
    rate *= 0.97 if n == 1 else 0.97 / SHARED
    return Plan(kind="serial", n_collectors=n, in_subprocesses=True, steps_per_second=rate)


def _process(m: Probe, n_envs: int, n_cores: int, n_workers: int) -> Plan:
    """Workers compute on cores of their own; waiting ones may be as many as the envs."""
    n = min(n_envs, n_workers or (32 if m.waits else WORKERS_PER_CORE * n_cores))
    share = -(-n_envs // n)
    busy = SHARED * n_envs * m.step_seconds * m.cpu_share / min(n_cores, n)
    rate = n_envs / (max(share * m.step_seconds, busy) + m.act_seconds(n_envs) + n * HANDOVER_SECONDS)
    return Plan(kind="process", n_workers=n, steps_per_second=0.93 * rate)


def _threads(m: Probe, n_envs: int) -> Plan:
    """Waiting overlaps; computing does not, because of the interpreter's lock, for which envs queue up."""
    own = m.step_seconds * m.cpu_share + THREAD_SECONDS
    waits = m.step_seconds * (1 - m.cpu_share) + m.act_seconds(n_envs)
    rate = queued = 0.0
    for n in range(1, n_envs + 1):  # mean value analysis of one server (Reiser and Lavenberg 1980)
        stay = own * (1 + queued)
        rate = n / (waits + stay)
        queued = rate * stay
    return Plan(kind="thread", n_workers=n_envs, steps_per_second=rate)


def _reason(plan: Plan, m: Probe, n_envs: int, n_cores: int, serial: Plan) -> str:
    step = f"a step takes {_duration(m.step_seconds)}" + (", mostly waiting" if m.waits else "")
    rate = f"about {plan.steps_per_second:,.0f} steps/s"
    gain = plan.steps_per_second / serial.steps_per_second
    if plan.in_subprocesses:
        return f"{step}: {plan.n_collectors} collectors on {n_cores} cores, {rate}, {gain:.1f} × one process"
    if plan.kind == "process":
        return f"{step}: {plan.n_workers} worker processes, {rate}, {gain:.1f} × one process"
    if plan.kind == "thread":
        return f"{step}: {n_envs} envs wait side by side on threads, {rate}, {gain:.1f} × in turn"
    return f"{step}: {n_envs} envs in turn in one process, {rate}; more processes would not pay"


def _duration(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"


def random_row(action: ActionLayout, rng: np.random.Generator) -> Array:
    """A random action as a policy would give it, one row."""
    if action.continuous:
        return rng.uniform(-1, 1, (1, action.size)).astype(np.float32)
    return np.array([[rng.integers(n) for n in action.nvec]])


def _n_bytes(obs: Any) -> int:
    if isinstance(obs, dict):
        return sum(map(_n_bytes, obs.values()))
    if isinstance(obs, tuple):
        return sum(map(_n_bytes, obs))
    return int(np.asarray(obs).nbytes)


def _is_picklable(factory: EnvFactory) -> bool:
    try:
        cloudpickle.dumps(factory)
    except Exception:
        return False
    return True


PLANNED_STEPS = 1_000_000
"""Steps for which starting processes has to pay in `make_vec`, where nobody says how many there will be."""


def rank_kinds(
    factory: EnvFactory, action_space: gym.Space[Any], n_envs: int, seed: int
) -> tuple[list[Kind], list[str]]:
    """Kinds of executor that can step the env without a policy, fastest first, and why the first is the first."""
    if n_envs == 1:
        return ["serial"], []
    try:
        measured = probe(factory, ActionLayout(action_space), lambda _: 0.0, seed=seed)
    except Exception as error:
        return ["serial"], [f"the env could not be measured ({one_line(error)}); using serial"]
    ranked = plans(
        measured, n_envs=n_envs, n_cores=usable_cores(), timesteps=PLANNED_STEPS, children_ok=False
    )
    return [plan.kind for plan in ranked], [f"executor {ranked[0].kind}: {ranked[0].reason}"]


def only_plan(env: EnvInfo, executor: str, n_envs: int) -> Plan | None:
    """The plan where nothing is to be measured: the env's kind, or the user, leaves one way. None: choose."""
    if env.batched:
        where = "in NumPy" if env.batched == "numpy" else f"as tensors on {env.device}"
        return _forced("batched", executor, "a batched env", f"the env steps {n_envs} at once {where}")
    if env.is_async:
        return _forced(
            "async", executor, "an async env", f"the env is async: {n_envs} envs in flight on one event loop"
        )
    if executor == "batched":
        raise FlatoutError("--executor batched is for envs that step N at once; this env does not, use auto")
    if executor == "async":
        raise FlatoutError(
            "--executor async is for envs with async def reset and step; this env has none, use auto"
        )
    return (
        _forced("serial", executor, "", "asked for with --executor serial") if executor == "serial" else None
    )


def _forced(kind: Kind, executor: str, what: str, reason: str) -> Plan:
    if executor not in ("auto", kind):
        raise FlatoutError(f"--executor {executor} cannot run {what}; use auto")
    return Plan(kind=kind, steps_per_second=0.0, reason=reason)
