"""The next batch is sampled in a thread while this one is learned from; on a single core, in line.

All that is asked of the replay is done in the order asked, by one thread, so which batch is drawn after which
update is decided by the calls alone and never by time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from flatout.buffers.batch import ReplayBatch
from flatout.device.machine import usable_cores

Result = TypeVar("Result")


class Sampler(Protocol):
    """What draws batches and takes priorities back: `Uniform`, `Prioritized` and their like on a device."""

    def sample(self, size: int, beta: float = ..., out: ReplayBatch | None = None) -> ReplayBatch:
        """Draw `size` transitions."""
        ...

    def update(self, index: Tensor, serial: Tensor, priority: Tensor) -> None:
        """New priorities of drawn transitions."""


class Prefetch:
    """Batches of one size, at most `depth` of them asked for and not yet taken.

    A batch that `take` gave is valid until the next `take`: its memory is used again.
    """

    def __init__(
        self,
        sampler: Sampler,
        size: int,
        device: torch.device,
        *,
        alloc: Callable[[], ReplayBatch] | None = None,
        depth: int = 1,
        background: bool | None = None,
    ) -> None:
        """`alloc` makes room for a batch in RAM; by default there is a thread where there is a core for it."""
        self._sampler, self._size, self._device, self._depth = sampler, size, device, depth
        # One more than are asked for: the one that is being learned from.
        self._rooms = deque(alloc() for _ in range(depth + 1)) if alloc is not None else None
        self._asked: deque[Future[ReplayBatch]] = deque()
        self._updates: deque[Future[None]] = deque()
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        in_thread = usable_cores() > 1 if background is None else background
        self._thread = ThreadPoolExecutor(1, "flatout-prefetch") if in_thread else None

    def ask(self, beta: float = 0.4) -> None:
        """Draw a batch from what is stored and known now."""
        assert len(self._asked) < self._depth, "take a batch before asking for another"
        room = None
        if self._rooms is not None:
            room = self._rooms[0]
            self._rooms.rotate(-1)
        self._asked.append(self._do(lambda: self._sample(beta, room)))

    def take(self) -> ReplayBatch:
        """The batch that was asked for first, on the learner's device."""
        assert self._asked, "ask for a batch before taking one"
        batch = self._asked.popleft().result()
        if self._copies is not None:
            now = torch.cuda.current_stream(self._device)
            for tensor in batch.tensors():
                tensor.record_stream(now)
        return batch

    def update(self, batch: ReplayBatch, priority: Tensor) -> None:
        """New priorities of a batch; batches asked for before this do not know of them."""
        index, serial = batch.index.clone(), batch.serial.clone()
        given = priority.detach().clone()
        self._updates.append(self._do(lambda: self._sampler.update(index, serial, given)))
        while self._updates and self._updates[0].done():
            self._updates.popleft().result()

    def finish(self) -> None:
        """Wait until all that was asked for is done: then the replay may be added to, saved or read."""
        for asked in self._asked:
            asked.result()
        while self._updates:
            self._updates.popleft().result()

    def close(self) -> None:
        """End the thread; what was asked for and not taken is dropped."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
        self._asked.clear()

    def _sample(self, beta: float, room: ReplayBatch | None) -> ReplayBatch:
        batch = self._sampler.sample(self._size, beta, room)
        if self._copies is None:
            return batch if batch.index.device == self._device else batch.to(self._device)
        with torch.cuda.stream(self._copies):
            sent = batch.to(self._device)
        self._copies.synchronize()  # waits here, not where the batch is learned from
        return sent

    def _do(self, work: Callable[[], Result]) -> Future[Result]:
        if self._thread is not None:
            return self._thread.submit(work)
        done: Future[Result] = Future()
        try:
            done.set_result(work())
        except Exception as error:
            done.set_exception(error)
        return done
