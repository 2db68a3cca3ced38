"""Whole runs through the command line: their folder, signals, resuming, and start-up time."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from flatout.agent import load
from flatout.training.checkpoint import CheckpointFolder
from tests.command import command, flatout

TINY = "--n-envs 4 --n-steps 32 --batch-size 64 --n-epochs 2".split()


def summary_of(run: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return data


def parameters(run: Path) -> dict[str, torch.Tensor]:
    _, checkpoint, _ = CheckpointFolder(run / "checkpoints").newest()
    return {name: value for name, value in checkpoint.tensors.items() if name.startswith("model.")}


def assert_same(a: Path, b: Path) -> None:
    left, right = parameters(a), parameters(b)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_a_run_leaves_a_complete_folder(tmp_path: Path) -> None:
    argv = ["train", "CartPole-v1", *TINY, "--timesteps", "2000", "--seed", "3", "--run-name", "a"]
    done = flatout(*argv, "--json", "--eval-every", "1000", "--checkpoint-every", "500", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "4 envs × 32 steps = 128 total batch, 2 minibatches of 64 × 2 epochs" in done.stderr
    run = tmp_path / "runs" / "a"
    summary = summary_of(run)
    assert json.loads(done.stdout.splitlines()[-1]) == summary
    for name in (
        "status env algo preset seed device env_steps updates startup_seconds wall_seconds steps_per_second "
        "episodes return_mean return_std target_return target_reached_seconds target_reached_steps "
        "learner_busy device_utilization device_energy_joules phases collect_rate learn_rate "
        "pipeline_efficiency executor policy_lag_mean policy_lag_max restarts oom_backoffs nan_skips"
    ).split():
        assert name in summary, name
    assert summary["status"] == "finished"
    assert summary["env_steps"] == 2048
    assert summary["updates"] == 2048 // 64 * 2
    assert sum(summary["phases"].values()) == pytest.approx(summary["wall_seconds"], rel=0.02)
    assert 0 < summary["learner_busy"] < 1
    assert summary["executor"].keys() >= {"kind", "collectors", "workers", "reason"}

    with (run / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert int(rows[-1]["time/total_timesteps"]) == 2048
    assert [row["eval/mean_reward"] for row in rows if row["eval/mean_reward"]] != []
    assert json.loads((run / "system.json").read_text())["cores"] >= 1
    names = sorted(p.name for p in (run / "checkpoints").iterdir())
    assert names == ["best.flatout", "step-000000001536.flatout", "step-000000002048.flatout"]
    assert list(run.glob("events.out.tfevents.*"))

    config = json.loads((run / "config.json").read_text())
    assert config["seed"] == 3
    assert config["ppo"]["n_steps"] == 32
    again = flatout("train", "--config", str(run / "config.json"), "--run-name", "b", "--quiet", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert again.stdout == again.stderr == ""
    assert json.loads((tmp_path / "runs" / "b" / "config.json").read_text()) == config
    assert_same(run, tmp_path / "runs" / "b")

    shown = flatout("evaluate", "a", "--episodes", "5", "--json", cwd=tmp_path)
    assert json.loads(shown.stdout)["episodes"] == 5
    assert (
        "over 5 episodes" in flatout("evaluate", "runs/a", "--episodes", "5", "--best", cwd=tmp_path).stdout
    )


def test_evaluate_says_which_checkpoint_it_uses_when_the_newest_is_damaged(tmp_path: Path) -> None:
    argv = ["train", "CartPole-v1", *TINY, "--timesteps", "512", "--checkpoint-every", "256"]
    assert flatout(*argv, "--run-name", "a", "--quiet", cwd=tmp_path).returncode == 0
    checkpoints = sorted((tmp_path / "runs" / "a" / "checkpoints").glob("step-*"))
    with checkpoints[-1].open("r+b") as file:
        file.truncate(3000)
    done = flatout("evaluate", "a", "--episodes", "1", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stderr.startswith("note: checkpoint 'runs/a/checkpoints/step-000000000512.flatout' is ")
    assert done.stderr.endswith("; using step-000000000256.flatout\n")
    with pytest.warns(UserWarning, match=r"using step-000000000256\.flatout"):
        load(tmp_path / "runs" / "a")


FAILS_LATER = """
import os, time
from pathlib import Path
import gymnasium as gym
import numpy as np

