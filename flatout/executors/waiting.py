"""Executors for envs that wait (networks, simulators, people): any env may be ready first, each keeps its own order.

Env workers (threads or tasks) only report outcomes. The thread that receives writes them to the arrays, so an env that
was given up can never write again.
"""

from __future__ import annotations

import math
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from time import perf_counter
from typing import Any, Generic, TypeVar

import numpy as np

from flatout.envs.spaces import Array
from flatout.envs.validate import broke_api, nan_message
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
    alloc_step,
)
from flatout.executors.env_worker import (
    Act,
    Apply,
    Command,
    Doing,
    EnvTasks,
    EnvThreads,
    EnvWorker,
    EnvWorkers,
    Outcome,
    Reset,
)
from flatout.executors.episodes import ActionLog, EpisodeStatistics, StepCheck

T = TypeVar("T")

HOLD_SHARE = 0.025
"""How long the first env of a batch is held back when nobody set it, as a share of a step's duration."""
MEMORY_STEPS = 500
"""Over about how many steps durations are averaged."""
ENV_MEMORY_STEPS = 30
"""The same for one env's own."""


class WaitingExecutor(Executor):
    """Envs that are ready one by one, in threads or tasks; lost envs are replaced."""

    waits = True

    def __init__(
        self,
        envs: EnvSet,
        *,
        workers: Callable[[], EnvWorkers],
        batch_size: int | None = None,
        batch_seconds: float | None = None,
        step_timeout: float = 60.0,
        max_restarts: int = 10,
        window_seconds: float = 60.0,
    ) -> None:
        n_envs = self.n_envs = len(envs.env_ids)
        self.env_ids, self._layout = envs.env_ids, envs.obs
        self.current = alloc_step(envs.obs, n_envs)
        self._statistics = EpisodeStatistics(envs.env_ids)
        self._log = ActionLog(envs.env_ids, envs.seed, replayable=False)
        self._check = StepCheck(self.current, envs.env_ids)
        self.budget = envs.budget or RestartBudget(max_restarts, window_seconds)
        self.notes = self.budget.notes
        self.infos: list[dict[str, Any]] = [{} for _ in range(n_envs)]
        self.final_infos: dict[int, dict[str, Any]] = {}
        self._timeout = step_timeout
        self._generations = [0] * n_envs
        self._asked: dict[int, Reset] = {}
        """The caller's resets under way; an env that is replaced meanwhile is reset in the same way."""
        self._due = [math.inf] * n_envs
        self._next_due = math.inf
        self._n_away = 0
        """How many envs were sent a command and have not answered."""
        self._n_steps = [0] * n_envs
        self._is_closed = False
        self._ready: ReadyQueue[Outcome] = ReadyQueue(batch_size, batch_seconds)
        self._workers = workers()
        self._worker = EnvWorker(envs.factory, envs.obs, self._ready.put, awaits=self._workers.awaits)
        try:
            self._start_all()
        except BaseException:
            self._workers.close()
            raise

    def reset(self) -> Step:
        """Begin a seeded episode in every env, after all steps under way are received."""
        self._wait_for_all()
        return self._begin({i: Reset(self._log.next_seed(i)) for i in range(self.n_envs)})

    def reset_envs(self, seeds: Seeds, options: Options = None, env_indices: EnvIndices = None) -> Step:
        self._wait_for_all()
        indices = list(range(self.n_envs) if env_indices is None else env_indices)
        self._asked = {i: Reset(seeds[i], options=options[i] if options else None) for i in indices}
        now = self._begin(self._asked)
        self._asked = {}
        return now

    def _begin(self, resets: Mapping[int, Reset]) -> Step:
        """Reset these envs and wait for all of them."""
        self._send(resets)
        begun: list[Outcome] = []
        while self._n_away:
            begun += self._arrivals()
        self._check.check_some(self._write(begun), self._n_steps)
        self._statistics.clear(list(resets))
        self.mark()
        self.final_infos = {}
        return self.current.begin(list(resets))

    def apply(self, function: EnvCall[T], env_indices: Iterable[int] | None = None) -> list[T]:
        """What `function` returns for each env, called in the env's thread or on the loop, and awaited there."""
        everyone = range(self.n_envs)
        indices = [everyone[i] for i in (everyone if env_indices is None else env_indices)]
        if any(self._due[i] < math.inf for i in indices):
            raise FlatoutError("an env can be reached when its last step was received; recv first")
        results = []
        for i in indices:  # one by one, as one env may be named twice
            result: Future[T] = Future()
            self._workers.send({i: Apply(function, result)})
            results.append(self._result(i, result))
        return results

    def _result(self, i: int, result: Future[T]) -> T:
        try:
            return result.result(self._timeout)
        except TimeoutError as error:
            if result.done():  # the function's own
                raise
            self._workers.raise_if_blocked()
            raise EnvError(f"env {self.env_ids[i]} gave no answer within {self._timeout:g} s") from error

    def send(self, actions: Array, env_indices: Array) -> None:
        """Send each of these envs its action; it starts at once."""
        # A copy, because the caller may reuse its array while envs still look at their actions.
        by_env = dict(zip(env_indices.tolist(), actions.copy(), strict=True))
        if self.final_infos:
            self.final_infos = {i: info for i, info in self.final_infos.items() if i not in by_env}
        self._send({i: Act(action) for i, action in by_env.items()})

    def recv(self) -> Step:
        """Wait for a batch of envs that are ready; one that was lost is ready when it has begun a new episode."""
        assert self._n_away, "send comes first"
        outcomes: list[Outcome] = []
        while not outcomes:
            outcomes = self._arrivals()
        out = self.current
        # An env that was sent an action and has been reset instead was lost during the step.
        out.restarted = [o.env_index for o in outcomes if o.done == "reset"]
        if out.restarted:
            for final, obs in zip(out.final_obs, out.obs, strict=True):
                final[out.restarted] = obs[out.restarted]
            self._statistics.clear(out.restarted)
        out.env_indices = self._write(outcomes)
        steps = [o for o in outcomes if o.done == "step"]
        out.ended = [episode for o in steps for episode in self._count(o)]
        done = [o.env_index for o in steps if o.final_obs is not None]
        self._check.check_some(out.env_indices, self._n_steps, np.array(done) if done else None)
        self._ready.learn((o.env_index, o.seconds) for o in steps)
        return out

    def mark(self) -> None:
        """Remember the current state as the one that `snapshot` describes; steps under way come after it."""
        self._log.mark(self.current.obs, self._statistics)

    def snapshot(self) -> dict[str, Array]:
        """How often each env was seeded, so that a resumed run does not repeat episodes."""
        return self._log.snapshot()

    def restore(self, snapshot: Mapping[str, Array]) -> list[int]:
        """Begin new episodes in all envs, with seeds that the run has not used before."""
        self._log.restore(snapshot)
        self.reset()
        return list(range(self.n_envs))

    def close(self) -> None:
        """Close every env; one that hangs is left behind."""
        self._is_closed = True
        self._workers.close()

    def _start(self, env_indices: Iterable[int]) -> None:
        self._workers.start(self._worker, {i: self._generations[i] for i in env_indices}, self.env_ids)

    def _start_all(self) -> None:
        missing = set(range(self.n_envs))
        self._start(missing)
        while missing:
            made = self._ready.take(len(missing), perf_counter() + self._timeout)
            for outcome in made:
                if outcome.error is not None:
                    raise self._failure(outcome.env_index, outcome.done, outcome.error) from outcome.error
                missing.discard(outcome.env_index)
            if not made:
                self._workers.raise_if_blocked()
                env_id = self.env_ids[min(missing)]
                raise EnvError(f"env {env_id} hangs in its constructor: not made within {self._timeout:g} s")

    def _send(self, commands: Mapping[int, Command]) -> None:
        due = perf_counter() + self._timeout
        for i in commands:
            assert self._due[i] == math.inf, "an env takes an action when its last step was received"
            self._due[i] = due
        self._next_due = min(self._next_due, due)
        self._n_away += len(commands)
        self._workers.send(commands)

    def _arrivals(self) -> list[Outcome]:
        """Outcomes of envs that were expected; lost envs are replaced, and their outcomes come later."""
        arrived = []
        for outcome in self._ready.take(self._n_away, self._next_due):
            i = outcome.env_index
            if outcome.generation != self._generations[i]:
                continue
            if outcome.error is not None:
                self._replace(i, outcome.done, outcome.error)
            elif outcome.done != "constructor":
                self._due[i] = math.inf
                arrived.append(outcome)
        self._n_away -= len(arrived)
        if perf_counter() >= self._next_due:
            self._replace_overdue()
        return arrived

    def _replace_overdue(self) -> None:
        now = perf_counter()
        overdue = [i for i, due in enumerate(self._due) if due <= now]
        if overdue:
            self._workers.raise_if_blocked()
        for i in overdue:
            self._replace(i, "step", TimeoutError(f"no answer within {self._timeout:g} s"))
        # Only here, because it may be too early for a while, but never too late.
        self._next_due = min(self._due)

    def _replace(self, i: int, doing: Doing, error: BaseException) -> None:
        """Replace a lost env by a new one with its next seed, if that has not happened too often."""
        # After such an error a new env would break its spaces too.
        if self._is_closed or (isinstance(error, EnvError) and doing != "constructor"):
            raise self._failure(i, doing, error) from error
        self._generations[i] += 1
        what = f"env {self.env_ids[i]} was rebuilt: {one_line(error)}"
        try:
            self.budget.spend(what, "".join(traceback.format_exception(error)))
        except EnvError as storm:
            raise storm from error
        self._workers.abandon(i)
        self._start([i])
        self._due[i] = perf_counter() + self._timeout
        self._next_due = min(self._next_due, self._due[i])
        self._workers.send({i: self._asked.get(i) or Reset(self._log.next_seed(i))})

    def _wait_for_all(self) -> None:
        while self._n_away:
            self.recv()

    def _write(self, outcomes: list[Outcome]) -> Array:
        """Copy outcomes to the arrays; returns their env indices."""
        out, write = self.current, self._layout.write
        for outcome in outcomes:
            i = outcome.env_index
            try:
                write(out.obs, i, outcome.obs)
                out.reward[i] = outcome.reward
                out.terminated[i], out.truncated[i] = outcome.terminated, outcome.truncated
            except Exception as error:
                raise self._failure(i, outcome.done, error) from error
            self.infos[i] = outcome.info or {}
            if outcome.final_obs is not None:
                self.final_infos[i] = outcome.final_info or {}
                for array, final in zip(out.final_obs, outcome.final_obs, strict=True):
                    array[i] = final[0]
        return np.array([outcome.env_index for outcome in outcomes], np.intp)

    def _count(self, outcome: Outcome) -> list[Episode]:
        """Count a step of one env; returns the episode that it ended, if any."""
        i, ended = outcome.env_index, outcome.final_obs is not None
        reward = float(self.current.reward[i])
        self._n_steps[i] += 1
        if not math.isfinite(reward):
            raise EnvError(nan_message("reward", int(self.env_ids[i]), self._n_steps[i]))
        self._statistics.add_some(i, reward)
        return self._statistics.end([i]) if ended else []

    def _failure(self, i: int, doing: Doing, error: BaseException) -> EnvError:
        if doing == "constructor" and isinstance(error, FlatoutError):
            return EnvError(str(error))
        if doing != "constructor" and isinstance(error, EnvError):
            return EnvError(broke_api(int(self.env_ids[i]), doing, self._n_steps[i] + 1, error))
        when = "" if doing == "constructor" else f" at step {self._n_steps[i] + 1}"
        return EnvError(f"env {self.env_ids[i]} raised in {doing}{when}: {one_line(error)}")


