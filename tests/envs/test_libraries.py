"""Envs of other libraries, text in observations, and envs that are made already."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

import flatout
from flatout.envs.libraries import follow_robot
from flatout.envs.make import env_factory
from flatout.envs.spaces import ObsLayout, StackedFrames, space_from_json, space_to_json, without_text
from flatout.errors import FlatoutError
from tests.known import LENGTH, Match

SMALL: dict[str, Any] = {"n_envs": 4, "n_steps": 16, "batch_size": 32, "n_epochs": 1}


def installed(*modules: str) -> bool:
    from importlib.util import find_spec

    return all(find_spec(name) is not None for name in modules)


needs_atari = pytest.mark.skipif(not installed("ale_py", "cv2"), reason="needs flatout[atari]")
needs_envpool = pytest.mark.skipif(not installed("envpool"), reason="needs flatout[envpool]")
needs_minigrid = pytest.mark.skipif(not installed("minigrid"), reason="needs flatout[minigrid]")


@pytest.mark.parametrize(
    ("env", "package", "extra"),
    [
        ("ALE/Pong-v5", "ale_py", "atari"),
        ("PongNoFrameskip-v4", "ale_py", "atari"),
        ("MiniGrid-Nothing-v0", "minigrid", "minigrid"),
        ("envpool:Pong-v5", "envpool", "envpool"),
    ],
)
def test_a_missing_library_is_named_with_its_pip_command(
    env: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(gym.registry, env, raising=False)
    with pytest.raises(
        FlatoutError, match=rf"'{package}', which is not installed; pip install \"flatout\[{extra}\]"
    ):
        env_factory(env).load()


class Plainly(Match):
    """As Match, with a mission."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Dict({"mission": spaces.Text(20), "target": self.observation_space})

    def _show(self) -> Any:
        return {"target": super()._show(), "mission": "match the target"}


def test_text_is_left_out_with_a_note(tmp_path: Any) -> None:
    agent = flatout.PPO(
        Plainly, seed=1, gamma=0.0, learning_rate=3e-3, n_envs=8, n_steps=64, batch_size=128, n_epochs=4
    )
    (note,) = [line for line in agent.header() if "text" in line]
    assert note.startswith("note: observation['mission'] is text, which the network does not see")
    agent.learn(15_000)
    assert agent.evaluate(20).return_mean >= 0.9 * LENGTH
    agent.save(tmp_path / "a.flatout")
    again = flatout.load(tmp_path / "a.flatout", env=Plainly)
    obs = {"target": np.eye(4, dtype=np.float32)[2], "mission": "match the target"}
    assert again.predict(obs, deterministic=True)[0] == 2
    again.learn(512)


def test_text_anywhere_has_no_array() -> None:
    space = spaces.Dict(
        {
            "a": spaces.Tuple([spaces.Text(5), spaces.Discrete(3)]),
            "b": spaces.Text(9),
            "c": spaces.Box(0, 1, (2,)),
        }
    )
    kept = without_text(space)
    assert space_from_json(space_to_json(kept)) == kept
    assert [spec.path for spec in ObsLayout(kept).specs] == [("a", 1), ("c",)]
    assert without_text(spaces.Discrete(2)) == spaces.Discrete(2)


@needs_minigrid
def test_minigrid_trains_without_its_mission() -> None:
    agent = flatout.PPO("MiniGrid-Empty-5x5-v0", seed=1, **SMALL)
    assert any("observation['mission'] is text" in line for line in agent.header())
    assert sum(p.numel() for p in agent.policy.model.parameters()) < 60_000
    agent.learn(128)


@needs_atari
def test_an_ale_id_gets_the_preprocessing_and_says_so() -> None:
    agent = flatout.PPO("ALE/Pong-v5", seed=1, **SMALL)
    assert agent.policy.obs.space == StackedFrames(0, 255, (4, 84, 84), np.uint8, frames=4)
    assert any(
        "Atari preprocessing (an Atari game; --no-atari turns it off)" in line for line in agent.header()
    )
    agent.learn(64)
    raw = flatout.PPO("ALE/Pong-v5", atari=False, seed=1, **SMALL)
    assert raw.policy.obs.specs[0].shape == (3, 210, 160)


@needs_atari
def test_fire_starts_a_game_and_every_life() -> None:
    from dataclasses import replace

    env = replace(env_factory("ALE/Breakout-v5"), atari=True, frame_stack=4)()
    env.reset(seed=3)
    lives = set()
    for _ in range(2_000):  # a policy that never presses FIRE
        *_, terminated, _, info = env.step(0)
        lives.add(info["lives"])
        if terminated:
            break
    assert terminated
    assert lives >= {0, 1, 2, 3, 4}


