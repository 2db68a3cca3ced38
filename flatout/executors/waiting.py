"""What executors of envs that wait have in common: any env may be ready first, and each keeps its own order.

Workers (threads or tasks) only report outcomes; rows of the arrays are written here, by the thread that receives,
so that an env which was given up can never write again. A subclass says how workers start, obey and stop.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import gymnasium as gym
import numpy as np

from flatout.envs.check import nan_message
from flatout.envs.make import one_line
from flatout.envs.spaces import Array, ObsLayout
from flatout.errors import EnvError, FlatoutError
from flatout.executors.base import Episode, Step, alloc_step
from flatout.executors.history import History
from flatout.executors.life import Act, Begin, Life, Outcome
from flatout.executors.ready import ReadyQueue
from flatout.executors.serial import bad_row
from flatout.executors.supervise import RestartBudget

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
    ) -> None:
        n_envs = self.n_envs = len(env_ids)
        self.env_ids = env_ids
        self._layout = layout
        self._step = alloc_step(layout, n_envs)
        self._float_leaves = [k for k, leaf in enumerate(layout.leaves) if leaf.dtype == np.float32]
        self._history = History(env_ids, seed, replayable=replayable)
        self._budget = RestartBudget(max_restarts, window_seconds)
        self._ready: ReadyQueue[Outcome] = ReadyQueue(batch_size, batch_seconds)
        self._life = Life(factory, layout, self._ready.put, awaits=self.awaits)
        self._timeout = STEP_TIMEOUT if step_timeout is None else step_timeout
        self._generations = [0] * n_envs
        self._actions: list[Any] = [None] * n_envs
        self._due = np.full(n_envs, math.inf)
        self._n_away = 0
        self._returns = np.zeros(n_envs)
        self._lengths = np.zeros(n_envs, np.int64)
        self._n_steps = np.zeros(n_envs, np.int64)
        try:
            self._start_all()
        except BaseException:
            self.close()
            raise

    @property
    def notes(self) -> list[str]:
        """One line for each env that was rebuilt."""
        return self._budget.notes

    @property
    def n_restarts(self) -> int:
        """How many envs were rebuilt so far."""
        return self._budget.n_restarts

    @property
    def current(self) -> Step:
        """The envs as they stand now: what the last `reset`, `recv` or `restore` left."""
        return self._step

    def reset(self) -> Step:
        """Begin a seeded episode in every env, once those on their way are back."""
        self._bring_home()
        self._post({i: Begin(self._history.next_seed(i)) for i in range(self.n_envs)})
        self._await_begun()
        self._returns[:], self._lengths[:] = 0.0, 0
        self.mark()
        return self._stand_still()

    def send(self, actions: Array, rows: Array) -> None:
        """Hand each env in `rows` its action; it starts at once."""
        # The caller may reuse its array while envs still look at their actions.
        orders = dict(zip(rows.tolist(), actions.copy(), strict=True))
        history = self._history
        if history.replayable:
            for i, action in orders.items():
                self._actions[i] = action
        self._post({i: Act(action, history.seed_at_end(i)) for i, action in orders.items()})

    def recv(self) -> Step:
        """Wait for a batch of envs that are ready, and for a lost one to begin anew."""
        assert self._n_away, "send comes first"
        outcomes: list[Outcome] = []
        while not outcomes:
            outcomes = self._arrivals()
        out = self._step
        out.rows = self._write(outcomes)
        # An env that was sent an action and has begun an episode instead was lost on the way.
        out.restarted = [o.row for o in outcomes if o.done == "reset"]
        if out.restarted:
            self._returns[out.restarted], self._lengths[out.restarted] = 0.0, 0
        stepped = [o for o in outcomes if o.done == "step"]
        self._ready.learn(o.seconds for o in stepped)
        out.ended = self._count(stepped)
        return out

    def mark(self) -> None:
        """Remember this moment as the one that `snapshot` describes; steps on their way come after it."""
        self._history.mark(self._step.obs, self._returns, self._lengths)

    def snapshot(self) -> dict[str, Array]:
        """The envs' state at the last mark: how each was seeded and, if replayable, the actions since."""
        return self._history.snapshot()

    def restore(self, snapshot: Mapping[str, Array], max_seconds: float = REPLAY_SECONDS) -> list[int]:
        """Replay each env to the snapshot's moment, side by side; returns those that began a new episode."""
        self._bring_home()
        self._returns[:], self._lengths[:] = snapshot["returns"], snapshot["lengths"]
        give_up_at = perf_counter() + max_seconds
        walks = self._history.restore(snapshot)
        orders = {i: Begin(walk[0], walk[1], give_up_at) for i, walk in enumerate(walks) if walk is not None}
        self._post(orders, extra_seconds=max_seconds)
        arrived = self._await_begun()
        leaves = [(leaf, snapshot[f"obs.{k}"]) for k, leaf in enumerate(self._step.obs)]
        kept = [i for i in arrived if all(np.array_equal(leaf[i], then[i]) for leaf, then in leaves)]
        fresh = sorted(set(range(self.n_envs)) - set(kept))
        self._post({i: Begin(self._history.next_seed(i)) for i in fresh if i not in self._lost})
        self._await_begun()
        self._returns[fresh], self._lengths[fresh] = 0.0, 0
        self._stand_still()
        self.mark()
        return fresh

    def close(self) -> None:
        """Close every env; one that hangs is left behind."""
        self._stop()

    @abstractmethod
    def _start(self, rows: Sequence[int]) -> None:
        """Give each row a new worker of its current generation, which makes an env and waits for orders."""

    @abstractmethod
    def _give(self, orders: Mapping[int, Begin | Act]) -> None:
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
