"""Envs in worker processes, stepped for a policy that acts in this process: for policies too large to copy.

Actions and observations are in shared memory; a step costs one byte each way. Each worker steps several envs in turn,
so `recv` returns all envs of each worker that is ready.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any, TypeVar

import cloudpickle
import numpy as np

from flatout.device.machine import usable_cores
from flatout.device.shared import SharedArrays, Spec
from flatout.envs.spaces import ActionLayout, Array, ObsLayout
from flatout.errors import EnvError, FlatoutError, one_line
from flatout.executors.base import (
    EnvCall,
    EnvIndices,
    EnvSet,
    Episode,
    Executor,
    Options,
    RestartBudget,
    Seeds,
    Step,
)
from flatout.executors.episodes import EpisodeStatistics
from flatout.executors.serial import SerialExecutor
from flatout.executors.workers import Command, WorkerPool, env_answers, serve, worker_seed

T = TypeVar("T")

WORKERS_PER_CORE = 2
"""While one worker's answer is on its way, another computes on its core; measured: 0.95 of the speed of two cores
with 2 workers each, 0.70 with 1 (a step of 300 µs)."""
SETTLE_SECONDS = 1.0
"""How long a snapshot waits for workers that are in the middle of a step."""
SPIN_SECONDS = 50e-6
"""How long to poll for an answer before sleeping, if a core is free for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a worker needs to know; it is sent once."""

    envs: EnvSet
    first: int
    """Index of its first env in the shared arrays."""
    end: int
    generation: int
    """How often this worker was replaced."""


class ProcessExecutor(Executor):
    """Worker processes behind the executor protocol.

    Infos are pickled in the steps in which there are any, and only if the EnvSet asks for them. If the envs need not be
    replayable, callers may also choose seeds and reach the envs.
    """

    def __init__(
        self,
        envs: EnvSet,
        *,
        n_workers: int | None = None,
        step_timeout: float = 60.0,
        max_restarts: int = 10,
        window_seconds: float = 60.0,
    ) -> None:
        assert envs.action is not None, "the workers' memory holds actions"
        n_envs = self.n_envs = len(envs.env_ids)
        self.env_ids = envs.env_ids
        n_cores = usable_cores()
        n_workers = min(n_workers or WORKERS_PER_CORE * n_cores, n_envs)
        self._spin = SPIN_SECONDS if n_workers < n_cores else 0.0
        self._shared = SharedArrays(_spec(envs.obs, envs.action, n_envs))
        self.current = _step_of(self._shared, len(envs.obs.specs), 0, n_envs)
        self._statistics = EpisodeStatistics(envs.env_ids)
        self._busy: set[int] = set()
        self.infos: list[dict[str, Any]] = [{} for _ in range(n_envs)]
        self.final_infos: dict[int, dict[str, Any]] = {}
        self._had_infos: set[int] = set()
        self._is_open = not envs.replayable
        self._obs_before = tuple(a.copy() for a in self.current.obs) if self._is_open else self.current.obs
        self._job_envs = replace(envs, budget=None)
        self.budget = envs.budget or RestartBudget(max_restarts, window_seconds)
        self.notes = self.budget.notes
        self._pool = WorkerPool(
            "worker",
            n_workers,
            envs.env_ids,
            worker_main,
            self._make_job,
            shared=self._shared,
            timeout=step_timeout,
            budget=self.budget,
        )
        sizes = [end - first for first, end in self._pool.shares]
        self._worker_of = np.repeat(np.arange(n_workers), sizes)
        self._indices = [np.arange(first, end) for first, end in self._pool.shares]

    @property
    def pids(self) -> list[int]:
        """The workers' process ids."""
        return self._pool.pids

    def reset(self) -> Step:
        """Begin a seeded episode in every env."""
        self._wait_for_all()
        self._take_begun(self._pool.ask_all(Command.RESET))
        self._statistics.clear()
        return self.current.begin()

    def reset_envs(self, seeds: Seeds, options: Options = None, env_indices: EnvIndices = None) -> Step:
        assert self._is_open, "a replay needs the executor's own seeds"
        self._wait_for_all()
        named = set(range(self.n_envs) if env_indices is None else env_indices)
        messages = {}
        for i, (first, end) in enumerate(self._pool.shares):
            part = slice(first, end)
            own = [n - first for n in range(first, end) if n in named]
            messages[i] = Command.RESET_ENVS + pack((seeds[part], options[part] if options else None, own))
        answers = self._pool.ask(messages)
        self._take_begun([answers[i] for i in range(len(messages))])
        self._statistics.clear(sorted(named))
        return self.current.begin(sorted(named))

    def apply(self, function: EnvCall[T], env_indices: Iterable[int] | None = None) -> list[T]:
        """What `function` returns for each env, called in the env's process; function and results are pickled."""
        everyone = range(self.n_envs)
        indices = [everyone[i] for i in (everyone if env_indices is None else env_indices)]
        if self._busy:
            raise FlatoutError("envs can be reached when their last step was received; recv first")
        by_worker: dict[int, list[int]] = {}
        for n in indices:
            worker = int(self._worker_of[n])
            by_worker.setdefault(worker, []).append(n - self._pool.shares[worker][0])
        try:
            calls = {i: bytes(cloudpickle.dumps((function, own))) for i, own in by_worker.items()}
        except Exception as error:
            raise EnvError(
                f"the function cannot be sent to the envs' processes: {one_line(error)}"
            ) from error
        answers = self._pool.ask({i: Command.APPLY + call for i, call in calls.items()})
        results = {}
        for i in sorted(answers):
            values, failure = pickle.loads(answers[i])
            if failure is not None:
                raise failure
            results[i] = iter(values)
        return [next(results[int(self._worker_of[n])]) for n in indices]

    def send(self, actions: Array, env_indices: Array) -> None:
        """Send actions; a worker starts when the actions of all its envs are there."""
        if self._is_open:
            self._keep_obs(env_indices)
        self._shared["action"][env_indices] = actions
        for i in np.unique(self._worker_of[env_indices]).tolist():
            self._shared["done"][i] = 0
            self._pool.send(i, Command.RESET if i in self._pool.restarted else Command.STEP)
            self._busy.add(i)

    def recv(self) -> Step:
        """The envs of every worker that is ready, at least one."""
        self._spin_briefly()
        ready: list[int] = []
        while not ready:
            for i, answer in self._pool.receive(self._busy):
                if answer is None:  # replaced; it is ready when it has reset its new envs
                    self._pool.restarted.add(i)
                    self._pool.send(i, Command.RESET)
                else:
                    ready.append(i)
                    if self._is_open:
                        self._take_infos(i, answer)
        ended: list[Episode] = []
        restarted: list[int] = []
        ready.sort()
        self._busy.difference_update(ready)
        for i in ready:
            if i in self._pool.restarted:
                self._pool.restarted.discard(i)
                self._statistics.clear(self._indices[i])
                restarted += self._indices[i].tolist()
            else:
                ended += self._count(*self._pool.shares[i])
        self.current.env_indices = np.concatenate([self._indices[i] for i in ready])
        self.current.ended, self.current.restarted = ended, restarted
        return self.current

    def mark(self) -> None:
        assert not self._busy, "receive all steps first"
        self._pool.ask_all(Command.MARK)

    def snapshot(self) -> dict[str, Array]:
        """What `restore` needs to bring every env back to the last mark; empty if a worker fails or hangs in a step."""
        if self._busy and self._pool.settle(self._busy, SETTLE_SECONDS):  # collecting was cut off
            self._busy.clear()
        return {} if self._busy else self._pool.snapshot()

    def restore(self, snapshot: Mapping[str, Array]) -> list[int]:
        assert not self._busy, "receive all steps first"
        fresh = self._pool.restore(snapshot)
        self._pool.restarted.clear()
        self._statistics.restore(snapshot)
        self._statistics.clear(fresh)
        return fresh

    def close(self) -> None:
        """End every worker."""
        self._pool.close()

    def _spin_briefly(self) -> None:
        if self._spin and self._busy:
            done, busy, until = self._shared["done"], list(self._busy), perf_counter() + self._spin
            while not done[busy].any() and perf_counter() < until:
                pass

    def _count(self, first: int, end: int) -> list[Episode]:
        """Count a step of one worker's envs; returns the episodes that ended."""
        step, part = self.current, slice(first, end)
        self._statistics.add_some(part, step.reward[part])
        return self._statistics.end(np.flatnonzero(step.terminated[part] | step.truncated[part]) + first)

    def _wait_for_all(self) -> None:
        while self._busy:
            self.recv()

    def _keep_obs(self, env_indices: Array) -> None:
        """Keep what the envs observe before they step: a worker that is lost may have overwritten some of it."""
        if self.final_infos:
            self.final_infos = {n: info for n, info in self.final_infos.items() if n not in env_indices}
        stepped = np.isin(self._worker_of, self._worker_of[env_indices])
        if len(env_indices) < self.n_envs and stepped.sum() > len(env_indices):
            raise FlatoutError("a worker steps all its envs at once: send actions for all that recv returned")
        for kept, obs in zip(self._obs_before, self.current.obs, strict=True):
            kept[env_indices] = obs[env_indices]

    def _take_infos(self, i: int, packed: bytes) -> None:
        """Store worker i's infos; most workers have none, and had none the last time."""
        first, end = self._pool.shares[i]
        infos, finals = pickle.loads(packed) if packed else ({}, {})
        if infos or i in self._had_infos:
            self.infos[first:end] = [infos.get(n, {}) for n in range(end - first)]
            (self._had_infos.add if infos else self._had_infos.discard)(i)
        part = slice(first, end)
        for n in np.flatnonzero(self.current.terminated[part] | self.current.truncated[part]).tolist():
            self.final_infos[first + n] = finals.get(n, {})

    def _take_begun(self, answers: list[bytes]) -> None:
        """Store the infos of the workers' resets; nothing is left of the episodes before."""
        self._pool.restarted.clear()
        if self._is_open:
            for i, answer in enumerate(answers):
                self._take_infos(i, answer)
        self.final_infos = {}

    def _make_job(self, i: int, generation: int, first: int, end: int) -> Job:
        if generation > 0:  # now, because the new worker overwrites the last observations
            source = self._obs_before if i in self._busy else self.current.obs
            for final, obs in zip(self.current.final_obs, source, strict=True):
                final[first:end] = obs[first:end]
        envs = replace(self._job_envs, env_ids=self.env_ids[first:end])
        return Job(envs=envs, first=first, end=end, generation=generation)


