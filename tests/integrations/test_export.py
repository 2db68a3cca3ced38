"""Exported policies give the same outputs as the agent, within 1e-5 over 1,000 observations, in every format."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from safetensors.torch import load_file

import flatout
from flatout.envs.spaces import ActionLayout, ObsLayout
from flatout.errors import FlatoutError
from flatout.integrations.export import FORMATS, export
from flatout.models.policy import Policy
from tests import command
from tests.known import OnlyTheMaskTells

VECTOR = spaces.Box(-1, 1, (4,), np.float32)
IMAGE = spaces.Box(0, 255, (20, 20, 3), np.uint8)
MIXED = spaces.Dict(
    {
        "action_mask": spaces.MultiBinary(5),
        "card": spaces.Discrete(7, start=2),
        "flags": spaces.MultiBinary(3),
        "x": VECTOR,
    }
)
CASES: dict[str, tuple[str, Any, Any, dict[str, Any]]] = {
    "ppo": ("ppo", VECTOR, spaces.Discrete(3, start=1), {"normalize_obs": True}),
    "ppo-continuous": ("ppo", VECTOR, spaces.Box(-2, 3, (2,), np.float32), {"squash": True}),
    "ppo-masked": ("ppo", MIXED, spaces.MultiDiscrete([2, 3]), {}),
    "ppo-images": ("ppo", IMAGE, spaces.Discrete(4), {}),
    "recurrent": ("recurrent-ppo", VECTOR, spaces.Discrete(3), {"memory": "lstm:8"}),
    "recurrent-gru": ("recurrent-ppo", VECTOR, spaces.Discrete(3), {"memory": "gru:8"}),
    "dqn": ("dqn", VECTOR, spaces.Discrete(3), {"dueling": True, "activation": "elu"}),
    "sac": ("sac", VECTOR, spaces.Box(-2, 3, (2,), np.float32), {"activation": "silu"}),
}


def a_policy(case: str) -> Policy:
    """An untrained policy with random parameters of a usual size."""
    algo, obs_space, action_space, settings = CASES[case]
    from flatout.config.run_config import resolve

    config = resolve("CartPole-v1", {"algo": algo, "n_envs": 8, **settings}, device="cpu", n_cores=2)
    obs, action = ObsLayout(obs_space), ActionLayout(action_space)
    model = config.learner_spec(obs, action).make_model()
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        for tensor in (*model.parameters(), *(b for n, b in model.named_buffers() if n.startswith("obs_"))):
            tensor += 0.1 * torch.randn(tensor.shape, generator=generator)
    return Policy(model=model, obs=obs, action=action, device=torch.device("cpu"))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form", ["numpy", "torch", "onnx"])
def test_the_exported_policy_differs_by_less_than_1e_5(form: str, case: str, tmp_path: Path) -> None:
    if form == "onnx":
        pytest.importorskip("onnxruntime", reason="ONNX files are run by onnxruntime")
    out = tmp_path / f"policy{FORMATS[form][0]}"
    worst = export(a_policy(case), form, out)
    assert 0 <= worst < 1e-5
    assert out.stat().st_size > 500
    assert len(list(tmp_path.iterdir())) == (2 if form == "numpy" else 1)  # nothing that could be left behind


def test_onnx_takes_batches_of_any_size_and_acts_like_predict(tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime", reason="ONNX files are run by onnxruntime")
    agent = flatout.PPO("CartPole-v1", n_envs=2, n_steps=16, batch_size=32, timesteps=64)
    agent.learn(64)
    export(agent.policy, "onnx", tmp_path / "policy.onnx")
    session = runtime.InferenceSession(str(tmp_path / "policy.onnx"))
    for n in (1, 2, 33):
        obs = np.random.default_rng(n).normal(size=(n, 4)).astype(np.float32)
        action = session.run(["action"], {"obs": obs})[0]
        np.testing.assert_array_equal(action, agent.predict(obs, deterministic=True)[0])


def test_the_numpy_policy_runs_without_torch_and_flatout(tmp_path: Path) -> None:
    policy = a_policy("ppo-masked")
    export(policy, "numpy", tmp_path / "policy.npz")
    script = """
import sys
sys.modules["torch"] = sys.modules["flatout"] = None
from policy import Policy
obs = {"action_mask": [0, 1, 1, 0, 0], "card": 3, "flags": [0, 1, 0], "x": [0.1, 0.2, 0.3, 0.4]}
print(Policy().predict(obs)[0].tolist())
"""
    found = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    action = json.loads(found.stdout)
    assert action == [1, 0]  # all that the mask allows


@pytest.mark.parametrize("case", CASES)
def test_safetensors_hold_all_parameters(case: str, tmp_path: Path) -> None:
    policy = a_policy(case)
    export(policy, "safetensors", tmp_path / "policy.safetensors")
    saved = load_file(tmp_path / "policy.safetensors")
    assert saved.keys() == policy.model.state_dict().keys()
    policy.model.load_state_dict(saved)


def test_safetensors_come_with_a_description(tmp_path: Path) -> None:
    export(a_policy("ppo"), "safetensors", tmp_path / "policy.safetensors")
    about = json.loads((tmp_path / "policy.json").read_text())
    assert about["inputs"] == {"obs": {"shape": ["batch", 4], "dtype": "float32"}}
    assert about["action_space"] == {"type": "Discrete", "n": 3, "start": 1}


def test_an_unknown_format_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(FlatoutError, match="did you mean 'onnx'"):
        export(a_policy("ppo"), "onx", tmp_path / "policy.onnx")


def test_a_masked_agent_exports_its_mask(tmp_path: Path) -> None:
    agent = flatout.PPO(OnlyTheMaskTells, n_envs=2, n_steps=8, batch_size=16)
    assert isinstance(agent.policy.obs.space, gym.spaces.Dict)
    assert export(agent.policy, "numpy", tmp_path / "policy.npz") < 1e-5


@pytest.mark.parametrize(("out", "file"), [("folder", "folder/policy.npz"), ("a/b.bin", "a/b.bin")])
def test_out_is_a_folder_or_a_file_of_any_name(out: str, file: str, tmp_path: Path) -> None:
    flatout.PPO("CartPole-v1", n_envs=2, n_steps=8, batch_size=16).save(str(tmp_path / "agent.flatout"))
    done = command.flatout("export", "agent.flatout", "--format", "numpy", "--out", out, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / file).is_file()
    assert (tmp_path / file).with_suffix(".py").is_file()
