"""Whichever envs are ready: workers put what came of their steps, the executor takes it in batches.

A batch closes when enough envs are ready or the first of them has waited long enough. Taking blocks on an OS
primitive and is woken at most twice a batch: by the first env and by the one that closes it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from time import perf_counter
from typing import Generic, TypeVar

HOLD_SHARE = 0.025
"""Time the first env of a batch is held back when nobody set it, as a share of a step's duration."""
MEMORY_STEPS = 500
"""Over about how many steps durations are averaged."""
ENV_MEMORY_STEPS = 30
"""The same for one env's own."""

T = TypeVar("T")


class ReadyQueue(Generic[T]):
    """Batches of what many threads put and one takes.

    Holding the envs of a batch back by w costs an env whose steps take d on average the share w/d of its steps; over
    all envs' steps that is w times the mean of 1/d. An untuned w is HOLD_SHARE over that mean: the first env of a batch
    loses 2.5 %, the average one half of that. Untuned, a batch has no size at which it closes early, other
    than all envs that are on their way: a policy that takes long finds more envs ready when it returns.
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
        """Wait for a batch out of `n_coming` items; empty when nothing came `until` then (perf_counter's time)."""
        with self._changed:
            self._wait_for(1, until)
            if self._items:
                size = n_coming if self._batch_size is None else min(self._batch_size, n_coming)
                self._wait_for(size, min(until, self._first_at + self.hold_seconds))
            items, self._items = self._items, []
            return items

    def learn(self, steps: Iterable[tuple[int, float]]) -> None:
        """Take notice of which envs' steps took how long."""
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
