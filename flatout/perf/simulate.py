"""Predicts the speed of a run: a discrete-event simulation of its collectors, envs and learner on shared cores.

An activity is a generator that yields `Compute`, `Wait` or a `Signal` to wait for. Work with the same lock (Python's,
one per process) shares one core; all locks share the cores. The same costs and settings give the same forecast.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count, pairwise
from typing import NamedTuple, TypeAlias

import numpy as np

from flatout.perf.costs import Costs, Settings, at, learn_seconds, update_cost

MAIN = 0
"""The lock of the learner's own process."""
NATIVE = -1
"""Work of the learner that needs no lock."""
MAX_STEPS = 96
"""Time steps of a rollout that are simulated; longer rollouts are scaled."""
MAX_ENV_STEPS = 6000
FEW_ENV_STEPS = 500
"""For comparing ways with one another: before a run begins, or hundreds of them."""
CHUNKS = 8
"""Pieces that the learning of an iteration is cut into, so that it shares the cores fairly."""
MAX_REMOTE = 8
"""Collectors on other machines that are simulated: none shares a core with another, so they are all alike."""
N_ITERATIONS = 3
"""Simulated iterations that count, after one that fills the pipeline."""
EPSILON = 1e-12


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """The predicted speed of a run."""

    steps_per_second: float
    learner_busy: float
    collect_rate: float
    """Steps/s if the collectors never wait for the learner."""
    learn_rate: float
    """Steps/s if data is always ready."""

    @property
    def limit(self) -> float:
        """The pipeline limit."""
        return min(self.collect_rate, self.learn_rate)


def simulate(costs: Costs, settings: Settings, max_env_steps: int = MAX_ENV_STEPS) -> Forecast:
    """The forecast for these settings."""
    collect, learn = collect_seconds(costs, settings, max_env_steps), learn_seconds(costs, settings)
    if settings.overlap:
        seconds, busy = iteration_seconds(costs, settings, max_env_steps)
    else:
        seconds = lockstep_seconds(costs, settings, collect)
        busy = learn / seconds
    n = settings.total_batch
    return Forecast(
        steps_per_second=n / seconds,
        learner_busy=busy,
        collect_rate=n / collect,
        learn_rate=n / max(learn, 1e-12),
    )


def collect_seconds(costs: Costs, settings: Settings, max_env_steps: int = MAX_ENV_STEPS) -> float:
    """Seconds of collecting a rollout while nobody learns."""
    return _Pipeline(costs, settings, max_env_steps, learn=False).run()[0]


def lockstep_seconds(costs: Costs, settings: Settings, collect: float) -> float:
    """Seconds of an iteration that collects, then learns."""
    return collect + learn_seconds(costs, settings) + costs.iteration + settings.extra_seconds


def iteration_seconds(
    costs: Costs, settings: Settings, max_env_steps: int = MAX_ENV_STEPS
) -> tuple[float, float]:
    """Seconds of a whole iteration, and the share of them in which the learner works."""
    return _Pipeline(costs, settings, max_env_steps, learn=True).run()