class Env(gym.Env):
    observation_space, action_space = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2)
    n_steps = 0

    def __init__(self, fault=None, flag=None):
        self.fault, self.flag = fault, flag

    def is_mine(self):
        try:
            return self.flag is None or Path(self.flag).touch(exist_ok=False) is None
        except FileExistsError:
            return False

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.n_steps += 1
        if self.fault and self.n_steps == 300 and self.is_mine():
            if self.fault == "exit":
                os._exit(3)
            time.sleep(1000)
        return np.zeros(2, np.float32), 1.0, self.n_steps % 10 == 0, False, {}
"""


@pytest.mark.parametrize(
    ("fault", "words"), [("exit", "exited with code 3"), ("hang", "gave no answer within 1 s")]
)
def test_evaluate_replaces_an_env_that_ends_or_blocks_its_process(
    fault: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / "my.py").write_text(FAILS_LATER)
    argv = ["train", "my.py:Env", *TINY, "--executor", "serial", "--timesteps", "128", "--step-timeout", "1"]
    assert flatout(*argv, "--run-name", "a", "--quiet", cwd=tmp_path).returncode == 0
    evaluate = ["evaluate", "a", "--json", "--episodes", "400", "--env-kwargs"]
    once = flatout(*evaluate, json.dumps({"fault": fault, "flag": "done"}), cwd=tmp_path)
    assert once.returncode == 0, once.stderr
    assert json.loads(once.stdout)["episodes"] == 400
    (note,) = once.stderr.splitlines()
    assert note.startswith("note: worker ")
    assert note.endswith("; rebuilt, going on")
    assert words in note
    if fault == "exit":
        always = flatout(
            "evaluate", "a", "--episodes", "4000", "--env-kwargs", json.dumps({"fault": fault}), cwd=tmp_path
        )
        *notes, line = always.stderr.splitlines()
        assert (always.returncode, always.stdout) == (2, "")
        assert line.startswith("flatout: gave up after 10 restarts; the last: worker ")
        assert all(note.startswith("note: worker ") for note in notes)


def start_and_wait(run: Path, *argv: str) -> subprocess.Popen[str]:
    """Start a run and wait until it has learned something."""
    process = subprocess.Popen(
        command(*argv), cwd=run.parents[1], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if (run / "metrics.csv").exists() and len((run / "metrics.csv").read_text().splitlines()) > 2:
            return process
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    raise AssertionError("the run did not start")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_saves_and_the_resumed_run_equals_the_uninterrupted(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    argv = ["train", "CartPole-v1", "--timesteps", "15000", "--quiet"]
    run = tmp_path / "runs" / "cut"
    process = start_and_wait(run, *argv, "--run-name", "cut")
    process.send_signal(number)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == code
    assert errors == ""
    stopped = summary_of(run)
    assert stopped["status"] == "stopped"
    assert 0 < stopped["env_steps"] < 15_000

    resumed = flatout("resume", "cut", "--quiet", "--json", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    summary = json.loads(resumed.stdout)
    assert summary["status"] == "finished"
    assert summary["wall_seconds"] > stopped["wall_seconds"]
    with (run / "metrics.csv").open() as file:
        steps = [int(row["time/total_timesteps"]) for row in csv.DictReader(file)]
    assert steps == sorted(set(steps))
    assert steps[-1] == 15_104

    assert flatout(*argv, "--run-name", "whole", cwd=tmp_path).returncode == 0
    assert_same(run, tmp_path / "runs" / "whole")


SLEEPER = """
import time
import gymnasium as gym
import numpy as np
from gymnasium import spaces

class Sleeper(gym.Env):
    observation_space = spaces.Box(-1, 1, (2,))
    action_space = spaces.Discrete(2)
    n = 0
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}
    def step(self, action):
        self.n += 1
        if self.n == 1000:
            open("asleep", "w").close()
            time.sleep(600)
        return np.zeros(2, np.float32), 1.0, self.n % 20 == 0, False, {}
