"""Blocking envs that wait (requests, sleep, sockets): a thread for each, acting on whichever are ready.

A thread that hangs cannot be ended. It is left behind as a daemon, and what it still reports goes unheard.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from queue import SimpleQueue
from time import perf_counter

from flatout.envs.wrappers import CLOSE_SECONDS
from flatout.executors.life import Life, Order
from flatout.executors.waiting import WaitingExecutor


class ThreadExecutor(WaitingExecutor):
    """Steps each env in a thread of its own, in which it is also made and closed."""

    def _open(self) -> None:
        self._workers: dict[int, _ThreadWorker] = {}

    def _start(self, rows: Sequence[int]) -> None:
        for row in rows:
            name = f"flatout-env-{self.env_ids[row]}"
            self._workers[row] = _ThreadWorker(row, self._generations[row], name, self._life)

    def _give(self, orders: Mapping[int, Order]) -> None:
        for row, order in orders.items():
            self._workers[row].orders.put(order)

    def _abandon(self, row: int) -> None:
        self._workers[row].orders.put(None)

    def _stop(self) -> None:
        for worker in self._workers.values():
            worker.orders.put(None)
        deadline = perf_counter() + CLOSE_SECONDS
        for worker in self._workers.values():
            worker.thread.join(max(0.0, deadline - perf_counter()))
        self._workers.clear()


class _ThreadWorker:
    """One env's thread and the queue of its orders."""

    def __init__(self, row: int, generation: int, name: str, life: Life) -> None:
        self.row, self.generation = row, generation
        self.orders: SimpleQueue[Order | None] = SimpleQueue()
        self.thread = threading.Thread(target=self._run, args=(life,), name=name, daemon=True)
        self.thread.start()

    async def next_order(self) -> Order | None:
        """Block until there is an order."""
        return self.orders.get()

    def _run(self, life: Life) -> None:
        try:
            life.live(self).send(None)
        except StopIteration:
            return
