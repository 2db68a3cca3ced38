"""Prefetched batches are the same with and without a thread, whichever side is slow."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import Tensor

from flatout.buffers.batch import ReplayBatch, alloc_batch
from flatout.buffers.prefetch import Prefetch
from flatout.buffers.priority import Prioritized
from flatout.errors import FlatoutError
from tests.buffers.plain_replay import ACTION, CPU, OBS, Filled


@contextmanager
def opened(fetch: Prefetch) -> Iterator[Prefetch]:
    """A prefetcher that is closed at the end."""
    try:
        yield fetch
    finally:
        fetch.close()


class Slow(Prioritized):
    """Is slow at random."""

    def sample(self, size: int, beta: float = 0.4, out: ReplayBatch | None = None) -> ReplayBatch:
        if self.n_draws % 7 == 3:
            time.sleep(0.01)
        return super().sample(size, beta, out)


def run(sampler_class: type[Prioritized], background: bool) -> list[Tensor]:
    """A learner's loop: request, take, request the next, learn, update; sometimes new steps are added."""
    filled = Filled(3, 20, 8)
    for _ in range(20):
        filled.anything()
    sampler = sampler_class(filled.replay, gamma=0.9, n_step=2, seed=5)
    alloc = partial(alloc_batch, OBS, ACTION, 16)
    seen = []
    fetch = Prefetch(sampler, 16, CPU, alloc=alloc, background=background)
    with opened(fetch):
        fetch.ask()
        for k in range(40):
            batch = fetch.take()
            fetch.ask()
            seen += [batch.index.clone(), batch.weight.clone(), batch.reward.clone()]
            fetch.update(batch, batch.reward.abs() + 0.1 * k)
            assert torch.equal(seen[-3], batch.index)  # not overwritten by the one asked for since
            if k % 10 == 9:
                fetch.finish()
                filled.anything()
    return seen


def test_timing_does_not_change_the_samples() -> None:
    in_line = run(Prioritized, False)
    for sampler_class in (Prioritized, Slow):
        threaded = run(sampler_class, True)
        assert all(torch.equal(x, y) for x, y in zip(in_line, threaded, strict=True))


def test_a_prefetched_batch_uses_the_priorities_of_its_request() -> None:
    filled = Filled(1, 20, 0, p_terminated=0, p_truncated=0)
    for _ in range(10):
        filled.step()
    sampler = Prioritized(filled.replay, gamma=0.9, alpha=1.0, eps=0.0)
    alloc = partial(alloc_batch, OBS, ACTION, 10)
    with opened(Prefetch(sampler, 10, CPU, alloc=alloc, background=True)) as fetch:
        fetch.ask()
        batch = fetch.take()
        assert batch.index.tolist() == list(range(10))
        fetch.ask()
        fetch.update(batch, torch.tensor([1e6] + [0.0] * 9))
        assert fetch.take().index.tolist() == list(range(10))
        fetch.ask()
        assert fetch.take().index.tolist() == [0] * 10


@pytest.mark.parametrize("background", [False, True])
def test_errors_in_the_prefetching_thread_are_raised(background: bool) -> None:
    filled = Filled(1, 20, 0)
    fetch = Prefetch(Prioritized(filled.replay, gamma=0.9), 4, CPU, background=background)
    with opened(fetch):
        fetch.ask()
        with pytest.raises(FlatoutError, match="holds no 1-step transition yet"):
            fetch.take()
        filled.step()
        fetch.ask()
        assert fetch.take().index.tolist() == [0] * 4


def test_a_batch_is_copied_to_the_learners_device() -> None:
    filled = Filled(1, 20, 0)
    filled.step()
    meta = torch.device("meta")
    with opened(Prefetch(Prioritized(filled.replay, gamma=0.9), 4, meta, background=True)) as fetch:
        fetch.ask()
        batch = fetch.take()
    assert {tensor.device for tensor in batch.tensors()} == {meta}
    assert batch.obs[1].shape == (4, 1, 7, 7)
