"""Collectors in processes of their own: each steps its share of the envs with its own copy of the policy.

Once per rollout, parameters come in through shared memory and transitions go out to this collector's columns of the
shared rollout. A collector that dies is replaced and collects its columns again, from new episodes.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from time import perf_counter

import numpy as np
import torch

from flatout.buffers.rollout import Rollout, rollout_spec
from flatout.collect.collector import Collector
from flatout.collect.noise import NO_EXPLORATION, Exploration
from flatout.collect.ragged import Interrupted
from flatout.device.shared import SharedArrays
from flatout.envs.spaces import Array
from flatout.executors.base import EnvSet, Episode, RestartBudget, make_executor
from flatout.executors.workers import Command, WorkerPool, env_answers, serve, worker_seed
from flatout.models.params import ParamBlock
from flatout.models.policy import PolicyNet
from flatout.timing import COLLECT_PHASES, MAX_WAITING, Phase, PhaseClock, Span

PHASES = (*COLLECT_PHASES, Phase.SLOT, Phase.START)
"""The columns of the spans in a collector's answer, after their start and end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectorJob:
    """What a collector needs to know; it is sent once."""

    envs: EnvSet
    """Its envs. Given to SubprocessCollectors: those of all collectors."""
    make_model: Callable[[], PolicyNet]
    """Makes the model that acts, with any parameters: those of the run are published to it."""
    exploration: Exploration = NO_EXPLORATION
    """Of all envs of the run."""
    generation: int = 0
    """How often this collector was replaced; each time its envs get new seeds."""
    first: int = 0
    """The column of its first env in the shared rollout."""


class SubprocessLane:
    """The clock of a collector as of its last answer."""

    def __init__(self, lane: str) -> None:
        self.lane = lane
        self.spans: deque[Span] = deque(maxlen=MAX_WAITING)
        self.n_spans = 0
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._until = perf_counter()

    def read(self) -> dict[str, float]:
        """Seconds per phase; the time since its last answer counts as waiting for a slot."""
        waited = {Phase.SLOT: self.seconds[Phase.SLOT] + perf_counter() - self._until}
        return {name: seconds for name, seconds in (self.seconds | waited).items() if seconds > 0}

    def add(self, rows: Array) -> None:
        """Add an answer: the seconds since the one before, then its spans."""
        began, until, *totals = rows[0].tolist()
        self.seconds[Phase.START] += max(began - self._until, 0.0)
        self._until = until
        for name, seconds in zip(PHASES, totals, strict=True):
            self.seconds[name] += seconds
        for start, end, *spent in rows[1:].tolist():
            self.spans.append(Span(start, end, {name: s for name, s in zip(PHASES, spent, strict=True) if s}))
        self.n_spans += len(rows) - 1


class SubprocessCollectors:
    """Looks like one collector, runs several in processes of their own."""

    def __init__(
        self,
        job: CollectorJob,
        model: PolicyNet,
        n_collectors: int,
        *,
        n_steps: int,
        n_slots: int = 1,
        timeout: float = 60.0,
    ) -> None:
        envs, n_envs = job.envs, len(job.envs.env_ids)
        assert envs.action is not None, "the shared rollout holds actions"
        spec = rollout_spec(model.obs, envs.action, n_steps, n_envs)
        extra = {
            "params": ((ParamBlock.size(model),), np.float32),
            "version": ((1,), np.int64),
            "ended": ((n_steps * n_envs, 3), np.float64),
        }
        slots = {f"{k}.{name}": what for k in range(n_slots) for name, what in spec.items()}
        self._shared = SharedArrays({**slots, **extra})
        self.rollouts = shared_rollouts(self._shared)
        """One that is filled and, if there are two, one that the learner trains on meanwhile."""
        self._block = ParamBlock(model, self._shared["params"], self._shared["version"])
        self._block.begin()
        self._block.finish(0)
        self.version = 0
        self.n_steps = 0
        self._given_up = False
        self._traced = False
        self._job = replace(job, envs=replace(envs, budget=None))
        self.lanes = [SubprocessLane(f"collector {i}") for i in range(n_collectors)]
        self.budget = envs.budget or RestartBudget()
        self._pool = WorkerPool(
            "collector",
            n_collectors,
            envs.env_ids,
            collector_main,
            self._make_job,
            shared=self._shared,
            timeout=timeout,
            budget=self.budget,
        )

    @property
    def pids(self) -> list[int]:
        """The collectors' process ids."""
        return self._pool.pids

    def trace(self, spans: bool) -> None:
        self._traced = spans
        self.lanes = [SubprocessLane(lane.lane) for lane in self.lanes]

    def publish(self) -> None:
        """Collect the next rollout with the model's current parameters; no collector may be collecting."""
        self.version += 1
        self._block.begin()

    def offer_next(self, rollout: Rollout) -> None:
        """Nothing: all envs are done at the same time."""

    def reset(self) -> None:
        self._pool.ask_all(Command.RESET)

    def collect(self, rollout: Rollout, stop: Callable[[], bool] = lambda: False) -> list[Episode]:
        """Have every collector fill its columns with the model last published; returns the episodes that ended."""
        self._block.finish(self.version)
        slot = next(k for k, shared in enumerate(self.rollouts) if shared is rollout)
        message = Command.COLLECT + struct.pack("<qq?", self.n_steps, slot, self._traced)
        try:
            answers = self._pool.ask(dict.fromkeys(range(len(self.lanes)), message), stop)
        except BaseException:  # the run is ending, and a collector may hang or be dead
            self._give_up()
            raise
        if len(answers) < len(self.lanes):
            self._give_up()
        if self._given_up or not all(answers.values()):
            raise Interrupted
        episodes: list[Episode] = []
        for i, (first, _) in enumerate(self._pool.shares):
            (n_ended,) = struct.unpack_from("<q", answers[i])
            self.lanes[i].add(np.frombuffer(answers[i], offset=8).reshape(-1, 2 + len(PHASES)))
            start = first * rollout.n_steps
            for env_id, total, length in self._shared["ended"][start : start + n_ended].tolist():
                episodes.append(Episode(int(env_id), total, int(length)))
        self.n_steps += rollout.n_steps
        return episodes

    def snapshot(self) -> dict[str, Array]:
        """What `restore` needs to bring every env back to the end of the last rollout; empty if it was cut off."""
        return {} if self._given_up else self._pool.snapshot()

    def restore(self, snapshot: Mapping[str, Array]) -> list[int]:
        return self._pool.restore(snapshot)

    def take_notes(self) -> list[str]:
        """None: what happens to envs is told by the restart budget."""
        return []

    def close(self) -> None:
        """End every collector."""
        self._pool.close()

    def _give_up(self) -> None:
        self._given_up = True
        self._pool.close()

    def _make_job(self, _: int, generation: int, first: int, end: int) -> CollectorJob:
        envs = replace(self._job.envs, env_ids=self._job.envs.env_ids[first:end])
        return replace(self._job, envs=envs, generation=generation, first=first)


