"""How fast a pipeline would be: its collectors, envs and learner simulated event by event, from measured costs.

In: costs and settings. Out: a forecast. The same seed gives the same forecast.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from flatout.perf.costs import Costs, Settings, at
from flatout.perf.events import Activity, Compute, Cores, Signal, Wait

MAIN = 0
"""The lock of the learner's own process."""
MAX_STEPS = 96
"""Time steps of a rollout that are simulated; longer rollouts are scaled."""
MAX_ENV_STEPS = 6000
FEW_ENV_STEPS = 1500
"""Where ways are only compared with one another."""
CHUNKS = 8
"""Pieces that the learning of an iteration is cut into, so that it shares the cores fairly."""
N_ITERATIONS = 3
"""The first fills the pipeline, the others count."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """What a run with such settings would reach."""

    steps_per_second: float
    learner_busy: float
    collect_rate: float
    """Steps/s with nobody waiting for the collectors."""
    learn_rate: float
    """Steps/s with data always ready."""

    @property
    def limit(self) -> float:
        """The pipeline limit."""
        return min(self.collect_rate, self.learn_rate)


def simulate(costs: Costs, settings: Settings, seed: int = 0) -> Forecast:
    """The forecast for these settings."""
    whole = _Pipeline(costs, settings, seed)
    seconds, busy = whole.run(collect=True, learn=True)
    collect, _ = _Pipeline(costs, settings, seed).run(collect=True, learn=False)
    learn = learn_seconds(costs, settings)
    n = settings.total_batch
    return Forecast(
        steps_per_second=n / seconds,
        learner_busy=busy,
        collect_rate=n / collect,
        learn_rate=n / max(learn, 1e-12),
    )


def steps_per_second(costs: Costs, settings: Settings) -> float:
    """Only about how fast it would be, in a tenth of a forecast's time."""
    seconds, _ = _Pipeline(costs, settings, 0, FEW_ENV_STEPS).run(collect=True, learn=True)
    return settings.total_batch / seconds


def update_seconds(costs: Costs, settings: Settings) -> float:
    """Of one update."""
    cost = costs.compiled if settings.compiled and costs.compiled else costs.update
    return cost.seconds(settings.batch_size)


def learn_seconds(costs: Costs, settings: Settings) -> float:
    """Of learning from one rollout, alone on its cores."""
    return settings.n_updates * update_seconds(costs, settings) + costs.advantage * settings.total_batch


class _Pipeline:
    """One run of some iterations."""

    def __init__(
        self, costs: Costs, settings: Settings, seed: int, max_env_steps: int = MAX_ENV_STEPS
    ) -> None:
        self._costs, self._settings = costs, settings
        self._rng = np.random.default_rng(seed)
        self._cores = Cores(settings.n_cores)
        most = max(max_env_steps // settings.n_envs, 8)
        self._n_steps = min(settings.n_steps, MAX_STEPS, most)
        self._scale = self._n_steps / settings.n_steps
        self._slowness = np.resize(np.array(costs.slowness), settings.n_envs)
        self._edges = np.linspace(0, settings.n_envs, settings.n_collectors + 1).astype(int)
        self._may_begin = -1
        """The last rollout that envs which wait may begin."""
        self._n_collected = 0
        self._some = Signal()

    def run(self, *, collect: bool, learn: bool) -> tuple[float, float]:
        """Seconds of an iteration, and the share of them in which the learner works."""
        self._marks: list[float] = []
        self._busy: list[float] = []
        self._cores.start(self._iterate(collect=collect, learn=learn))
        self._cores.run()
        first, last = self._marks[0], self._marks[-1]
        n = len(self._marks) - 1
        seconds = (last - first) / n
        return seconds / self._scale, sum(self._busy[1:]) / max(last - first, 1e-12)

    def _iterate(self, *, collect: bool, learn: bool) -> Activity:
        waiting = self._settings.executor in ("thread", "async")
        begin, done = self._let_begin if waiting else self._start_collecting, Signal()
        self._done = done
        if collect and waiting:
            self._cores.start(self._collect_ready())
        ahead = self._settings.overlap and collect
        for k in range(N_ITERATIONS + 1):
            if collect:
                begin(k)
                while self._n_collected <= k:
                    yield done
            if ahead:
                begin(k + 1)
            began = self._cores.now
            if learn:
                yield from self._learn()
            self._busy.append(self._cores.now - began)
            if ahead and waiting:  # those that are done need not wait for the others
                begin(k + 2)
            if learn:
                yield Compute(self._scale * (self._costs.iteration + self._settings.extra_seconds), MAIN)
            self._marks.append(self._cores.now)
        self._cores.stopped = True

    def _start_collecting(self, k: int) -> None:
        """Collect rollout k, unless that is under way."""
        if k > self._may_begin:
            self._may_begin = k
            self._cores.start(self._collect())

    def _let_begin(self, k: int) -> None:
        """Let envs that wait begin rollout k as soon as they are done with the one before."""
        if k > self._may_begin:
            self._may_begin = k
            self._cores.fire(self._some)

    def _collected(self) -> None:
        self._n_collected += 1
        self._cores.fire(self._done)

    def _learn(self) -> Activity:
        """All updates of an iteration: the part that holds the lock and the part that only computes."""
        costs, settings = self._costs, self._settings
        cost = costs.compiled if settings.compiled and costs.compiled else costs.update
        n = settings.n_updates * self._scale
        total = cost.seconds(settings.batch_size)
        python, native = n * min(cost.python, total), n * max(total - cost.python, 0.0)
        native += costs.advantage * settings.total_batch * self._scale
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
        elif kind == "batched" or not self._settings.in_subprocesses:
            yield from self._collect_in_turn(0, self._settings.n_envs, MAIN)
        else:
            yield from self._collect_in_children()
        self._collected()

    def _collect_in_turn(self, first: int, end: int, lock: int) -> Activity:
        """Envs one after the other in one process, or all at once if batched."""
        costs, n = self._costs, end - first
        wait, compute = self._samples(first, end)
        own = at(costs.act, n) + costs.store
        for t in range(self._n_steps):
            yield Wait(float(wait[t].sum()))
            yield Compute(float(compute[t].sum()) + own, lock)

    def _collect_in_children(self) -> Activity:
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
        """Envs that wait side by side, rollout after rollout; the policy acts on whichever are ready."""
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
        costs = self._costs
        which = self._rng.integers(len(costs.wait), size=(self._n_steps, end - first))
        slow = self._slowness[first:end]
        return np.array(costs.wait)[which] * slow, np.array(costs.compute)[which] * slow


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


def ladder(low: int, high: int) -> Iterator[int]:
    """Powers of two from `low` to `high`."""
    n = low
    while n <= high:
        yield n
        n *= 2
