"""Collectors as actors of a Ray cluster: each steps its share of the envs with its own copy of the policy.

Parameters go into the object store once per version, and every actor's columns of a rollout come back through it, with how
to replay its envs. An actor that is lost with its node or process is replaced elsewhere, brings its envs back to where the
rollout began, and collects its columns again: the result is the same.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from time import perf_counter
from typing import Any

import cloudpickle
import numpy as np
import torch

from flatout.buffers.rollout import Rollout
from flatout.collect.collector import Collector
from flatout.collect.ragged import Interrupted
from flatout.collect.subprocess import CollectorJob, SubprocessLane, collect_answer
from flatout.envs.spaces import Array
from flatout.errors import EnvError, FlatoutError, one_line
from flatout.executors.base import NOT_IN_ENV, EnvSet, Episode, RestartBudget, make_executor
from flatout.executors.episodes import merge_snapshots, part_of_snapshot
from flatout.executors.workers import MAX_IN_VAIN, ONE_THREAD, OUTSIDE_SECONDS, worker_seed
from flatout.models.params import ParamBlock
from flatout.models.policy import PolicyNet
from flatout.timing import PhaseClock

POLL_SECONDS = 0.2
CONNECT_SECONDS = 10.0
"""How long to try to reach a cluster."""
LOOK_SECONDS = 2.0
"""How often to ask an actor which env and step it has come to."""
START_SECONDS = 120.0
"""How long the cluster may take to find room for an actor and to start it."""


def ray_module() -> Any:
    """The package ray, or a line that says how to get it."""
    # Ray would otherwise warn that actors without a GPU will see none in a later version.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # A cluster that is started here gives its workers the priority of this process, not one that any other program exceeds.
    os.environ.setdefault("RAY_worker_niceness", "0")
    try:
        import ray
    except ImportError:
        raise FlatoutError("Ray is not installed: pip install 'flatout[ray]'") from None
    return ray


def connect(ray: Any, address: str | None, n_cpus: int) -> bool:
    """Join the cluster; true if it was started here, and has to be ended here."""
    if ray.is_initialized():
        return False
    how: dict[str, Any] = {"log_to_driver": False, "logging_level": "error", "configure_logging": False}
    address = address or os.environ.get("RAY_ADDRESS") or None
    handler = signal.getsignal(signal.SIGTERM)
    try:
        if address is None:
            here = {"num_cpus": n_cpus, "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
            ray.init(address="local", **here, **how)
        else:
            host, _, port = address.removeprefix("ray://").rpartition(":")
            if host and port.isdigit():  # Ray itself tries for minutes
                socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
            ray.init(address=address, **how)
    except Exception as error:
        where = "ray" if address is None else f"--ray-address {address}"
        raise FlatoutError(f"{where}: {one_line(error)}") from None
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # Ray's own would end the run at once
    return address is None


class RayCollectors:
    """Looks like one collector, runs several as actors."""

    def __init__(
        self,
        job: CollectorJob,
        model: PolicyNet,
        n_collectors: int,
        *,
        n_steps: int,
        n_slots: int = 1,
        address: str | None = None,
        timeout: float = 60.0,
    ) -> None:
        envs, n_envs = job.envs, len(job.envs.env_ids)
        assert envs.action is not None, "the rollout holds actions"
        self._ray = ray_module()
        self._started_here = connect(self._ray, address, n_collectors)
        self.rollouts = tuple(Rollout.alloc(model.obs, envs.action, n_steps, n_envs) for _ in range(n_slots))
        """One that is filled and, if there are two, one that the learner trains on meanwhile."""
        self._values = np.zeros(ParamBlock.size(model), np.float32)
        self._block = ParamBlock(model, self._values, np.zeros(1, np.int64))
        self._published: Any = None
        """The version's parameters in the object store, once they are there."""
        self.version = self.n_steps = 0
        self._given_up = self._traced = False
        self._job, self._n_steps_each = replace(job, envs=replace(envs, budget=None)), n_steps
        self._timeout, self.budget = timeout, envs.budget or RestartBudget()
        self.lanes = [SubprocessLane(f"collector {i}") for i in range(n_collectors)]
        self._shares = list(pairwise(np.linspace(0, n_envs, n_collectors + 1).astype(int).tolist()))
        self._generations, self._in_vain = [0] * n_collectors, [0] * n_collectors
        self._snapshots: list[dict[str, Array]] = [{} for _ in self.lanes]
        """How to bring each actor's envs back to the end of the last rollout."""
        self._actors: list[Any] = [None] * n_collectors
        try:
            for i in range(n_collectors):
                self._actors[i] = self._actor(i)
        except BaseException:
            self.close()
            raise

    def trace(self, spans: bool) -> None:
        self._traced = spans
        self.lanes = [SubprocessLane(lane.lane) for lane in self.lanes]

    def publish(self) -> None:
        """Collect the next rollout with the model's current parameters."""
        self.version += 1
        self._block.begin()
        self._published = None

    def offer_next(self, rollout: Rollout) -> None:
        """Nothing: all envs are done at the same time."""

    def reset(self) -> None:
        for i, snapshot in self._ask("reset", dict.fromkeys(range(len(self.lanes)), ())).items():
            self._snapshots[i] = snapshot

    def collect(self, rollout: Rollout, stop: Callable[[], bool] = lambda: False) -> list[Episode]:
        """Have every actor fill its columns with the model last published; returns the episodes that ended."""
        if self._published is None:
            self._block.finish(self.version)
            self._published = self._ray.put(self._values)
        calls = dict.fromkeys(range(len(self.lanes)), (self._published, self.n_steps, self._traced))
        try:
            answers = self._ask("collect", calls, stop)
        except BaseException:
            self._give_up()
            raise
        episodes: list[Episode] = []
        for i, (first, end) in enumerate(self._shares):
            arrays, ended, rows, self._snapshots[i] = answers[i]
            for name, out in rollout.part(first, end).by_name.items():
                out[...] = arrays[name]
            rows = rows.copy()
            rows[:, :2] += perf_counter()  # it counts from its own now: clocks of machines differ
            self.lanes[i].add(rows)
            episodes += [Episode(int(env_id), total, int(length)) for env_id, total, length in ended]
        self.n_steps += rollout.n_steps
        return episodes

    def snapshot(self) -> dict[str, Array]:
        """What `restore` needs to bring every env back to the end of the last rollout; empty if it was cut off."""
        return {} if self._given_up else merge_snapshots(self._snapshots)

    def restore(self, snapshot: Mapping[str, Array]) -> list[int]:
        self._snapshots = [part_of_snapshot(snapshot, *share) for share in self._shares]
        answers = self._ask("restore", {i: (part,) for i, part in enumerate(self._snapshots)})
        fresh: list[int] = []
        for i, (first, _) in enumerate(self._shares):
            own, self._snapshots[i] = answers[i]
            fresh += [first + n for n in own]
        return fresh

    def take_notes(self) -> list[str]:
        """None: what happens to envs is told by the restart budget."""
        return []

    def close(self) -> None:
        """End every actor, and the cluster if it was started here."""
        for actor in self._actors:
            if actor is not None:
                try:
                    self._ray.kill(actor)
                except Exception:  # the cluster may be gone
                    break
        self._actors = [None] * len(self._actors)
        if self._started_here:
            self._started_here = False
            self._ray.shutdown()

    def _give_up(self) -> None:
        self._given_up = True
        self.close()

    def _actor(self, i: int) -> Any:
        """A new actor for the envs of share i; the cluster decides where."""
        first, end = self._shares[i]
        envs = replace(self._job.envs, env_ids=self._job.envs.env_ids[first:end])
        job = replace(self._job, envs=envs, generation=self._generations[i])
        env_vars = dict.fromkeys(ONE_THREAD, "1") | {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        # A second thread answers `at` while the first one steps envs.
        remote = self._ray.remote(num_cpus=1, max_restarts=0, max_concurrency=2)(CollectorActor)
        return remote.options(runtime_env={"env_vars": env_vars}).remote(
            cloudpickle.dumps(job), self._n_steps_each
        )

    def _ask(
        self, method: str, calls: Mapping[int, tuple[Any, ...]], stop: Callable[[], bool] | None = None
    ) -> dict[int, Any]:
        """Call a method of actors and wait for all answers; an actor that is lost is replaced and asked again."""
        errors = self._ray.exceptions
        left = {i: getattr(self._actors[i], method).remote(*args) for i, args in calls.items()}
        watch, answers = _Watch(self._ray, self._timeout), dict[int, Any]()
        while left:
            ready, _ = self._ray.wait(list(left.values()), num_returns=1, timeout=POLL_SECONDS)
            if stop is not None and stop():
                self._give_up()
                raise Interrupted
            for i in [i for i, ref in left.items() if ref in ready]:
                try:
                    answers[i] = self._ray.get(left.pop(i))
                    self._in_vain[i] = 0
                except errors.RayTaskError as error:
                    cause = error.cause
                    if isinstance(cause, FlatoutError) and cause.__cause__ is None:
                        raise EnvError(f"{one_line(cause)} ({self._describe(i)})") from None
                    self._replace(i, one_line(cause), str(error), anew=True)
                    left[i] = getattr(self._actors[i], method).remote(*calls[i])
                except errors.RayError as error:  # its process or its node is gone
                    self._replace(i, one_line(error).split(" The actor")[0])
                    left[i] = getattr(self._actors[i], method).remote(*calls[i])
            for i in watch.late({i: self._actors[i] for i in left}):
                self._replace(i, f"an env gave no answer within {self._timeout:g} s", anew=True)
                left[i] = getattr(self._actors[i], method).remote(*calls[i])
        return answers

    def _replace(self, i: int, cause: str, traceback_text: str = "", *, anew: bool = False) -> None:
        """Start another actor for share i where the rollout began, or with new episodes."""
        what = f"{self._describe(i)}: {cause}"
        self._in_vain[i] += 1
        if self._in_vain[i] > MAX_IN_VAIN:
            raise EnvError(
                f"gave up: {what}; it was replaced {MAX_IN_VAIN} times without completing anything"
            )
        self.budget.spend(what, traceback_text)
        self._ray.kill(self._actors[i])
        self._generations[i] += anew
        self._actors[i] = self._actor(i)
        begin = (
            self._actors[i].restore.remote(self._snapshots[i]) if self._snapshots[i] and not anew else None
        )
        self._ray.wait([begin or self._actors[i].reset.remote()], timeout=START_SECONDS)

    def _describe(self, i: int) -> str:
        ids = self._job.envs.env_ids[slice(*self._shares[i])]
        return f"collector {i} with envs {ids[0]} to {ids[-1]}"


class _Watch:
    """Notices actors that have not moved on to another env step for too long."""

    def __init__(self, ray: Any, timeout: float) -> None:
        self._ray, self._timeout = ray, timeout
        self._seen: dict[int, tuple[Any, float]] = {}
        self._asked: dict[int, Any] = {}
        self._look_at = perf_counter() + LOOK_SECONDS

    def late(self, waiting: Mapping[int, Any]) -> list[int]:
        """Those that are late."""
        now, late = perf_counter(), []
        if now < self._look_at:
            return []
        self._look_at = now + LOOK_SECONDS
        for i, actor in waiting.items():
            asked = self._asked.get(i)
            at: Any = None
            if asked is not None and self._ray.wait([asked], timeout=0)[0]:
                try:
                    at = self._ray.get(asked)
                except self._ray.exceptions.RayError:
                    continue  # the call that is waited for tells
                asked = None
            if asked is None:
                self._asked[i] = actor.at.remote()
            before = self._seen.get(i)
            if before is None or (at is not None and at != before[0]):
                self._seen[i] = at, now
                continue
            in_env = before[0] is not None and before[0][0] != NOT_IN_ENV
            limit = self._timeout if in_env else max(self._timeout, OUTSIDE_SECONDS, START_SECONDS)
            if now - before[1] > limit:
                late.append(i)
                self._seen.pop(i)
                self._asked.pop(i, None)
        return late


class CollectorActor:
    """Steps its envs on some machine of the cluster."""

    def __init__(self, payload: bytes, n_steps: int) -> None:
        torch.set_num_threads(1)
        job: CollectorJob = cloudpickle.loads(payload)
        envs: EnvSet = job.envs
        assert envs.action is not None, "the rollout holds actions"
        model = job.make_model()
        self._values = np.zeros(ParamBlock.size(model), np.float32)
        ParamBlock(model, self._values, np.zeros(1, np.int64)).adopt()
        self._at = np.zeros(2, np.int64)
        executor = make_executor(
            "serial", replace(envs, seed=worker_seed(envs.seed, job.generation), at=self._at)
        )
        self._collector = Collector(
            executor,
            model,
            device=torch.device("cpu"),
            seed=envs.seed,
            clock=PhaseClock(),
            exploration=job.exploration,
        )
        self._rollout = Rollout.alloc(model.obs, envs.action, n_steps, len(envs.env_ids))

    def reset(self) -> dict[str, Array]:
        """Begin new episodes; how to replay them."""
        self._collector.reset()
        return self._collector.snapshot()

    def restore(self, snapshot: Mapping[str, Array]) -> tuple[list[int], dict[str, Array]]:
        """Bring the envs back; those that began a new episode instead, and how to replay all."""
        return self._collector.restore(
            {name: x.copy() for name, x in snapshot.items()}
        ), self._collector.snapshot()

    def at(self) -> tuple[int, int]:
        """The env and the step that it has come to."""
        return int(self._at[0]), int(self._at[1])

    def collect(self, values: Array, n_steps: int, traced: bool) -> tuple[Any, Any, Array, dict[str, Array]]:
        """A rollout with these parameters: its arrays, the episodes that ended, the time it took, how to replay the envs."""
        self._values[:] = values
        episodes, rows = collect_answer(self._collector, self._rollout, n_steps, traced=traced)
        rows[:, :2] -= perf_counter()
        ended = [(e.env_id, e.total_reward, e.length) for e in episodes]
        return self._rollout.by_name, ended, rows, self._collector.snapshot()
