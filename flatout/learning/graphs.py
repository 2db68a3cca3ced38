"""On CUDA the whole step is captured once as a graph and replayed: one launch instead of hundreds.

A graph reads and writes fixed addresses: minibatches are copied into the captured one, and the update's state,
settings and the model's buffers are changed in place by everyone, so every replay sees the newest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic

import torch

from flatout.learning.update import Batch, Update

WARM_UPS = 3


class Captured(Generic[Batch]):
    """One update step on minibatches shaped like the one it was captured with."""

    def __init__(self, update: Update[Batch], run: Callable[[Batch], Any], batch: Batch) -> None:
        self._inputs = [tensor.clone() for tensor in batch.tensors()]
        own = batch.like(self._inputs)
        stream = torch.cuda.Stream()
        self._graph = torch.cuda.CUDAGraph()
        with update.rehearsing():  # warming up and capturing are no learning
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UPS):
                    update.commit(run(own))
            torch.cuda.current_stream().wait_stream(stream)
            with torch.cuda.graph(self._graph):
                update.commit(run(own))

    def step(self, batch: Batch) -> None:
        """Learn from one minibatch."""
        torch._foreach_copy_(self._inputs, batch.tensors())
        self._graph.replay()
