"""Evaluation during training: a limit for episodes, the first signal, and envs that fail in it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flatout
from flatout.runlog.folder import RunFolder
from flatout.training.checkpoint import CheckpointFolder
from tests.batched import MatchBatch
from tests.faults import Walk

SMALL: dict[str, Any] = {"n_envs": 2, "n_steps": 32, "batch_size": 64, "n_epochs": 1, "seed": 1}


class Later(Walk):
    """Misbehaves only in envs made after the first `n_sound` of them in all processes, as those of evaluations are."""

    def __init__(self, folder: str, fault: str, n_sound: int) -> None:
        super().__init__()
        self._folder = Path(folder)
        with (self._folder / "made").open("ab") as file:
            file.write(b".")
            file.flush()
            self._sound = file.tell() <= n_sound
        self._fault = "" if self._sound else fault

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = super().step(action)
        if self._fault:
            (self._folder / "reached").touch()
        if self._fault == "die":
            os.kill(os.getpid(), signal.SIGSEGV)
        if self._fault == "raise":
            raise KeyError("speed")
        if self._fault == "hang":
            time.sleep(1000)
        if self._fault == "NaN":
            obs = np.full(2, np.nan, np.float32)
        return obs, reward, terminated and self._fault != "endless", truncated, info


def notes_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]


def test_an_endless_episode_is_cut_and_counts_with_its_return_so_far(tmp_path: Path) -> None:
    # Made before: one env to check, two to train in.
    kwargs = {"folder": str(tmp_path), "fault": "endless", "n_sound": 3}
    agent = flatout.PPO(Later, **SMALL, executor="serial", overlap="off", env_kwargs=kwargs)
    agent.learn(64)
    found = agent.evaluate(13, max_steps=50)
    assert found.n_cut == 13
    assert found.lengths == (50,) * 13
    assert found.returns == (50.0,) * 13


def test_episodes_that_end_in_time_are_not_changed_by_the_limit() -> None:
    agent = flatout.PPO("CartPole-v1", seed=3)
    whole = agent.evaluate(12)
    longest = max(whole.lengths)
    assert agent.evaluate(12, max_steps=longest + 1) == whole
    cut = agent.evaluate(12, max_steps=longest - 1)
    assert cut.n_cut > 0
    assert max(cut.lengths) == longest - 1


def test_a_batched_env_that_cannot_reset_some_envs_plays_no_more_in_those_that_were_cut() -> None:
    agent = flatout.PPO(MatchBatch, n_envs=4, n_steps=32, batch_size=64)
    found = agent.evaluate(16, max_steps=3)  # in 10 envs
    assert (found.n_cut, found.lengths) == (10, (3,) * 10)


@pytest.mark.parametrize(
    ("executor", "fault"), [("process", "die"), ("thread", "hang"), ("serial", "raise"), ("serial", "NaN")]
)
def test_training_goes_on_where_evaluation_fails(
    executor: str, fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    n_sound = 3 if executor == "serial" else 4  # steps are timed in one more
    agent = flatout.PPO(
        Later,
        **SMALL,
        executor=executor,
        overlap="off",
        eval_every=64,
        eval_episodes=2,
        step_timeout=0.5,
        env_kwargs={"folder": str(tmp_path), "fault": fault, "n_sound": n_sound},
        runs_dir=tmp_path,
        run_name="r",
    )
    agent.learn(128, progress_bar=True)
    assert agent.summary["status"] == "finished"
    assert agent.summary["env_steps"] == 128
    notes = notes_of(capsys)
    failed = [note for note in notes if "evaluation failed: " in note]
    assert len(failed) == 2, notes
    assert all(note.endswith("training goes on") for note in failed), notes
    assert "evaluation failed" in RunFolder.open(tmp_path / "r").faults.read_text()


def test_an_env_that_fails_once_in_evaluation_is_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class OneDies(Later):
        def __init__(self, folder: str) -> None:
            super().__init__(folder, "raise", 3)
            if (tmp_path / "reached").exists():
                self._fault = ""

    agent = flatout.PPO(
        OneDies,
        **SMALL,
        executor="serial",
        overlap="off",
        eval_every=64,
        eval_episodes=1,
        env_kwargs={"folder": str(tmp_path)},
    ).learn(64, progress_bar=True)
    assert agent.summary["status"] == "finished"
    notes = notes_of(capsys)
    (note,) = notes
    assert "in evaluation: env 0 raised in step" in note


ENV = """
from tests.training.test_evaluation import Later

def make(fault):
    return Later(".", fault, 3)
"""


@pytest.mark.parametrize("fault", ["endless", "hang"])
def test_the_first_signal_ends_an_evaluation_and_the_run_is_saved(fault: str, tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text(ENV)
    flags = "--n-envs 2 --n-steps 32 --batch-size 64 --executor serial --overlap off --timesteps 6400"
    limits = "--eval-every 64 --eval-max-steps 1000000000 --run-name r --quiet"
    command = [sys.executable, "-m", "flatout", "train", "my.py:make", *flags.split(), *limits.split()]
    run = subprocess.Popen(
        [*command, "--env-kwargs", json.dumps({"fault": fault})],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    while not (tmp_path / "reached").exists():
        assert run.poll() is None, run.communicate()
        time.sleep(0.05)
    run.send_signal(signal.SIGINT)
    assert run.communicate(timeout=200)[1] == ""
    assert run.returncode == 130
    summary = json.loads((tmp_path / "runs" / "r" / "summary.json").read_text())
    assert (summary["status"], summary["env_steps"]) == ("stopped", 64)
    assert CheckpointFolder(tmp_path / "runs" / "r" / "checkpoints").newest()[0].name.endswith("64.flatout")


def test_evaluations_have_the_same_results_in_worker_processes_and_threads() -> None:
    found = []
    for executor in ("serial", "process", "thread"):
        agent = flatout.PPO("CartPole-v1", n_envs=2, n_steps=32, batch_size=64, executor=executor, seed=5)
        found.append([agent.trainer().evaluate() for _ in range(2)])
        agent.close()
    assert found[0] == found[1] == found[2]
    assert found[0][0] != found[0][1], "each evaluation has its own episodes"
