"""Models of Stable-Baselines3 as flatout agents: the same actions, and no code of a stranger's file."""

from __future__ import annotations

import base64
import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flatout
from flatout.cli.main import run
from flatout.errors import FlatoutError
from flatout.sb3.imported import import_model
from flatout.training.checkpoint import write

CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("PPO", "CartPole-v1", {"n_steps": 64, "batch_size": 64}),
    ("PPO", "Pendulum-v1", {"n_steps": 64, "policy_kwargs": {"net_arch": {"pi": [32], "vf": [16, 16]}}}),
    ("DQN", "CartPole-v1", {"learning_starts": 50, "policy_kwargs": {"net_arch": [24, 24]}}),
    ("SAC", "Pendulum-v1", {"learning_starts": 50, "batch_size": 16}),
]


@pytest.mark.parametrize(("name", "env", "arguments"), CASES)
def test_an_imported_model_gives_the_same_actions(
    name: str, env: str, arguments: dict[str, Any], tmp_path: Path
) -> None:
    sb3 = pytest.importorskip("stable_baselines3", reason="it trains the models that are imported")
    theirs = getattr(sb3, name)("MlpPolicy", env, seed=1, **arguments).learn(128)
    theirs.save(tmp_path / "model")
    write(tmp_path / "model.flatout", import_model(tmp_path / "model.zip", trust=True, env=env))
    agent = flatout.load(tmp_path / "model.flatout")
    n_inputs = {"CartPole-v1": 4, "Pendulum-v1": 3}[env]
    obs = np.random.default_rng(0).normal(size=(1000, n_inputs)).astype(np.float32)
    expected, found = theirs.predict(obs, deterministic=True)[0], agent.predict(obs, deterministic=True)[0]
    if np.issubdtype(expected.dtype, np.integer):
        assert (expected == found).mean() > 0.999  # rounding may decide between two actions of equal value
    else:
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    agent.learn(64)
    assert agent.summary["status"] == "finished"


class Hostile:
    """Runs code when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


def test_a_hostile_zip_runs_nothing_without_trust(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = base64.b64encode(pickle.dumps(Hostile(tmp_path / "proof"))).decode()
    with zipfile.ZipFile(tmp_path / "model.zip", "w") as archive:
        spaces = {
            name: {":serialized:": hostile} for name in ("observation_space", "action_space", "policy_class")
        }
        archive.writestr("data", json.dumps({"clip_range": 0.2, **spaces}))
        archive.writestr("policy.pth", pickle.dumps(Hostile(tmp_path / "proof")))
    assert run(["import", "sb3", str(tmp_path / "model.zip")]) == 2
    error = capsys.readouterr().err
    assert "can run any code" in error
    assert "--trust" in error
    assert error.count("\n") == 1
    assert [file.name for file in tmp_path.iterdir()] == ["model.zip"]


def test_what_is_no_model_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "model.zip").write_text("hello")
    with pytest.raises(FlatoutError, match="is no model of Stable-Baselines3"):
        import_model(tmp_path / "model.zip", trust=True)
    with pytest.raises(FlatoutError, match="does not exist"):
        import_model(tmp_path / "missing.zip", trust=True)