ThreadExecutor = partial(WaitingExecutor, workers=EnvThreads)
"""Blocking envs that wait, each in its own thread."""
CoroutineExecutor = partial(WaitingExecutor, workers=EnvTasks)
"""Async envs, each in its own task, all on one event loop."""


class ReadyQueue(Generic[T]):
    """Batches of items that many threads put and one takes.

    A batch closes when enough items are there or the first of them has waited long enough. Taking blocks on an OS
    primitive and is woken at most twice per batch: by its first item and by the one that closes it.

    Holding the envs of a batch back by w costs an env whose steps take d on average the share w/d of its steps; over
    all envs' steps that is w times the mean of 1/d. An untuned w is HOLD_SHARE over that mean: the first env of a batch
    loses 2.5 %, the average one half of that. Untuned, a batch closes early only when all envs under way are there: a
    policy that takes long finds more envs ready when it returns.
    """

    def __init__(self, batch_size: int | None = None, batch_seconds: float | None = None) -> None:
        self._batch_size, self._batch_seconds = batch_size, batch_seconds
        self._changed = threading.Condition(threading.Lock())
        self._items: list[T] = []
        self._first_at = 0.0
        self._wake_at = 0
        self._rate = 0.0
        self._means: dict[int, float] = {}
        """Seconds of each env's steps: one that now and then answers at once is not a fast one."""

    @property
    def hold_seconds(self) -> float:
        """How long the first env of a batch waits for others."""
        if self._batch_seconds is not None:
            return self._batch_seconds
        return HOLD_SHARE / self._rate if self._rate else 0.0

    def put(self, item: T) -> None:
        """Add one item, from any thread."""
        with self._changed:
            self._items.append(item)
            n_ready = len(self._items)
            if n_ready == 1:
                self._first_at = perf_counter()
            if 0 < self._wake_at <= n_ready:
                self._wake_at = 0
                self._changed.notify()

    def take(self, n_coming: int, until: float) -> list[T]:
        """Wait for a batch of at most `n_coming` items; empty when none came until `until` (perf_counter)."""
        with self._changed:
            self._wait_for(1, until)
            if self._items:
                size = n_coming if self._batch_size is None else min(self._batch_size, n_coming)
                self._wait_for(size, min(until, self._first_at + self.hold_seconds))
            items, self._items = self._items, []
            return items

    def learn(self, steps: Iterable[tuple[int, float]]) -> None:
        """Update the mean duration of steps from pairs of env index and seconds."""
        means, rates = self._means, []
        for env, seconds in steps:
            before = means.get(env, seconds)
            means[env] = before + (seconds - before) / ENV_MEMORY_STEPS
            rates.append(1.0 / max(means[env], 1e-6))
        if rates:
            kept = (1.0 - 1.0 / MEMORY_STEPS) ** len(rates) if self._rate else 0.0
            self._rate = kept * self._rate + (1.0 - kept) * sum(rates) / len(rates)

    def _wait_for(self, n_items: int, until: float) -> None:
        while len(self._items) < n_items:
            left = until - perf_counter()
            if left <= 0:
                break
            self._wake_at = n_items
            self._changed.wait(min(left, threading.TIMEOUT_MAX))
        self._wake_at = 0
