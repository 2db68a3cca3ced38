"""What executors of envs that wait have in common: any env may be ready first, and each keeps its own order.

Workers (threads or tasks) only report outcomes; rows of the arrays are written here, by the thread that receives,
so that an env which was given up can never write again. A subclass says how workers start, obey and stop.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from time import perf_counter
from typing import Any, TypeVar

import gymnasium as gym
import numpy as np

from flatout.envs.check import nan_message
from flatout.envs.spaces import Array, ObsArrays, ObsLayout
from flatout.errors import EnvError, FlatoutError, one_line
from flatout.executors.base import Episode, Step, alloc_step
from flatout.executors.history import History
from flatout.executors.life import Act, Apply, Begin, Doing, Life, Order, Outcome
from flatout.executors.ready import ReadyQueue
from flatout.executors.supervise import RestartBudget

T = TypeVar("T")

STEP_TIMEOUT = 60.0
REPLAY_SECONDS = 60.0


class WaitingExecutor(ABC):
    """The executor protocol for envs that are ready one by one, with lost envs rebuilt."""

    awaits = False
    """Whether its envs have `async def reset` and `async def step`."""

    def __init__(
        self,
        factory: Callable[[], gym.Env[Any, Any]],
        layout: ObsLayout,
        env_ids: Array,
        seed: int,
        *,
        replayable: bool = False,
        batch_size: int | None = None,
        batch_seconds: float | None = None,
        step_timeout: float | None = None,
        max_restarts: int = 10,
        window_seconds: float = 60.0,
        budget: RestartBudget | None = None,
    ) -> None:
        from flatout.executors import rows  # here, because the compiler takes a moment to load

        n_envs = self.n_envs = len(env_ids)
        self.env_ids = env_ids
        self._all_finite = rows.all_finite
        self._layout = layout
        self._step = alloc_step(layout, n_envs)
        self._history = History(env_ids, seed, replayable=replayable)
        self.budget = budget or RestartBudget(max_restarts, window_seconds)
        self._ready: ReadyQueue[Outcome] = ReadyQueue(batch_size, batch_seconds)
        self._life = Life(factory, layout, self._ready.put, awaits=self.awaits)
        self._timeout = STEP_TIMEOUT if step_timeout is None else step_timeout
        self._generations = [0] * n_envs
        self.infos: list[dict[str, Any]] = [{} for _ in range(n_envs)]
        """What each env's last step told, or its last reset where an episode has just begun."""
        self.final_infos: dict[int, dict[str, Any]] = {}
        """By place, what the last step of each episode told that ended in it."""
        self._asked: dict[int, Begin] = {}
        self._actions: list[Any] = [None] * n_envs
        self._due = [math.inf] * n_envs
        self._next_due = math.inf
        self._n_away = 0
        # Lists, because most batches have a few rows only, and NumPy costs more for those.
        self._returns = [0.0] * n_envs
        self._lengths = [0] * n_envs
        self._n_steps = [0] * n_envs
        self._open()
        try:
            self._start_all()
        except BaseException:
            self._stop()
            raise

    @property
    def notes(self) -> list[str]:
        """One line for each env that was rebuilt."""
        return self.budget.notes

    @property
    def n_restarts(self) -> int:
        """How many envs were rebuilt so far."""
        return self.budget.n_restarts

    @property
    def current(self) -> Step:
        """The envs as they stand now: what the last `reset`, `recv` or `restore` left."""
        return self._step

    def reset(self) -> Step:
        """Begin a seeded episode in every env, once those on their way are back."""
        self._bring_home()
        self._post({i: Begin(self._history.next_seed(i)) for i in range(self.n_envs)})
        self._await_begun()
        self._forget(range(self.n_envs))
        self.mark()
        return self._stand_still()

    def begin(
        self,
        seeds: Sequence[int | None],
        options: Sequence[dict[str, Any] | None] | None = None,
        rows: Sequence[int] | None = None,
    ) -> Step:
        """Begin new episodes, in the places named or in all, with the caller's seeds (None: none) and options."""
        assert not self._history.replayable, "a replay knows only the executor's own seeds"
        self._bring_home()
        places = range(self.n_envs) if rows is None else rows
        self._asked = {i: Begin(seeds[i], options=options[i] if options else None) for i in places}
        self._post(self._asked)
        self._await_begun()
        self._asked = {}
        self._forget(places)
        self.mark()
        return self._stand_still(np.fromiter(places, np.intp))

    def apply(self, function: Callable[[gym.Env[Any, Any]], T], rows: Iterable[int] | None = None) -> list[T]:
        """What `function` returns for each env, called where the env lives: in its thread, or on the loop.

        What it returns is awaited there if it can be. The envs must stand still.
        """
        places = [range(self.n_envs)[i] for i in (range(self.n_envs) if rows is None else rows)]
        if any(self._due[i] < math.inf for i in places):
            raise FlatoutError("an env can be reached when its last step was received; recv first")
        results = []
        for i in places:  # one by one, as one env may be named twice
            result: Future[T] = Future()
            self._give({i: Apply(function, result)})
            results.append(self._answer(i, result))
        return results

    def _answer(self, i: int, result: Future[T]) -> T:
        try:
            return result.result(self._timeout)
        except TimeoutError as error:
            if result.done():  # the function's own
                raise
            self._refuse_blocked()
            raise EnvError(f"env {self.env_ids[i]} gave no answer within {self._timeout:g} s") from error

    def send(self, actions: Array, rows: Array) -> None:
        """Hand each env in `rows` its action; it starts at once."""
        # The caller may reuse its array while envs still look at their actions.
        by_row = dict(zip(rows.tolist(), actions.copy(), strict=True))
        if self.final_infos:
            self.final_infos = {i: info for i, info in self.final_infos.items() if i not in by_row}
        if self._history.replayable:
            for i, action in by_row.items():
                self._actions[i] = action
            self._post({i: Act(action, self._history.seed_at_end(i)) for i, action in by_row.items()})
        else:
            self._post({i: Act(action, None) for i, action in by_row.items()})

    def recv(self) -> Step:
        """Wait for a batch of envs that are ready, and for a lost one to begin anew."""
        assert self._n_away, "send comes first"
        outcomes: list[Outcome] = []
        while not outcomes:
            outcomes = self._arrivals()
        out = self._step
        # An env that was sent an action and has begun an episode instead was lost on the way.
        out.restarted = [o.row for o in outcomes if o.done == "reset"]
        if out.restarted:
            for leaf, last in zip(out.final_obs, out.obs, strict=True):
                leaf[out.restarted] = last[out.restarted]
            self._forget(out.restarted)
        out.rows = self._write(outcomes)
        out.ended = [episode for o in outcomes if o.done == "step" for episode in self._count(o)]
        if out.ended:
            done = np.array([o.row for o in outcomes if o.final_obs is not None])
            self._refuse_nan("observation", out.final_obs, done)
        self._refuse_nan("observation", out.obs, out.rows)
        self._ready.learn((o.row, o.seconds) for o in outcomes if o.done == "step")
        return out

    def mark(self) -> None:
        """Remember this moment as the one that `snapshot` describes; steps on their way come after it."""
        self._history.mark(self._step.obs, np.array(self._returns), np.array(self._lengths))

    def remember(self, rows: Array) -> None:
        """Let the next mark describe these envs as they stand now, wherever they are by then."""
        self._history.remember(rows, self._step.obs, self._returns, self._lengths)

    def snapshot(self) -> dict[str, Array]:
        """The envs' state at the last mark: how each was seeded and, if replayable, the actions since."""
        return self._history.snapshot()

    def restore(self, snapshot: Mapping[str, Array], max_seconds: float = REPLAY_SECONDS) -> list[int]:
        """Replay each env to the snapshot's moment, side by side; returns those that began a new episode."""
        self._bring_home()
        self._returns, self._lengths = snapshot["returns"].tolist(), snapshot["lengths"].tolist()
        give_up_at = perf_counter() + max_seconds
        walks, before = self._history.restore(snapshot), list(self._generations)
        orders = {i: Begin(walk[0], walk[1], give_up_at) for i, walk in enumerate(walks) if walk is not None}
        self._post(orders, extra_seconds=max_seconds)
        walked = self._await_begun() & {i for i in orders if self._generations[i] == before[i]}
        leaves = [(leaf, snapshot[f"obs.{k}"]) for k, leaf in enumerate(self._step.obs)]
        kept = {i for i in walked if all(np.array_equal(leaf[i], then[i]) for leaf, then in leaves)}
        fresh = [i for i in range(self.n_envs) if i not in kept]
        # Those that were lost on the way have already begun anew.
        self._post({i: Begin(self._history.next_seed(i)) for i in fresh if self._generations[i] == before[i]})
        self._await_begun()
        self._forget(fresh)
        self._stand_still()
        self.mark()
        return fresh

    def close(self) -> None:
        """Close every env; one that hangs is left behind."""
        self._stop()

    def _start_all(self) -> None:
        self._start(range(self.n_envs))
        missing = set(range(self.n_envs))
        while missing:
            made = self._ready.take(len(missing), perf_counter() + self._timeout)
            for outcome in made:
                if outcome.error is not None:
                    raise self._failure(outcome.row, outcome.done, outcome.error) from outcome.error
                missing.discard(outcome.row)
            if not made:
                self._refuse_blocked()
                env_id = self.env_ids[min(missing)]
                raise EnvError(f"env {env_id} hangs in its constructor: not made within {self._timeout:g} s")

    def _post(self, orders: Mapping[int, Order], extra_seconds: float = 0.0) -> None:
        due = perf_counter() + self._timeout + extra_seconds
        for i in orders:
            assert self._due[i] == math.inf, "an env takes an action when its last step was received"
            self._due[i] = due
        self._next_due = min(self._next_due, due)
        self._n_away += len(orders)
        self._give(orders)

    def _arrivals(self) -> list[Outcome]:
        """What came from envs that were expected; the lost ones are rebuilt and stay on their way."""
        arrived = []
        for outcome in self._ready.take(self._n_away, self._next_due):
            if outcome.generation != self._generations[outcome.row]:
                continue
            if outcome.error is not None:
                self._rebuild(outcome.row, outcome.done, outcome.error)
            elif outcome.done != "constructor":
                self._due[outcome.row] = math.inf
                arrived.append(outcome)
        self._n_away -= len(arrived)
        if perf_counter() >= self._next_due:
            self._rebuild_overdue()
        return arrived

    def _rebuild_overdue(self) -> None:
        now = perf_counter()
        overdue = [i for i, due in enumerate(self._due) if due <= now]
        if overdue:
            self._refuse_blocked()
        for i in overdue:
            self._rebuild(i, "step", TimeoutError(f"no answer within {self._timeout:g} s"))
        # Only here, because it may be too early for a while, but never too late.
        self._next_due = min(self._due)

    def _rebuild(self, i: int, doing: Doing, error: BaseException) -> None:
        """Replace a lost env by a new one with its next seed, if that has not happened too often."""
        if isinstance(error, EnvError) and doing != "constructor":  # it broke its contract and would again
            raise self._failure(i, doing, error) from error
        self._generations[i] += 1
        cause = str(error) if isinstance(error, FlatoutError) else one_line(error)
        try:
            self.budget.spend(f"env {self.env_ids[i]} was rebuilt: {cause}")
        except EnvError as storm:
            raise storm from error
        self._abandon(i)
        self._start([i])
        self._due[i] = perf_counter() + self._timeout
        self._next_due = min(self._next_due, self._due[i])
        self._give({i: self._asked.get(i) or Begin(self._history.next_seed(i))})

    def _bring_home(self) -> None:
        while self._n_away:
            self.recv()

    def _await_begun(self) -> set[int]:
        """Wait for all that were told to begin; returns those that did."""
        begun = []
        while self._n_away:
            begun += [outcome for outcome in self._arrivals() if outcome.obs is not None]
        self._refuse_nan("observation", self._step.obs, self._write(begun))
        return {outcome.row for outcome in begun}

    def _stand_still(self, begun: Array | slice = slice(None)) -> Step:
        out = self._step
        for flags in (out.reward, out.terminated, out.truncated):
            flags[begun] = 0
        self.final_infos = {}
        out.rows, out.ended, out.restarted = np.arange(self.n_envs), [], []
        return out

    def _write(self, outcomes: list[Outcome]) -> Array:
        """Copy what envs gave into their rows, which are returned."""
        out, write = self._step, self._layout.write
        for outcome in outcomes:
            i = outcome.row
            try:
                write(out.obs, i, outcome.obs)
                out.reward[i] = outcome.reward
                out.terminated[i], out.truncated[i] = outcome.terminated, outcome.truncated
            except Exception as error:
                raise self._failure(i, outcome.done, error) from error
            self.infos[i] = outcome.info or {}
            if outcome.final_obs is not None:
                self.final_infos[i] = outcome.final_info or {}
                for leaf, final in zip(out.final_obs, outcome.final_obs, strict=True):
                    leaf[i] = final[0]
        return np.array([outcome.row for outcome in outcomes], np.intp)

    def _count(self, outcome: Outcome) -> list[Episode]:
        """Add a step to its env's statistics; returns the episode that it ended, if any."""
        i, ended = outcome.row, outcome.final_obs is not None
        reward = float(self._step.reward[i])
        self._n_steps[i] += 1
        self._returns[i] += reward
        self._lengths[i] += 1
        if not math.isfinite(reward):
            raise EnvError(nan_message("reward", int(self.env_ids[i]), self._n_steps[i]))
        if self._history.replayable:
            self._history.add(i, self._actions[i], ended=ended)
        if not ended:
            return []
        episode = Episode(int(self.env_ids[i]), self._returns[i], self._lengths[i])
        self._forget([i])
        return [episode]

    def _forget(self, rows: Iterable[int]) -> None:
        """The episodes in these rows are over."""
        for i in rows:
            self._returns[i], self._lengths[i] = 0.0, 0

    def _refuse_nan(self, what: str, arrays: ObsArrays, rows: Array) -> None:
        for values in arrays:
            if values.dtype.kind != "f" or self._all_finite(values.reshape(len(values), -1), rows):
                continue
            bad = ~np.isfinite(values[rows].reshape(len(rows), -1)).all(axis=1)
            i = rows[bad.argmax()]
            raise EnvError(nan_message(what, int(self.env_ids[i]), self._n_steps[i]))

    def _failure(self, i: int, doing: Doing, error: BaseException) -> EnvError:
        if doing == "constructor" and isinstance(error, FlatoutError):
            return EnvError(str(error))
        cause = str(error) if isinstance(error, FlatoutError) else one_line(error)
        when = "" if doing == "constructor" else f" at step {self._n_steps[i] + 1}"
        return EnvError(f"env {self.env_ids[i]} raised in {doing}{when}: {cause}")

    @abstractmethod
    def _open(self) -> None:
        """Set up what workers need; comes before all else."""

    @abstractmethod
    def _start(self, rows: Sequence[int]) -> None:
        """Give each row a new worker of its current generation, which makes an env and waits for orders."""

    @abstractmethod
    def _give(self, orders: Mapping[int, Order]) -> None:
        """Hand each row's worker its order."""

    @abstractmethod
    def _abandon(self, row: int) -> None:
        """End a row's worker, or give it up when it hangs."""

    @abstractmethod
    def _stop(self) -> None:
        """End all workers, waiting a moment for them at most; may be called twice."""

    def _refuse_blocked(self) -> None:
        """Raise where it is not the overdue env that is to blame."""
        return
