"""An algorithm in a user's file is used like a built-in one: flags, JSON, collectors, checkpoints, reports, doctor."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from gymnasium import spaces

import flatout
from flatout.algorithms import base as algorithms
from flatout.algorithms.base import LearnerSpec
from flatout.config.run_config import RunConfig, resolve
from flatout.envs.spaces import ActionLayout, ObsLayout
from flatout.errors import FlatoutError
from tests import command

FILE = Path(__file__).with_name("a2c_example.py")
A2C = f"{FILE}:A2C"


def run(*words: str, cwd: Path) -> str:
    """What a `flatout` command prints; it must succeed."""
    done = command.flatout(*words, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


def config(**settings: Any) -> Any:
    return resolve("CartPole-v1", {"algo": A2C, **settings}, device="cpu", n_cores=2)


def test_the_example_is_short() -> None:
    assert len(FILE.read_text().splitlines()) <= 120


@pytest.mark.slow
def test_it_learns_cartpole_from_the_command_line(tmp_path: Path) -> None:
    train = ["--algo", A2C, "--n-collectors", "2", "--value-weight", "0.4", "--run-name", "own"]
    out = run("train", "CartPole-v1", *train, "--timesteps", "60000", "--quiet", "--json", cwd=tmp_path)
    summary = json.loads(out.splitlines()[-1])
    assert summary["algo"] == "a2c"
    assert summary["executor"]["collectors"] == 2
    assert summary["backend"] in ("eager", "compiled")
    saved = json.loads((tmp_path / "runs/own/config.json").read_text())
    assert saved["algo"] == A2C
    columns = (tmp_path / "runs/own/metrics.csv").read_text().splitlines()[0].split(",")
    assert "train/advantage_std" in columns
    assert saved["a2c"]["value_weight"] == 0.4
    run("resume", "own", "--timesteps", "80000", "--quiet", cwd=tmp_path)
    result = json.loads(run("evaluate", "own", "--episodes", "20", "--json", cwd=tmp_path))
    assert result["return_mean"] >= 100  # of a random policy: 22
    assert "a2c" in run("report", "own", cwd=tmp_path).lower()
    assert "steps/s" in run("doctor", "CartPole-v1", "--algo", A2C, cwd=tmp_path)


def test_its_settings_are_flags_and_json() -> None:
    before = config(gae_lambda=0.5)
    assert before.n_envs == 16  # its recipe
    assert before.arithmetic().endswith("1 minibatch of 128 × 1 epoch = 1 update per iteration")
    assert RunConfig.from_json(json.loads(json.dumps(before.to_json())), "test") == before
    with pytest.raises(FlatoutError, match="--clip-range is a setting of PPO and RECURRENT-PPO, not of A2C"):
        config(clip_range=0.1)
    with pytest.raises(FlatoutError, match="does not divide the rollout"):
        config(batch_size=100)


def learner_spec(**settings: Any) -> LearnerSpec:
    obs, action = ObsLayout(spaces.Box(-1, 1, (4,))), ActionLayout(spaces.Discrete(2))
    spec: LearnerSpec = config(**settings).learner_spec(obs, action)
    return spec


def test_another_process_makes_the_same_learner(tmp_path: Path) -> None:
    """As subprocess collectors and the compiler do."""
    spec = learner_spec()
    (tmp_path / "spec").write_bytes(cloudpickle.dumps(spec))
    code = (
        "import pickle, pathlib\n"
        "learner = pickle.loads(pathlib.Path('spec').read_bytes()).make_learner('cpu', 'fp32')\n"
        "print(float(learner.params.flat.double().sum()), learner.config)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    learner: Any = spec.make_learner("cpu", "fp32")
    assert done.stdout.strip() == f"{float(learner.params.flat.double().sum())} {learner.config}", done.stderr


def test_a_compiled_update_is_kept_for_the_file_it_was_made_from(tmp_path: Path) -> None:
    facts = learner_spec().update_facts()
    assert facts["algorithm"][1] == hashlib.sha256(FILE.read_bytes()).hexdigest()
    assert learner_spec(value_weight=0.1).update_facts() != facts


def test_an_algorithm_can_be_given_as_an_object(tmp_path: Path) -> None:
    own = replace(algorithms.get(A2C), name="a2c_again", source="")
    agent = flatout.Agent("CartPole-v1", algo=own, n_envs=4, entropy_weight=0.01, seed=1)
    assert agent.config.algo == "a2c_again"
    agent.learn(512)
    agent.save(tmp_path / "agent.flatout")
    again = flatout.load(tmp_path / "agent.flatout")
    assert type(again) is flatout.Agent
    assert again.config == agent.config


def test_a_wrong_algorithm_is_refused_in_one_line(tmp_path: Path) -> None:
    for name, message in (
        ("a2c.py", "it must be one of ppo, dqn, pqn"),
        (f"{FILE}:Nothing", "has no 'Nothing'"),
        (f"{FILE}:A2CConfig", "not a flatout.Algorithm"),
        (f"{tmp_path}/none.py:A2C", "does not exist"),
        ("pppo", "did you mean 'ppo'"),
    ):
        with pytest.raises(FlatoutError, match=message):
            algorithms.get(name)
    with pytest.raises(FlatoutError, match="called 'ppo' already"):
        flatout.register_algorithm(replace(algorithms.get(A2C), name="ppo"))