class _Pipeline:
    """A few iterations of a run."""

    def __init__(self, costs: Costs, settings: Settings, max_env_steps: int, *, learn: bool) -> None:
        self._costs, self._settings, self._learns = costs, settings, learn
        self._rng = np.random.default_rng(0)
        # Env workers sleep between steps, so more of them than cores lose nothing.
        crowded = costs.crowded if settings.in_subprocesses else 1.0
        n_remote = min(settings.n_collectors, MAX_REMOTE) if settings.network is not None else 0
        self._cores = Cores(settings.n_cores + n_remote, costs.busy, crowded)
        self._waiting = settings.executor in ("thread", "async")
        most = max(max_env_steps // settings.n_envs, 4)
        if len(costs.wait) == 1 and not self._waiting:
            most = 8  # every time step is the same
        self._n_steps = min(settings.n_steps, MAX_STEPS, most)
        self._scale = self._n_steps / settings.n_steps
        self._n_begun = self._n_collected = 0
        """Rollouts that may be begun, and that are complete."""
        self._done, self._some = Signal(), Signal()
        self._began = self._busy = 0.0
        """When the iterations that count began, and for how long the learner has worked since."""

    def run(self) -> tuple[float, float]:
        """Seconds of an iteration, and the share of them in which the learner works; without learning, of collecting."""
        # Where rollout follows rollout, two are enough: there is no pipeline to be filled.
        n_first, n = (1, N_ITERATIONS) if self._learns or self._settings.overlap else (0, 2)
        if self._waiting:
            self._cores.start(self._collect_ready())
        self._cores.start(self._iterate(n_first, n))
        self._cores.run()
        passed = self._cores.now - self._began
        return passed / n / self._scale, self._busy / max(passed, EPSILON)

    def _iterate(self, n_first: int, n: int) -> Activity:
        """So many iterations that do not count, then n that do."""
        overlap, learn = self._settings.overlap, self._learns
        for k in range(1, n_first + n + 1):
            self._begin(k)
            while self._n_collected < k:
                yield self._done
            if overlap:
                self._begin(k + 1)
            began = self._cores.now
            if learn:
                yield from self._learn()
            self._busy += self._cores.now - began
            if overlap and self._waiting:  # envs that have finished need not wait for the others
                self._begin(k + 2)
            if learn:
                yield Compute(self._scale * (self._costs.iteration + self._settings.extra_seconds))
            if k == n_first:
                self._began, self._busy = self._cores.now, 0.0
        self._cores.stopped = True

    def _begin(self, n: int) -> None:
        """Let the n-th rollout begin, unless it has."""
        if n > self._n_begun:
            self._n_begun = n
            if self._waiting:
                self._cores.fire(self._some)
            else:
                self._cores.start(self._collect())

    def _collected(self) -> None:
        self._n_collected += 1
        self._cores.fire(self._done)

    def _learn(self) -> Activity:
        """The updates of an iteration: a part that holds Python's lock and a part that only computes."""
        costs, settings = self._costs, self._settings
        total = learn_seconds(costs, settings) * self._scale
        launching = costs.learn_overhead * settings.n_updates * update_cost(costs, settings).python
        python = min(launching * self._scale, total)
        acting = 0.0 if settings.in_subprocesses else settings.n_steps * self._scale * costs.act_on_device
        native = (total - python + acting) / CHUNKS
        for _ in range(CHUNKS):
            yield Compute(python / CHUNKS)
            yield Wait(native) if settings.on_device else Compute(native, NATIVE, settings.learn_threads)

    def _collect(self) -> Activity:
        """A rollout of envs that are stepped in turn or in worker processes."""
        costs, settings = self._costs, self._settings
        if settings.executor == "process":
            yield from self._collect_with_workers()
        elif settings.in_subprocesses:
            network, parts = settings.network, [*enumerate(_split(settings.n_envs, settings.n_collectors), 1)]
            if network is not None:
                parts = parts[-MAX_REMOTE:]
                yield Wait(network.out_seconds(settings.n_collectors) * self._scale)
            yield from self._all([self._collect_in_turn(first, end, lock) for lock, (first, end) in parts])
            if network is not None:
                yield Wait(network.back_seconds(settings.total_batch) * self._scale)
            handover = (
                costs.ray_call * settings.n_collectors if settings.executor == "ray" else costs.handover
            )
            yield Compute(handover * self._scale)
        else:
            yield from self._collect_in_turn(0, settings.n_envs, MAIN)
        self._collected()

    def _collect_in_turn(self, first: int, end: int, lock: int) -> Activity:
        """Envs one after the other in one process, or a batched env."""
        costs = self._costs
        act = costs.act if lock == MAIN or costs.act_apart is None else costs.act_apart
        own = at(act, end - first) + costs.store
        wait, compute = (times.sum(axis=1).tolist() for times in self._samples(self._n_steps, first, end))
        for slept, worked in zip(wait, compute, strict=True):
            yield Wait(slept)
            yield Compute(worked + own, lock)

    def _collect_with_workers(self) -> Activity:
        costs, n_envs = self._costs, self._settings.n_envs
        n = min(max(self._settings.n_workers, 1), n_envs)
        firsts = [first for first, _ in _split(n_envs, n)]
        samples = self._samples(self._n_steps, 0, n_envs)
        wait, compute = (np.add.reduceat(times, firsts, axis=1).tolist() for times in samples)
        own = at(costs.act, n_envs) + costs.store + n * costs.handover / 2
        for slept, worked in zip(wait, compute, strict=True):
            steps = zip(slept, worked, range(1, n + 1), strict=True)
            yield from self._all(_step(s, w + costs.handover / 2, lock) for s, w, lock in steps)
            yield Compute(own)

    def _all(self, activities: Iterable[Activity]) -> Activity:
        """Run activities at the same time, until the last one has ended."""
        activities, ended = list(activities), Signal()
        n_left = len(activities)

        def counted(activity: Activity) -> Activity:
            nonlocal n_left
            yield from activity
            n_left -= 1
            if not n_left:
                self._cores.fire(ended)

        for activity in activities:
            self._cores.start(counted(activity))
        yield ended

    def _collect_ready(self) -> Activity:
        """Envs that wait at the same time, rollout after rollout; the policy acts on those that are ready."""
        costs, n_envs, n_steps = self._costs, self._settings.n_envs, self._n_steps
        samples = self._samples((N_ITERATIONS + 3) * n_steps, 0, n_envs)
        wait, compute = samples[0].tolist(), (samples[1] + costs.passing).tolist()
        act = [at(costs.act, n) + costs.store for n in range(n_envs + 1)]
        hold = costs.hold * costs.step_seconds
        taken, idle, ready = [0] * n_envs, list(range(n_envs)), list[int]()

        def step(i: int, nth: int) -> Activity:
            yield Wait(wait[nth][i])
            yield Compute(compute[nth][i])
            ready.append(i)
            if len(ready) == 1:
                self._cores.fire(self._some)

        while True:
            if go := [i for i in idle if taken[i] < self._n_begun * n_steps]:
                idle = [i for i in idle if taken[i] >= self._n_begun * n_steps]
                yield Compute(act[len(go)])
                for i in go:
                    self._cores.start(step(i, taken[i]))
            elif not ready:
                yield self._some
                if 0 < len(ready) < n_envs - len(idle):
                    yield Wait(hold)
            for i in ready:
                taken[i] += 1
            idle += ready
            ready.clear()
            while min(taken) >= (self._n_collected + 1) * n_steps:
                self._collected()

    def _samples(self, n_steps: int, first: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Waiting and computing seconds (steps, envs) of these envs."""
        costs = self._costs
        which = self._rng.integers(len(costs.wait), size=(n_steps, end - first))
        slow = np.resize(costs.slowness, self._settings.n_envs)[first:end]
        return np.array(costs.wait)[which] * slow, np.array(costs.compute)[which] * slow


def _split(n_envs: int, n: int) -> Iterator[tuple[int, int]]:
    """The first env and the end of each of n parts."""
    return pairwise(np.linspace(0, n_envs, n + 1).astype(int).tolist())


def _step(slept: float, worked: float, lock: int) -> Activity:
    yield Wait(slept)
    yield Compute(worked, lock)


class Compute(NamedTuple):
    """Work of so many seconds, if nothing else runs."""

    seconds: float
    lock: int = MAIN
    """Work with the same lock takes turns."""
    width: int = 1
    """Cores it uses at once."""


class Wait(NamedTuple):
    """So many seconds without work."""

    seconds: float


@dataclass(slots=True)
class Signal:
    """Resumes the activities that wait for it when fired; fired before anyone waits, it is kept."""

    fired: bool = False
    waiting: list[Activity] = field(default_factory=list)


Activity: TypeAlias = Generator["Compute | Wait | Signal", None, None]


@dataclass(slots=True)
class _Lock:
    """The work with one lock: all of it goes on, each at an equal share of the speed."""

    width: int
    done: float = 0.0
    """Seconds of work that each has been given so far."""
    work: list[tuple[float, int, Activity]] = field(default_factory=list)
    """A heap by the value of `done` at which it ends."""


class Cores:
    """Runs activities until none is left or it is told to stop.

    Work takes `busy` × as long while something else computes too, and `crowded` × longer still where more cores are
    wanted than there are.
    """

    def __init__(self, n_cores: int, busy: float = 1.0, crowded: float = 1.0) -> None:
        self.now = 0.0
        self.stopped = False
        self._n_cores, self._busy, self._crowded = n_cores, busy, crowded
        self._order = count()
        self._locks: dict[int, _Lock] = {}
        self._sleeping: list[tuple[float, int, Activity]] = []

    def fire(self, signal: Signal) -> None:
        """Resume the activities that wait for the signal."""
        if not signal.waiting:
            signal.fired = True
        waiting, signal.waiting = signal.waiting, []
        for activity in waiting:
            heappush(self._sleeping, (self.now, next(self._order), activity))

    def run(self) -> None:
        """Run until nothing is left to do."""
        while (self._locks or self._sleeping) and not self.stopped:
            speed = self._speed()
            passed = self._sleeping[0][0] - self.now if self._sleeping else math.inf
            for lock in self._locks.values():
                if (left := (lock.work[0][0] - lock.done) * len(lock.work) / speed) < passed:
                    passed = left
            self.now += passed
            ready: list[Activity] = []
            for name, lock in [*self._locks.items()]:
                work = lock.work
                lock.done += passed * speed / len(work)
                while work and work[0][0] <= lock.done + EPSILON:
                    ready.append(heappop(work)[2])
                if not work:
                    del self._locks[name]
            while self._sleeping and self._sleeping[0][0] <= self.now + EPSILON:
                ready.append(heappop(self._sleeping)[2])
            for activity in ready:
                self.start(activity)

    def _speed(self) -> float:
        """The speed of the work with one lock."""
        if len(self._locks) < 2:
            return 1.0
        speed = 1 / self._busy if self._n_cores > 1 else 1.0
        wanted = sum([lock.width for lock in self._locks.values()])
        return speed if wanted <= self._n_cores else speed * self._n_cores / wanted / self._crowded

    def start(self, activity: Activity) -> None:
        """Begin or resume an activity."""
        for request in activity:
            if isinstance(request, Signal):
                if not request.fired:
                    request.waiting.append(activity)
                    return
                request.fired = False
            elif request.seconds > EPSILON:
                if isinstance(request, Wait):
                    heappush(self._sleeping, (self.now + request.seconds, next(self._order), activity))
                else:
                    if (lock := self._locks.get(request.lock)) is None:
                        lock = self._locks[request.lock] = _Lock(request.width)
                    heappush(lock.work, (lock.done + request.seconds, next(self._order), activity))
                return


def ladder(low: int, high: int) -> Iterator[int]:
    """Powers of two from `low` to `high`."""
    n = low
    while n <= high:
        yield n
        n *= 2
