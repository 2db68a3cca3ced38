"""Models with Stable-Baselines3's interface do what its own do: counts, callbacks, schedules, files."""

from __future__ import annotations

import json
import warnings
import zipfile
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from flatout.errors import FlatoutError

sb3 = pytest.importorskip(
    "stable_baselines3", reason="flatout.sb3 works with Stable-Baselines3's envs and callbacks"
)

from stable_baselines3.common.callbacks import BaseCallback  # noqa: E402
from stable_baselines3.common.env_util import make_vec_env  # noqa: E402
from stable_baselines3.common.torch_layers import FlattenExtractor  # noqa: E402

from flatout.sb3 import DQN, PPO, SAC  # noqa: E402
from flatout.sb3.arguments import DQNArguments, PPOArguments, SACArguments  # noqa: E402


class Diary(BaseCallback):  # type: ignore[misc,unused-ignore]
    """Writes down every call."""

    def __init__(self, stop_at: int = 10**9) -> None:
        super().__init__()
        self.calls: list[Any] = []
        self.stop_at = stop_at

    def _on_training_start(self) -> None:
        self.calls.append("start")

    def _on_rollout_start(self) -> None:
        self.calls.append("rollout")

    def _on_step(self) -> bool:
        assert len(self.locals["infos"]) == len(self.locals["dones"]) == self.training_env.num_envs
        self.calls.append(self.num_timesteps)
        return bool(self.num_timesteps < self.stop_at)

    def _on_rollout_end(self) -> None:
        self.calls.append("end of rollout")

    def _on_training_end(self) -> None:
        self.calls.append("end")


@pytest.mark.parametrize(
    "arguments", [{"n_steps": 4, "batch_size": 8, "n_epochs": 1}, {"train_freq": 4, "learning_starts": 0}]
)
def test_callbacks_are_called_as_often_as_by_stable_baselines(arguments: dict[str, Any]) -> None:
    name = "PPO" if "n_steps" in arguments else "DQN"
    calls = []
    for kind in (getattr(sb3, name), {"PPO": PPO, "DQN": DQN}[name]):
        diary = Diary()
        kind("MlpPolicy", make_vec_env("CartPole-v1", n_envs=2), **arguments).learn(16, callback=diary)
        calls.append(diary.calls)
    assert calls[0] == calls[1]


def test_a_callback_stops_training_at_once_and_learning_can_go_on() -> None:
    diary = Diary(stop_at=10)
    model = PPO("MlpPolicy", "CartPole-v1", n_steps=64)
    model.learn(1000, callback=diary)
    assert model.num_timesteps == 10
    assert diary.calls[-2:] == [10, "end"]
    model.learn(64, reset_num_timesteps=False)
    assert model.num_timesteps == 74


def test_what_a_callback_or_an_env_raises_is_raised_by_learn() -> None:
    class Broken(BaseCallback):  # type: ignore[misc,unused-ignore]
        def _on_step(self) -> bool:
            raise LookupError("from the callback")

    with pytest.raises(LookupError, match="from the callback"):
        PPO("MlpPolicy", "CartPole-v1", n_steps=64).learn(64, callback=Broken())


def test_a_schedule_begins_again_with_each_learn() -> None:
    rates: list[float] = []

    def schedule(remaining: float) -> float:
        rates.append(round(remaining, 3))
        return 1e-3 * remaining

    model = PPO("MlpPolicy", "CartPole-v1", n_steps=64, n_epochs=1, learning_rate=schedule)
    rates.clear()
    model.learn(128)
    model.learn(128)
    assert rates == [1.0, 0.5, 1.0, 0.5]


