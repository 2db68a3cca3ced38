"""Models of Stable-Baselines3 as flatout agents: the same actions, and no code of a stranger's file."""

from __future__ import annotations

import base64
import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

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


class Screens(gym.Env[Any, Any]):
    """Random images of 40x44 in three colours, channels last as most envs have them."""

    observation_space = gym.spaces.Box(0, 255, (40, 44, 3), np.uint8)

    def __init__(self, *, continuous: bool) -> None:
        self.action_space = gym.spaces.Box(-1, 1, (2,)) if continuous else gym.spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._n = 0
        return self.np_random.integers(0, 256, (40, 44, 3), np.uint8), {}

    def step(self, action: Any) -> Any:
        self._n += 1
        return self.np_random.integers(0, 256, (40, 44, 3), np.uint8), 1.0, self._n == 20, False, {}


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("PPO", {"n_steps": 32, "batch_size": 32, "n_epochs": 1}),
        ("PPO", {"n_steps": 32, "batch_size": 32, "policy_kwargs": {"net_arch": {"pi": [16], "vf": [8]}}}),
        ("DQN", {"learning_starts": 30, "buffer_size": 100}),
        ("SAC", {"learning_starts": 30, "buffer_size": 100, "batch_size": 8}),
    ],
)
def test_an_imported_model_of_images_gives_the_same_actions(
    name: str, arguments: dict[str, Any], tmp_path: Path
) -> None:
    sb3 = pytest.importorskip("stable_baselines3", reason="it trains the models that are imported")
    env = Screens(continuous=name == "SAC")
    theirs = getattr(sb3, name)("CnnPolicy", env, seed=1, **arguments).learn(32)
    obs = np.random.default_rng(0).integers(0, 256, (1000, 3, 40, 44), np.uint8)
    if name != "SAC":  # let every action be the best for some images
        last = theirs.policy.action_net if name == "PPO" else theirs.policy.q_net.q_net[-1]
        outputs: list[torch.Tensor] = []
        hook = last.register_forward_hook(lambda *found: outputs.append(found[2]))
        theirs.predict(obs, deterministic=True)
        hook.remove()
        with torch.no_grad():
            last.bias -= outputs[0].mean(0)
    theirs.save(tmp_path / "model")
    write(tmp_path / "model.flatout", import_model(tmp_path / "model.zip", trust=True))
    agent = flatout.load(tmp_path / "model.flatout")
    expected, found = theirs.predict(obs, deterministic=True)[0], agent.predict(obs, deterministic=True)[0]
    if name == "SAC":
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    else:
        assert (expected == found).mean() > 0.99  # centred outputs are often nearly equal
        assert len(np.unique(expected)) == 3


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


@pytest.mark.parametrize(
    ("data", "weights"),
    [
        ({}, {"action_net.weight": torch.zeros(7, 64)}),
        ({}, [1, 2]),
        ({}, b""),
        ({"observation_space": None}, {}),
        ({"n_envs": "many"}, {}),
        ({"policy_kwargs": [1]}, {}),
        (3, {}),
    ],
)
def test_a_zip_with_other_content_is_refused_in_one_line(data: Any, weights: Any, tmp_path: Path) -> None:
    spaces = {"observation_space": gym.spaces.Box(-1, 1, (4,)), "action_space": gym.spaces.Discrete(2)}
    pickled = {
        name: {":serialized:": base64.b64encode(pickle.dumps(space)).decode()}
        for name, space in spaces.items()
    }
    with zipfile.ZipFile(tmp_path / "model.zip", "w") as archive:
        archive.writestr("data", json.dumps({"clip_range": 0.2} | pickled | data if data != 3 else data))
        with archive.open("policy.pth", "w") as file:
            file.write(weights) if isinstance(weights, bytes) else torch.save(weights, file)
    with pytest.raises(FlatoutError, match="is no model of Stable-Baselines3") as caught:
        import_model(tmp_path / "model.zip", trust=True)
    assert "\n" not in str(caught.value)


def test_what_is_no_model_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "model.zip").write_text("hello")
    with pytest.raises(FlatoutError, match="is no model of Stable-Baselines3"):
        import_model(tmp_path / "model.zip", trust=True)
    with pytest.raises(FlatoutError, match="does not exist"):
        import_model(tmp_path / "missing.zip", trust=True)
