"""Envs that end, block or break their process are tried in another one; this one names them and lives on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

import flatout
from flatout.envs.make import env_factory
from flatout.envs.spaces import ActionLayout
from flatout.errors import EnvError
from flatout.perf import trial
from flatout.perf.trial import try_out, try_steps
from tests.faults import Walk

SEGV, REAL_TIME = int(signal.SIGSEGV), int(signal.SIGRTMIN) + 3


class Fatal(Walk):
    """Ends or blocks its process at one place, unless it is the process `spared`."""

    def __init__(self, place: str, fault: int | str, at_step: int = 5, spared: int = 0) -> None:
        super().__init__()
        self._place, self._fault, self._at, self._spared = place, fault, at_step, spared
        self._n = 0
        self._reach("constructor")

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        self._reach("reset")
        return super().reset(**kwargs)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._n += 1
        if self._n == self._at:
            self._reach("step")
        return super().step(action)

    def close(self) -> None:
        self._reach("close")

    def _reach(self, place: str) -> None:
        if place != self._place or os.getpid() == self._spared:
            return
        if self._fault == "hang":
            time.sleep(1000)
        if self._fault == "exit":
            os._exit(3)
        if self._fault == "sys.exit":
            sys.exit(4)
        if self._fault == "raise":
            raise KeyError("speed")
        os.kill(os.getpid(), int(self._fault))
        time.sleep(1000)


class SecondDies(Walk):
    """The second env of a process ends it: the one whose steps are timed after the check of the first."""

    n_made = 0

    def __init__(self) -> None:
        super().__init__()
        SecondDies.n_made += 1
        self._dies = SecondDies.n_made == 2

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._dies:
            os.kill(os.getpid(), SEGV)
        return super().step(action)


def fatal(*args: Any, timeout: float = 60.0, **kwargs: Any) -> str:
    """The one line that the trial of a Fatal env ends in."""
    with pytest.raises(EnvError) as error:
        try_out(env_factory(partial(Fatal, *args, **kwargs)), seed=0, n_envs=1, timeout=timeout)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("place", "fault", "words"),
    [
        ("constructor", "exit", "lost in its constructor, .*: exited with code 3$"),
        ("reset", REAL_TIME, "lost in reset, .*: killed by .*37$"),
        ("step", SEGV, "lost in step 5, .*: killed by SIGSEGV$"),
        ("close", "exit", "lost in close, .*: exited with code 3$"),
    ],
)
def test_an_env_that_ends_its_process_is_named_with_place_and_cause(
    place: str, fault: Any, words: str
) -> None:
    line = fatal(place, fault)
    assert line.startswith(f"{__name__}:Fatal: ")
    assert re.search(words, line), line


def test_an_env_that_hangs_is_named_and_ended() -> None:
    line = fatal("step", "hang", timeout=0.5)
    assert "gave no answer within 0.5 s in step 5" in line
    assert "raise --step-timeout" in line
    assert not [child for child in psutil.Process().children() if "trial" in " ".join(child.cmdline())]


def test_slow_steps_within_the_limit_may_take_longer_together() -> None:
    class Slow(Walk):
        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            time.sleep(0.4)
            return super().step(action)

    info, _ = try_out(env_factory(Slow), seed=0, n_envs=1, timeout=0.9)
    assert info.action_space == Walk.action_space


def test_an_exception_is_raised_as_in_this_process() -> None:
    assert "Fatal: raised in step 5: KeyError: 'speed' (test_trial.py:" in fatal("step", "raise")
    assert "Fatal: raised in step 5: SystemExit: 4 (test_trial.py:" in fatal("step", "sys.exit")
    assert "could not be created: SystemExit: 4 (test_trial.py:" in fatal("constructor", "sys.exit")


def test_an_env_that_works_only_in_this_process_is_checked_here() -> None:
    here = partial(Fatal, "step", "raise", spared=os.getpid())
    info, costs = try_out(env_factory(here), seed=0, n_envs=1, timeout=60.0, timed=True)
    assert info.observation_space == Walk.observation_space
    assert costs is not None
    assert costs.step_seconds > 0


def test_an_env_that_cannot_be_sent_or_is_too_large_is_checked_here(monkeypatch: pytest.MonkeyPatch) -> None:
    lock, here = threading.Lock(), os.getpid()

    def unpicklable() -> Walk:
        assert not lock.locked()
        return Fatal("constructor", "exit", spared=here)

    def large() -> Walk:
        return Fatal("constructor", "exit", spared=here)

    for make in (unpicklable, large):
        assert try_out(env_factory(make), seed=0, n_envs=1, timeout=60.0)[0].factory.source is make
        monkeypatch.setattr(trial, "MAX_PAYLOAD", 10)


def test_steps_that_cannot_be_timed_are_a_fault_and_not_an_error() -> None:
    info, costs = try_out(env_factory(SecondDies), seed=0, n_envs=1, timeout=60.0, timed=True)
    assert costs is not None
    assert re.search(r"lost in step 1, .*: killed by SIGSEGV$", costs.fault)
    raising = env_factory(partial(Fatal, "step", "raise", at_step=250))
    assert "KeyError" in try_steps(raising, ActionLayout(info.action_space), timeout=60.0, seed=0).fault


def test_envs_that_die_when_they_are_timed_train_in_workers() -> None:
    settings: dict[str, Any] = {"n_envs": 4, "n_steps": 32, "batch_size": 64, "n_epochs": 1}
    agent = flatout.PPO(SecondDies, **settings)
    trainer = agent.trainer(512)
    agent.close()
    assert trainer.plan.executor == "process"
    assert "its steps could not be timed" in trainer.plan_reason


def test_make_vec_and_doctor_name_the_env_too() -> None:
    with pytest.raises(EnvError, match=r"lost in its constructor, .*: exited with code 3$"):
        flatout.make_vec(partial(Fatal, "constructor", "exit"), 2, "process")
    envs = flatout.make_vec(SecondDies, 2)
    assert envs.kind == "process"
    assert "could not be measured" in envs.notes[0]
    envs.close()
    with pytest.raises(EnvError, match="KeyError: 'speed'"):
        flatout.doctor(
            partial(Fatal, "step", "raise", at_step=250), n_envs=1, executor="serial", overlap="off"
        )


HANGS = """
import sys, time
from tests.faults import Walk