def worker_main(
    connection: Connection, job: Job, shared: SharedArrays, signs: SharedArrays, index: int
) -> None:
    """A worker process: steps its envs when told."""
    out = _step_of(shared, len(job.envs.obs.specs), job.first, job.end)
    seed = worker_seed(job.envs.seed, job.generation)
    with closing(SerialExecutor(replace(job.envs, seed=seed, out=out, at=signs["at"][index]))) as envs:
        if job.generation > 0:
            envs.reset()
        _serve(connection, envs, job, shared, index)


def _serve(connection: Connection, envs: SerialExecutor, job: Job, shared: SharedArrays, index: int) -> None:
    actions, done = shared["action"][job.first : job.end], shared["done"]
    own = np.arange(job.end - job.first)

    def infos() -> bytes:
        return _pack_infos(envs.infos, envs.final_infos) if job.envs.infos else b""

    def step(_: bytes) -> bytes:
        envs.send(actions, own)
        envs.recv()
        done[index] = 1
        return infos()

    def reset(_: bytes) -> bytes:
        envs.reset()
        return infos()

    def reset_envs(body: bytes) -> bytes:
        envs.reset_envs(*pickle.loads(body))
        return infos()

    def mark(_: bytes) -> bytes:
        envs.mark()
        return b""

    serve(
        connection,
        {
            **env_answers(envs),
            Command.STEP: step,
            Command.RESET: reset,
            Command.RESET_ENVS: reset_envs,
            Command.MARK: mark,
            Command.APPLY: lambda body: _call(envs, body),
        },
    )


