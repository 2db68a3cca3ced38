"""What learners of rollouts share: a rollout as an algorithm takes it, and passes over its rows, in a new order each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic

import torch

from flatout.learning.update import Batch, Update


class Epochs(Generic[Batch]):
    """Minibatches of one size; the order depends on the seed, the iteration and the pass alone."""

    def __init__(self, update: Update[Batch], *, seed: int, batch_size: int) -> None:
        self._update, self._seed, self._size = update, seed, batch_size
        self._shuffle = torch.Generator(update.device)

    def begin(self, iteration: int) -> None:
        """Before a rollout's first pass."""
        self._shuffle.manual_seed(self._seed * 1_000_003 + iteration)

    def run(self, batch: Batch, stop: Callable[[], bool]) -> bool:
        """One pass in a new order; true when it was cut."""
        n_rows, size = len(batch), self._size
        # Shuffled once, then sliced: one gather per epoch instead of one per minibatch.
        order = torch.randperm(n_rows, generator=self._shuffle, device=self._update.device)
        shuffled = batch.take(order)
        for start in range(0, n_rows, size):
            self._update.step(shuffled.take(slice(start, start + size)))
            if stop():
                return True
        return False
