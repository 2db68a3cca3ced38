"""The coroutine executor: a thousand envs on one loop, cancelling, and envs that block or ignore it."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from flatout.errors import EnvError
from tests.executors.slow import AsyncCounter, Kind, Script, play

ABANDONED = """
import numpy as np
from tests.executors.slow import Kind, Script
envs = Kind("coroutine").counters(Script(seconds=(5.0, 5.0)), 4)
envs.send(np.zeros(4, np.int64), np.arange(4))
"""


@pytest.fixture
def kind(caplog: pytest.LogCaptureFixture) -> Iterator[Kind]:
    """Executors that are closed at the end, without a message from asyncio."""
    kind = Kind("coroutine")
    with caplog.at_level(logging.WARNING):
        yield kind
        kind.close()
    assert caplog.records == []


def test_a_thousand_envs_wait_at_the_same_time(kind: Kind) -> None:
    envs = kind.counters(Script(seconds=(0.005, 0.015), length=6), 1024)
    before = set(threading.enumerate())
    start = time.perf_counter()
    seen = play(envs, 10)
    assert time.perf_counter() - start < 15.0, "in turn it would take 102 s"
    assert set(threading.enumerate()) <= before
    assert all(obs == [[t % 6] for t in range(1, 11)] for obs in seen.obs)
    assert all(len(ended) == 1 for ended in seen.ended)


def test_an_env_that_blocks_the_loop_is_named(kind: Kind) -> None:
    class Rude(AsyncCounter):
        async def step(self, action: Any) -> Any:  # type: ignore[override]
            if self.number == 2:
                time.sleep(2.5)
            return await super().step(action)

    script = Script()
    envs = kind.make(lambda: Rude(script), 4, step_timeout=0.3)
    envs.reset()
    with pytest.raises(EnvError, match=r"env 2 blocks all others at test_env_tasks.py:\d+: await there"):
        play(envs, 3)
    assert envs.budget.n_restarts == 0


def test_a_hanging_step_is_cancelled_and_its_env_closed(kind: Kind) -> None:
    cancelled = []

    class Cancelled(AsyncCounter):
        async def step(self, action: Any) -> Any:  # type: ignore[override]
            try:
                return await super().step(action)
            except asyncio.CancelledError:
                cancelled.append(self.number)
                raise

    script = Script(on_step=lambda made, t: 100.0 if made == 0 else 0.0)
    envs = kind.make(lambda: Cancelled(script), 2, step_timeout=0.2)
    envs.reset()
    play(envs, 5)
    assert cancelled == [0]
    assert script.n_closed == 1


def test_an_env_that_ignores_being_cancelled_is_left_behind(kind: Kind) -> None:
    class Stubborn(AsyncCounter):
        async def step(self, action: Any) -> Any:  # type: ignore[override]
            while self.number == 0:
                try:
                    await asyncio.sleep(100)
                except asyncio.CancelledError:
                    continue
            return await super().step(action)

    script = Script()
    envs = kind.make(lambda: Stubborn(script), 2, step_timeout=0.2)
    envs.reset()
    assert play(envs, 5).restarted == [0]
    start = time.perf_counter()
    envs.close()
    assert time.perf_counter() - start < 4.0


def test_an_env_that_cancels_itself_is_rebuilt(kind: Kind) -> None:
    def on_step(made: int, t: int) -> None:
        if made == 0 and t == 2:
            raise asyncio.CancelledError

    envs = kind.counters(Script(on_step=on_step), 2)
    assert play(envs, 5).restarted == [0]


def test_envs_are_made_and_closed_on_the_loop(kind: Kind) -> None:
    loops = []

    class Client(AsyncCounter):
        def __init__(self, script: Script) -> None:
            super().__init__(script)
            loops.append(asyncio.get_running_loop())

        async def close(self) -> None:  # type: ignore[override]
            await asyncio.sleep(0.01)
            loops.append(asyncio.get_running_loop())

    script = Script()
    envs = kind.make(lambda: Client(script), 3)
    envs.reset()
    envs.close()
    assert len(loops) == 6
    assert len(set(loops)) == 1
    assert loops[0].is_closed()


def test_it_works_where_a_loop_already_runs(kind: Kind) -> None:
    async def notebook() -> Any:
        return play(kind.counters(Script(), 3), 4).obs

    assert asyncio.run(notebook()) == [[[1], [2], [3], [4]]] * 3


def test_a_script_that_ends_without_closing_ends_quietly() -> None:
    done = subprocess.run([sys.executable, "-c", ABANDONED], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0
    assert done.stderr == ""


def test_waiting_does_not_spin(kind: Kind) -> None:
    envs = kind.counters(Script(seconds=(0.5, 0.5)), 8)
    envs.send(np.zeros(8, np.int64), np.arange(8))
    start = time.process_time()
    envs.recv()
    assert time.process_time() - start < 0.2
