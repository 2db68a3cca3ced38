"""Predicts the speed of a run: a discrete-event simulation of its collectors, envs and learner on shared cores.

An activity is a generator that yields `Compute`, `Wait` or a `Signal` to wait for. Activities share the cores evenly;
those with the same lock (Python's, one per process) share one core. The same costs and settings give the same forecast.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import TypeAlias

import numpy as np

from flatout.perf.costs import Costs, Settings, at, learn_seconds, update_cost

MAIN = 0
"""The lock of the learner's own process."""
MAX_STEPS = 96
"""Time steps of a rollout that are simulated; longer rollouts are scaled."""
MAX_ENV_STEPS = 6000
FEW_ENV_STEPS = 500
"""For comparing ways with one another: before a run begins, or hundreds of them."""
CHUNKS = 8
"""Pieces that the learning of an iteration is cut into, so that it shares the cores fairly."""
N_ITERATIONS = 3
"""Simulated iterations that count, after one that fills the pipeline."""


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
    return _Pipeline(costs, settings, max_env_steps).run(learn=False)[0]


def lockstep_seconds(costs: Costs, settings: Settings, collect: float) -> float:
    """Seconds of an iteration that collects, then learns."""
    return collect + learn_seconds(costs, settings) + costs.iteration + settings.extra_seconds


def iteration_seconds(
    costs: Costs, settings: Settings, max_env_steps: int = MAX_ENV_STEPS
) -> tuple[float, float]:
    """Seconds of a whole iteration, and the share of them in which the learner works."""
    return _Pipeline(costs, settings, max_env_steps).run(learn=True)


