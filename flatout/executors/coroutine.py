"""Envs with `async def reset` and `async def step`: all on one event loop, acting on whichever are ready.

The loop has a thread of its own. Driving it inside `recv` was measured to be no faster, and an env that blocks
the loop could not be named then, nor envs go on while the policy acts or learns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from flatout.envs.wrappers import LoopThread
from flatout.errors import EnvError
from flatout.executors.life import Life, Order
from flatout.executors.waiting import WaitingExecutor


class CoroutineExecutor(WaitingExecutor):
    """Steps each env in a task of its own; hundreds to thousands may be in flight."""

    awaits = True

    def _open(self) -> None:
        self._loop_thread = LoopThread("flatout-loop")
        self._workers: dict[int, _TaskWorker] = {}

    def _start(self, rows: Sequence[int]) -> None:
        loop = self._loop_thread.loop
        for row in rows:
            worker = self._workers[row] = _TaskWorker(row, self._generations[row], loop)
            loop.call_soon_threadsafe(worker.start, f"env {self.env_ids[row]}", self._life)

    def _give(self, orders: Mapping[int, Order]) -> None:
        # One hand-over for all of them: waking the loop is the expensive part.
        pairs = [(self._workers[row], order) for row, order in orders.items()]
        self._loop_thread.loop.call_soon_threadsafe(_hand_out, pairs)

    def _abandon(self, row: int) -> None:
        self._loop_thread.loop.call_soon_threadsafe(self._workers[row].cancel)

    def _stop(self) -> None:
        self._loop_thread.close()

    def _refuse_blocked(self) -> None:
        place = self._loop_thread.blocked_at()
        if place is not None:
            task = asyncio.current_task(self._loop_thread.loop)
            raise EnvError(
                f"{task.get_name() if task else 'an env'} blocks all others at {place}: "
                "await there instead, or run it with executor 'thread'"
            )


class _TaskWorker:
    """One env's task and the order that it awaits; lives on the loop's thread."""

    def __init__(self, row: int, generation: int, loop: asyncio.AbstractEventLoop) -> None:
        self.row, self.generation = row, generation
        self._loop = loop
        self.order: asyncio.Future[Order] = loop.create_future()
        self._task: asyncio.Task[None] | None = None

    def start(self, name: str, life: Life) -> None:
        """Begin to live."""
        self._task = self._loop.create_task(life.live(self), name=name)

    def cancel(self) -> None:
        """End, from within the env's step if need be."""
        assert self._task is not None
        self._task.cancel()

    async def next_order(self) -> Order:
        """Wait until there is an order."""
        order = await self.order
        self.order = self._loop.create_future()
        return order


def _hand_out(pairs: list[tuple[_TaskWorker, Order]]) -> None:
    for worker, order in pairs:
        worker.order.set_result(order)
