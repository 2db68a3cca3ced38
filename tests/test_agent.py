"""The agent's API: learn, predict, save, load, callbacks, determinism."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

import flatout
from flatout.runlog.recorder import Progress
from tests.known import Match, N

SMALL: dict[str, Any] = {"n_envs": 4, "n_steps": 32, "batch_size": 64, "n_epochs": 2}


def params(agent: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in agent.policy.model.state_dict().items()}


def same(a: Any, b: Any) -> bool:
    left, right = params(a), params(b)
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def test_the_same_seed_gives_identical_parameters_and_another_does_not() -> None:
    a, b, c = (flatout.PPO("CartPole-v1", seed=s, **SMALL).learn(2_000) for s in (7, 7, 8))
    assert same(a, b)
    assert not same(a, c)


RESUME = """
import sys, torch, flatout
agent = flatout.load(sys.argv[1])
agent.learn(int(sys.argv[2]))
agent.save(sys.argv[3])
"""


@pytest.mark.parametrize(
    ("env", "settings"),
    [
        ("CartPole-v1", {}),
        ("LunarLander-v3", {"normalize_obs": True, "normalize_reward": True}),
        ("Pendulum-v1", {"learning_rate_schedule": "linear", "clip_range_schedule": "linear"}),
    ],
)
def test_half_save_resume_in_a_new_process_half_equals_the_whole(
    env: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    half = 12 * 128
    whole = flatout.PPO(env, seed=3, timesteps=2 * half, **SMALL, **settings).learn()

    def stop_half_way(progress: Progress) -> bool:
        return progress.env_steps < half

    part = flatout.PPO(env, seed=3, timesteps=2 * half, **SMALL, **settings).learn(callback=stop_half_way)
    assert part.summary["status"] == "stopped"
    assert part.summary["env_steps"] == half
    assert not same(part, whole)
    part.save(tmp_path / "half.flatout")
    arguments = [str(tmp_path / "half.flatout"), str(half), str(tmp_path / "whole.flatout")]
    subprocess.run([sys.executable, "-c", RESUME, *arguments], check=True)
    resumed = flatout.load(tmp_path / "whole.flatout")
    assert same(resumed, whole)


def test_learning_twice_continues() -> None:
    agent = flatout.PPO("CartPole-v1", seed=1, **SMALL)
    agent.learn(1_000)
    first = agent.summary["env_steps"]
    agent.learn(1_000)
    assert first == 1_024
    assert agent.summary["env_steps"] == 2_048
    assert agent.summary["updates"] == 2_048 // 128 * 4


def test_predict_follows_stable_baselines_convention(tmp_path: Path) -> None:
    agent = flatout.PPO("CartPole-v1", seed=1, **SMALL)
    one = np.array([0.01, 0.0, 0.02, 0.0], np.float32)
    action, state = agent.predict(one, deterministic=True)
    assert state is None
    assert np.shape(action) == ()
    assert action in (0, 1)
    actions, _ = agent.predict(np.stack([one] * 5), deterministic=True)
    assert actions.tolist() == [action] * 5
    drawn = [int(agent.predict(one)[0]) for _ in range(50)]
    assert set(drawn) == {0, 1}
    agent.save(tmp_path / "a.flatout")
    assert flatout.load(tmp_path / "a.flatout").predict(one, deterministic=True)[0] == action
    with pytest.raises(flatout.FlatoutError, match=r"shape \(3,\)"):
        agent.predict(np.zeros(3, np.float32))


def test_a_loaded_agent_acts_without_its_env(tmp_path: Path) -> None:
    """The factory below cannot be found by name; only further learning needs it."""

    def make() -> Match:
        return Match("dict", "multidiscrete")

    agent = flatout.PPO(make, seed=1, **SMALL).learn(256)
    agent.save(tmp_path / "a.flatout")
    loaded = flatout.load(tmp_path / "a.flatout")
    obs = {"low": np.int64(1), "high": {"b": np.array([0], np.int8)}}
    assert np.array_equal(
        loaded.predict(obs, deterministic=True)[0], agent.predict(obs, deterministic=True)[0]
    )
    with pytest.raises(flatout.FlatoutError):
        loaded.learn(256)
    again = flatout.load(tmp_path / "a.flatout", env=make).learn(256)
    assert again.summary["env_steps"] == 512


class Parts(Match):
    """The target is in "shown", and "about" is noise: the keys of this space are not in alphabetical order."""

    def __init__(self) -> None:
        super().__init__()
        box = self.observation_space
        self.observation_space = gym.spaces.Dict(shown=box, about=box)

    def _show(self) -> Any:
        noise = self.np_random.random(N).astype(np.float32)
        return {"shown": super()._show(), "about": noise}


def test_a_loaded_agent_reads_a_dict_in_the_order_of_its_keys(tmp_path: Path) -> None:
    agent = flatout.PPO(Parts, seed=1, **SMALL).learn(256)
    agent.save(tmp_path / "a.flatout")
    loaded = flatout.load(tmp_path / "a.flatout", env=Parts)
    env = Parts()
    obs = env.reset(seed=1)[0]
    for _ in range(20):
        action = agent.predict(obs, deterministic=True)[0]
        assert np.array_equal(loaded.predict(obs, deterministic=True)[0], action)
        obs = env._show()


def test_normalisation_is_saved_and_frozen_in_evaluation(tmp_path: Path) -> None:
    agent = flatout.PPO("Pendulum-v1", seed=1, normalize_obs=True, **SMALL).learn(2_000)
    before = params(agent)
    assert before["obs_mean_0"].abs().max() > 0
    agent.evaluate(5)
    assert all(torch.equal(before[k], v) for k, v in params(agent).items())
    agent.save(tmp_path / "a.flatout")
    obs = np.array([0.5, 0.5, 3.0], np.float32)
    loaded = flatout.load(tmp_path / "a.flatout")
    assert np.array_equal(
        loaded.predict(obs, deterministic=True)[0], agent.predict(obs, deterministic=True)[0]
    )


def test_a_callback_sees_progress_and_may_stop() -> None:
    seen: list[Progress] = []

    def callback(progress: Progress) -> bool:
        seen.append(progress)
        return len(seen) < 3

    agent = flatout.PPO("CartPole-v1", seed=1, **SMALL).learn(10_000, callback=callback)
    assert [p.env_steps for p in seen] == [128, 256, 384]
    assert [p.updates for p in seen] == [4, 8, 12]
    assert seen[-1].total_steps == 10_000
    assert "train/approx_kl" in seen[-1].metrics
    assert agent.summary["status"] == "stopped"


class Watch(flatout.Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_begin(self, agent: Any) -> None:
        self.seen.append((agent.config.env, agent.summary))

    def on_iteration(self, progress: Progress) -> None:
        self.seen.append(progress.env_steps)

    def on_end(self, agent: Any) -> None:
        self.seen.append(agent.summary["status"])


def test_callbacks_are_called_at_the_beginning_after_iterations_and_at_the_end() -> None:
    watch = Watch()
    begun: tuple[str, dict[str, Any]] = ("CartPole-v1", {})
    agent = flatout.PPO("CartPole-v1", seed=1, **SMALL)
    agent.learn(10_000, callback=[lambda p: p.env_steps < 256, watch])
    assert watch.seen == [begun, 128, 256, "stopped"]

    def fails(progress: Progress) -> None:
        raise ValueError("mine")

    watch = Watch()
    with pytest.raises(ValueError, match="mine"):
        agent.learn(10_000, callback=[watch, fails])
    assert watch.seen[1:] == [384, "failed"]
    with pytest.raises(
        flatout.FlatoutError, match=r"must be a function, a flatout\.Callback, or a list of them"
    ):
        agent.learn(10_000, callback=Watch)  # type: ignore[arg-type]


def test_a_target_return_ends_the_run() -> None:
    settings = SMALL | {"gamma": 0.0, "learning_rate": 3e-3, "n_epochs": 4}
    agent = flatout.PPO(partial(Match), seed=1, target_return=6.0, timesteps=100_000, **settings)
    agent.learn()
    summary = agent.summary
    assert summary["status"] == "finished"
    assert summary["return_mean"] >= 6.0
    assert summary["target_reached_steps"] == summary["env_steps"] < 100_000
    assert 0 < summary["target_reached_seconds"] <= summary["wall_seconds"]


def test_an_evaluation_that_reaches_the_target_ends_the_run() -> None:
    settings = SMALL | {
        "gamma": 0.0,
        "learning_rate": 3e-3,
        "n_epochs": 4,
        "eval_every": 1024,
        "eval_episodes": 5,
    }
    agent = flatout.PPO(partial(Match), seed=1, target_return=8.0, timesteps=100_000, **settings)
    agent.learn()
    summary = agent.summary
    assert summary["return_mean"] < 8.0 <= summary["eval_return_mean"]
    assert summary["target_reached_steps"] == summary["env_steps"] < 100_000


def test_schedules_fall_to_zero_over_the_run() -> None:
    rates: list[float] = []

    def callback(progress: Progress) -> None:
        rates.append(progress.metrics["train/learning_rate"])

    settings = SMALL | {"learning_rate": 1.0e-3, "learning_rate_schedule": "linear"}
    flatout.PPO("CartPole-v1", seed=1, **settings).learn(128 * 4, callback=callback)
    assert rates == pytest.approx([1.0e-3, 0.75e-3, 0.5e-3, 0.25e-3])


def test_target_kl_skips_updates() -> None:
    def n_updates(target_kl: float | None) -> int:
        settings = SMALL | {"n_epochs": 20, "learning_rate": 3e-2, "target_kl": target_kl}
        return int(flatout.PPO("CartPole-v1", seed=1, **settings).learn(1024).summary["updates"])

    assert n_updates(None) == 8 * 2 * 20
    assert 8 <= n_updates(0.01) < 8 * 2 * 20


def test_a_loss_that_is_not_finite_is_skipped_counted_and_ends_the_run_if_it_persists(
    tmp_path: Path,
) -> None:
    class Absurd(Match):
        def __init__(self, after: int) -> None:
            super().__init__()
            self._after, self._n = after, 0

        def step(self, action: Any) -> Any:
            obs, reward, *rest = super().step(action)
            self._n += 1
            return (obs, 1e30 if self._n > self._after else reward, *rest)

    settings = SMALL | {"timesteps": 10_000, "normalize_reward": False}
    agent = flatout.PPO(partial(Absurd, 100), seed=1, run_name="r", runs_dir=tmp_path, **settings)
    with pytest.raises(flatout.FlatoutError, match="NaN or infinite"):
        agent.learn()
    assert agent.summary["status"] == "failed"
    assert agent.summary["nan_skips"] >= 12
    loaded = flatout.load(tmp_path / "r")
    assert all(torch.isfinite(value).all() for value in params(loaded).values())
    assert same(loaded, agent)


def test_an_unknown_setting_gets_the_nearest_name() -> None:
    with pytest.raises(flatout.FlatoutError, match="'n_env'; did you mean 'n_envs'"):
        flatout.PPO("CartPole-v1", n_env=3)


def test_evaluation_runs_the_given_number_of_episodes_on_fixed_seeds() -> None:
    agent = flatout.PPO("CartPole-v1", seed=1, **SMALL)
    a, b = agent.evaluate(13), agent.evaluate(13)
    assert len(a.returns) == 13
    assert a == b
    assert agent.evaluate(13, seed=99) != a


def test_cartpole_is_solved_by_its_recipe() -> None:
    """The fast subset of benchmarks/returns.py."""
    agent = flatout.PPO("CartPole-v1", seed=1).learn()
    assert agent.summary["env_steps"] <= 100_352
    assert agent.evaluate(100).return_mean >= 490


@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_accumulated_gradients_learn_what_whole_minibatches_do(algo: str) -> None:
    settings: dict[str, Any] = {"ppo": {"n_epochs": 2}, "dqn": {"learning_starts": 64}}[algo]
    settings |= {"n_envs": 4, "n_steps": 32, "batch_size": 64, "seed": 1, "overlap": "off"}
    agents = [flatout.Agent(Match, algo=algo, compile="off", **settings)]
    agents += [flatout.Agent(Match, algo=algo, accumulate=n, **settings) for n in (3, 16)]
    flat = [agent.learn(512).trainer().learner.params.flat for agent in agents]
    for parts in flat[1:]:
        torch.testing.assert_close(parts, flat[0], atol=1e-5, rtol=1e-4)
    assert [agent.trainer().learner.update.parts.n_rows for agent in agents] == [64, 22, 4]
    assert [agent.summary["backend"] for agent in agents] == ["eager"] * 3
    assert any("eager backend" in line for line in agents[1].header())


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        (("MlpPolicy", "CartPole-v1"), {}),
        (("CartPole-v1",), {"policy_kwargs": {}}),
        (("CartPole-v1",), {"verbose": 1}),
    ],
)
def test_the_signature_of_stable_baselines3_is_answered_with_the_import_that_takes_it(
    arguments: Any, settings: dict[str, Any]
) -> None:
    with pytest.raises(flatout.FlatoutError, match=r"from flatout\.sb3 import PPO"):
        flatout.PPO(*arguments, **settings)