"""


@pytest.mark.parametrize("executor", ["serial", "process"])
def test_an_env_that_blocks_does_not_prevent_stopping(executor: str, tmp_path: Path) -> None:
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    run = tmp_path / "runs" / "s"
    argv = command("train", "sleeper.py:Sleeper", *TINY, "--run-name", "s", "--quiet", "--executor", executor)
    process = subprocess.Popen(argv, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "asleep").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 143, errors
    assert errors == ""
    assert summary_of(run)["env_steps"] == 999 // 32 * 128
    assert parameters(run)
    (tmp_path / "sleeper.py").write_text(SLEEPER.replace("== 1000", "== -1"))
    resumed = flatout("resume", "s", "--timesteps", "5000", "--quiet", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert summary_of(run)["env_steps"] == 5_120


REPLAY = "--save-replay --network-arch 32,32 --train-ratio 0.25 --overlap off".split()
DQN = ["CartPole-v1", "--algo", "dqn", *REPLAY]
SAC = ["Pendulum-v1", "--algo", "sac", *REPLAY, "--n-envs", "2"]


@pytest.mark.parametrize("what", [["CartPole-v1"], DQN, SAC], ids=["ppo", "dqn", "sac"])
def test_a_killed_run_resumes_from_its_last_checkpoint(what: list[str], tmp_path: Path) -> None:
    argv = ["train", *what, "--timesteps", "8000", "--checkpoint-every", "1000", "--quiet"]
    run = tmp_path / "runs" / "killed"
    process = start_and_wait(run, *argv, "--run-name", "killed")
    while not list((run / "checkpoints").glob("step-*.flatout")):
        time.sleep(0.02)
    process.kill()
    process.communicate()
    assert not (run / "summary.json").exists()
    assert flatout("resume", "killed", "--quiet", cwd=tmp_path).returncode == 0
    assert flatout(*argv, "--run-name", "whole", cwd=tmp_path).returncode == 0
    assert_same(run, tmp_path / "runs" / "whole")


def test_help_needs_no_torch() -> None:
    """`flatout --help` and a typo's complaint must not pay for heavy imports."""
    code = (
        "import sys; from flatout.cli.main import run; "
        "assert run(['--help']) == 0; assert run(['train', 'CartPole-v1', '--n-env', '3']) == 2; "
        "assert run(['train', 'CartPole-v1', '--batch-size', '100']) == 2; "
        "assert run(['train', 'CartPol-v1']) == 2; assert run(['doctor', 'CartPol-v1']) == 2; "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_output_to_a_closed_pipe_gives_no_traceback(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        command("train", "--help"), cwd=tmp_path, stdout=write, stderr=subprocess.PIPE, text=True
    )
    os.close(write)
    assert "Traceback" not in done.stderr


def workers_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The env workers of a run: children of its fork server."""
    for child in psutil.Process(process.pid).children():
        if "forkserver" in " ".join(child.cmdline()):
            return list(child.children())
    return []


def test_a_run_survives_a_killed_worker_and_ctrl_c_leaves_no_orphan(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "p"
    argv = ["train", "CartPole-v1", "--executor", "process", "--timesteps", "1e7", "--run-name", "p"]
    process = start_and_wait(run, *argv)
    workers = workers_of(process)
    assert len(workers) >= 2
    workers[0].kill()
    deadline = time.monotonic() + 30
    while not (run / "faults.log").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    everyone = psutil.Process(process.pid).children(recursive=True)
    for victim in (psutil.Process(process.pid), *everyone):  # a terminal's Ctrl-C goes to the whole group
        victim.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=200)
    assert process.returncode == 130
    assert "Traceback" not in errors + out
    assert f"pid {workers[0].pid}: killed by SIGKILL; rebuilt, going on" in errors
    assert summary_of(run)["restarts"] == 1
    assert summary_of(run)["executor"]["kind"] == "process"
    _, alive = psutil.wait_procs(everyone, timeout=5)
    assert alive == []
