"""The check of envs that follow Gymnasium's API, and of every way to break it."""

from __future__ import annotations

import time
import warnings
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from flatout.envs.check import EnvInfo, check
from flatout.envs.make import env_factory
from flatout.envs.validate import nan_message, validate_obs
from flatout.errors import EnvError, where

Info = dict[str, Any]


class Walk(gym.Env[Any, Any]):
    """A clean env of ten steps per episode; each test breaks one thing of it."""

    observation_space: Any = spaces.Box(-10, 10, (2,))
    action_space: Any = spaces.Discrete(3)
    step_part: tuple[int, Any] = (-1, None)

    def __init__(self) -> None:
        self.t = 0
        self.n_steps = 0
        self.actions: list[Any] = []

    def obs(self) -> Any:
        return np.array([self.t, 0], np.float32)

    def info(self) -> Info:
        return {}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self.obs(), self.info()

    def step(self, action: Any) -> Any:
        self.t += 1
        self.n_steps += 1
        self.actions.append(action)
        result: list[Any] = [self.obs(), 1.0, self.t == 10, False, self.info()]
        index, value = self.step_part
        if index >= 0:
            result[index] = value
        return tuple(result)


def variant(**attributes: Any) -> type[Walk]:
    """A Walk that differs from the clean one in these attributes."""
    return type("Variant", (Walk,), attributes)


def broken(source: Any, **limits: Any) -> str:
    """The one line that checking this env ends in."""
    with pytest.raises(EnvError) as error:
        check(env_factory(source), **limits)
    text = str(error.value)
    assert "\n" not in text
    assert text.startswith(("tests.envs", "CartPole", "FourValues", "env ")), "the env is named first"
    return text


def passed(source: Any, **limits: Any) -> EnvInfo:
    return check(env_factory(source), **limits)


def walk_made_by(source: type[Walk], **limits: Any) -> Walk:
    """The env instance that a check has stepped."""
    made: list[Walk] = []

    def make() -> Walk:
        made.append(source())
        return made[0]

    passed(make, **limits)
    return made[0]


@pytest.mark.parametrize(
    "env_id", ["CartPole-v1", "Pendulum-v1", "FrozenLake-v1", "Blackjack-v1", "LunarLander-v3"]
)
def test_gymnasium_envs_pass_without_warnings(env_id: str) -> None:
    info = passed(env_id)
    assert info.warnings == ()
    assert not info.factory.mask_in_info
    assert info.observation_space == gym.make(env_id).observation_space
    assert info.action_space == gym.make(env_id).action_space


def test_check_takes_all_its_steps_across_episodes() -> None:
    assert walk_made_by(Walk).n_steps == 200
    assert walk_made_by(Walk, max_steps=13).n_steps == 13


def test_same_seed_takes_the_same_actions() -> None:
    first, again = (walk_made_by(Walk, seed=5).actions for _ in range(2))
    other = walk_made_by(Walk, seed=6).actions
    assert first == again
    assert first != other


def test_the_check_of_a_slow_env_ends_after_the_step_in_progress() -> None:
    class Slow(Walk):
        def step(self, action: Any) -> Any:
            time.sleep(0.05)
            return super().step(action)

    start = time.perf_counter()
    n_steps = walk_made_by(Slow, max_seconds=0.12).n_steps
    assert 1 <= n_steps <= 4
    assert time.perf_counter() - start < 1.0
    assert walk_made_by(Slow, max_seconds=0.0).n_steps == 1


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"observation_space": None}, "has no observation_space; set self.observation_space in __init__"),
        ({"action_space": None}, "has no action_space; set self.action_space in __init__"),
        ({"action_space": 4}, "action_space is a builtins.int, not a gymnasium space"),
        (
            {"observation_space": spaces.Text(5)},
            "observation_space is a Text; text must become numbers: encode it to a Box or MultiDiscrete",
        ),
        (
            {"observation_space": spaces.Dict(a=spaces.Tuple([spaces.Graph(spaces.Discrete(2), None)]))},
            "observation_space['a'][0] is a Graph; a graph must have a fixed size: pad its nodes and edges",
        ),
        (
            {"observation_space": spaces.Sequence(spaces.Discrete(2))},
            "observation_space is a Sequence; a sequence must have a fixed length: pad it to a Box",
        ),
        (
            {"observation_space": spaces.Dict(a=spaces.Text(5))},
            "observation_space is a Dict of text alone; text must become numbers",
        ),
        (
            {"action_space": spaces.Dict(a=spaces.Discrete(2))},
            "action_space is a Dict; supported are Discrete, MultiDiscrete, MultiBinary and Box",
        ),
        (
            {"observation_space": spaces.Box(0, 1, (0, 3))},
            "observation_space has no elements: its shape is (0, 3)",
        ),
        ({"action_space": spaces.Box(0, 1, (0,))}, "action_space has no elements"),
        ({"observation_space": spaces.Dict()}, "observation_space is an empty Dict"),
    ],
)
def test_spaces_that_cannot_be_used_are_named(attributes: dict[str, Any], words: str) -> None:
    assert words in broken(variant(**attributes))


