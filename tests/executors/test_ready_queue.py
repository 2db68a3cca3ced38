"""When a batch closes, and the default waiting time."""

from __future__ import annotations

import math
import threading
from time import perf_counter

import pytest

from flatout.executors.waiting import HOLD_SHARE, ReadyQueue


def test_ready_envs_are_returned_at_once() -> None:
    ready: ReadyQueue[int] = ReadyQueue()
    for item in range(3):
        ready.put(item)
    assert ready.take(3, math.inf) == [0, 1, 2]


def test_take_returns_nothing_at_the_deadline() -> None:
    start = perf_counter()
    assert ReadyQueue[int]().take(3, start + 0.05) == []
    assert 0.05 <= perf_counter() - start < 2.0


@pytest.mark.parametrize(("n_coming", "n_got"), [(10, 4), (3, 3)])
def test_a_batch_closes_at_its_size_or_when_all_envs_are_ready(n_coming: int, n_got: int) -> None:
    ready: ReadyQueue[int] = ReadyQueue(batch_size=4, batch_seconds=60.0)
    putter = threading.Timer(0.05, lambda: list(map(ready.put, range(n_got))))
    putter.start()
    assert ready.take(n_coming, math.inf) == list(range(n_got))
    putter.join()


def test_the_first_ready_env_waits_no_longer_than_the_limit() -> None:
    ready: ReadyQueue[int] = ReadyQueue(batch_seconds=0.1)
    ready.put(1)
    start = perf_counter()
    assert ready.take(5, math.inf) == [1]
    assert 0.05 < perf_counter() - start < 2.0


def test_the_default_wait_is_a_share_of_the_step_time_of_the_fast_envs() -> None:
    ready: ReadyQueue[int] = ReadyQueue()
    assert ready.hold_seconds == 0.0
    ready.learn([(0, 0.01)] * 10)
    assert ready.hold_seconds == pytest.approx(HOLD_SHARE * 0.01)
    # One env of 10 s among hundred of 10 ms: its few steps change nothing.
    ready.learn([(1, 10.0)])
    assert ready.hold_seconds == pytest.approx(HOLD_SHARE * 0.01, rel=0.01)
    for _ in range(100):
        ready.learn([(2, 0.001)] * 50)
    assert ready.hold_seconds == pytest.approx(HOLD_SHARE * 0.001, rel=0.01)


def test_a_given_wait_is_not_tuned() -> None:
    ready: ReadyQueue[int] = ReadyQueue(batch_seconds=0.3)
    ready.learn([(0, 0.01)] * 100)
    assert ready.hold_seconds == 0.3


def test_an_env_that_now_and_then_answers_at_once_is_not_a_fast_one() -> None:
    ready: ReadyQueue[int] = ReadyQueue()
    for _ in range(2000):
        ready.learn([(0, 0.02), (0, 0.02), (0, 0.0001)])
    assert ready.hold_seconds == pytest.approx(HOLD_SHARE * 0.0134, rel=0.1)
