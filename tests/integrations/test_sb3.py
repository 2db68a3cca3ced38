"""The Stable-Baselines3 bridge: what SB3's own DummyVecEnv with a Monitor would give, and PPO learns through it."""

from __future__ import annotations

import importlib
import sys
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
import pytest

from flatout.errors import FlatoutError
from flatout.integrations.sb3 import make_vec_env
from tests.faults import Doomed
from tests.known import Match, OnlyTheMaskTells
from tests.test_vector import Taciturn, Talkative, same

N = 3


def test_without_sb3_the_error_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from flatout.integrations import sb3

    sb3._vec_env_type.cache_clear()
    for name in [name for name in sys.modules if name.startswith("stable_baselines3")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "stable_baselines3", None)
    with pytest.raises(FlatoutError, match="pip install stable-baselines3"):
        make_vec_env("CartPole-v1", N)


@pytest.mark.parametrize("kind", ["serial", "process", "thread"])
@pytest.mark.parametrize(
    "make",
    [
        partial(gym.make, "CartPole-v1", max_episode_steps=30),
        partial(gym.make, "Pendulum-v1", max_episode_steps=15),
        partial(Match, "tuple"),
        partial(OnlyTheMaskTells, "obs"),
        Taciturn,
        partial(Talkative, 5, True),
        partial(Match, "image"),
    ],
)
def test_every_step_equals_sb3s_own(make: Any, kind: str) -> None:
    vec_env = pytest.importorskip("stable_baselines3.common.vec_env")
    monitor = importlib.import_module("stable_baselines3.common.monitor")
    theirs = vec_env.DummyVecEnv([lambda: monitor.Monitor(make())] * N)
    ours = make_vec_env(make, N, seed=5, executor=kind)
    assert isinstance(ours, vec_env.VecEnv)
    assert (ours.observation_space, ours.action_space) == (theirs.observation_space, theirs.action_space)
    theirs.seed(5)
    ours.action_space.seed(0)
    n_ended = 0
    for t in range(80):
        if t in (0, 30):  # the second time in the middle of episodes, and unseeded
            assert same(ours.reset(), theirs.reset())
        actions = np.stack([ours.action_space.sample() for _ in range(N)])
        obs, rewards, dones, infos = ours.step(actions)
        their_obs, their_rewards, their_dones, their_infos = theirs.step(actions)
        assert same((obs, rewards, dones), (their_obs, their_rewards, their_dones))
        for info, their_info in zip(infos, their_infos, strict=True):
            for told in (info, their_info):  # the only thing that is not the env's own: the time
                if "episode" in told:
                    n_ended += 1
                    assert told["episode"].pop("t") >= 0.0
            assert same(info, their_info)
        assert same(tuple(ours.reset_infos), tuple(theirs.reset_infos))
    assert n_ended >= 4
    ours.seed(9)
    theirs.seed(9)
    assert same(ours.reset(), theirs.reset())
    ours.close()


@pytest.mark.parametrize("kind", ["serial", "process", "thread"])
def test_env_attributes_and_methods_can_be_used(kind: str) -> None:
    pytest.importorskip("stable_baselines3")
    monitor = importlib.import_module("stable_baselines3.common.monitor")
    envs = make_vec_env("CartPole-v1", N, seed=0, executor=kind)
    assert envs.get_attr("length") == [0.5] * N
    envs.set_attr("length", 0.7, indices=[0, 2])
    assert envs.get_attr("length") == [0.7, 0.5, 0.7]
    assert envs.get_attr("length", indices=1) == [0.5]
    assert envs.has_attr("length")
    assert not envs.has_attr("breadth")
    assert [obs.shape for obs, _ in envs.env_method("reset", indices=[1], seed=3)] == [(4,)]
    assert envs.env_is_wrapped(gym.wrappers.TimeLimit) == [True] * N
    assert envs.env_is_wrapped(gym.wrappers.ClipAction, indices=[0]) == [False]
    assert envs.env_is_wrapped(monitor.Monitor, indices=[0, 1]) == [True] * 2
    assert envs.seed(4) == [4, 5, 6]
    envs.close()


def test_closing_leaves_no_process() -> None:
    pytest.importorskip("stable_baselines3")
    envs = make_vec_env("CartPole-v1", N, seed=0, executor="process", n_workers=2)
    envs.reset()
    pids = envs.executor.pids
    assert len(pids) == 2
    assert all(map(psutil.pid_exists, pids))
    envs.close()
    assert not any(map(psutil.pid_exists, pids))


def test_a_lost_env_is_a_truncated_episode() -> None:
    pytest.importorskip("stable_baselines3")
    envs = make_vec_env(Doomed, N, seed=0, executor="process", n_workers=1)
    before = envs.reset()
    envs.set_attr("doomed", True, indices=[2])
    obs, rewards, dones, infos = envs.step(np.zeros(N, np.int64))
    assert rewards.tolist() == [0.0] * N
    assert dones.tolist() == [True] * N
    for info, last, first in zip(infos, before, obs, strict=True):
        assert info["TimeLimit.truncated"]
        assert info["terminal_observation"].tolist() == last.tolist()
        assert first[1] == 0
    assert "raised in step" in envs.notes[-1]
    envs.close()


def test_options_are_used_for_one_reset() -> None:
    pytest.importorskip("stable_baselines3")
    envs = make_vec_env("CartPole-v1", N, seed=0)
    envs.set_options({"low": 0.01, "high": 0.011})
    assert (envs.reset() >= 0.01).all()
    assert not (envs.reset() >= 0.01).all()


def test_images_are_rendered() -> None:
    pytest.importorskip("stable_baselines3")
    envs = make_vec_env("CartPole-v1", 2, env_kwargs={"render_mode": "rgb_array"})
    envs.reset()
    assert envs.render_mode == "rgb_array"
    assert envs.render().shape == (800, 600, 3)
    assert make_vec_env("CartPole-v1", 2).get_images() == [None, None]


def test_ppo_learns_and_logs_through_it() -> None:
    sb3 = pytest.importorskip("stable_baselines3")
    evaluation = importlib.import_module("stable_baselines3.common.evaluation")
    settings: dict[str, Any] = {"n_steps": 64, "batch_size": 128, "n_epochs": 8, "learning_rate": 1e-3}
    model = sb3.PPO("MlpPolicy", make_vec_env("CartPole-v1", 8, seed=1), seed=1, device="cpu", **settings)
    model.learn(8_000)
    assert len(model.ep_info_buffer) == 100
    assert all(episode["r"] == episode["l"] for episode in model.ep_info_buffer)
    # A warning here would be an error: SB3 sees a Monitor.
    mean, _ = evaluation.evaluate_policy(model, make_vec_env("CartPole-v1", 4, seed=2), n_eval_episodes=8)
    assert mean > 60.0  # a random policy has 22