def test_space_that_was_never_set_is_named() -> None:
    class Bare(gym.Env[Any, Any]):
        pass

    assert "has no observation_space" in broken(Bare)


def test_unbounded_actions_are_fine() -> None:
    assert passed(variant(action_space=spaces.Box(-np.inf, np.inf, (2,)))).warnings == ()


RESET_RULE = "Gymnasium's reset returns 2: obs, info"


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (np.zeros(2, np.float32), f"reset() returned one value (ndarray); {RESET_RULE}"),
        (None, f"reset() returned one value (NoneType); {RESET_RULE}"),
        ((0, {}, 1), f"reset() returned 3 values; {RESET_RULE}"),
        ((np.zeros(2, np.float32), [1]), "reset() returned an info that is a list; it must be a dict"),
    ],
)
def test_reset_that_returns_something_else(returned: Any, words: str) -> None:
    assert words in broken(variant(reset=lambda self, *, seed=None, options=None: returned))


def test_reset_without_its_keywords() -> None:
    class NoSeed(Walk):
        def reset(self) -> Any:  # type: ignore[override]
            return self.obs(), {}

    class NoOptions(Walk):
        def reset(self, seed: int | None = None) -> Any:  # type: ignore[override]
            return self.obs(), {}

    rule = "write def reset(self, *, seed=None, options=None)"
    assert broken(NoSeed).endswith(f"reset() does not accept 'seed'; {rule}")
    assert broken(NoOptions).endswith(f"reset() does not accept 'options'; {rule}")


STEP_RULE = "Gymnasium's step returns 5: obs, reward, terminated, truncated, info"


@pytest.mark.parametrize(
    ("returned", "words"),
    [((0, 0.0, False, {}), "4 values"), ((0,) * 6, "6 values"), (None, "one value (NoneType)")],
)
def test_step_that_returns_another_number_of_values(returned: Any, words: str) -> None:
    text = broken(variant(step=lambda self, action: returned))
    assert text.endswith(f":Variant: step() returned {words}; {STEP_RULE}")


@pytest.mark.parametrize(
    ("returned", "words"),
    [((0, 0.0, False, {}), "4 values"), ((0,) * 6, "more values"), (None, "one value (NoneType)")],
)
def test_step_behind_a_time_limit_is_described_the_same_way(returned: Any, words: str) -> None:
    env_class = variant(step=lambda self, action: returned)
    gym.register("FourValues-v0", entry_point=lambda **kwargs: env_class(), max_episode_steps=5)
    text = broken("FourValues-v0")
    gym.registry.pop("FourValues-v0")
    assert text == f"FourValues-v0: step() returned {words}; {STEP_RULE}"


DEEP = spaces.Dict(
    pos=spaces.Box(-1, 1, (2,)),
    parts=spaces.Tuple([spaces.Discrete(3, start=1), spaces.MultiDiscrete([2, 3])]),
    bits=spaces.MultiBinary(2),
)


def deep_obs(**changes: Any) -> Info:
    obs: Info = {
        "pos": np.zeros(2, np.float32),
        "parts": (1, np.array([1, 2])),
        "bits": np.array([0, 1], np.int8),
    }
    return {**obs, **changes}


