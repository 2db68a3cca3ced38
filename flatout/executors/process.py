"""Envs in worker processes, stepped for a policy that acts in this one: for policies too large to copy.

Actions and observations lie in shared memory; a step costs one byte each way. Each worker runs several envs in
turn, so `recv` returns whole workers, whichever are ready.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any, TypeVar

import gymnasium as gym
import numpy as np

from flatout.device.shared import SharedArrays, Spec
from flatout.envs.spaces import ActionLayout, Array, ObsLayout
from flatout.errors import FlatoutError
from flatout.executors.base import Episode, Step, merge_snapshots, part_of_snapshot
from flatout.executors.parcels import answer_call, pack, pack_call, pack_infos, unpack_answer, unpack_infos
from flatout.executors.serial import SerialExecutor
from flatout.executors.supervise import ChildProcess, Crew, RestartBudget

T = TypeVar("T")

WORKERS_PER_CORE = 2
"""While one worker's answer is on its way, another computes on its core; measured: 0.95 of what two cores give
with 2 workers each, 0.70 with 1 (a step of 300 µs)."""
SPIN_SECONDS = 50e-6
"""How long to look for an answer before sleeping, if there is a core to spare for looking."""
POLL_SECONDS = 0.1
STEP, RESET, MARK, SNAPSHOT, RESTORE, DONE = b"s", b"0", b"M", b"S", b"R", b"D"
BEGIN, APPLY = b"B", b"A"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a worker needs to know; it is sent once."""

    factory: Callable[[], gym.Env[Any, Any]]
    layout: ObsLayout
    seed: int
    env_ids: Array
    first: int
    """Its first row in the shared arrays."""
    end: int
    replayable: bool
    infos: bool
    """Whether to tell what the envs' infos hold."""
    index: int = 0
    generation: int = 0

    @property
    def rows(self) -> Array:
        """Its rows in the shared arrays."""
        return np.arange(self.first, self.end)


