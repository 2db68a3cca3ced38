"""Collectors in processes of their own: each steps its share of envs with its own copy of the policy.

One hand-over per rollout: parameters come in through a shared block, transitions go out into this child's
columns of the shared rollout. A child that dies is rebuilt and collects its columns anew, from fresh episodes.
"""

from __future__ import annotations

import pickle
import struct
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from multiprocessing.connection import Connection
from time import perf_counter

import numpy as np
import torch

from flatout.buffers.rollout import Rollout, rollout_spec
from flatout.collect.collector import Collector, Interrupted
from flatout.collect.noise import USUAL, Habits
from flatout.device.shared import SharedArrays
from flatout.envs.make import EnvFactory
from flatout.envs.spaces import ActionLayout, Array, ObsLayout
from flatout.executors.base import Episode, merge_snapshots, part_of_snapshot
from flatout.executors.serial import SerialExecutor
from flatout.executors.supervise import ChildProcess, Crew, RestartBudget
from flatout.models.params import ParamBlock
from flatout.models.policy import PolicyNet
from flatout.timing import COLLECT_PHASES, MAX_WAITING, Phase, PhaseClock, Span

POLL_SECONDS = 0.1
COLLECT, RESET, SNAPSHOT, RESTORE, RESET_ALL, DONE = b"C", b"0", b"S", b"R", b"A", b"D"
PHASES = (*COLLECT_PHASES, Phase.SLOT, Phase.START)
"""The columns of the spans that a child answers with, after their start and end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a child needs to know; it is sent once."""

    factory: EnvFactory
    obs: ObsLayout
    action: ActionLayout
    make_model: Callable[[], PolicyNet]
    """Makes the model that acts, with any parameters: the run's own are published to it."""
    seed: int
    first: int
    """Its first column; its envs have consecutive numbers."""
    end: int
    habits: Habits = USUAL
    """How the envs of the whole run explore."""
    generation: int = 0
    """How often it was rebuilt; each time its envs get new seeds."""


class ChildLane:
    """A child's lane as it told it with its last rollout."""

    def __init__(self, lane: str) -> None:
        self.lane = lane
        self.spans: deque[Span] = deque(maxlen=MAX_WAITING)
        self.n_spans = 0
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._until = perf_counter()

    def read(self) -> dict[str, float]:
        """Seconds per phase; since the last rollout it has waited for a slot, or not yet told otherwise."""
        waited = {Phase.SLOT: self.seconds[Phase.SLOT] + perf_counter() - self._until}
        return {name: seconds for name, seconds in (self.seconds | waited).items() if seconds > 0}

    def add(self, rows: Array) -> None:
        """Take a child's answer: what it spent since the one before, then its spans."""
        began, until, *totals = rows[0].tolist()
        self.seconds[Phase.START] += max(began - self._until, 0.0)
        self._until = until
        for name, seconds in zip(PHASES, totals, strict=True):
            self.seconds[name] += seconds
        for start, end, *spent in rows[1:].tolist():
            self.spans.append(Span(start, end, {name: s for name, s in zip(PHASES, spent, strict=True) if s}))
        self.n_spans += len(rows) - 1


class ChildCollectors:
    """Looks like one Collector, runs several in processes of their own."""

    def __init__(
        self,
        job: Job,
        model: PolicyNet,
        n_children: int,
        *,
        n_steps: int,
        n_slots: int = 1,
        timeout: float = 60.0,
        budget: RestartBudget | None = None,
    ) -> None:
        n_envs = job.end - job.first
        spec = rollout_spec(job.obs, job.action, n_steps, n_envs)
        extra = {
            "params": ((ParamBlock.size(model),), np.float32),
            "version": ((1,), np.int64),
            "ended": ((n_steps * n_envs, 3), np.float64),
        }
        slots = {f"{k}.{name}": what for k in range(n_slots) for name, what in spec.items()}
        self._shared = SharedArrays({**slots, **extra})
        self.rollouts = shared_rollouts(self._shared)
        """One that is filled, and one that is learned from meanwhile if there are two."""
        self._block = ParamBlock(model, self._shared["params"], self._shared["version"])
        self._block.publish(0)
        self.n_steps = 0
        self.version = 0
        self._given_up = False
        edges = np.linspace(job.first, job.end, n_children + 1).astype(int).tolist()
        self._jobs = [replace(job, first=a, end=b) for a, b in pairwise(edges)]
        self.lanes = [ChildLane(f"collector {i}") for i in range(n_children)]
        self._traced = False
        self.budget = budget or RestartBudget()
        self._crew = Crew(n_children, self._start, self._describe, timeout=timeout, budget=self.budget)

    @property
    def pids(self) -> list[int]:
        """The children's process ids."""
        return self._crew.pids

    def trace(self, spans: bool) -> None:
        """Begin to count time anew, and keep spans or not."""
        self._traced = spans
        self.lanes = [ChildLane(lane.lane) for lane in self.lanes]

    def publish(self) -> None:
        """Let the next rollout be collected with the model as it is now; no child may be collecting."""
        self.version += 1
        self._block.publish(self.version)

    def offer(self, rollout: Rollout) -> None:
        """Nothing: all envs are done at the same time."""

    def reset(self) -> None:
        """Begin new episodes in every env."""
        self._ask([RESET] * len(self._jobs))

    def collect(self, rollout: Rollout, stop: Callable[[], bool] = lambda: False) -> list[Episode]:
        """Have every child fill its columns with the model last published; returns the episodes that ended."""
        slot = next(k for k, shared in enumerate(self.rollouts) if shared is rollout)
        message = COLLECT + struct.pack("<qq?", self.n_steps, slot, self._traced)
        try:
            replies = self._ask([message] * len(self._jobs), stop)
        except BaseException:
            self._give_up()
            raise
        episodes: list[Episode] = []
        for job, lane, reply in zip(self._jobs, self.lanes, replies, strict=True):
            (n_ended,) = struct.unpack_from("<q", reply)
            lane.add(np.frombuffer(reply, offset=8).reshape(-1, 2 + len(PHASES)))
            start = job.first * rollout.n_steps
            for env_id, total, length in self._shared["ended"][start : start + n_ended].tolist():
                episodes.append(Episode(int(env_id), total, int(length)))
        self.n_steps += rollout.n_steps
        return episodes

    def snapshot(self) -> dict[str, Array]:
        """Every env's way back to the end of the last rollout; nothing once collecting was given up."""
        if self._given_up:
            return {}
        return merge_snapshots([pickle.loads(reply) for reply in self._ask([SNAPSHOT] * len(self._jobs))])

    def restore(self, snapshot: Mapping[str, Array]) -> list[int]:
        """Bring the envs back to a snapshot, whoever took it; returns those that began a new episode."""
        parts = [part_of_snapshot(snapshot, job.first, job.end) for job in self._jobs]
        replies = self._ask([RESTORE + pickle.dumps(part) for part in parts])
        return [i for reply in replies for i in pickle.loads(reply)]

    def close(self) -> None:
        """End every child."""
        self._crew.close()

    def _start(self, i: int, generation: int) -> ChildProcess:
        job = replace(self._jobs[i], generation=generation)
        return ChildProcess(f"flatout collector {i}", child_main, (job,), self._shared)

    def _describe(self, i: int) -> str:
        return f"collector {i} with envs {self._jobs[i].first} to {self._jobs[i].end - 1}"

    def _give_up(self) -> None:
        """End children in the middle of a rollout: the run is ending, and one of them may hang or be dead."""
        self._given_up = True
        self._crew.close()

    def _ask(self, messages: list[bytes], stop: Callable[[], bool] = lambda: False) -> list[bytes]:
        """Send every child its message and wait for all answers; one that was replaced is asked again."""
        for i, message in enumerate(messages):
            self._crew.send(i, message)
        replies: dict[int, bytes] = {}
        while len(replies) < len(messages):
            waiting = [i for i in range(len(messages)) if i not in replies]
            for i, reply in self._crew.receive(waiting, POLL_SECONDS):
                if reply is not None:
                    replies[i] = reply[1:]
                else:  # the new child has new episodes, so there is nothing to restore any more
                    self._crew.send(i, RESET_ALL if messages[i].startswith(RESTORE) else messages[i])
            if stop():
                raise Interrupted
        return [replies[i] for i in range(len(messages))]