def test_nested_observation_passes() -> None:
    assert passed(variant(observation_space=DEEP, obs=lambda self: deep_obs())).warnings == ()


@pytest.mark.parametrize(
    ("obs", "words"),
    [
        (deep_obs(pos=np.zeros(3)), "observation['pos'] at step 0 is float64 of shape (3,); its space is a Box of shape (2,), float32"),
        ({"pos": np.zeros(2), "bits": np.zeros(2)}, "observation at step 0 lacks 'parts'"),
        (deep_obs(speed=1), "observation at step 0 has the undeclared 'speed'"),
        (deep_obs(parts=(1,)), "observation['parts'] at step 0 has 1 parts; its Tuple space has 2"),
        (deep_obs(parts=4), "observation['parts'] at step 0 is a int; its space is a Tuple"),
        (np.zeros(2), "observation at step 0 is a ndarray; its space is a Dict"),
        (deep_obs(parts=(1.5, np.array([1, 2]))), "observation['parts'][0] at step 0 is a float; its space is Discrete(3, start=1)"),
        (deep_obs(parts=(0, np.array([1, 2]))), "observation['parts'][0] at step 0 is 0, outside Discrete(3, start=1)"),
        (deep_obs(parts=(1, np.array([1, 3]))), "observation['parts'][1] at step 0 is array([1, 3]), outside MultiDiscrete"),
        (deep_obs(bits=np.array([0, 2])), "observation['bits'] at step 0 is array([0, 2]), outside MultiBinary(2)"),
        (deep_obs(pos=np.array(["a", "b"])), "observation['pos'] at step 0 is strings of shape (2,)"),
        (deep_obs(pos=np.array([None, 1])), "observation['pos'] at step 0 is objects of shape (2,)"),
        (deep_obs(pos=[[1], [1, 2]]), "observation['pos'] at step 0 is not an array"),
        (deep_obs(pos=None), "observation['pos'] at step 0 is a NoneType"),
        (deep_obs(pos=np.array([0, np.nan])), "env 0 gave a NaN observation['pos'] at step 0"),
        (deep_obs(pos=np.array([0, np.inf])), "env 0 gave an infinite observation['pos'] at step 0"),
    ],
)  # fmt: skip
def test_observation_that_breaks_its_space(obs: Any, words: str) -> None:
    assert words in broken(variant(observation_space=DEEP, obs=lambda self: obs))


def test_nan_is_found_at_its_step_even_in_unbounded_spaces() -> None:
    def obs(self: Walk) -> Any:
        return np.array([0, np.nan if self.n_steps == 7 else 0], np.float32)

    env_class = variant(obs=obs, observation_space=spaces.Box(-np.inf, np.inf, (2,)))
    assert broken(env_class).endswith(nan_message("observation", 0, 7))
    assert nan_message("observation", 3, 117) == "env 3 gave a NaN observation at step 117"


@pytest.mark.parametrize(
    ("space", "obs", "words"),
    [
        (spaces.Box(-9, 9, (2,)), np.zeros(2), "observation is float64 where its space says float32"),
        (spaces.Box(-9, 9, (2,)), [0.0, 1.0], "observation is a list, not a NumPy array"),
        (spaces.Box(-1, 1, (2,)), np.full(2, 3, np.float32), "observation is outside the bounds"),
        (
            spaces.Box(0, 255, (2,), np.uint8),
            np.full(2, 3),
            "observation is int64 where its space says uint8",
        ),
    ],
)
def test_observation_that_can_be_cast_is_only_a_warning(space: Any, obs: Any, words: str) -> None:
    (warning,) = passed(variant(observation_space=space, obs=lambda self: obs)).warnings
    assert words in warning


@pytest.mark.parametrize(
    ("space", "obs"),
    [
        (spaces.Discrete(4), 2),
        (spaces.Discrete(4), np.int32(2)),
        (spaces.Discrete(4), np.array(2)),
        (spaces.Box(-1, 1, ()), 0.5),
        (spaces.Box(-1, 1, (2,), np.float64), np.zeros(2, np.float32)),
        (spaces.MultiBinary(2), np.array([True, False])),
    ],
)
def test_observation_of_an_equivalent_type_is_fine(space: Any, obs: Any) -> None:
    assert validate_obs(space, obs) == []


