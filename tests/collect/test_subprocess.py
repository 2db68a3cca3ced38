"""Collectors in subprocesses: the same rollouts as one in-process collector, through faults and signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from flatout.buffers.rollout import Rollout
from flatout.collect.collector import Collector
from flatout.collect.subprocess import CollectorJob, SubprocessCollectors
from flatout.envs.make import env_factory
from flatout.envs.spaces import ActionLayout, ObsLayout
from flatout.executors.base import EnvSet, RestartBudget, make_executor
from flatout.executors.process import ProcessExecutor
from flatout.executors.serial import SerialExecutor
from flatout.models.config import NetworkConfig
from flatout.models.policy import ActorCritic, build
from flatout.timing import PhaseClock
from tests.faults import Once, Walk

N_STEPS = 24


def job_for(source: Any, n_envs: int) -> tuple[CollectorJob, ActorCritic]:
    factory = env_factory(source)
    env = Walk() if isinstance(source, partial) and source.func is Once else factory()
    obs, action, network = ObsLayout(env.observation_space), ActionLayout(env.action_space), NetworkConfig()
    model = build(obs, action, network, seed=1)
    envs = EnvSet(factory, obs, np.arange(n_envs), 1, action=action)
    job = CollectorJob(envs=envs, make_model=partial(build, obs, action, network, 1))
    return job, model


@contextmanager
def children(
    source: Any, n_envs: int, n_children: int, timeout: float = 30.0
) -> Iterator[SubprocessCollectors]:
    job, model = job_for(source, n_envs)
    out = SubprocessCollectors(job, model, n_children, n_steps=N_STEPS, timeout=timeout)
    try:
        out.reset()
        yield out
    finally:
        out.close()


def arrays_of(rollout: Rollout) -> dict[str, Any]:
    names = ("action", "log_prob", "reward", "terminated", "truncated")
    return {name: getattr(rollout, name).copy() for name in names} | {"obs": rollout.obs[0].copy()}


@pytest.mark.parametrize(("env_id", "n_envs"), [("CartPole-v1", 6), ("Pendulum-v1", 5)])
def test_rollouts_do_not_depend_on_the_number_of_processes(env_id: str, n_envs: int) -> None:
    """One process, worker processes, and 1, 2 or 4 subprocess collectors: identical to the bit."""
    job, model = job_for(env_id, n_envs)
    envs, action = job.envs, job.envs.action
    assert action is not None
    process = ProcessExecutor(envs, n_workers=2)
    wanted: list[dict[str, Any]] = []
    try:
        for executor in (SerialExecutor(envs), process):
            executor.reset()
            collector = Collector(executor, model, device=torch.device("cpu"), seed=1, clock=PhaseClock())
            rollout = Rollout.alloc(envs.obs, action, N_STEPS, n_envs)
            got = []
            for _ in range(8):
                collector.collect(rollout)
                got.append(arrays_of(rollout))
            wanted = wanted or got
            assert_same(got, wanted)
    finally:
        process.close()
    for n_children in (1, 2, 4):
        with children(env_id, n_envs, n_children) as collectors:
            got = []
            for _ in range(8):
                collectors.collect(collectors.rollouts[0])
                got.append(arrays_of(collectors.rollouts[0]))
            assert_same(got, wanted)


def assert_same(got: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    for a, b in zip(got, wanted, strict=True):
        for name in a:
            assert np.array_equal(a[name], b[name]), name


def assert_whole(rollout: Rollout) -> None:
    """Every stored transition lies within one episode."""
    obs, final = rollout.obs[0], rollout.final_obs[0]
    for t in range(rollout.n_steps):
        for n in range(rollout.n_envs):
            episode, at = obs[t, n]
            if rollout.terminated[t, n]:
                assert at == 6
            elif rollout.truncated[t, n]:
                assert final[t, n].tolist() == [episode, at + 1]
            else:
                assert obs[t + 1, n].tolist() == [episode, at + 1]


@pytest.mark.parametrize("fault", ["raise in step", "hang in step", "die in step", "raise in constructor"])
def test_a_lost_collector_is_rebuilt_and_no_transition_mixes_episodes(fault: str, tmp_path: Path) -> None:
    source = partial(Once, str(tmp_path / "flag"), fault, at_step=30)
    with children(source, 6, 2, timeout=3.0) as collectors:
        for _ in range(5):
            collectors.collect(collectors.rollouts[0])
            assert_whole(collectors.rollouts[0])
        assert collectors.budget.n_restarts == 1
        assert "with envs" in collectors.budget.notes[0]


@pytest.mark.parametrize(
    ("kind", "fault"), [("process", "die in step"), ("serial", "raise in step"), ("serial", "raise in reset")]
)
def test_an_env_lost_in_a_rollout_leaves_only_complete_transitions(
    kind: str, fault: str, tmp_path: Path
) -> None:
    job, model = job_for(partial(Once, str(tmp_path / "flag"), fault, at_step=33), 6)
    action, budget = job.envs.action, RestartBudget()
    assert action is not None
    envs = replace(job.envs, budget=budget)
    executor = make_executor(kind, envs, n_workers=3, step_timeout=10)
    try:
        executor.reset()
        collector = Collector(executor, model, device=torch.device("cpu"), seed=1, clock=PhaseClock())
        rollout = Rollout.alloc(job.envs.obs, action, N_STEPS, 6)
        for _ in range(4):
            collector.collect(rollout)
            assert_whole(rollout)
        assert budget.n_restarts == 1
    finally:
        executor.close()


SCRIPT = """
import sys, numpy as np
from flatout.envs.spaces import ActionLayout, ObsLayout
from flatout.executors.base import EnvSet, step
from flatout.executors.process import ProcessExecutor
from tests.faults import Hangs, Walk
factory = Hangs if sys.argv[1] == "hang" else Walk
env = Walk()
action = ActionLayout(env.action_space)
envs = EnvSet(factory, ObsLayout(env.observation_space), np.arange(4), 1, action=action)
envs = ProcessExecutor(envs, n_workers=2, step_timeout=600)
envs.reset()
print(*envs.pids, flush=True)
while True:
    step(envs, np.zeros(4, np.int64))
"""


def start_script(kind: str) -> tuple[subprocess.Popen[str], list[int]]:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, kind], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    workers = [int(word) for word in process.stdout.readline().split()]
    assert len(workers) == 2
    time.sleep(0.5)
    everyone = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
    return process, sorted({*workers, *everyone})


def gone(pids: list[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(psutil.pid_exists(p) and psutil.Process(p).status() != "zombie" for p in pids):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("kind", ["hang", "fine", "stopped"])
def test_subprocesses_end_when_the_parent_is_killed(kind: str) -> None:
    shm = set(os.listdir("/dev/shm"))
    process, children_pids = start_script(kind)
    if kind == "stopped":
        os.kill(children_pids[-1], signal.SIGSTOP)
    process.kill()
    process.communicate()
    assert gone(children_pids, 5)
    assert set(os.listdir("/dev/shm")) == shm


def test_ctrl_c_gives_no_traceback_from_subprocesses() -> None:
    process, pids = start_script("fine")
    for pid in (process.pid, *pids):  # a terminal's Ctrl-C goes to the whole group
        os.kill(pid, signal.SIGINT)
    _, errors = process.communicate(timeout=200)
    assert errors.count("Traceback") == 1  # the script's own, which catches nothing
    assert "worker_main" not in errors
    assert gone(pids, 5)
