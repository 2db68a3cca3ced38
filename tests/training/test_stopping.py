"""Runs that are cut off: what is saved, that learn() goes on afterwards, and what users are told about lost envs."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

import flatout
from flatout.training.checkpoint import CheckpointFolder
from flatout.training.stop import StopRequest
from tests.faults import Walk

SMALL: dict[str, Any] = {"n_envs": 2, "n_steps": 16, "batch_size": 32, "n_epochs": 1, "seed": 3}
ENVS = """
import signal
import time
import gymnasium as gym
import numpy as np
from gymnasium import spaces

class Slow(gym.Env):
    observation_space, action_space = spaces.Box(-1, 1, (2,)), spaces.Discrete(2)
    n, seconds = 0, 0.02
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}
    def step(self, action):
        self.n += 1
        time.sleep(self.seconds)
        return np.zeros(2, np.float32), 1.0, self.n % 10 == 0, False, {}

class Finalized:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

class Drops(Slow):
    def step(self, action):
        if self.n == 30:
            Finalized()
        return super().step(action)

class Broken(Slow):
    seconds = 0.0
    def step(self, action):
        if self.n >= 3000:
            raise RuntimeError("broken for good")
        return super().step(action)
"""


@pytest.fixture(autouse=True)
def no_stray_signals() -> Iterator[None]:
    """A signal that comes after learn() has ended must not end the tests."""
    before = signal.signal(signal.SIGINT, lambda *_: None)
    yield
    signal.signal(signal.SIGINT, before)


def start(folder: Path, env: str, *flags: str, **options: Any) -> subprocess.Popen[str]:
    """Start a run and wait until it has learned something."""
    (folder / "envs.py").write_text(ENVS)
    sizes = "--n-envs 4 --n-steps 8 --batch-size 32 --n-epochs 1 --timesteps 1e6 --run-name r".split()
    words = [sys.executable, "-m", "flatout", "train", f"envs.py:{env}", *sizes, *flags]
    pipe = subprocess.PIPE
    process = subprocess.Popen(words, cwd=folder, stdout=pipe, stderr=pipe, text=True, **options)
    wait_for_rows(process, folder, 1)
    return process


def wait_for_rows(process: subprocess.Popen[str], folder: Path, n_rows: int) -> None:
    metrics, deadline = folder / "runs/r/metrics.csv", time.monotonic() + 60
    while not metrics.exists() or len(metrics.read_text().splitlines()) <= n_rows:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the run does not go on"
        time.sleep(0.02)


def summary_of(folder: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((folder / "runs/r/summary.json").read_text())
    return summary


@pytest.mark.parametrize("where", ["--n-collectors=1", "--executor=process"])
def test_two_signals_in_a_row_save_the_run_and_end_it(where: str, tmp_path: Path) -> None:
    process = start(tmp_path, "Slow", where, "--overlap", "on")
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
    out, errors = process.communicate(timeout=200)
    assert process.returncode == 130, errors
    assert "Traceback" not in out + errors
    summary = summary_of(tmp_path)
    assert summary["status"] == "stopped"
    _, checkpoint, _ = CheckpointFolder(tmp_path / "runs/r/checkpoints").newest()
    assert checkpoint.state["progress"]["env_steps"] == summary["env_steps"] > 0


def test_signals_that_come_in_a_finalizer_end_the_run_without_a_traceback(tmp_path: Path) -> None:
    process = start(tmp_path, "Drops", "--executor", "serial", "--step-timeout", "60")
    out, errors = process.communicate(timeout=200)
    assert process.returncode == 130, errors
    assert "Traceback" not in out + errors
    assert summary_of(tmp_path)["status"] == "stopped"


def test_a_hang_up_stops_and_saves_a_run(tmp_path: Path) -> None:
    process = start(tmp_path, "Slow", "--executor", "process")
    process.send_signal(signal.SIGHUP)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 128 + signal.SIGHUP, errors
    assert summary_of(tmp_path)["status"] == "stopped"


def test_under_nohup_a_run_outlives_its_terminal(tmp_path: Path) -> None:
    ignore = {"preexec_fn": lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)}
    process = start(tmp_path, "Slow", "--executor", "process", "--quiet", **ignore)
    process.send_signal(signal.SIGHUP)
    wait_for_rows(process, tmp_path, 4)
    process.terminate()
    process.communicate(timeout=200)
    assert process.returncode == 128 + signal.SIGTERM


class Slow(gym.Env[Any, Any]):
    """Takes a moment for each step."""

    observation_space, action_space = spaces.Box(-1, 1, (2,)), spaces.Discrete(2)
    n = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(0.01)
        return self.now()

    def now(self) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.n += 1
        return np.zeros(2, np.float32), 1.0, self.n % 10 == 0, False, {}


class SlowAsync(Slow):
    """Waits without blocking."""

    async def reset(self, **kwargs: Any) -> Any:  # type: ignore[override]
        return super().reset(**kwargs)

    async def step(self, action: Any) -> Any:  # type: ignore[override]
        await asyncio.sleep(0.01)
        return self.now()


def slow_vector() -> Any:
    mode = gym.vector.AutoresetMode.SAME_STEP
    return gym.vector.SyncVectorEnv([Slow, Slow], autoreset_mode=mode)


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "serial": (Slow, {"executor": "serial"}),
    "process": (Slow, {"executor": "process"}),
    "thread": (Slow, {"executor": "thread"}),
    "async": (SlowAsync, {"executor": "async"}),
    "collectors": (Slow, {"n_collectors": 2}),
    "batched": (None, {}),
}


def interrupt_twice() -> None:
    for _ in range(2):
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)


def params(agent: flatout.Agent) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in agent.policy.model.parameters()])


@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize("kind", KINDS)
def test_learn_goes_on_where_an_interrupted_learn_ended(kind: str, overlap: str, tmp_path: Path) -> None:
    env, settings = KINDS[kind]
    others = set(threading.enumerate())  # hung envs of other tests
    agent = flatout.PPO(slow_vector() if env is None else env, **SMALL, **settings, overlap=overlap)
    seen: list[int] = []

    def callback(progress: Any) -> None:
        seen.append(progress.env_steps)
        if len(seen) == 2:
            threading.Thread(target=interrupt_twice).start()

    with pytest.raises(KeyboardInterrupt):
        agent.learn(32 * 50, callback)
    n_steps, before = agent.summary["env_steps"], params(agent)
    assert agent.summary["status"] == "stopped"
    assert n_steps >= seen[-1]
    assert len(agent.evaluate(1).returns) == 1
    agent.save(tmp_path / "cut.flatout")
    assert torch.equal(params(flatout.load(tmp_path / "cut.flatout", env=env or slow_vector())), before)
    assert torch.equal(params(agent), before)
    more: list[int] = []
    agent.learn(64, lambda progress: more.append(progress.env_steps))
    assert more == [n_steps + 32, n_steps + 64]
    assert agent.summary["status"] == "finished"
    assert not torch.equal(params(agent), before)
    agent.save(tmp_path / "whole.flatout")
    agent.close()
    names = [thread.name for thread in threading.enumerate() if thread not in others]
    assert not [name for name in names if name.startswith("flatout")], names


class Site(Walk):
    """Raises for as long as a file is there, or only once."""

    def __init__(self, file: str, once: bool = False) -> None:
        super().__init__()
        self._file, self._once = Path(file), once

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._file.exists():
            if self._once:
                self._file.unlink()
            raise OSError("the site is down")
        return super().step(action)


@pytest.mark.parametrize(("executor", "overlap"), [("serial", "on"), ("process", "off"), ("thread", "on")])
def test_learn_goes_on_once_a_broken_env_works_again(executor: str, overlap: str, tmp_path: Path) -> None:
    down = tmp_path / "down"
    agent = flatout.PPO(Site, **SMALL, executor=executor, overlap=overlap, env_kwargs={"file": str(down)})
    with pytest.raises(flatout.EnvError, match="the site is down"):
        agent.learn(32 * 50, lambda progress: down.touch() if progress.iteration == 2 else None)
    n_steps = agent.summary["env_steps"]
    assert agent.summary["status"] == "failed"
    down.unlink()
    agent.learn(64)
    assert agent.summary["env_steps"] == n_steps + 64
    agent.close()


def test_the_replay_buffer_and_the_envs_survive_a_cut(tmp_path: Path) -> None:
    """A cut between two iterations and in the middle of one gives the run that was not cut."""

    def learned(cut: bool) -> torch.Tensor:
        settings: dict[str, Any] = {"n_envs": 2, "n_steps": 8, "batch_size": 16, "learning_starts": 32}
        down = tmp_path / "down"
        down.unlink(missing_ok=True)
        agent = flatout.DQN(
            Site, **settings, seed=1, executor="serial", overlap="off", env_kwargs={"file": str(down)}
        )
        if cut:
            with pytest.raises(flatout.EnvError):
                agent.learn(160, lambda progress: down.touch() if progress.iteration == 5 else None)
            down.unlink()
        agent.learn(160 - agent.summary.get("env_steps", 0))
        assert agent.summary["env_steps"] == 160
        agent.close()
        return params(agent)

    assert torch.equal(learned(cut=True), learned(cut=False))


def test_an_env_that_raises_in_the_serial_executor_is_named_counted_and_logged(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    down = tmp_path / "down"
    agent = flatout.PPO(
        Site,
        **SMALL,
        executor="serial",
        env_kwargs={"file": str(down), "once": True},
        runs_dir=tmp_path / "runs",
        run_name="r",
    )
    agent.learn(320, lambda progress: down.touch() if progress.iteration == 3 else None, progress_bar=True)
    summary = summary_of(tmp_path)
    assert (summary["status"], summary["env_steps"], summary["restarts"]) == ("finished", 320, 1)
    note = "env 0 raised in step at step 49: OSError: the site is down (test_stopping.py:"
    assert note in capfd.readouterr().err
    log = (tmp_path / "runs/r/faults.log").read_text()
    assert note in log
    assert "Traceback" in log


def test_every_restart_is_told_before_a_run_gives_up(tmp_path: Path) -> None:
    process = start(tmp_path, "Broken", "--executor", "thread")
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 2
    lines = errors.splitlines()
    assert "gave up after 10 restarts" in lines[-1]
    assert sum("broken for good" in line for line in lines[:-1]) == 11
    assert (tmp_path / "runs/r/faults.log").read_text().count("Traceback") >= 11
    assert summary_of(tmp_path)["restarts"] == 10


class OnlyHere(Walk):
    """Can be reset only in the process that trains."""

    def __init__(self, pid: int) -> None:
        super().__init__()
        self._pid = pid

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        if os.getpid() != self._pid:
            raise RuntimeError("no display here")
        return super().reset(**kwargs)


def test_a_first_reset_that_fails_in_subprocesses_falls_back_to_the_next_executor(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    agent = flatout.PPO(
        OnlyHere,
        **SMALL,
        n_collectors=2,
        env_kwargs={"pid": os.getpid()},
        runs_dir=tmp_path / "runs",
        run_name="r",
    )
    agent.learn(64, progress_bar=True)
    lines = capfd.readouterr().err.splitlines()
    restarts = [i for i, line in enumerate(lines) if line.startswith("note: collector")]
    header = next(i for i, line in enumerate(lines) if "PPO" in line)
    assert restarts
    assert max(restarts) < header  # at once, and not again
    assert any("note: executor serial in subprocesses could not start" in line for line in lines[header:])
    summary = summary_of(tmp_path)
    assert summary["status"] == "finished"
    assert not summary["executor"]["children"]
    assert "no display here" in (tmp_path / "runs/r/faults.log").read_text()
    agent.close()


def test_a_timer_of_the_program_goes_on_while_a_run_is_stopped() -> None:
    ticks: list[float] = []
    before = signal.signal(signal.SIGALRM, lambda *_: ticks.append(time.monotonic()))
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    try:
        stop = StopRequest()
        with stop.listening():
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.signal == signal.SIGTERM
        n_before = len(ticks)
        time.sleep(0.3)
        assert len(ticks) > n_before
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


HANDLER = """
#include <signal.h>
static void handle(int number) { (void)number; }
__attribute__((constructor)) static void init(void) { signal(SIGTERM, handle); }
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_signal_handler_of_c_code_stays(tmp_path: Path) -> None:
    (tmp_path / "handler.c").write_text(HANDLER)
    library = tmp_path / "handler.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "handler.c"], check=True)
    code = (
        "import os, signal; from flatout.training.stop import StopRequest\n"
        "assert signal.getsignal(signal.SIGTERM) is None\n"
        "stop = StopRequest()\n"
        "with stop.listening(): os.kill(os.getpid(), signal.SIGTERM)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "assert stop.signal is None\n"
    )
    env = {**os.environ, "LD_PRELOAD": str(library)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