class Env(Walk):
    def step(self, action):
        assert "torch" not in sys.modules, "a trial loads no torch"
        open("reached", "w").close()
        time.sleep(1000)
"""


def test_ctrl_c_ends_a_trial_at_once_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text(HANGS)
    command = [sys.executable, "-m", "flatout", "train", "my.py:Env", "--quiet"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
    )
    while not (tmp_path / "reached").exists():
        assert run.poll() is None, run.communicate()
        time.sleep(0.05)
    children = psutil.Process(run.pid).children(recursive=True)
    assert children
    run.send_signal(signal.SIGINT)
    assert run.communicate(timeout=200)[0] == b""
    assert run.returncode == 130
    psutil.wait_procs(children, timeout=60)
    assert not any(child.is_running() and child.status() != "zombie" for child in children)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            "import os; os._exit(3)",
            "its process was lost when its code was imported, .*: exited with code 3$",
        ),
        ("import time; time.sleep(1000)", "gave no answer within 1 s when its code was imported"),
    ],
)
@pytest.mark.parametrize("source", ["{folder}/fatal_import.py:Env", "fatal_import:Env"])
def test_code_that_ends_or_blocks_its_process_when_it_is_imported_does_that_in_another_one(
    source: str, code: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fatal_import.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(trial, "START_SECONDS", 1.0)
    with pytest.raises(EnvError, match=words):
        flatout.PPO(source.format(folder=tmp_path), step_timeout=0.1)


def test_making_an_env_may_take_longer_than_a_step() -> None:
    class SlowToMake(Walk):
        def __init__(self) -> None:
            time.sleep(1.0)
            super().__init__()

    assert try_out(env_factory(SlowToMake), seed=0, n_envs=1, timeout=0.5)[1] is None
