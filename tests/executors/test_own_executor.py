"""An executor in a file outside the package: train, resume and make_vec use it by FILE.py:NAME."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import flatout
from flatout.cli.main import run
from flatout.errors import FlatoutError

SMALL: dict[str, Any] = {"n_envs": 4, "n_steps": 16, "batch_size": 32, "n_epochs": 2, "seed": 3}
STEPS = 4 * 16 * 6


@pytest.fixture
def own(tmp_path: Path) -> str:
    file = tmp_path / "my_file.py"
    shutil.copy(Path(__file__).with_name("pool_executor.py"), file)
    return f"{file}:PoolExecutor"


def learned(executor: str) -> flatout.PPO:
    agent = flatout.PPO("CartPole-v1", preset="auto", **SMALL, executor=executor, overlap="off")
    agent.learn(STEPS)
    return agent


def params(agent: Any) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in agent.policy.model.parameters()])


def test_training_with_it_is_training_with_the_serial_executor(own: str) -> None:
    agent = learned(own)
    assert agent.summary["executor"]["kind"] == own
    assert agent.summary["executor"]["reason"] == f"asked for with --executor {own}"
    assert agent.summary["episodes"] > 0
    assert torch.equal(params(agent), params(learned("serial")))


def test_the_command_line_trains_and_resumes_with_it(
    own: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = ["--runs-dir", str(tmp_path / "runs"), "--quiet", "--json"]
    settings = ["--n-envs", "4", "--n-steps", "16", "--batch-size", "32", "--timesteps", str(STEPS)]
    argv = ["train", "CartPole-v1", "--executor", own, "--run-name", "mine", *settings, *runs]
    assert run(argv) == 0
    assert run(["resume", "mine", "--timesteps", str(2 * STEPS), *runs]) == 0
    summary = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert summary["executor"]["kind"] == own
    assert summary["env_steps"] == 2 * STEPS


def test_make_vec_steps_it_like_the_serial_executor_and_passes_its_options(own: str) -> None:
    mine = flatout.make_vec("CartPole-v1", 3, own, seed=5, n_threads=3)
    serial = flatout.make_vec("CartPole-v1", 3, "serial", seed=5)
    assert mine.kind == own
    assert np.array_equal(mine.reset()[0], serial.reset()[0])
    actions, n_ended = np.array([0, 1, 1]), 0
    for _ in range(60):
        got, want = mine.step(actions), serial.step(actions)
        for a, b in zip(got[:4], want[:4], strict=True):
            assert np.array_equal(a, b)
        assert got[4].keys() == want[4].keys()
        for i in np.flatnonzero(got[4].get("_final_obs", [])):
            n_ended += 1
            assert np.array_equal(got[4]["final_obs"][i], want[4]["final_obs"][i])
    assert n_ended > 3
    mine.close()


def test_what_it_does_not_have_is_refused_in_one_line(own: str) -> None:
    with pytest.raises(FlatoutError, match=r"takes no option 'n_thread'; did you mean 'n_threads'"):
        flatout.make_vec("CartPole-v1", 3, own, n_thread=3)
    mine = flatout.make_vec("CartPole-v1", 3, own)
    with pytest.raises(FlatoutError, match="PoolExecutor has no reset_envs"):
        mine.reset(seed=1)
    with pytest.raises(FlatoutError, match="PoolExecutor has no apply"):
        mine.get_attr("spec")
    mine.close()
    with pytest.raises(FlatoutError, match="has no 'PoolExecutr'; did you mean 'PoolExecutor'"):
        flatout.make_vec("CartPole-v1", 3, own.replace("PoolExecutor", "PoolExecutr"))