@pytest.mark.parametrize(
    ("index", "value", "words"),
    [
        (1, np.array([1.0]), "reward at step 1 is an array of shape (1,); return float(reward)"),
        (1, None, "reward at step 1 is None; return a number"),
        (1, "1", "reward at step 1 is '1'; return a number"),
        (1, [[1], [1, 2]], "reward at step 1 is [[1], [1, 2]]; return a number"),
        (1, float("nan"), "env 0 gave a NaN reward at step 1"),
        (1, -np.inf, "env 0 gave an infinite reward at step 1"),
        (2, np.array([False]), "terminated at step 1 is an array of shape (1,); return bool(terminated)"),
        (3, None, "truncated at step 1 is None; return bool(truncated)"),
        (2, 2, "terminated at step 1 is 2"),
        (4, None, "step() returned an info that is a NoneType; it must be a dict"),
    ],
)
def test_step_with_one_bad_part(index: int, value: Any, words: str) -> None:
    assert words in broken(variant(step_part=(index, value)))


@pytest.mark.parametrize("reward", [1, True, np.float32(1), np.int64(1), np.array(1.0)])
def test_any_scalar_number_is_a_reward(reward: Any) -> None:
    assert passed(variant(step_part=(1, reward))).warnings == ()


@pytest.mark.parametrize(("flag", "n_warnings"), [(np.bool_(False), 0), (0, 1), (np.int64(0), 1)])
def test_flags_may_be_ints_with_a_warning(flag: Any, n_warnings: int) -> None:
    found = passed(variant(step_part=(3, flag))).warnings
    assert len(found) == n_warnings
    assert all("truncated is the int 0 where Gymnasium expects a bool" in warning for warning in found)


def test_exception_in_step_names_the_step_and_the_line() -> None:
    class Raising(Walk):
        def step(self, action: Any) -> Any:
            return super().step(action) if self.n_steps < 11 else self.info()["x"]

    with pytest.raises(EnvError) as error:
        check(env_factory(Raising))
    cause = error.value.__cause__
    assert isinstance(cause, KeyError)
    assert str(error.value).endswith(f"Raising: raised in step 12: KeyError: 'x' ({where(cause)})")
    assert where(cause).startswith("test_check.py:")


def test_exception_in_reset_is_quoted_on_one_line() -> None:
    def reset(self: Walk, *, seed: int | None = None, options: Any = None) -> Any:
        raise RuntimeError("no\nserver")

    assert "raised in reset: RuntimeError: no server (test_check.py:" in broken(variant(reset=reset))


def test_unpacking_error_of_the_env_itself_is_not_taken_for_a_wrong_step() -> None:
    def step(self: Walk, action: Any) -> Any:
        values = np.zeros(4)
        _obs, _reward, _terminated, _truncated, _info = values

    assert "raised in step 1: ValueError: not enough values to unpack" in broken(variant(step=step))


def test_close_is_called_and_its_exception_is_a_warning() -> None:
    def close(self: Walk) -> None:
        raise OSError("socket is gone")

    (warning,) = passed(variant(close=close)).warnings
    assert warning.startswith("close() raised OSError: socket is gone (test_check.py:")
    assert "4 values" in broken(variant(close=close, step=lambda self, action: (0, 0.0, False, {})))


def test_python_warnings_are_shown_once_and_deprecations_never() -> None:
    def info(self: Walk) -> Info:
        warnings.warn(f"step {self.t} is\nodd", UserWarning, stacklevel=1)
        warnings.warn("old", DeprecationWarning, stacklevel=1)
        gym.logger.warn("from gymnasium")
        return {}

    odd, from_gymnasium = passed(variant(info=info)).warnings
    assert odd.startswith("step 0 is odd (test_check.py:")
    assert from_gymnasium.startswith("from gymnasium (test_check.py:")


