"""What a run tells about envs and settings that nobody has tuned: endless episodes, rounding, policies that differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

import flatout
from flatout.cli.main import run as main

SERIAL = "--executor serial --overlap off --seed 1".split()


class Endless(gym.Env[Any, Any]):
    """Never ends an episode."""

    observation_space = spaces.Box(-1, 1, (2,))
    action_space: gym.Space[Any] = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.zeros(2, np.float32), 1.0, False, False, {}


class Unsure(Endless):
    """An episode of 20 steps, of which those with action 0 earn 1; ends at once where two actions are alike."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self._t, self._before = 0, -1
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._t += 1
        alike, self._before = int(action) == self._before, int(action)
        return np.zeros(2, np.float32), 0.0 if alike else 1.0, False, self._t == 20, {}


class Steered(Endless):
    """Endless, with continuous actions."""

    action_space: Any = spaces.Box(-1, 1, (1,))


class Rich(Steered):
    """The same, with rewards in the hundreds."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, 300 * reward, terminated, truncated, info


class Far(Endless):
    """Endless, with observations in the hundreds."""

    observation_space: Any = spaces.Box(-np.inf, np.inf, (2,))

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        _, reward, terminated, truncated, info = super().step(action)
        return np.full(2, 300, np.float32), reward, terminated, truncated, info


class Both(Far):
    """The same with an image, which is not what is large about it."""

    observation_space: Any = spaces.Dict(
        {"far": Far.observation_space, "seen": spaces.Box(0, 255, (8, 8, 3), np.uint8)}
    )

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        obs, info = super().reset(**kwargs)
        return self._with_image(obs), info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = super().step(action)
        return self._with_image(obs), reward, terminated, truncated, info

    def _with_image(self, obs: Any) -> dict[str, Any]:
        return {"far": obs, "seen": np.full((8, 8, 3), 255, np.uint8)}


FILE = f"{__file__}:"


def test_a_run_in_which_no_episode_ends_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--n-envs 2 --n-steps 1024 --batch-size 1024 --n-epochs 1 --timesteps 12288".split()
    place = ["--runs-dir", str(tmp_path)]
    assert main(["train", f"{FILE}Endless", *flags, *SERIAL, *place, "--run-name", "a"]) == 0
    done = capsys.readouterr()
    assert done.err.count("no episode has ended in 10,240 env steps, 5,120 in each env") == 1
    assert "max_episode_steps" in done.err
    assert "no episode ended; if the env never ends one, give it a limit" in " ".join(done.out.split())
    limited = [*flags, *SERIAL, *place, "--eval-max-steps", "50"]
    assert main(["evaluate", "a", "--runs-dir", str(tmp_path), "--episodes", "2", *limited[-2:]]) == 0
    assert "return 50.0 ± 0.0 over 2 episodes" in (line := capsys.readouterr().out)
    assert "2 of them were cut after 50 steps (--eval-max-steps)" in line


def test_the_defaults_go_by_the_kind_of_actions_and_the_header_says_so() -> None:
    small: dict[str, Any] = {"n_envs": 2, "n_steps": 16, "seed": 1}
    with_choices, steered = (flatout.Agent(env, **small) for env in (Endless, Steered))
    assert "settings: auto ·" in with_choices.header()[0]
    assert "normalized: rewards" in with_choices.header()
    assert "settings: auto, for continuous actions ·" in steered.header()[0]
    assert not any("normalized" in line for line in steered.header())


@pytest.mark.parametrize("make", [Far, Both])
def test_observations_that_are_large_are_normalized_unless_the_user_says_otherwise(make: Any) -> None:
    small: dict[str, Any] = {"n_envs": 2, "n_steps": 16, "seed": 1, "algo": "ppo"}
    agent = flatout.Agent(make, **small)
    assert agent.config.algorithm.normalize_obs
    assert "normalized: observations and rewards" in agent.header()
    assert not flatout.Agent(make, normalize_obs=False, **small).config.algorithm.normalize_obs


def test_rewards_that_are_large_are_normalized_unless_the_user_says_otherwise() -> None:
    small: dict[str, Any] = {"n_envs": 2, "n_steps": 16, "seed": 1, "batch_size": 32}
    assert "normalized: rewards" in flatout.Agent(Rich, **small).header()
    assert not any("normalized" in line for line in flatout.SAC(Rich, **small).header())
    assert not any(
        "normalized" in line for line in flatout.PPO(Rich, normalize_reward=False, **small).header()
    )


def test_a_registered_env_gets_a_limit_by_its_keyword_arguments() -> None:
    limit = {"max_episode_steps": 30}
    agent = flatout.PPO("CliffWalking-v1", env_kwargs=limit, n_envs=2, n_steps=64, batch_size=64, seed=1)
    agent.learn(256)
    assert agent.summary["episodes"] >= 8
    agent.close()


def test_a_run_says_that_whole_rollouts_take_more_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "train",
        "CartPole-v1",
        "--n-envs",
        "4",
        "--n-steps",
        "512",
        *SERIAL,
        "--runs-dir",
        str(tmp_path),
    ]
    assert main([*words, "--timesteps", "256"]) == 0
    line = (
        "rollouts have 4 envs × 512 steps, so this run takes 2,048 env steps, not 256; --n-steps 64 would fit"
    )
    assert line in " ".join(capsys.readouterr().err.split())
    assert main([*words, "--timesteps", "4000"]) == 0  # 4,096: near enough
    assert "so this run takes" not in capsys.readouterr().err


def test_evaluate_says_that_the_sampled_policy_was_better(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--n-envs 4 --n-steps 64 --batch-size 256 --learning-rate 1e-9 --timesteps 4096".split()
    place = ["--runs-dir", str(tmp_path)]
    argv = ["train", f"{FILE}Unsure", *flags, *SERIAL, *place, "--run-name", "a", "--eval-every", "2048"]
    assert main(argv) == 0
    assert "it differs much from the sampled policy of training" in " ".join(capsys.readouterr().out.split())
    assert main(["evaluate", "a", *place, "--episodes", "10"]) == 0
    out = capsys.readouterr().out
    assert "return 1.00 ± 0.00 over 10 episodes" in out
    assert "note: in training, where actions are sampled, the return was" in out
    assert main(["evaluate", "a", *place, "--episodes", "10", "--stochastic"]) == 0
    assert "note:" not in capsys.readouterr().out