@needs_atari
def test_dqn_learns_from_an_atari_game() -> None:
    agent = flatout.DQN("ALE/Pong-v5", seed=1, n_envs=2, learning_starts=16, buffer_size=1_000, batch_size=4)
    agent.learn(64)
    assert any(line.startswith("replay: 1,000 transitions, 7.") for line in agent.header())


@needs_envpool
@pytest.mark.parametrize("kind", ["PPO", "DQN"])
def test_envpool_steps_its_own_batch(kind: str) -> None:
    settings = (
        SMALL if kind == "PPO" else {"n_envs": 4, "learning_starts": 16, "batch_size": 4, "buffer_size": 900}
    )
    agent = getattr(flatout, kind)("envpool:Pong-v5", seed=1, **settings)
    assert ObsLayout(agent.policy.obs.space).frames == 4
    agent.learn(128)
    assert "observations: 84x84, 4 frames stacked by the env" in agent.header()
    assert agent.trainer().plan.executor == "batched"


@needs_envpool
def test_frames_of_envpool_are_stacked_as_ours() -> None:
    """Each stack is the one before, shifted by one frame; the first of an episode repeats a frame."""
    envs: Any = env_factory("envpool:Breakout-v5", {"max_episode_steps": 20}).make(3)
    obs, _ = envs.reset(seed=5)
    obs, began, ended = obs.copy(), np.ones(3, bool), np.zeros(3, bool)
    for _ in range(60):
        assert (obs[began] == obs[began][:, -1:]).all()
        before, began = obs, ended  # an episode that has ended is reset by the next step
        obs, _, terminated, truncated, _ = envs.step(np.ones(3, np.int64))
        obs, ended = obs.copy(), terminated | truncated
        assert (obs[~began][:, :-1] == before[~began][:, 1:]).all()
    envs.close()


@needs_envpool
def test_an_unknown_task_of_envpool_is_refused_with_the_nearest() -> None:
    with pytest.raises(FlatoutError, match="EnvPool has no env 'Pongg-v5'; did you mean 'Pong-v5'"):
        env_factory("envpool:Pongg-v5").load()


class Closable(Match):
    """Knows whether it was closed."""

    closed = False

    def close(self) -> None:
        self.closed = True


def test_one_env_that_is_made_already_is_enough_for_one() -> None:
    env = Closable()
    agent = flatout.PPO(env, seed=1, n_steps=32, batch_size=32)
    assert (agent.config.n_envs, agent.config.executor) == (1, "serial")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agent.learn(128)
        assert len(agent.evaluate(3).returns) == 3
        agent.learn(128)
    agent.close()
    assert not env.closed


def test_a_registered_env_that_is_made_already_keeps_its_recipe() -> None:
    agent = flatout.PPO(gym.make("CartPole-v1"), seed=1)
    assert agent.config.env == "CartPole-v1"
    agent.learn(64)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"n_envs": 4},
            r"an env that is made already cannot be 4 envs; give what makes it, such as lambda: Match\(",
        ),
        ({"executor": "process"}, "steps in this process, with executor='serial'"),
        ({"n_collectors": 2}, "steps in this process, with executor='serial'"),
        ({"env_kwargs": {"a": 1}}, "env_kwargs have no effect on an env that is made already"),
    ],
)
def test_one_env_is_not_copied(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(FlatoutError, match=words):
        flatout.PPO(Match(), **settings)


def test_make_vec_does_not_copy_one_env_either() -> None:
    with pytest.raises(FlatoutError, match="cannot be 2 envs"):
        flatout.make_vec(Match(), 2)
    envs = flatout.make_vec(Match(), 1)
    envs.reset(seed=0)
    envs.close()


@pytest.mark.parametrize(("env", "name"), [("HalfCheetah-v5", "track"), ("Hopper-v5", None)])
def test_the_camera_follows_a_robot_that_runs(env: str, name: str | None) -> None:
    """Hopper's does so by Gymnasium's own settings, so it stays as it is."""
    mujoco: Any = pytest.importorskip("mujoco")
    made = gym.make(env, render_mode="rgb_array")
    follow_robot(made)
    renderer: Any = made.unwrapped.mujoco_renderer  # type: ignore[attr-defined]
    found = mujoco.mj_id2name(renderer.model, mujoco.mjtObj.mjOBJ_CAMERA, renderer.camera_id)
    assert found == name
    assert name or "trackbodyid" in renderer.default_cam_config
