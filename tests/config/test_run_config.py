"""The presets are exactly the documented ones, any flag overrides one value, and the arithmetic is right."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from flatout.algorithms.base import EnvTraits
from flatout.algorithms.ppo.recipes import AUTO, AUTO_CONTINUOUS, PRESETS, RECIPES
from flatout.algorithms.pqn.recipes import RECIPES as PQN_RECIPES
from flatout.config.run_config import RunConfig, preset_note, resolve
from flatout.errors import FlatoutError

TABLE = {
    "cpu": (1, 256, 64, 4, (128, 128), 1),
    "gpu": (8, 512, 256, 10, (256, 256), 4),
    "fast": (16, 256, 2048, 15, (512, 512), 4),
    "heavy": (32, 256, 4096, 20, (1024, 512, 256), 8),
    "beast": (64, 512, 8192, 30, (1024, 512, 512, 256), 16),
    "max": (32, 8192, 512, 30, (1024, 1024, 512, 256), 8),
}


def config(env: str = "Some-v0", **settings: Any) -> Any:
    return resolve(env, settings, device="cpu", n_cores=2)


@pytest.mark.parametrize("name", TABLE)
def test_presets_have_the_documented_values(name: str) -> None:
    n_envs, n_steps, batch, epochs, arch, cores = TABLE[name]
    got = config(preset=name)
    values = (
        got.n_envs,
        got.algorithm.n_steps,
        got.algorithm.batch_size,
        got.algorithm.n_epochs,
        got.network.network_arch,
    )
    assert values == (n_envs, n_steps, batch, epochs, arch)
    assert PRESETS[name].n_cores == cores
    assert got.total_batch == n_envs * n_steps


def test_n_steps_never_depends_on_n_envs() -> None:
    for n_envs in (1, 8, 64):
        assert config(preset="gpu", n_envs=n_envs).algorithm.n_steps == 512
        assert config(n_envs=n_envs).algorithm.n_steps == config().algorithm.n_steps


def test_a_presets_batch_becomes_one_that_divides_and_an_explicit_one_is_refused() -> None:
    assert config(preset="fast", n_envs=3).algorithm.batch_size == 768
    assert config(preset="gpu", n_envs=1, n_steps=300).algorithm.batch_size == 150
    assert config(n_envs=4, n_steps=100, batch_size="auto").algorithm.batch_size == 200
    with pytest.raises(FlatoutError, match="4 envs x 100 steps = 400; the nearest that do are 50 or 80"):
        config(n_envs=4, n_steps=100, batch_size=64)


def test_the_batch_arithmetic_is_shown() -> None:
    assert config(preset="gpu").arithmetic() == (
        "8 envs × 512 steps = 4,096 total batch, 16 minibatches of 256 × 10 epochs = 160 updates per iteration"
    )


def test_a_known_env_gets_its_recipe_unless_a_preset_is_given() -> None:
    for env, recipe in RECIPES.items():
        got = config(env, algo="ppo")
        assert (got.n_envs, got.algorithm, got.network) == (
            recipe.n_envs,
            recipe.algorithm,
            recipe.network,
        )
        assert config(env, preset="cpu").algorithm == PRESETS["cpu"].algorithm
    assert config("snake") == config("flatout/Snake-v0")
    assert config("mission") == config("flatout/Mission-v0")
    assert config("CartPole-v1", gamma=0.5).algorithm.gamma == 0.5
    assert config("CartPole-v1", gamma=0.5).n_envs == RECIPES["CartPole-v1"].n_envs


def test_the_defaults_go_by_what_only_the_env_can_tell_but_no_recipe_or_preset_does() -> None:
    def made(
        env: str = "Some-v0", large: bool = False, continuous: bool = False, **settings: Any
    ) -> RunConfig:
        traits = EnvTraits(continuous=continuous, large_obs=large)
        return resolve(env, settings, device="cpu", n_cores=2, traits=traits)

    assert made().algorithm == AUTO[0].algorithm
    assert made(continuous=True).algorithm == AUTO_CONTINUOUS[0].algorithm
    rollouts = {n: made(continuous=True, n_envs=str(n)).algorithm.n_steps for n in (1, 2, 3, 8, 64)}
    assert rollouts == {1: 2048, 2: 1024, 3: 512, 8: 256, 64: 256}
    assert made(n_envs=1).algorithm.n_steps == made(n_envs=64).algorithm.n_steps == 256
    for algo in ("ppo", "recurrent-ppo", "dqn", "pqn", "sac"):
        assert not made(algo=algo).algorithm.normalize_obs
        assert made(algo=algo, large=True).algorithm.normalize_obs
        assert not made(algo=algo, large=True, normalize_obs=False).algorithm.normalize_obs
    assert made(preset="cpu") == made(preset="cpu", continuous=True, large=True)
    assert made("Pendulum-v1", algo="ppo") == made("Pendulum-v1", continuous=True, large=True, algo="ppo")


def test_an_env_gets_the_algorithm_that_learns_it_fastest_unless_one_is_given() -> None:
    assert config("CartPole-v1").algo == "ppo"
    assert config("snake").algorithm == PQN_RECIPES["flatout/Snake-v0"].algorithm
    assert config("snake", algo="dqn").algo == "dqn"
    assert config("snake", n_envs=64, gamma=0.9).algo == "pqn"
    assert config("snake", clip_range=0.1).algo == "ppo"  # a setting of PPO alone
    assert config("snake", preset="cpu").algo == "ppo"


def test_json_gives_the_same_config_back() -> None:
    before = config("CartPole-v1", seed=4, env_kwargs={"a": [1, 2]}, target_return=-5, clip_range_vf=0.1)
    assert RunConfig.from_json(before.to_json(), "test") == before


def test_a_file_older_than_a_setting_is_read_and_one_without_an_essential_is_not() -> None:
    data = json.loads(json.dumps(config().to_json()))
    del data["step_timeout"]
    assert RunConfig.from_json(data, "old").step_timeout == 60.0
    del data["timesteps"]
    with pytest.raises(FlatoutError, match="misses timesteps"):
        RunConfig.from_json(data, "old")


def test_env_kwargs_from_numpy_become_plain_json() -> None:
    given = {"a": np.float32(0.5), "b": np.arange(3), "c": np.bool_(True), "d": [np.int64(7)], "e": (1, None)}
    plain = config("CartPole-v1", env_kwargs=given).env_kwargs
    assert plain == {"a": 0.5, "b": [0, 1, 2], "c": True, "d": [7], "e": (1, None)}
    assert json.loads(json.dumps(plain))["b"] == [0, 1, 2]


@pytest.mark.parametrize("bad", [np.inf, np.array([np.nan]), object(), {1: 2}, np.longdouble("0.1"), {1, 2}])
def test_env_kwargs_that_json_cannot_hold_are_refused_in_one_line(bad: object) -> None:
    with pytest.raises(FlatoutError, match=r"--env-kwargs is .* it must be a JSON object") as caught:
        config("CartPole-v1", env_kwargs={"limit": bad})
    assert "\n" not in str(caught.value)


def test_a_preset_too_big_for_the_machine_names_one_that_fits() -> None:
    assert preset_note(PRESETS, "cpu", 1, 10**9, 16) is None
    assert preset_note(PRESETS, "beast", 4, 10**12, 16) == (
        "preset beast needs 16 cores; this machine has 4; --preset gpu fits"
    )
    note = preset_note(PRESETS, "max", 64, 10 * 10**9, 84 * 84 * 4)
    assert note is not None
    assert "GB of memory" in note
    assert note.endswith("--preset beast fits")


@pytest.mark.parametrize("text", ["1e6", "1_000_000", "1000000", 1_000_000, 1e6])
def test_large_numbers_may_be_written_in_several_ways(text: object) -> None:
    assert config(timesteps=text).timesteps == 1_000_000


@pytest.mark.parametrize("n", [0, 65])
def test_a_minibatch_has_at_least_one_sample_in_each_part(n: int) -> None:
    with pytest.raises(FlatoutError, match=f"--accumulate is {n}; it must be from 1 to the batch size, 64"):
        resolve("CartPole-v1", {"preset": "cpu", "accumulate": n}, device="cpu", n_cores=1)
    assert resolve("CartPole-v1", {"preset": "cpu", "accumulate": 3}, device="cpu", n_cores=1).part_size == 22