class ProcessExecutor:
    """`n_workers` processes behind the executor protocol.

    Where envs need not be replayable, their user may choose seeds, reach the envs and, with `infos`, see what they
    tell; a worker's infos are pickled at the steps in which there are any. Training has none of that and its cost.
    """

    def __init__(
        self,
        factory: Callable[[], gym.Env[Any, Any]],
        layout: ObsLayout,
        env_ids: Array,
        seed: int,
        *,
        action: ActionLayout,
        n_workers: int,
        n_cores: int,
        replayable: bool = True,
        infos: bool = False,
        timeout: float = 60.0,
        budget: RestartBudget | None = None,
    ) -> None:
        self.n_envs, self.env_ids = len(env_ids), env_ids
        n_workers = min(n_workers, self.n_envs)
        self._shared = SharedArrays(_spec(layout, action, self.n_envs))
        self._step = _step_of(self._shared, len(layout.specs), 0, self.n_envs)
        self._spin = SPIN_SECONDS if n_workers < n_cores else 0.0
        job = Job(
            factory=factory,
            layout=layout,
            seed=seed,
            env_ids=env_ids,
            first=0,
            end=self.n_envs,
            replayable=replayable,
            infos=infos,
        )
        edges = np.linspace(0, self.n_envs, n_workers + 1).astype(int).tolist()
        self._jobs = [
            replace(job, index=i, first=a, end=b, env_ids=env_ids[a:b])
            for i, (a, b) in enumerate(pairwise(edges))
        ]
        self._worker_of = np.repeat(np.arange(n_workers), np.diff(edges))
        self._busy: set[int] = set()
        self._rebuilding: set[int] = set()
        self.infos: list[dict[str, Any]] = [{} for _ in range(self.n_envs)]
        """What each env's last step told, or its last reset where an episode has just begun."""
        self.final_infos: dict[int, dict[str, Any]] = {}
        """By place, what the last step of each episode told that ended in it."""
        self._telling: set[int] = set()
        self._is_open = not replayable
        self._before = tuple(leaf.copy() for leaf in self._step.obs) if self._is_open else self._step.obs
        self.budget = budget or RestartBudget()
        self._crew = Crew(n_workers, self._start, self._describe, timeout=timeout, budget=self.budget)

    @property
    def current(self) -> Step:
        """The envs as they stand now."""
        return self._step

    @property
    def notes(self) -> list[str]:
        """One line for each worker that was replaced."""
        return self.budget.notes

    @property
    def pids(self) -> list[int]:
        """The workers' process ids."""
        return self._crew.pids

    def reset(self) -> Step:
        """Begin a seeded episode in every env."""
        self._bring_home()
        self._take_begun(self._ask([RESET] * len(self._jobs)))
        for flags in (self._step.reward, self._step.terminated, self._step.truncated):
            flags[:] = 0
        return replace(self._step, rows=np.arange(self.n_envs))

    def begin(
        self,
        seeds: Sequence[int | None],
        options: Sequence[dict[str, Any] | None] | None = None,
        rows: Sequence[int] | None = None,
    ) -> Step:
        """Begin new episodes, in the places named or in all, with the caller's seeds (None: none) and options."""
        assert self._is_open, "a replay knows only the executor's own seeds"
        self._bring_home()
        named = set(range(self.n_envs) if rows is None else rows)
        messages = []
        for job in self._jobs:
            part = slice(job.first, job.end)
            places = [n - job.first for n in range(job.first, job.end) if n in named]
            messages.append(BEGIN + pack((seeds[part], options[part] if options else None, places)))
        self._take_begun(self._ask(messages))
        return replace(self._step, rows=np.arange(self.n_envs), ended=[], restarted=[])

    def apply(self, function: Callable[[gym.Env[Any, Any]], T], rows: Iterable[int] | None = None) -> list[T]:
        """What `function` returns for each env, called in the env's process; both are pickled on their way.

        The envs must stand still.
        """
        places = [range(self.n_envs)[i] for i in (range(self.n_envs) if rows is None else rows)]
        if self._busy:
            raise FlatoutError("envs can be reached when their last step was received; recv first")
        by_worker: dict[int, list[int]] = {}
        for n in places:
            by_worker.setdefault(int(self._worker_of[n]), []).append(n)
        jobs = self._jobs
        asked = {i: pack_call(function, [n - jobs[i].first for n in mine]) for i, mine in by_worker.items()}
        answers = self._ask_some({i: APPLY + packed for i, packed in asked.items()})
        values = {i: iter(unpack_answer(answers[i])) for i in sorted(answers)}
        return [next(values[int(self._worker_of[n])]) for n in places]

    def send(self, actions: Array, rows: Array) -> None:
        """Hand over actions; a worker starts when the actions of all its envs are there."""
        if self._is_open:
            self._remember(rows)
        self._shared["action"][rows] = actions
        for i in np.unique(self._worker_of[rows]).tolist():
            self._shared["done"][i] = 0
            self._crew.send(i, RESET if i in self._rebuilding else STEP)
            self._busy.add(i)

    def recv(self) -> Step:
        """The envs of every worker that is ready, at least one."""
        self._look_briefly()
        ready: list[int] = []
        restarted: list[int] = []
        while not ready:
            for i, answer in self._crew.receive(self._busy, POLL_SECONDS):
                if answer is None:  # replaced; it is ready when it has reset its new envs
                    self._rebuilding.add(i)
                    self._crew.send(i, RESET)
                else:
                    ready.append(i)
                    if self._is_open:
                        self._take_infos(i, answer[1:])
        rows = []
        ended: list[Episode] = []
        for i in sorted(ready):
            self._busy.discard(i)
            rows.append(self._jobs[i].rows)
            if i in self._rebuilding:
                self._rebuilding.discard(i)
                restarted += self._jobs[i].rows.tolist()
            else:
                ended += self._ended(self._jobs[i])
        self._step.rows = np.concatenate(rows)
        self._step.ended, self._step.restarted = ended, restarted
        return self._step

    def mark(self) -> None:
        """Remember this moment as the one that `snapshot` describes."""
        self._ask([MARK] * len(self._jobs))

    def snapshot(self) -> dict[str, Array]:
        """What is needed to bring every env back to the last mark; nothing while workers are in a step."""
        if self._busy:  # collecting was given up, and one of them may hang
            return {}
        return merge_snapshots([pickle.loads(answer) for answer in self._ask([SNAPSHOT] * len(self._jobs))])

    def restore(self, snapshot: Mapping[str, Array]) -> list[int]:
        """Bring the envs back to a snapshot; returns the places of those that began a new episode."""
        parts = [part_of_snapshot(snapshot, job.first, job.end) for job in self._jobs]
        answers = self._ask([RESTORE + pickle.dumps(part) for part in parts])
        return [
            job.first + i
            for job, answer in zip(self._jobs, answers, strict=True)
            for i in (pickle.loads(answer) if answer else range(job.end - job.first))
        ]

    def close(self) -> None:
        """End every worker."""
        self._crew.close()

    def _look_briefly(self) -> None:
        if self._spin and self._busy:
            done, busy, until = self._shared["done"], list(self._busy), perf_counter() + self._spin
            while not done[busy].any() and perf_counter() < until:
                pass

    def _ended(self, job: Job) -> list[Episode]:
        step, shared = self._step, self._shared
        part = slice(job.first, job.end)
        places = np.flatnonzero(step.terminated[part] | step.truncated[part]) + job.first
        return [
            Episode(int(self.env_ids[n]), float(shared["return"][n]), int(shared["length"][n]))
            for n in places
        ]

    def _bring_home(self) -> None:
        while self._busy:
            self.recv()

    def _remember(self, rows: Array) -> None:
        """Keep what the envs show before they step: a worker that is lost may have written over some of it."""
        if self.final_infos:
            self.final_infos = {n: info for n, info in self.final_infos.items() if n not in rows}
        if len(rows) < self.n_envs and np.isin(self._worker_of, self._worker_of[rows]).sum() > len(rows):
            raise FlatoutError("a worker steps all its envs at once: send actions for all that recv returned")
        for kept, leaf in zip(self._before, self._step.obs, strict=True):
            kept[rows] = leaf[rows]

    def _take_infos(self, i: int, packed: bytes) -> None:
        """Put worker i's infos in their places; most workers have none, and had none the last time."""
        job, step = self._jobs[i], self._step
        infos, finals = unpack_infos(packed)
        if infos or i in self._telling:
            self.infos[job.first : job.end] = [infos.get(n, {}) for n in range(job.end - job.first)]
            (self._telling.add if infos else self._telling.discard)(i)
        part = slice(job.first, job.end)
        for n in np.flatnonzero(step.terminated[part] | step.truncated[part]).tolist():
            self.final_infos[job.first + n] = finals.get(n, {})

    def _take_begun(self, answers: list[bytes]) -> None:
        """What is left of the time before new episodes, and what their resets told."""
        self._rebuilding.clear()
        if self._is_open:
            for i, answer in enumerate(answers):
                self._take_infos(i, answer)
        self.final_infos = {}

    def _ask(self, messages: list[bytes]) -> list[bytes]:
        """Send every worker its message and wait for all; one that was replaced has reset its envs instead."""
        answers = self._ask_some(dict(enumerate(messages)))
        return [answers[i] for i in range(len(messages))]

    def _ask_some(self, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        assert not self._busy, "the envs must stand still"
        for i, message in messages.items():
            self._crew.send(i, message)
        answers: dict[int, bytes] = {}
        while len(answers) < len(messages):
            waiting = [i for i in messages if i not in answers]
            for i, answer in self._crew.receive(waiting, POLL_SECONDS):
                if answer is not None:
                    answers[i] = answer[1:]
                    continue
                kind = messages[i][:1]
                if kind in (SNAPSHOT, MARK, APPLY):  # its envs began anew unseen: the next step will say so
                    self._rebuilding.add(i)
                self._crew.send(i, messages[i] if kind in (SNAPSHOT, MARK, APPLY, BEGIN) else RESET)
        return answers

    def _start(self, i: int, generation: int) -> ChildProcess:
        if generation > 0:  # now, because the new worker writes over what the envs showed last
            part = slice(self._jobs[i].first, self._jobs[i].end)
            source = self._before if i in self._busy else self._step.obs
            for final, leaf in zip(self._step.final_obs, source, strict=True):
                final[part] = leaf[part]
        job = replace(self._jobs[i], generation=generation)
        return ChildProcess(f"flatout worker {i}", worker_main, (job,), self._shared)

    def _describe(self, i: int) -> str:
        ids = self._jobs[i].env_ids
        return f"worker {i} with envs {ids[0]} to {ids[-1]}"


def worker_main(connection: Connection, job: Job, shared: SharedArrays) -> None:
    """A worker's life: step its envs whenever told, until the parent closes the connection."""
    out = _step_of(shared, len(job.layout.specs), job.first, job.end)
    seed = job.seed if job.generation == 0 else _rebuilt_seed(job)
    envs = SerialExecutor(job.factory, job.layout, job.env_ids, seed, replayable=job.replayable, out=out)
    if job.generation > 0:
        envs.reset()
    actions, done = shared["action"][job.first : job.end], shared["done"]
    returns, lengths = shared["return"], shared["length"]
    first_id = int(job.env_ids[0])
    while True:
        message = connection.recv_bytes()
        kind, body = message[:1], message[1:]
        if kind == STEP:
            envs.send(actions, job.rows)
            for episode in envs.recv().ended:
                n = episode.env_id - first_id + job.first
                returns[n], lengths[n] = episode.total_reward, episode.length
            done[job.index] = 1
            connection.send_bytes(DONE + pack_infos(envs.infos, envs.final_infos) if job.infos else DONE)
        elif kind in (RESET, BEGIN):
            if kind == RESET:
                envs.reset()
            else:
                envs.begin(*pickle.loads(body))
            connection.send_bytes(DONE + pack_infos(envs.infos, {}) if job.infos else DONE)
        elif kind == APPLY:
            connection.send_bytes(DONE + answer_call(envs, body))
        elif kind == MARK:
            envs.mark()
            connection.send_bytes(DONE)
        elif kind == SNAPSHOT:
            connection.send_bytes(DONE + pickle.dumps(envs.snapshot()))
        else:
            connection.send_bytes(DONE + pickle.dumps(envs.restore(pickle.loads(body))))


def _spec(layout: ObsLayout, action: ActionLayout, n_envs: int) -> Spec:
    zero = np.zeros((n_envs, action.size), action.dtype)
    like = action.to_env(zero)
    leaves = list(enumerate(layout.specs))
    return {
        **{f"obs.{i}": ((n_envs, *leaf.shape), leaf.dtype) for i, leaf in leaves},
        **{f"final_obs.{i}": ((n_envs, *leaf.shape), leaf.dtype) for i, leaf in leaves},
        "reward": ((n_envs,), np.float64),
        "terminated": ((n_envs,), np.bool_),
        "truncated": ((n_envs,), np.bool_),
        "action": (like.shape, like.dtype),
        "return": ((n_envs,), np.float64),
        "length": ((n_envs,), np.int64),
        "done": ((n_envs,), np.int64),
    }


def _step_of(shared: SharedArrays, n_leaves: int, first: int, end: int) -> Step:
    """The rows from `first` to before `end` of the shared arrays as a Step."""
    return Step(
        rows=np.arange(end - first),
        obs=tuple(shared[f"obs.{i}"][first:end] for i in range(n_leaves)),
        reward=shared["reward"][first:end],
        terminated=shared["terminated"][first:end],
        truncated=shared["truncated"][first:end],
        final_obs=tuple(shared[f"final_obs.{i}"][first:end] for i in range(n_leaves)),
        ended=[],
        restarted=[],
    )


def _rebuilt_seed(job: Job) -> int:
    return int(np.random.SeedSequence([job.seed, job.generation, 2**31]).generate_state(1)[0])