def collector_main(
    connection: Connection, job: CollectorJob, shared: SharedArrays, signs: SharedArrays, index: int
) -> None:
    """A collector process: collects rollouts when told."""
    torch.set_num_threads(1)
    envs = job.envs
    model = job.make_model()
    ParamBlock(model, shared["params"], shared["version"]).adopt()
    seed = worker_seed(envs.seed, job.generation)
    executor = make_executor("serial", replace(envs, seed=seed, at=signs["at"][index]))
    stop = signs["stop"].data
    clock = PhaseClock()
    cpu = torch.device("cpu")
    collector = Collector(
        executor, model, device=cpu, seed=envs.seed, clock=clock, exploration=job.exploration
    )
    first, end = job.first, job.first + len(envs.env_ids)
    rollouts = [rollout.part(first, end) for rollout in shared_rollouts(shared)]
    n_steps = rollouts[0].n_steps
    ended = shared["ended"][first * n_steps : end * n_steps]

    def collect(body: bytes) -> bytes:
        n_before, slot, traced = struct.unpack("<qq?", body)
        try:
            episodes, rows = collect_answer(
                collector, rollouts[slot], n_before, lambda: stop[0] > 0, traced=traced
            )
        except Interrupted:
            return b""
        if episodes:
            ended[: len(episodes)] = [(e.env_id, e.total_reward, e.length) for e in episodes]
        return struct.pack("<q", len(episodes)) + rows.tobytes()

    with closing(executor):
        if job.generation > 0:
            collector.reset()
        serve(connection, {**env_answers(collector.executor), Command.COLLECT: collect})


def collect_answer(
    collector: Collector,
    rollout: Rollout,
    n_steps: int,
    stop: Callable[[], bool] = lambda: False,
    *,
    traced: bool,
) -> tuple[list[Episode], Array]:
    """Collect a rollout after so many steps: the episodes that ended, and the clock's new spans as rows of PHASES.

    The first row holds the seconds per phase since the last rollout.
    """
    clock = collector.clock
    collector.n_steps = n_steps
    if clock.traced != traced:
        collector.trace(traced)
    before, began = dict(clock.seconds), clock.since
    episodes = collector.collect(rollout, stop)
    spent = {name: s - before.get(name, 0.0) for name, s in clock.seconds.items()}
    spans = [Span(began, clock.since, spent), *(clock.spans.popleft() for _ in range(len(clock.spans)))]
    rows = [(span.start, span.end, *(span.phases.get(name, 0.0) for name in PHASES)) for span in spans]
    return episodes, np.array(rows)


def shared_rollouts(shared: SharedArrays) -> tuple[Rollout, ...]:
    """The rollouts in shared memory, by slot."""
    slots: dict[str, dict[str, Array]] = {}
    for name, array in shared.arrays.items():
        slot, _, rest = name.partition(".")
        if rest:
            slots.setdefault(slot, {})[rest] = array
    return tuple(Rollout(arrays) for arrays in slots.values())
