"""Decides how a run steps its envs and whether it collects and learns at the same time.

`train`, `make_vec`, `doctor`, the report and `--what-if` all ask `decide`, with the same costs and the same simulation.
How envs are stepped changes how fast a run is, never what it computes. Overlap does change what it computes, so a gain
that decides it is measured once per env, settings and machine, and remembered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from flatout.device.shared import no_processes
from flatout.errors import FlatoutError
from flatout.perf.costs import MAX_WAITING_WORKERS, START_SECONDS, WORKERS_PER_CORE, WORTH, Costs, Settings
from flatout.perf.simulate import FEW_ENV_STEPS, collect_seconds, iteration_seconds, lockstep_seconds

MIN_UPDATES = 10_000
"""A run with fewer updates is over before subprocess collectors have paid for their start."""
MIN_ITERATIONS = {"waits": 20, "computes": 200}
"""With fewer rollouts in a run, a policy lag of 1 costs more than overlap gains: LunarLander with 18 rollouts of 16,384
steps reached a return lower by 98. Envs that wait gain more, so fewer will do."""
MIN_GAIN = {"waits": 1.15, "computes": 1.5}
"""Overlap must promise to be this much faster than lockstep, because data of the previous policy is worth less. CartPole
with rollouts of 32 steps ran 1.25 × as fast and reached 317 after 300,000 steps, lockstep 469."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What the user asked for and what the env allows."""

    timesteps: float = math.inf
    """Env steps of the run."""
    executor: str = "auto"
    n_collectors: int = 0
    """0: as many as are fastest."""
    n_workers: int = 0
    overlap: str = "auto"
    env: str = ""
    """`batched` or `async` for such envs."""
    where: str = ""
    """Where a batched env steps."""
    subprocess_collectors: bool = True
    """Whether there is a policy to act in other processes."""
    began_overlapped: bool | None = None
    """How a resumed run began."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """How to run, and why."""

    ways: list[Settings]
    """Ways to step the envs, to be tried in this order; empty if none is possible."""
    reasons: dict[Settings, str]
    """Why each of them."""
    overlap: bool
    overlap_reason: str
    measured: dict[str, Any] = field(default_factory=dict)
    """The measurements behind it, for summary.json; None where nothing was measured."""


def decide(
    request: Request,
    settings: Settings,
    costs: Costs | None = None,
    *,
    with_updates: Callable[[], Costs] | None = None,
    remember: Callable[[Callable[[], float]], float] = lambda measure: measure(),
) -> Decision:
    """Rank the ways to step the envs, decide on overlap, rank again if it is on.

    `costs`: None if nothing was measured. `with_updates` measures updates too; it is called only if they matter.
    """
    in_children = request.executor == "process" or (request.executor == "auto" and request.n_collectors)
    if in_children and (missing := no_processes()):
        asked = "--n-collectors" if request.n_collectors else "--executor process"
        raise FlatoutError(f"{asked} is not available here: {missing}; use --executor auto, serial or thread")
    known = costs or Costs(wait=(0.0,), compute=(0.0,))
    speeds = _Speeds(known, with_updates)
    lockstep = _possible(request, replace(settings, overlap=False), known)
    if len(lockstep) > 1:
        ranked = _rank(lockstep, request.timesteps, speeds.collecting)
        # Learning makes the difference smaller: does it still pay?
        lockstep = ranked if ranked[0] == lockstep[0] else _rank(lockstep, request.timesteps, speeds.running)
    beside = _possible(request, replace(settings, overlap=True), known)
    waits = request.env == "async" or (known.waits and request.executor != "serial")

    def gain() -> float:
        if costs is None or settings.on_device or not lockstep:
            return math.inf  # an async env, a learner that needs no core, or no way to run
        return remember(lambda: max(map(speeds.running, beside)) / speeds.running(lockstep[0]))

    spare = any(way.in_subprocesses for way in beside)
    overlap, reason = decide_overlap(request, settings, waits=waits, cores_to_spare=spare, gain=gain)
    if request.overlap == "auto" and request.began_overlapped is not None:
        overlap, reason = request.began_overlapped, "as the run began"
    ways = lockstep
    if overlap:
        if len(beside) > 1:
            beside = _rank(beside, request.timesteps, speeds.running)
        ways = beside + [replace(way, overlap=True) for way in lockstep]
    if request.n_collectors and request.executor == "auto" and not request.env and known.picklable:
        n, plain = min(request.n_collectors, settings.n_envs), settings.in_one_process
        ways = [replace(plain, overlap=overlap, in_subprocesses=True, n_collectors=n), *ways]
    ways = list(dict.fromkeys(ways))
    reasons = {way: _reason(way, request, known, speeds) for way in ways}
    if ways[:1] == [settings.in_one_process] and request.executor == "auto":
        reasons[ways[0]] += f"; {no_processes() or 'more processes would not pay'}"
    return Decision(ways=ways, reasons=reasons, overlap=overlap, overlap_reason=reason)


class _Speeds:
    """Predicted steps/s, each simulated once; updates are measured only if a prediction needs them."""

    def __init__(self, costs: Costs, with_updates: Callable[[], Costs] | None) -> None:
        self._complete = cache(with_updates or (lambda: costs))
        self._collect = cache(lambda way: collect_seconds(costs, way, FEW_ENV_STEPS))
        self._beside = cache(lambda way: iteration_seconds(self._complete(), way, FEW_ENV_STEPS)[0])

    def collecting(self, way: Settings) -> float:
        """Of collecting while nobody learns."""
        return way.total_batch / self._collect(way)

    def running(self, way: Settings) -> float:
        """Of the run."""
        if way.overlap:
            return way.total_batch / self._beside(way)
        return way.total_batch / lockstep_seconds(self._complete(), way, self._collect(way))


def _rank(ways: list[Settings], timesteps: float, rate: Callable[[Settings], float]) -> list[Settings]:
    """The ways by the time of the whole run; the simplest before all others unless the best is worth more."""
    seconds = {way: seconds_per_step(rate(way), way, timesteps) for way in ways}
    best = min(ways, key=lambda way: seconds[way])
    if seconds[ways[0]] <= WORTH * seconds[best]:
        best = ways[0]
    return sorted(ways, key=lambda way: (way is not best, seconds[way]))


def _possible(request: Request, settings: Settings, costs: Costs) -> list[Settings]:
    """The ways that the env and the request allow, simplest first."""
    executor, plain, n_envs = request.executor, settings.in_one_process, settings.n_envs
    if request.env:
        if executor not in ("auto", request.env):
            article = "a" if request.env == "batched" else "an"
            raise FlatoutError(f"--executor {executor} cannot run {article} {request.env} env; use auto")
        return [replace(plain, executor=request.env)]
    if executor == "batched":
        raise FlatoutError("--executor batched is for envs that step N at once; this env does not, use auto")
    if executor == "async":
        raise FlatoutError(
            "--executor async is for envs with async def reset and step; this env has none, use auto"
        )
    if executor == "thread":
        return [replace(plain, executor="thread", n_workers=n_envs)]
    if executor == "ray":
        if not costs.picklable:
            raise FlatoutError("--executor ray cannot send this env to other processes; use auto")
        n = min(request.n_collectors or settings.n_cores, n_envs)
        return [replace(plain, executor="ray", in_subprocesses=True, n_collectors=n)]
    if executor == "process":
        ways = [_in_workers(costs, plain)] if costs.picklable and n_envs > 1 else []
    elif executor == "auto":
        ways = [w for w in candidates(costs, plain) if request.subprocess_collectors or not w.in_subprocesses]
    else:
        return [replace(plain, executor=executor)]
    n_workers = min(request.n_workers, n_envs)
    return [replace(w, n_workers=n_workers or w.n_workers) if w.executor == "process" else w for w in ways]


def candidates(costs: Costs, settings: Settings) -> Iterator[Settings]:
    """Every sensible way to step these envs with this overlap, simplest first.

    Collecting in a thread beside the learner is left out for envs that compute: the two would share Python's lock.
    """
    n_envs, n_cores = settings.n_envs, settings.n_cores
    if settings.executor in ("batched", "async"):
        if settings.executor == "async" or not settings.overlap:
            yield settings
        return
    plain = settings.in_one_process
    if not settings.overlap or settings.on_device:
        yield plain
    if costs.waits:
        yield replace(plain, executor="thread", n_workers=n_envs)
    if not costs.picklable or n_envs == 1 or (n_cores == 1 and not costs.waits) or no_processes():
        return
    if n_cores > 1:
        sizes = {n_cores - 1, n_cores} if settings.overlap else {n_cores}
        for n in sorted({min(n, n_envs) for n in sizes}):
            yield replace(plain, in_subprocesses=True, n_collectors=n)
    yield _in_workers(costs, plain)


def _in_workers(costs: Costs, plain: Settings) -> Settings:
    """Envs in worker processes: two per core, or one per env for envs that wait."""
    most = MAX_WAITING_WORKERS if costs.waits else WORKERS_PER_CORE * plain.n_cores
    return replace(plain, executor="process", n_workers=min(plain.n_envs, most))


def seconds_per_step(steps_per_second: float, settings: Settings, timesteps: float) -> float:
    """Of a whole run of so many env steps, the start of its processes included."""
    start = START_SECONDS if settings.starts_processes else 0.0
    return 1 / steps_per_second + start / timesteps


def decide_overlap(
    request: Request, settings: Settings, *, waits: bool, cores_to_spare: bool, gain: Callable[[], float]
) -> tuple[bool, str]:
    """Whether to overlap, and why; `gain` is the speed with overlap ÷ without."""
    if request.overlap != "auto":
        return request.overlap == "on", f"asked for with --overlap {request.overlap}"
    if request.env == "batched":
        return False, "the batched env and the learner take turns in one process"
    n_iterations = request.timesteps // settings.total_batch
    few = f"a run of {n_iterations:,.0f} rollouts learns better from the newest policy's data"
    if waits:
        if n_iterations < MIN_ITERATIONS["waits"]:
            return False, few
        if (times := gain()) < MIN_GAIN["waits"]:
            return False, f"learning is short beside waiting for envs (overlap would gain {times:.2f} ×)"
        return True, "the learner works while envs wait"
    if n_iterations * settings.n_updates < MIN_UPDATES:
        return False, "the run is too short for it to pay"
    if n_iterations < MIN_ITERATIONS["computes"]:
        return False, few
    if settings.on_device:
        return True, "the GPU learns while the CPU collects"
    if not cores_to_spare:
        return False, "there is no core to spare"
    times = gain()
    if times < MIN_GAIN["computes"]:
        return False, f"the newest policy's data is worth more (overlap would gain {times:.2f} ×)"
    return True, f"collectors and the learner run on different cores, {times:.1f} × as fast"


def _reason(way: Settings, request: Request, costs: Costs, speeds: _Speeds) -> str:
    """Why to step the envs this way."""
    if request.env == "batched":
        return f"the env steps {way.n_envs} at once {request.where}"
    if request.env == "async":
        return f"the env is async: {way.n_envs} envs in flight on one event loop"
    if request.executor not in ("auto", "thread", "process"):
        return f"asked for with --executor {way.executor}"
    if way.in_subprocesses and way.n_collectors == request.n_collectors:
        return f"asked for with --n-collectors {request.n_collectors}"
    cores = f" on {way.n_cores} cores" if way.in_subprocesses else ""
    if way.overlap:
        return f"{stepping(way)} beside the learner{cores}, about {speeds.running(way):,.0f} steps/s"
    rate, serial = speeds.collecting(way), way.in_one_process
    step = duration(costs.step_seconds) + (", mostly waiting" if costs.waits else "")
    gain = "" if way == serial else f", {rate / speeds.collecting(serial):.1f} × one process"
    return f"a step takes {step}: {stepping(way)}{cores}, collecting about {rate:,.0f} steps/s{gain}"


def stepping(way: Settings) -> str:
    """How the envs are stepped, in words."""
    if way.in_subprocesses:
        what = "Ray actor" if way.executor == "ray" else "collector"
        return f"1 {what}" if way.n_collectors == 1 else f"{way.n_collectors} {what}s"
    known = {
        "serial": "one env in one process"
        if way.n_envs == 1
        else f"{way.n_envs} envs in turn in one process",
        "thread": f"{way.n_envs} envs at the same time on threads",
        "process": f"{way.n_envs} envs in {way.n_workers} worker processes",
    }
    return known.get(way.executor, f"executor {way.executor}")


def describe(way: Settings) -> str:
    """How the run goes, in words."""
    where = " in subprocesses" if way.in_subprocesses and way.executor != "ray" else ""
    if way.network is not None:
        n = way.network.n_machines(way.n_collectors)
        where = f" on {n} other {'machine' if n == 1 else 'machines'} with {way.network.cores} cores"
    return f"{stepping(way)}{where}, overlap {'on' if way.overlap else 'off'}"


def duration(seconds: float) -> str:
    """Seconds as text: `35 µs`, `1.2 ms`."""
    return f"{seconds * 1e6:.0f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"