def _spec(layout: ObsLayout, action: ActionLayout, n_envs: int) -> Spec:
    actions = action.to_env(np.zeros((n_envs, action.size), action.dtype))
    specs = list(enumerate(layout.specs))
    return {
        **{f"obs.{i}": ((n_envs, *spec.shape), spec.dtype) for i, spec in specs},
        **{f"final_obs.{i}": ((n_envs, *spec.shape), spec.dtype) for i, spec in specs},
        "reward": ((n_envs,), np.float64),
        "terminated": ((n_envs,), np.bool_),
        "truncated": ((n_envs,), np.bool_),
        "action": (actions.shape, actions.dtype),
        "done": ((n_envs,), np.int64),
    }


def _step_of(shared: SharedArrays, n_arrays: int, first: int, end: int) -> Step:
    """The envs from `first` to before `end` of the shared arrays as a Step."""
    return Step(
        env_indices=np.arange(end - first),
        obs=tuple(shared[f"obs.{i}"][first:end] for i in range(n_arrays)),
        reward=shared["reward"][first:end],
        terminated=shared["terminated"][first:end],
        truncated=shared["truncated"][first:end],
        final_obs=tuple(shared[f"final_obs.{i}"][first:end] for i in range(n_arrays)),
    )


def pack(value: Any) -> bytes:
    """Pickled; what the user's main module defines is sent by value, as a worker has another main module."""
    try:
        return pickle.dumps(value)
    except Exception:
        return bytes(cloudpickle.dumps(value))


def _pack_infos(infos: Sequence[dict[str, Any]], final_infos: Mapping[int, dict[str, Any]]) -> bytes:
    """The infos that are not empty, by env index; no bytes at all where all are empty."""
    filled = {i: info for i, info in enumerate(infos) if info}
    finals = {i: info for i, info in final_infos.items() if info}
    if not filled and not finals:
        return b""
    try:
        return pack((filled, finals))
    except Exception as error:
        # Without a cause: a new worker would have the same infos.
        raise EnvError(
            f"an env's info cannot be sent between processes ({one_line(error)}); "
            "use infos=False, or executor 'serial' or 'thread'"
        ) from None


def _call(envs: SerialExecutor, packed: bytes) -> bytes:
    """Call a packed function and pack what it returned, or what it raised."""
    try:
        function, env_indices = pickle.loads(packed)
        return pack((envs.apply(function, env_indices), None))
    except Exception as error:
        try:
            answer = pack((None, error))
            pickle.loads(answer)
        except Exception:  # many exceptions cannot be made again from their message
            answer = pack((None, EnvError(one_line(error))))
        return answer
