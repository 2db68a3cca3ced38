"""The thread executor: each env has one thread, hundreds of them work, and a hung one is abandoned."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from flatout.errors import EnvError
from tests.executors.slow import Kind, Script, play


def test_an_env_is_made_stepped_and_closed_in_one_thread_of_its_own() -> None:
    script, kind = Script(), Kind("thread")
    closed_in: list[int] = []

    class Home(kind.counter):  # type: ignore[name-defined,misc]
        """Records the thread that closed it."""

        def close(self) -> None:
            closed_in.append(threading.get_ident())

    envs = kind.make(lambda: Home(script), 5)
    envs.reset()
    play(envs, 3)
    homes = [env.home for env in script.made]
    assert len(set(homes)) == 5
    assert threading.get_ident() not in homes
    kind.close()
    assert sorted(closed_in) == sorted(homes)


def test_three_hundred_threads() -> None:
    kind, before = Kind("thread"), set(threading.enumerate())
    envs = kind.counters(Script(seconds=(0.005, 0.015), length=7), 300)
    seen = play(envs, 8)
    assert all(obs == [[t % 7] for t in range(1, 9)] for obs in seen.obs)
    kind.close()
    assert set(threading.enumerate()) <= before


def test_a_constructor_that_hangs_is_reported() -> None:
    kind = Kind("thread")
    script = Script(on_make=lambda made: time.sleep(1.0) if made == 1 else None)
    with pytest.raises(EnvError, match=r"env \d hangs in its constructor: not made within 0.2 s"):
        kind.make(lambda: kind.counter(script), 3, step_timeout=0.2)


def test_the_late_result_of_a_hung_reset_is_ignored() -> None:
    kind = Kind("thread")
    script = Script(on_reset=lambda made: time.sleep(0.6) if made == 0 else None)
    envs = kind.counters(script, 2, step_timeout=0.2)
    assert envs.budget.n_restarts == 1
    assert play(envs, 3).obs == [[[1], [2], [3]]] * 2
    time.sleep(0.6)
    envs.send(np.zeros(2, np.int64), np.arange(2))
    envs.recv()
    assert script.n_closed == 1, "the hung env was closed by its own thread when it came back"
    kind.close()


def test_waiting_does_not_spin() -> None:
    kind = Kind("thread")
    envs = kind.counters(Script(seconds=(0.5, 0.5)), 8)
    envs.send(np.zeros(8, np.int64), np.arange(8))
    start = time.thread_time()
    envs.recv()
    assert time.thread_time() - start < 0.1
    kind.close()