class _Pipeline:
    """A few iterations of a run."""

    def __init__(self, costs: Costs, settings: Settings, max_env_steps: int) -> None:
        self._costs, self._settings = costs, settings
        self._rng = np.random.default_rng(0)
        # Env workers sleep between steps, so more of them than cores lose nothing.
        crowded = costs.crowded if settings.in_subprocesses else 1.0
        self._cores = Cores(settings.n_cores, costs.busy, crowded)
        most = max(max_env_steps // settings.n_envs, 4)
        if len(costs.wait) == 1 and settings.executor not in ("thread", "async"):
            most = 8  # every time step is the same
        self._n_steps = min(settings.n_steps, MAX_STEPS, most)
        self._scale = self._n_steps / settings.n_steps
        self._wait, self._compute = np.array(costs.wait), np.array(costs.compute)
        self._slowness = np.resize(np.array(costs.slowness), settings.n_envs)
        self._edges = np.linspace(0, settings.n_envs, settings.n_collectors + 1).astype(int)
        self._may_begin = -1
        """The last rollout that may be begun."""
        self._n_collected = 0
        self._done, self._some = Signal(), Signal()
        self._marks: list[float] = []
        self._busy: list[float] = []

    def run(self, *, learn: bool) -> tuple[float, float]:
        """Seconds of an iteration, and the share of them in which the learner works; without learning, of collecting."""
        self._cores.start(self._iterate(learn=learn))
        self._cores.run()
        first, last = self._marks[0], self._marks[-1]
        seconds = (last - first) / (len(self._marks) - 1)
        return seconds / self._scale, sum(self._busy[1:]) / max(last - first, 1e-12)

    def _iterate(self, *, learn: bool) -> Activity:
        waiting = self._settings.executor in ("thread", "async")
        begin = self._let_begin if waiting else self._start_collecting
        if waiting:
            self._cores.start(self._collect_ready())
        overlap = self._settings.overlap
        for k in range(N_ITERATIONS + 1):
            begin(k)
            while self._n_collected <= k:
                yield self._done
            if overlap:
                begin(k + 1)
            began = self._cores.now
            if learn:
                yield from self._learn()
            self._busy.append(self._cores.now - began)
            if overlap and waiting:  # envs that have finished need not wait for the others
                begin(k + 2)
            if learn:
                yield Compute(self._scale * (self._costs.iteration + self._settings.extra_seconds), MAIN)
            self._marks.append(self._cores.now)
        self._cores.stopped = True

    def _start_collecting(self, k: int) -> None:
        """Collect rollout k, unless it is begun."""
        if k > self._may_begin:
            self._may_begin = k
            self._cores.start(self._collect())

    def _let_begin(self, k: int) -> None:
        """Let each env begin rollout k as soon as it has finished the one before."""
        if k > self._may_begin:
            self._may_begin = k
            self._cores.fire(self._some)

    def _collected(self) -> None:
        self._n_collected += 1
        self._cores.fire(self._done)

    def _learn(self) -> Activity:
        """The updates of an iteration: a part that holds Python's lock and a part that only computes."""
        costs, settings = self._costs, self._settings
        total = learn_seconds(costs, settings) * self._scale
        launching = costs.learn_overhead * settings.n_updates * update_cost(costs, settings).python
        python = min(launching * self._scale, total)
        native = total - python
        for _ in range(CHUNKS):
            yield Compute(python / CHUNKS, MAIN)
            if settings.on_device:
                yield Wait(native / CHUNKS)
            else:
                yield Compute(native / CHUNKS, None, settings.learn_threads)

    def _collect(self) -> Activity:
        kind = self._settings.executor
        if kind == "process":
            yield from self._collect_with_workers()
        elif self._settings.in_subprocesses:
            yield from self._collect_in_subprocesses()
        else:
            yield from self._collect_in_turn(0, self._settings.n_envs, MAIN)
        self._collected()

    def _collect_in_turn(self, first: int, end: int, lock: int) -> Activity:
        """Envs one after the other in one process, or a batched env."""
        costs, n = self._costs, end - first
        wait, compute = self._samples(first, end)
        own = at(costs.act, n) + costs.store
        for t in range(self._n_steps):
            yield Wait(float(wait[t].sum()))
            yield Compute(float(compute[t].sum()) + own, lock)

    def _collect_in_subprocesses(self) -> Activity:
        joined = _Join(self._cores, self._settings.n_collectors)
        for i, (first, end) in enumerate(pairwise(self._edges.tolist())):
            self._cores.start(joined.after(self._collect_in_turn(first, end, i + 1)))
        yield joined.signal
        yield Compute(self._costs.handover * self._scale, MAIN)

    def _collect_with_workers(self) -> Activity:
        costs, settings = self._costs, self._settings
        n = min(max(settings.n_workers, 1), settings.n_envs)
        wait, compute = self._samples(0, settings.n_envs)
        edges = np.linspace(0, settings.n_envs, n + 1).astype(int).tolist()
        own = at(costs.act, settings.n_envs) + costs.store
        for t in range(self._n_steps):
            joined = _Join(self._cores, n)
            for i, (first, end) in enumerate(pairwise(edges)):
                slept, worked = float(wait[t, first:end].sum()), float(compute[t, first:end].sum())
                self._cores.start(joined.after(_step(slept, worked + costs.handover / 2, i + 1)))
            yield joined.signal
            yield Compute(own + n * costs.handover / 2, MAIN)

    def _collect_ready(self) -> Activity:
        """Envs that wait at the same time, rollout after rollout; the policy acts on those that are ready."""
        costs, n_envs, n_steps = self._costs, self._settings.n_envs, self._n_steps
        sent, ready = [Signal() for _ in range(n_envs)], list[int]()
        taken = np.zeros(n_envs, np.int64)
        hold = costs.hold * costs.step_seconds
        idle = list(range(n_envs))
        for i in idle:
            self._cores.start(self._one_env(i, sent[i], ready))
        while True:
            if not ready and not any(taken[i] // n_steps <= self._may_begin for i in idle):
                yield self._some
                if 0 < len(ready) < n_envs - len(idle):
                    yield Wait(hold)
            now, ready[:] = list(ready), []
            taken[now] += 1
            while taken.min() >= (self._n_collected + 1) * n_steps:
                self._collected()
            idle += now
            go = [i for i in idle if taken[i] // n_steps <= self._may_begin]
            if go:
                idle = [i for i in idle if taken[i] // n_steps > self._may_begin]
                yield Compute(at(costs.act, len(go)) + costs.store, MAIN)
                for i in go:
                    self._cores.fire(sent[i])

    def _one_env(self, i: int, sent: Signal, ready: list[int]) -> Activity:
        while True:
            wait, compute = self._samples(i, i + 1)
            for slept, worked in zip(wait[:, 0].tolist(), compute[:, 0].tolist(), strict=True):
                yield sent
                yield Wait(slept)
                yield Compute(worked + self._costs.passing, MAIN)
                ready.append(i)
                if len(ready) == 1:
                    self._cores.fire(self._some)

    def _samples(self, first: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Waiting and computing seconds (steps, envs) of a rollout."""
        which = self._rng.integers(len(self._wait), size=(self._n_steps, end - first))
        slow = self._slowness[first:end]
        return self._wait[which] * slow, self._compute[which] * slow


def _step(slept: float, worked: float, lock: int) -> Activity:
    yield Wait(slept)
    yield Compute(worked, lock)


class _Join:
    """Fires when so many activities have ended."""

    def __init__(self, cores: Cores, n: int) -> None:
        self._cores, self._left, self.signal = cores, n, Signal()

    def after(self, activity: Activity) -> Activity:
        """The activity, counted when it ends."""
        yield from activity
        self._left -= 1
        if not self._left:
            self._cores.fire(self.signal)


EPSILON = 1e-12


@dataclass(slots=True)
class Compute:
    """Work of so many seconds, if nothing else runs."""

    seconds: float
    lock: int | None = None
    """Work with the same lock takes turns."""
    width: int = 1
    """Cores it uses at once."""


@dataclass(slots=True)
class Wait:
    """So many seconds without work."""

    seconds: float


@dataclass(slots=True)
class Signal:
    """Resumes the activities that wait for it when fired; fired before anyone waits, it is kept."""

    fired: bool = False
    waiting: list[Activity] = field(default_factory=list)


Activity: TypeAlias = Generator["Compute | Wait | Signal", None, None]


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
        self._computing: list[tuple[Compute, Activity]] = []
        self._sleeping: list[tuple[float, int, Activity]] = []

    def fire(self, signal: Signal) -> None:
        """Resume the activities that wait for the signal."""
        if not signal.waiting:
            signal.fired = True
        waiting, signal.waiting = signal.waiting, []
        for activity in waiting:
            heapq.heappush(self._sleeping, (self.now, next(self._order), activity))

    def run(self) -> None:
        """Run until nothing is left to do."""
        while (self._computing or self._sleeping) and not self.stopped:
            ready: list[Activity] = []
            rates = self._rates()
            slept = self._sleeping[0][0] - self.now if self._sleeping else math.inf
            passed = max(slept, 0.0)
            for (work, _), rate in zip(self._computing, rates, strict=True):
                passed = min(passed, work.seconds / rate)
            self.now += passed
            going_on = []
            for item, rate in zip(self._computing, rates, strict=True):
                item[0].seconds -= passed * rate
                if item[0].seconds > EPSILON:
                    going_on.append(item)
                else:
                    ready.append(item[1])
            self._computing = going_on
            while self._sleeping and self._sleeping[0][0] <= self.now + EPSILON:
                ready.append(heapq.heappop(self._sleeping)[2])
            for activity in ready:
                self.start(activity)

    def _rates(self) -> list[float]:
        """The speed of each piece of work: those with the same lock share a core, and all share the cores."""
        if len(self._computing) == 1:
            return [min(1.0, self._n_cores / self._computing[0][0].width)]
        holders: dict[int, int] = {}
        wanted = n_others = 0
        for work, _ in self._computing:
            if work.lock is None:
                wanted += work.width
                n_others += 1
            else:
                wanted += work.lock not in holders
                holders[work.lock] = holders.get(work.lock, 0) + 1
        alone = self._n_cores == 1 or len(holders) + n_others == 1
        speed = 1.0 if alone else 1 / self._busy
        if wanted > self._n_cores:
            speed *= self._n_cores / wanted / self._crowded
        return [speed / holders[work.lock] if work.lock is not None else speed for work, _ in self._computing]

    def start(self, activity: Activity) -> None:
        """Begin or resume an activity."""
        while True:
            try:
                request = next(activity)
            except StopIteration:
                return
            if isinstance(request, Compute):
                if request.seconds > EPSILON:
                    self._computing.append((request, activity))
                    return
            elif isinstance(request, Wait):
                if request.seconds > EPSILON:
                    heapq.heappush(self._sleeping, (self.now + request.seconds, next(self._order), activity))
                    return
            elif request.fired:
                request.fired = False
            else:
                request.waiting.append(activity)
                return


def ladder(low: int, high: int) -> Iterator[int]:
    """Powers of two from `low` to `high`."""
    n = low
    while n <= high:
        yield n
        n *= 2
