"""Worker processes: deadlines for each env step, closing that lets envs close, and signals sent to all processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from flatout.errors import EnvError
from flatout.executors.base import RestartBudget, step
from flatout.executors.workers import MAX_IN_VAIN, ChildProcess
from tests.collect.test_subprocess import children, gone
from tests.executors.test_process import workers
from tests.faults import Once, Walk


class Slow(Walk):
    """Takes a moment for each step."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(0.05)
        return super().step(action)


class HangsWhile(Walk):
    """Hangs in every step while the file `flag` exists."""

    def __init__(self, flag: str) -> None:
        super().__init__()
        self._flag = Path(flag)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._flag.exists():
            time.sleep(1000)
        return super().step(action)


class Starter(Walk):
    """Starts a program, as envs with simulators do, and ends it in close() if `polite`."""

    def __init__(self, folder: str, polite: bool) -> None:
        super().__init__()
        self._folder, self._polite = Path(folder), polite
        self._program: subprocess.Popen[bytes] | None = None

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        if self._program is None:
            self._program = subprocess.Popen(["sleep", "1000"])
            (self._folder / f"started-{self._program.pid}").touch()
        return super().reset(**kwargs)

    def close(self) -> None:
        if self._program is not None:
            (self._folder / f"closed-{self._program.pid}").touch()
            if self._polite:
                self._program.terminate()
                self._program.wait()


def test_a_rollout_may_take_longer_than_an_env_step() -> None:
    with children(Slow, 2, 1, timeout=1.0) as collectors:  # 24 steps of 2 envs take 2.4 s
        collectors.collect(collectors.rollouts[0])
        assert collectors.budget.n_restarts == 0


def test_the_env_that_hangs_is_named_and_replaced(tmp_path: Path) -> None:
    source = partial(Once, str(tmp_path / "flag"), "hang in step", 10)
    with children(source, 4, 1, timeout=1.0) as collectors:
        collectors.collect(collectors.rollouts[0])
        (note,) = collectors.budget.notes
        assert "collector 0 with envs 0 to 3" in note
        assert note.endswith("env 0 gave no answer within 1 s")


def test_restarts_without_progress_end_the_run(tmp_path: Path) -> None:
    (flag := tmp_path / "flag").touch()
    with children(partial(HangsWhile, str(flag)), 2, 1, timeout=0.3) as collectors:
        with pytest.raises(EnvError, match=r"gave up.*env 0 gave no answer within 0.3 s"):
            collectors.collect(collectors.rollouts[0])
        assert collectors.budget.n_restarts == MAX_IN_VAIN


def test_a_hung_worker_is_noticed_while_others_keep_answering(tmp_path: Path) -> None:
    executor = workers(partial(Once, str(tmp_path / "flag"), "hang in step"), step_timeout=1.0)
    try:
        executor.reset()
        executor.send(np.zeros(6, np.int64), np.arange(6))
        deadline = time.monotonic() + 30
        restarted: list[int] = []
        while not restarted and time.monotonic() < deadline:
            now = executor.recv()
            restarted = list(now.restarted)
            indices = now.env_indices.copy()
            executor.send(np.zeros(len(indices), np.int64), indices)
        assert len(restarted) == 2
        assert "gave no answer within 1 s" in executor.notes[0]
    finally:
        executor.close()


def test_a_message_that_is_not_read_does_not_block_the_run() -> None:
    executor = workers(partial(Walk), n_envs=2, n_workers=1, replayable=False, step_timeout=1.0)
    try:
        executor.reset()
        os.kill(executor.pids[0], signal.SIGSTOP)
        large = np.zeros(4_000_000)
        assert executor.apply(lambda env: len(large)) == [4_000_000] * 2
        assert executor.budget.n_restarts == 1
    finally:
        executor.close()


def test_an_env_that_takes_longer_than_the_deadline_to_replay_is_not_lost() -> None:
    executor = workers(partial(Slow), n_envs=1, n_workers=1, step_timeout=1.0)
    try:
        executor.reset()
        for _ in range(25):
            step(executor, np.zeros(1, np.int64))
        executor.mark()
        before = executor.current.obs[0].copy()
        assert executor.restore(executor.snapshot()) == []
        assert np.array_equal(executor.current.obs[0], before)
        assert executor.budget.n_restarts == 0
    finally:
        executor.close()


@pytest.mark.parametrize("kind", ["process", "collectors"])
@pytest.mark.parametrize("polite", [True, False])
def test_closing_closes_the_envs_and_ends_what_they_started(kind: str, polite: bool, tmp_path: Path) -> None:
    make = partial(Starter, str(tmp_path), polite)
    if kind == "process":
        executor = workers(make, n_envs=4, n_workers=2)
        executor.reset()
        executor.close()
    else:
        with children(make, 4, 2) as collectors:
            collectors.collect(collectors.rollouts[0])
    started, closed = (
        {int(path.name.partition("-")[2]) for path in tmp_path.glob(f"{what}-*")}
        for what in ("started", "closed")
    )
    assert len(started) == 4
    assert closed == started
    assert gone(sorted(started), 5)


def test_what_an_env_started_ends_with_a_killed_run(tmp_path: Path) -> None:
    script = (
        "import sys, numpy as np\n"
        "from functools import partial\n"
        "from tests.executors.test_process import workers\n"
        "from tests.executors.test_workers import Starter\n"
        f"executor = workers(partial(Starter, {str(tmp_path)!r}, True), n_envs=2, n_workers=2)\n"
        "executor.reset()\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    programs = [p.pid for p in psutil.Process(process.pid).children(recursive=True) if p.name() == "sleep"]
    process.kill()
    process.communicate()
    assert len(programs) == 2
    assert gone(programs, 5)


def test_a_killed_fork_server_is_started_again() -> None:
    executor = workers(partial(Walk), n_envs=2, n_workers=2)
    try:
        executor.reset()
        server = psutil.Process(executor.pids[0]).parent()
        assert server is not None
        server.kill()
        os.kill(executor.pids[0], signal.SIGKILL)
        for _ in range(3):
            step(executor, np.zeros(2, np.int64))
        assert executor.budget.n_restarts == 1
    finally:
        executor.close()


def test_a_real_time_signal_is_a_cause_of_death() -> None:
    child = ChildProcess("test", _die_by, (int(signal.SIGRTMIN) + 3,))
    try:
        with pytest.raises(EOFError):
            child.connection.recv_bytes()
        assert child.cause_of_death() == f"killed by signal {int(signal.SIGRTMIN) + 3}"
    finally:
        child.kill()


def _die_by(_: Any, number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_every_process_of_a_pool_ends_none_of_them(number: signal.Signals) -> None:
    budget = RestartBudget()
    executor = workers(partial(Walk), n_envs=2, n_workers=2, budget=budget)
    try:
        executor.reset()
        server = psutil.Process(executor.pids[0]).parent()
        assert server is not None
        for process in (server, *server.children()):
            process.send_signal(number)
        for _ in range(5):
            step(executor, np.zeros(2, np.int64))
        assert server.is_running()
        assert budget.n_restarts == 0
    finally:
        executor.close()
