"""Samples the next batch in a thread while the learner works on this one; on a single core, in line.

One thread serves all requests in order, so the batches depend on the order of the calls, never on timing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from flatout.buffers.batch import ReplayBatch
from flatout.buffers.replay import Sampler
from flatout.device.accelerator import Retries, current_stream, has_streams, new_stream, use_device
from flatout.device.machine import usable_cores

Result = TypeVar("Result")


class Prefetch:
    """Batches of one size; at most one is requested and not yet taken.

    A batch from `take` is valid until the next `take`, which reuses its memory.
    """

    def __init__(
        self,
        sampler: Sampler[Any],
        size: int,
        device: torch.device,
        *,
        alloc: Callable[[], ReplayBatch] | None = None,
        background: bool | None = None,
        retries: Retries | None = None,
    ) -> None:
        """`alloc` allocates a batch in RAM; `background` defaults to a thread if there is more than one core."""
        self._sampler, self._size, self._device = sampler, size, device
        self._attempt = (retries or Retries(device)).attempt
        # In turn: one is requested, one the learner works on.
        self._buffers = deque((alloc(), alloc()) if alloc is not None else (None, None))
        self._requested: Future[ReplayBatch] | None = None
        self._updates: deque[Future[None]] = deque()
        self._copies = new_stream(device) if has_streams(device) else None
        in_thread = usable_cores() > 1 if background is None else background
        self._thread = ThreadPoolExecutor(1, "flatout-prefetch") if in_thread else None

    def ask(self, beta: float = 0.4) -> None:
        """Request a batch, drawn from what is stored and updated so far."""
        assert self._requested is None, "take a batch before asking for another"
        out = self._buffers[0]
        self._buffers.rotate()
        self._requested = self._do(lambda: self._sample(beta, out))

    def take(self) -> ReplayBatch:
        """The batch that was requested, on the learner's device."""
        assert self._requested is not None, "ask for a batch before taking one"
        requested, self._requested = self._requested, None
        batch = requested.result()
        if self._copies is not None:
            now = current_stream(self._device)
            for tensor in batch.tensors():
                tensor.record_stream(now)
        return batch

    def update(self, batch: ReplayBatch, priority: Tensor) -> None:
        """Set new priorities of a batch; batches requested before this call do not see them."""
        drawn = self._attempt(lambda: [x.detach().clone() for x in (batch.index, batch.serial, priority)])
        self._updates.append(self._do(lambda: self._sampler.update(*drawn)))
        while self._updates and self._updates[0].done():
            self._updates.popleft().result()

    def finish(self) -> None:
        """Wait until all requests are done; then the replay may be added to, saved or read."""
        if self._requested is not None:
            self._requested.result()
        while self._updates:
            self._updates.popleft().result()

    def close(self) -> None:
        """End the thread; a batch that was not taken is dropped."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
        self._requested = None

    def _sample(self, beta: float, out: ReplayBatch | None) -> ReplayBatch:
        batch = self._sampler.sample(self._size, beta, out)
        if self._copies is None:
            return batch if batch.index.device == self._device else batch.to(self._device)
        use_device(self._device)
        with self._copies:
            sent = batch.to(self._device)
        self._copies.synchronize()  # waits in this thread, not in the learner's
        return sent

    def _do(self, work: Callable[[], Result]) -> Future[Result]:
        if self._thread is not None:
            return self._thread.submit(self._attempt, work)
        done: Future[Result] = Future()
        try:
            done.set_result(self._attempt(work))
        except Exception as error:
            done.set_exception(error)
        return done
