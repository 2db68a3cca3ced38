"""SAC as users run it: known answers, the train ratio, overlap, stopping and resuming."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

import flatout
from flatout.config.run_config import RunConfig, resolve
from tests.known import LENGTH, Match

SMALL: dict[str, Any] = {
    "preset": "auto",
    "network_arch": (32, 32),
    "n_envs": 4,
    "n_steps": 4,
    "batch_size": 64,
    "gamma": 0.5,
    "seed": 1,
    "learning_starts": 100,
    "buffer_size": 5000,
    "learning_rate": 3e-3,
    "train_ratio": 0.5,
}
Box = partial(Match, "box", "box")


class Constant(gym.Env[Any, Any]):
    """Every step earns 1 and ends the episode: it is terminated or, after two steps, truncated."""

    observation_space = spaces.Box(0, 1, (2,))
    action_space = spaces.Box(-1, 1, (1,))

    def __init__(self, terminates: bool) -> None:
        self._terminates, self._t = terminates, 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._t = 0
        return np.ones(2, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        self._t += 1
        cut = not self._terminates and self._t == 2
        return np.ones(2, np.float32), 1.0, self._terminates, cut, {}


@pytest.mark.parametrize("multi_step", [1, 3])
@pytest.mark.parametrize(("terminates", "value"), [(True, 1.0), (False, 2.0)])
def test_a_truncated_episode_is_bootstrapped_and_a_terminated_one_is_not(
    multi_step: int, terminates: bool, value: float
) -> None:
    settings = SMALL | {"tau": 0.1, "ent_coef": 1e-5, "tune_ent_coef": False, "multi_step": multi_step}
    agent = flatout.SAC(partial(Constant, terminates), **settings, learning_rate_schedule="linear")
    agent.learn(1500)
    model: Any = agent.policy.model
    action, bits = torch.linspace(-0.9, 0.9, 7)[:, None], torch.zeros(7, 1, dtype=torch.int64)
    with torch.no_grad():
        q = model.critics((torch.ones(7, 2),), action, bits, 0)
    torch.testing.assert_close(q, torch.full((2, 7), value), atol=0.1, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{}, {"compile": "off", "layer_norm": True, "dropout": 0.01}, {"prioritized": True, "multi_step": 2}],
    ids=["plain", "layer-norm", "prioritized"],
)
def test_a_known_answer_is_learned(settings: dict[str, Any]) -> None:
    agent = flatout.SAC(Box, **(SMALL | {"gamma": 0.0, "train_ratio": 1.0} | settings))
    agent.learn(2000)
    assert agent.evaluate(20).return_mean > 0.93 * LENGTH
    chance = flatout.SAC(Box, **SMALL).evaluate(20).return_mean
    assert chance < 0.8 * LENGTH


@pytest.mark.parametrize("obs", ["image", "dict", "discrete"])
def test_any_observation_is_learned_from(obs: str) -> None:
    agent = flatout.SAC(partial(Match, obs, "box_unbounded"), **SMALL)
    agent.learn(160)
    assert agent.summary["updates"] == (160 - 100) // 2


def test_a_batch_may_be_large() -> None:
    agent = flatout.SAC(Box, **(SMALL | {"n_envs": 32, "batch_size": 32_768, "train_ratio": 1 / 64}))
    agent.learn(256)
    assert agent.summary["updates"] == int((256 - 100) / 64)
    assert agent.summary["nan_skips"] == 0


@pytest.mark.parametrize("n_envs", [1, 3, 8])
@pytest.mark.parametrize("overlap", ["on", "off"])
def test_the_train_ratio_holds_after_every_iteration(n_envs: int, overlap: str) -> None:
    seen: list[tuple[int, int]] = []
    settings = SMALL | {"n_envs": n_envs, "overlap": overlap, "executor": "serial", "train_ratio": 0.29}
    agent = flatout.SAC(Box, **settings)
    agent.learn(480, callback=lambda p: seen.append((p.env_steps, p.updates)))
    assert len(seen) == -(-480 // (4 * n_envs))
    for env_steps, updates in seen:
        assert updates == max(env_steps - 100, 0) * 29 // 100


def params(agent: Any) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in agent.policy.model.parameters()])


@pytest.mark.parametrize("kind", ["fused", "eager", "prioritized"])
@pytest.mark.parametrize("overlap", ["on", "off"])
def test_a_run_resumed_with_its_replay_equals_the_uninterrupted_one(
    overlap: str, kind: str, tmp_path: Path
) -> None:
    of_kind: dict[str, dict[str, Any]] = {
        "fused": {},
        "eager": {"compile": "off", "dropout": 0.1, "layer_norm": True},
        "prioritized": {"prioritized": True},
    }
    settings = SMALL | of_kind[kind]
    settings |= {"overlap": overlap, "executor": "serial", "normalize_obs": True, "save_replay": True}
    settings |= {"multi_step": 2, "buffer_size": 300, "exploration_hold": 3}
    whole = flatout.SAC(Box, **settings)
    whole.learn(640)
    half = flatout.SAC(Box, **settings)
    half.learn(640, callback=lambda p: p.env_steps < 320)
    half.save(tmp_path / "half.flatout")
    again = flatout.load(tmp_path / "half.flatout", Box)
    assert isinstance(again, flatout.SAC)
    again.learn(320)
    assert again.summary["env_steps"] == 640
    assert again.summary["updates"] == whole.summary["updates"]
    assert torch.equal(params(again), params(whole))


def test_collectors_in_subprocesses_collect_the_same() -> None:
    agents = [
        flatout.SAC(Box, **SMALL, overlap="off", **how)
        for how in ({"executor": "serial"}, {"n_collectors": 2})
    ]
    for agent in agents:
        agent.learn(320)
    assert torch.equal(params(agents[0]), params(agents[1]))


def test_policies_act_without_their_critics_deciding(tmp_path: Path) -> None:
    agent = flatout.SAC(Box, **SMALL)
    agent.learn(160)
    agent.save(tmp_path / "a.flatout")
    again = flatout.load(tmp_path / "a.flatout", Box)
    obs = np.eye(4, dtype=np.float32)
    action, _ = agent.predict(obs, deterministic=True)
    np.testing.assert_array_equal(action, again.predict(obs, deterministic=True)[0])
    assert action.shape == (4, 2)
    assert (action >= -10).all()
    assert (action <= 30).all()


def test_configs_survive_json() -> None:
    config = resolve("Pendulum-v1", {"algo": "sac", "gamma": 0.5}, device="cpu", n_cores=2)
    data = config.to_json()
    assert data["sac"]["gamma"] == 0.5
    assert RunConfig.from_json(data, "test") == config


def test_an_env_for_which_only_sac_has_a_recipe_uses_it() -> None:
    def algo(env: str, **given: Any) -> str:
        return resolve(env, given, device="cpu", n_cores=2).algo

    assert algo("BipedalWalker-v3") == "sac"
    assert algo("BipedalWalker-v3", clip_range=0.1) == "ppo"
    assert algo("Pendulum-v1") == algo("MyBox-v0") == "ppo"
