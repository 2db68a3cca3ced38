"""Frames: stacks, channels first as bytes from the env to the network, encoders by size, and learning from them."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

import flatout
from benchmarks.envs import Catch
from flatout.buffers.rollout import Rollout, Staging
from flatout.envs.make import env_factory
from flatout.envs.pixels import FrameStack
from flatout.envs.spaces import ObsLayout, StackedFrames, space_from_json, space_to_json
from flatout.errors import FlatoutError
from flatout.models.encoders import ImageEncoder

LENGTH = 8
SIDE = 8


class Moved(gym.Env[Any, Any]):
    """A dot that stays (first frame) or moves left or right; the action that says which earns 1: single frames do not."""

    action_space = spaces.Discrete(3)

    def __init__(self, channels_last: bool = True) -> None:
        self._last = channels_last
        shape = (SIDE, SIDE, 1) if channels_last else (1, SIDE, SIDE)
        self.observation_space = spaces.Box(0, 255, shape, np.uint8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._t, self._way = 0, 0
        self._x, self._y = self.np_random.integers(SIDE, size=2).tolist()
        return self._image(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward = float(action == self._way % 3)
        self._t += 1
        self._way = int(self.np_random.choice([-1, 1]))
        self._x = (self._x + self._way) % SIDE
        return self._image(), reward, False, self._t == LENGTH, {}

    def _image(self) -> Any:
        image = np.zeros((SIDE, SIDE), np.uint8)
        image[self._y, self._x] = 255
        return image[:, :, None] if self._last else image[None]


class Counting(gym.Env[Any, Any]):
    """Observations that are the number of the step."""

    action_space = spaces.Discrete(2)

    def __init__(self, space: gym.Space[Any]) -> None:
        self.observation_space = space

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._t = 1
        return self._show(self.observation_space), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._t += 1
        return self._show(self.observation_space), 0.0, self._t > 9, False, {}

    def _show(self, space: gym.Space[Any]) -> Any:
        if isinstance(space, spaces.Dict):
            return {key: self._show(sub) for key, sub in space.items()}
        if isinstance(space, spaces.Discrete):
            return np.int64(self._t % 2)
        return np.full(space.shape, self._t % 256, space.dtype)


PPO: dict[str, Any] = {
    "n_envs": 8,
    "n_steps": 32,
    "batch_size": 64,
    "n_epochs": 4,
    "learning_rate": 2e-3,
    "gamma": 0.0,
    "network_arch": (32,),
}
DQN: dict[str, Any] = {
    "n_envs": 8,
    "n_steps": 8,
    "batch_size": 64,
    "train_ratio": 0.15,
    "learning_starts": 500,
    "learning_rate": 2e-3,
    "gamma": 0.0,
    "network_arch": (32,),
    "activation": "relu",
    "exploration_final_eps": 0.2,
}


@pytest.mark.parametrize(("kind", "settings"), [("PPO", PPO), ("DQN", DQN)])
def test_what_only_two_frames_show_is_learned(kind: str, settings: dict[str, Any]) -> None:
    agent = getattr(flatout, kind)(Moved, frame_stack=2, seed=1, **settings)
    agent.learn(8_000)
    assert agent.evaluate(20).return_mean >= 0.9 * LENGTH


CATCH: dict[str, dict[str, Any]] = {
    "PPO": {
        "n_steps": 64,
        "batch_size": 128,
        "n_epochs": 4,
        "ent_coef": 0.01,
        "learning_rate_schedule": "constant",
    },
    "DQN": {
        "n_steps": 4,
        "batch_size": 32,
        "train_ratio": 0.125,
        "learning_starts": 500,
        "target_update_interval": 500,
        "exploration_fraction": 0.3,
        "activation": "relu",
    },
}


@pytest.mark.parametrize("kind", CATCH)
def test_a_ball_is_caught_by_what_the_frames_show(kind: str) -> None:
    make = getattr(flatout, kind)
    agent = make(
        partial(Catch, 7), n_envs=8, learning_rate=1e-3, network_arch=(64,), seed=1, **CATCH[kind]
    ).learn(8_000)
    assert agent.evaluate(50).return_mean >= 0.9


def test_single_frames_do_not_show_it() -> None:
    agent = flatout.PPO(Moved, seed=1, **PPO).learn(4_000)
    assert agent.evaluate(20).return_mean <= 0.75 * LENGTH


@pytest.mark.parametrize(
    ("shape", "stacked"),
    [((7, 9, 3), (12, 7, 9)), ((3, 9, 9), (12, 9, 9)), ((9, 8), (4, 9, 8)), ((2,), (8,)), ((2, 3), (24,))],
)
def test_a_reset_repeats_the_first_frame(shape: tuple[int, ...], stacked: tuple[int, ...]) -> None:
    env = FrameStack(Counting(spaces.Box(0, 255, shape, np.uint8)), 4)
    assert env.observation_space.shape == stacked
    assert isinstance(env.observation_space, StackedFrames) == (len(stacked) == 3)

    def seen(obs: Any) -> list[int]:
        parts = np.split(obs, 4)
        assert all((part == part.flat[0]).all() for part in parts)
        return [int(part.flat[0]) for part in parts]

    assert seen(env.reset()[0]) == [1, 1, 1, 1]
    assert seen(env.step(0)[0]) == [1, 1, 1, 2]
    assert [seen(env.step(0)[0]) for _ in range(3)][-1] == [2, 3, 4, 5]
    assert seen(env.reset()[0]) == [1, 1, 1, 1]


def test_only_boxes_are_stacked() -> None:
    space = spaces.Dict(
        {
            "image": spaces.Box(0, 255, (7, 7, 3), np.uint8),
            "way": spaces.Discrete(2),
            "action_mask": spaces.Box(0, 1, (2,), np.int8),
        }
    )
    env = FrameStack(Counting(space), 2)
    assert env.observation_space["way"] == spaces.Discrete(2)  # type: ignore[index]
    assert env.observation_space["action_mask"].shape == (2,)  # type: ignore[index]
    obs, _ = env.reset()
    assert obs["image"].shape == (6, 7, 7)
    kinds = {spec.kind: spec.frames for spec in ObsLayout(env.observation_space).specs}
    assert kinds == {"image": 2, "discrete": 1, "mask": 1}


def test_the_space_of_stacked_frames_is_saved() -> None:
    space = StackedFrames(0, 255, (4, 84, 84), np.uint8, frames=4)
    again = space_from_json(space_to_json(space))
    assert again == space
    assert ObsLayout(again).specs[0].frames == 4
    assert again != StackedFrames(0, 255, (4, 84, 84), np.uint8, frames=2)


@pytest.mark.parametrize("n_collectors", [0, 2])
def test_images_are_bytes_and_channels_first_up_to_the_network(n_collectors: int) -> None:
    how = {"n_collectors": n_collectors} if n_collectors else {"executor": "serial"}
    agent = flatout.PPO(Moved, frame_stack=2, seed=1, **PPO, **how)
    agent.learn(256)
    (rollout,) = agent.trainer().pipeline.rollouts
    assert isinstance(rollout, Rollout)
    (obs,) = rollout.obs
    assert obs.dtype == np.uint8
    assert obs.shape == (33, 8, 2, SIDE, SIDE)
    assert set(np.unique(obs)) == {0, 255}
    staged = rollout.tensors(Staging(torch.device("cpu")))
    assert staged.obs_tn[0].dtype == torch.uint8
    agent.close()


def test_a_replay_holds_frames_once_and_says_its_size() -> None:
    agent = flatout.DQN(Moved, frame_stack=2, seed=1, buffer_size=4_000, **DQN)
    agent.learn(640)
    learner: Any = agent.trainer().learner
    stored = learner.experience.replay.arrays()["obs.0"]
    assert (stored.dtype, stored.shape[2:]) == (np.uint8, (1, SIDE, SIDE))
    each = SIDE * SIDE + 7
    size = f"{8 * 501 * each + 8 * SIDE * SIDE:,} bytes"
    assert f"replay: 4,000 transitions, {size} (each frame stored once)" in agent.header()
    assert "observations: 2 frames stacked" in agent.header()


def test_channels_last_and_first_learn_the_same() -> None:
    agents = [
        flatout.PPO(partial(Moved, last), frame_stack=2, seed=1, **PPO).learn(512) for last in (True, False)
    ]
    params = [torch.cat([p.flatten() for p in agent.policy.model.parameters()]) for agent in agents]
    assert torch.equal(*params)
    raw = np.zeros((SIDE, SIDE, 1), np.uint8)
    raw[1, 2] = 9
    plain = flatout.PPO(Moved, seed=1, **PPO)
    first = flatout.PPO(partial(Moved, False), seed=1, **PPO)
    assert (
        plain.predict(raw, deterministic=True)[0] == first.predict(raw[None, :, :, 0], deterministic=True)[0]
    )


@pytest.mark.parametrize(
    ("shape", "n_features", "most"),
    [
        ((3, 7, 7), 64, 50_000),
        ((3, 32, 32), 256, 400_000),
        ((4, 84, 84), 512, 1_684_128),
        ((3, 210, 160), 512, 3_000_000),
    ],
)
def test_the_encoder_fits_the_image(shape: tuple[int, ...], n_features: int, most: int) -> None:
    encoder = ImageEncoder(shape, scale=True)
    n_params = sum(p.numel() for p in encoder.parameters())
    assert n_params <= most
    assert shape != (4, 84, 84) or n_params == most  # Stable-Baselines3's NatureCNN
    assert encoder(torch.zeros(2, *shape, dtype=torch.uint8)).shape == (2, n_features)


def test_the_encoder_computes_what_plain_layers_do() -> None:
    torch.manual_seed(0)
    encoder = ImageEncoder((4, 84, 84), scale=True)
    image = torch.randint(0, 256, (5, 4, 84, 84), dtype=torch.uint8)
    x = image.float() / 255
    for conv in encoder.convs:
        x = torch.relu(conv(x))
    torch.testing.assert_close(encoder(image), torch.relu(encoder.out(x.flatten(1))), rtol=1e-4, atol=1e-5)


def test_a_resumed_agent_goes_on_with_its_frames(tmp_path: Any) -> None:
    agent = flatout.DQN(Moved, frame_stack=2, seed=1, save_replay=True, **DQN).learn(1_280)
    agent.save(tmp_path / "a.flatout")
    again = flatout.load(tmp_path / "a.flatout", env=Moved)
    agent.learn(1_280)
    again.learn(1_280)
    for a, b in zip(agent.policy.model.parameters(), again.policy.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"atari": True}, "--atari is for games of ale-py; this env is a Moved"),
        ({"frame_stack": -1}, "--frame-stack is -1; it must be at least 0"),
    ],
)
def test_frames_that_cannot_be_had_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(FlatoutError, match=words):
        flatout.PPO(Moved, **settings)


def test_a_batched_env_stacks_its_own_frames() -> None:
    with pytest.raises(FlatoutError, match="is a batched env, whose frames are not preprocessed"):
        flatout.PPO("snake", frame_stack=2)


def test_rewards_are_clipped_for_learning_only() -> None:
    class Rich(Moved):
        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            obs, reward, *rest = super().step(action)
            return obs, 100 * reward, *rest

    for kind, settings in (("PPO", PPO), ("DQN", DQN)):
        clipped = getattr(flatout, kind)(Rich, frame_stack=2, seed=1, clip_reward=True, **settings).learn(
            1_280
        )
        plain = getattr(flatout, kind)(Moved, frame_stack=2, seed=1, **settings).learn(1_280)
        assert clipped.summary["return_mean"] == pytest.approx(100 * plain.summary["return_mean"])
        pairs = zip(clipped.policy.model.parameters(), plain.policy.model.parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


def test_frames_are_stacked_by_the_factory() -> None:
    from dataclasses import replace

    env = replace(env_factory(Moved), frame_stack=3)()
    assert env.observation_space.shape == (3, SIDE, SIDE)