@pytest.mark.parametrize("kind", [PPO, SAC])
def test_a_saved_model_acts_the_same_and_learns_on(kind: Any, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"n_steps": 64} if kind is PPO else {"learning_starts": 10, "batch_size": 16}
    model = kind("MlpPolicy", "Pendulum-v1", policy_kwargs={"net_arch": [16]}, seed=3, **arguments)
    model.learn(256)
    model.save(tmp_path / "model")
    with zipfile.ZipFile(tmp_path / "model.zip") as archive:
        assert json.loads(archive.read("sb3.json"))["arguments"]["policy_kwargs"] == {"net_arch": [16]}
    loaded = kind.load(tmp_path / "model", env=gym.make("Pendulum-v1"))
    obs = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
    np.testing.assert_array_equal(
        model.predict(obs, deterministic=True)[0], loaded.predict(obs, deterministic=True)[0]
    )
    assert loaded.num_timesteps == 256
    assert len(model.ep_info_buffer) == 1
    assert [it["r"] for it in loaded.ep_info_buffer] == [it["r"] for it in model.ep_info_buffer]
    loaded.learn(64, reset_num_timesteps=False)
    assert loaded.num_timesteps == 320


def test_a_model_of_stable_baselines_is_not_loaded_by_mistake(tmp_path: Path) -> None:
    sb3.PPO("MlpPolicy", "CartPole-v1", n_steps=8, batch_size=8).save(tmp_path / "theirs")
    with pytest.raises(FlatoutError, match="flatout import sb3"):
        PPO.load(tmp_path / "theirs")


EXTRACTOR = {"features_extractor_class": FlattenExtractor}


class OwnTraining(PPO):
    """Overrides what flatout does not call."""

    def train(self) -> None:
        raise AssertionError


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PPO("MlpPolicy", "CartPole-v1", use_sde=True), "use_sde=True has no counterpart"),
        (lambda: PPO("MlpPolicy", "CartPole-v1", n_step=8), "no argument 'n_step'.*did you mean 'n_steps'"),
        (lambda: PPO("MlpPolicy", "CartPole-v1", batch_size=100), "--batch-size"),
        (lambda: PPO("LstmPolicy", "CartPole-v1"), "policy 'LstmPolicy' has no counterpart"),
        (
            lambda: PPO("MlpPolicy", "CartPole-v1", policy_kwargs={"netarch": [8]}),
            "netarch.*did you mean 'net_arch'",
        ),
        (lambda: SAC("MlpPolicy", "Pendulum-v1", action_noise=object()), "action_noise"),
        (
            lambda: SAC(
                "MlpPolicy", "Pendulum-v1", policy_kwargs={"share_features_extractor": True} | EXTRACTOR
            ),
            "cannot share a features extractor",
        ),
        (
            lambda: DQN("MlpPolicy", "CartPole-v1", policy_kwargs={"log_std_init": -2}),
            "log_std_init has no counterpart",
        ),
        (lambda: OwnTraining("MlpPolicy", "CartPole-v1"), r"OwnTraining.train\(\) would never be called"),
        (lambda: setattr(PPO("MlpPolicy", "CartPole-v1"), "gamma", 0.9), "model.gamma cannot be changed"),
        (lambda: PPO("MlpPolicy", "CartPole-v1").predict((np.zeros(4), {})), r"obs, info = env.reset\(\)"),
        (lambda: PPO("MlpPolicy", "CartPole-v1").set_parameters({}), "as get_parameters"),
        (
            lambda: PPO("MlpPolicy", "CartPole-v1").set_parameters({"policy": {"x": np.zeros(1)}}),
            "none of these names is a parameter.*pi_body.0.weight",
        ),
        (
            lambda: PPO("MlpPolicy", "CartPole-v1").policy.load_state_dict({"pi_out.bias": torch.zeros(2)}),
            "do not fit the model",
        ),
        (lambda: SAC("MlpPolicy", "Pendulum-v1", train_freq=(1, "episode")), "counts episodes"),
        (lambda: DQN("MlpPolicy", "CartPole-v1", tau=0.5), "target_update_interval=1"),
        (lambda: SAC("MlpPolicy", "CartPole-v1"), "SAC chooses continuous actions"),
    ],
)
def test_what_has_no_counterpart_is_refused_in_one_line(make: Any, message: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(FlatoutError, match=message) as caught:
            make()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "ours"), [("PPO", PPOArguments), ("DQN", DQNArguments), ("SAC", SACArguments)]
)
def test_arguments_and_defaults_are_those_of_stable_baselines(name: str, ours: Any) -> None:
    import inspect
    from dataclasses import fields

    theirs = list(inspect.signature(getattr(sb3, name).__init__).parameters.values())[3:]
    assert [(it.name, it.default) for it in theirs] == [(field.name, field.default) for field in fields(ours)]