def child_main(connection: Connection, job: Job, shared: SharedArrays) -> None:
    """A child's life: answer the parent's messages until it closes the connection."""
    torch.set_num_threads(1)
    model = job.make_model()
    ParamBlock(model, shared["params"], shared["version"]).adopt()
    seed = job.seed if job.generation == 0 else _rebuilt_seed(job)
    executor = SerialExecutor(job.factory, job.obs, np.arange(job.first, job.end), seed)
    clock = PhaseClock()
    collector = Collector(
        executor,
        model,
        job.action,
        device=torch.device("cpu"),
        seed=job.seed,
        clock=clock,
        habits=job.habits,
    )
    rollouts = [rollout.part(job.first, job.end) for rollout in shared_rollouts(shared)]
    n_steps = rollouts[0].n_steps
    ended = shared["ended"][job.first * n_steps : job.end * n_steps]
    if job.generation > 0:
        executor.reset()
    while True:
        message = connection.recv_bytes()
        kind, body = message[:1], message[1:]
        if kind == COLLECT:
            connection.send_bytes(DONE + _collect(collector, rollouts, ended, clock, body))
        elif kind == RESET:
            executor.reset()
            connection.send_bytes(DONE)
        elif kind == RESET_ALL:
            executor.reset()
            connection.send_bytes(DONE + pickle.dumps(list(range(job.first, job.end))))
        elif kind == SNAPSHOT:
            connection.send_bytes(DONE + pickle.dumps(executor.snapshot()))
        else:
            fresh = executor.restore(pickle.loads(body))
            connection.send_bytes(DONE + pickle.dumps([int(job.first + i) for i in fresh]))


def shared_rollouts(shared: SharedArrays) -> tuple[Rollout, ...]:
    """The rollouts that lie in shared memory, by slot."""
    slots: dict[str, dict[str, Array]] = {}
    for name, array in shared.arrays.items():
        slot, _, rest = name.partition(".")
        if rest:
            slots.setdefault(slot, {})[rest] = array
    return tuple(Rollout(arrays) for arrays in slots.values())


def _collect(
    collector: Collector, rollouts: list[Rollout], ended: Array, clock: PhaseClock, body: bytes
) -> bytes:
    collector.n_steps, slot, traced = struct.unpack("<qq?", body)
    if clock.traced != traced:
        clock.traced = traced
        clock.restart({}, Phase.SLOT)
    before, began = dict(clock.seconds), clock.since
    episodes = collector.collect(rollouts[slot])
    if episodes:
        ended[: len(episodes)] = [(e.env_id, e.total_reward, e.length) for e in episodes]
    spent = {name: s - before.get(name, 0.0) for name, s in clock.seconds.items()}
    spans = [Span(began, clock.since, spent), *(clock.spans.popleft() for _ in range(len(clock.spans)))]
    rows = [(span.start, span.end, *(span.phases.get(name, 0.0) for name in PHASES)) for span in spans]
    return struct.pack("<q", len(episodes)) + np.array(rows).tobytes()


def _rebuilt_seed(job: Job) -> int:
    return int(np.random.SeedSequence([job.seed, job.generation, 2**31]).generate_state(1)[0])
