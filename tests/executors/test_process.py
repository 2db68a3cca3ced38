"""Envs in worker processes: the same trajectories as the serial executor, and faults that a run survives."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
import pytest

from flatout.envs.make import env_factory
from flatout.envs.spaces import ActionLayout, ObsLayout
from flatout.errors import EnvError
from flatout.executors.base import EnvSet, RestartBudget, Step, step
from flatout.executors.process import ProcessExecutor
from flatout.executors.serial import SerialExecutor
from tests.faults import AlwaysRaises, Once, Walk


def workers(
    make: Callable[[], gym.Env[Any, Any]], n_envs: int = 6, n_workers: int = 3, **options: Any
) -> ProcessExecutor:
    env = make() if make.func is not Once else Walk()  # type: ignore[attr-defined]
    given = {name: options.pop(name) for name in ("replayable", "budget", "infos") if name in options}
    obs, action = ObsLayout(env.observation_space), ActionLayout(env.action_space)
    return ProcessExecutor(
        EnvSet(make, obs, np.arange(n_envs), 5, action=action, **given), n_workers=n_workers, **options
    )


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_trajectories_equal_those_of_the_serial_executor(env_id: str) -> None:
    factory = env_factory(env_id)
    env = factory()
    obs, action = ObsLayout(env.observation_space), ActionLayout(env.action_space)
    ids = np.arange(7)
    envs = EnvSet(factory, obs, ids, seed=5, action=action)
    serial = SerialExecutor(envs)
    process = ProcessExecutor(envs, n_workers=3)
    try:
        serial.reset()
        process.reset()
        rng = np.random.default_rng(0)
        for _ in range(400):
            rows = (
                rng.normal(size=(7, 1)).astype(np.float32)
                if action.continuous
                else rng.integers(2, size=(7, 1))
            )
            a, b = (step(executor, action.to_env(rows)) for executor in (serial, process))
            assert np.array_equal(a.obs[0], b.obs[0])
            assert np.array_equal(a.reward, b.reward)
            assert np.array_equal(a.terminated, b.terminated)
            assert np.array_equal(a.truncated, b.truncated)
            assert a.ended == b.ended
        serial.mark()
        process.mark()
        assert process.restore(serial.snapshot()) == []
        assert serial.restore(process.snapshot()) == []
    finally:
        process.close()


def walk_on(
    executor: ProcessExecutor, n_steps: int, on_step: Callable[[int], None] = lambda _: None
) -> list[int]:
    """Step all envs and check that no transition mixes two episodes; returns the envs that were restarted."""
    now = executor.reset()
    before = now.obs[0].copy()
    restarted: list[int] = []
    for t in range(n_steps):
        on_step(t)
        now = step(executor, np.zeros(executor.n_envs, np.int64))
        check_whole(before, now)
        restarted += now.restarted
        before = now.obs[0].copy()
    return restarted


def check_whole(before: Any, now: Step) -> None:
    for n in range(len(before)):
        episode, t = before[n]
        if n in now.restarted:
            assert now.obs[0][n, 1] == 0
        elif now.terminated[n]:
            assert now.final_obs[0][n].tolist() == [episode, t + 1]
            assert now.obs[0][n, 1] == 0
        else:
            assert now.obs[0][n].tolist() == [episode, t + 1]


@pytest.mark.parametrize("which", [0, -1])
def test_a_worker_killed_while_idle_is_rebuilt_and_named(which: int) -> None:
    executor = workers(partial(Walk))
    pids = executor.pids
    try:

        def kill(t: int) -> None:
            if t == 10:
                os.kill(pids[which], signal.SIGKILL)

        lost = [0, 1] if which == 0 else [4, 5]
        assert walk_on(executor, 30, kill) == lost
        assert executor.budget.n_restarts == 1
        assert (
            f"envs {lost[0]} to {lost[1]}, pid {pids[which]}: killed by SIGKILL" in executor.budget.notes[0]
        )
    finally:
        executor.close()


def test_a_worker_killed_in_the_middle_of_its_step_is_rebuilt(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    executor = workers(partial(Once, str(flag), "hang in step"), step_timeout=60.0)

    def kill_the_one_that_hangs() -> None:
        while not flag.exists() or not flag.read_text():
            time.sleep(0.01)
        os.kill(int(flag.read_text()), signal.SIGKILL)

    killer = threading.Thread(target=kill_the_one_that_hangs)
    killer.start()
    try:
        restarted = walk_on(executor, 60)
        assert len(restarted) == 2
        assert executor.budget.n_restarts == 1
        assert f"pid {flag.read_text()}: killed by SIGKILL" in executor.budget.notes[0]
    finally:
        killer.join()
        executor.close()


@pytest.mark.parametrize("doing", ["constructor", "reset", "step"])
@pytest.mark.parametrize("fault", ["raise", "hang", "die"])
def test_a_fault_anywhere_is_survived(fault: str, doing: str, tmp_path: Path) -> None:
    make = partial(Once, str(tmp_path / "flag"), f"{fault} in {doing}")
    executor = workers(make, step_timeout=2.0)
    try:
        restarted = walk_on(executor, 60)
        assert executor.budget.n_restarts == 1
        note = executor.budget.notes[0]
        words = {"raise": "KeyError: 'speed'", "hang": "no answer within 2 s", "die": "exited with code 3"}
        assert words[fault] in note
        assert "pid" in note
        if doing != "constructor":
            assert len(restarted) == 2
    finally:
        executor.close()


def test_too_many_restarts_end_the_run_cleanly() -> None:
    executor = workers(partial(AlwaysRaises), budget=RestartBudget(4, 60.0))
    children = executor.pids
    try:
        with pytest.raises(
            EnvError, match=r"gave up after 4 restarts within 60 s; the last: .*broken for good"
        ):
            walk_on(executor, 100)
    finally:
        executor.close()
    assert not any(psutil.pid_exists(pid) for pid in children)


def test_closing_leaves_no_process_and_no_file() -> None:
    shm = set(os.listdir("/dev/shm"))
    executor = workers(partial(Walk))
    pids = executor.pids
    walk_on(executor, 5)
    executor.close()
    deadline = time.monotonic() + 5
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert set(os.listdir("/dev/shm")) == shm
    executor.close()


class NanReward(Walk):
    """Breaks Gymnasium's API; a new worker would too."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, *rest = super().step(action)
        return obs, float("nan") if self._t == 3 else reward, *rest


def test_an_env_that_breaks_the_api_is_not_rebuilt() -> None:
    executor = workers(partial(NanReward))
    try:
        with pytest.raises(
            EnvError, match=r"env \d gave a NaN reward at step 3 \(worker \d with envs .*, pid \d+\)"
        ):
            walk_on(executor, 10)
        assert executor.budget.n_restarts == 0
    finally:
        executor.close()


def test_the_traceback_of_a_lost_worker_is_kept(tmp_path: Path) -> None:
    executor = workers(partial(Once, str(tmp_path / "flag"), "raise in step"))
    try:
        walk_on(executor, 40)
        assert "faults.py" in executor.budget.tracebacks[0]
        assert "KeyError: 'speed'" in executor.budget.tracebacks[0]
    finally:
        executor.close()