def masked_variant(space: gym.Space[Any], mask: Any, in_obs: bool = False) -> type[Walk]:
    """A Walk whose mask comes in the info, or in the observation."""
    if not in_obs:
        return variant(action_space=space, info=lambda self: {"action_mask": mask})
    obs_space = spaces.Dict(x=spaces.Discrete(2), action_mask=spaces.Box(0, 1, np.shape(mask), np.int8))
    obs = {"x": 0, "action_mask": np.asarray(mask, np.int8)}
    return variant(action_space=space, observation_space=obs_space, obs=lambda self: obs)


@pytest.mark.parametrize("in_obs", [False, True])
@pytest.mark.parametrize(
    ("space", "mask", "allowed"),
    [
        (spaces.Discrete(4, start=10), [0, 1, 0, 1], {11, 13}),
        (spaces.MultiDiscrete([2, 3]), [0, 1, 1, 0, 1], {(1, 0), (1, 2)}),
        (spaces.MultiBinary(2), [1, 0, 1, 1], {(0, 0), (0, 1)}),
    ],
)
def test_check_takes_only_allowed_actions(
    space: gym.Space[Any], mask: Any, allowed: set[Any], in_obs: bool
) -> None:
    env = walk_made_by(masked_variant(space, mask, in_obs))
    assert all(space.contains(action) for action in env.actions)
    assert {tuple(a) if np.ndim(a) else int(a) for a in env.actions} == allowed


def test_mask_in_the_info_is_found_and_wrapped() -> None:
    info = passed(masked_variant(spaces.Discrete(3), np.array([True, False, True])))
    assert info.factory.mask_in_info
    assert info.observation_space == spaces.Dict(
        obs=Walk.observation_space, action_mask=spaces.MultiBinary(3)
    )
    obs, _ = info.factory().reset(seed=0)
    assert obs["action_mask"].tolist() == [1, 0, 1]
    assert check(info.factory).observation_space == info.observation_space, "wrapped once, not twice"


def test_mask_in_the_observation_needs_no_wrapper() -> None:
    assert not passed(masked_variant(spaces.Discrete(3), [1, 0, 1], in_obs=True)).factory.mask_in_info


@pytest.mark.parametrize(
    ("mask", "in_obs", "words"),
    [
        ([1, 1], False, "reset() gave an info['action_mask'] of 2 values; the action space has 3 choices"),
        ([0, 0, 0], False, "action_mask at step 0 allows no action"),
        ([0, 5, 0], False, "observation['action_mask'] at step 0 is array([0, 5, 0], dtype=int8), outside"),
        ([0, 5, 0], True, "action_mask at step 0 holds other values than 0 and 1"),
        ([1, 1], True, "observation_space['action_mask'] has shape (2,); Discrete(3) needs (3,)"),
        ([0, 0, 0], True, "action_mask at step 0 allows no action"),
    ],
)
def test_bad_mask_is_described(mask: Any, in_obs: bool, words: str) -> None:
    assert words in broken(masked_variant(spaces.Discrete(3), mask, in_obs))


def test_mask_that_stops_coming_is_an_error() -> None:
    def info(self: Walk) -> Info:
        return {"action_mask": [1, 1, 1]} if self.n_steps < 3 else {}

    assert "step() gave no info['action_mask']" in broken(variant(info=info))


def test_finished_game_may_have_no_move_left() -> None:
    def info(self: Walk) -> Info:
        return {"action_mask": [0, 0, 0] if self.t == 10 else [0, 1, 1]}

    assert passed(variant(info=info)).warnings == ()


def test_mask_on_continuous_actions() -> None:
    box = spaces.Box(-1, 1, (1,))
    info = passed(masked_variant(box, [1, 1]))
    assert info.warnings == ("info['action_mask'] is ignored: a Box action space has nothing to mask",)
    assert not info.factory.mask_in_info
    assert "cannot mask a Box action space" in broken(masked_variant(box, [1, 1], in_obs=True))


def test_an_env_that_cannot_be_made_is_reported_by_its_factory() -> None:
    def make() -> gym.Env[Any, Any]:
        raise RuntimeError("no display")

    assert "could not be created: RuntimeError: no display" in broken(make)