@pytest.mark.parametrize("name", ["rollout_buffer", "lr_schedule", "actor", "train"])
def test_an_attribute_that_is_missing_says_where_to_read_about_it(name: str) -> None:
    model = DQN("MlpPolicy", "CartPole-v1", buffer_size=100)
    assert not hasattr(model, name)
    with pytest.raises(AttributeError, match=f"DQN has no {name}; see docs/migrating.md"):
        getattr(model, name)
    with pytest.raises(AttributeError, match="replay_buffer has no sample, only size"):
        model.replay_buffer.sample(4)


class Screen(gym.Env[Any, Any]):
    """An image with channels last, and a vector."""

    observation_space = gym.spaces.Dict(
        {"image": gym.spaces.Box(0, 255, (36, 40, 3), np.uint8), "x": gym.spaces.Box(-1, 1, (2,))}
    )
    action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        return self.observation_space.sample(), 1.0, False, False, {}


def test_images_in_a_dict_are_taken_with_channels_first_and_last() -> None:
    model = PPO("MultiInputPolicy", Screen(), n_steps=8, batch_size=8)
    obs = Screen.observation_space.sample()
    turned = obs | {"image": obs["image"].transpose(2, 0, 1)}
    first, last = (model.predict(it, deterministic=True)[0] for it in (turned, obs))
    assert first == last


@pytest.mark.parametrize("name", ["PPO", "DQN"])
@pytest.mark.parametrize("is_loaded", [True, False])
def test_learning_and_saving_begin_with_the_parameters_that_were_set(
    name: str, is_loaded: bool, tmp_path: Path
) -> None:
    arguments: dict[str, Any] = (
        {"n_steps": 16} if name == "PPO" else {"learning_starts": 0, "buffer_size": 64}
    )
    kind = {"PPO": PPO, "DQN": DQN}[name]
    model = kind("MlpPolicy", "CartPole-v1", learning_rate=1e-9, batch_size=16, seed=1, **arguments)
    model.learn(16)
    if is_loaded:
        model.save(tmp_path / "first")
        model = kind.load(tmp_path / "first", env="CartPole-v1")
    wanted = {key: value + 1 for key, value in model.get_parameters()["policy"].items()}
    model.set_parameters({"policy": wanted})
    model.save(tmp_path / "second")
    model.learn(16)
    loaded = kind.load(tmp_path / "second", env="CartPole-v1")
    loaded.learn(16)
    for it in (model, loaded):
        found = it.get_parameters()["policy"]["pi_body.0.weight"]
        np.testing.assert_allclose(found, wanted["pi_body.0.weight"], atol=1e-4)
        if name == "DQN":
            learner: Any = it._agent.trainer().learner
            networks = learner.networks
            np.testing.assert_allclose(networks.target, networks._params.flat, atol=1e-4)


def test_updates_are_counted_as_by_stable_baselines() -> None:
    counts = []
    for kind in (sb3.PPO, PPO):
        model = kind("MlpPolicy", "CartPole-v1", n_steps=32, batch_size=8, n_epochs=3).learn(64)
        counts.append((model._n_updates, model._current_progress_remaining))
    assert counts[0][0] == counts[1][0] == 6


def test_an_epsilon_of_adam_is_the_given_one() -> None:
    model = PPO(
        "MlpPolicy",
        "CartPole-v1",
        n_steps=8,
        batch_size=8,
        policy_kwargs={"optimizer_kwargs": {"eps": 1e-3}},
    ).learn(8)
    optimizer: Any = model._agent.trainer().learner.update.optimizer
    assert optimizer._optimizer.param_groups[0]["eps"] == 1e-3
