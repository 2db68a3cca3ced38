"""Spaces as arrays, without loss in either direction."""

from __future__ import annotations

import pickle
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from flatout.envs.spaces import (
    ActionLayout,
    FastDiscrete,
    ObsLayout,
    fast_contains,
    space_from_json,
    space_to_json,
)
from flatout.errors import FlatoutError
from tests.known import action_space, observation_space

OBS = ["box", "image", "image_first", "discrete", "multidiscrete", "multibinary", "dict", "tuple"]
ACTIONS = ["discrete", "discrete_from_3", "multidiscrete", "multibinary", "box", "box_unbounded"]


@pytest.mark.parametrize("kind", OBS)
def test_observations_become_arrays_without_loss(kind: str) -> None:
    space = observation_space(kind)
    space.seed(1)
    layout = ObsLayout(space)
    out = layout.alloc(2)
    obs = [space.sample(), space.sample()]
    for i in range(2):
        layout.write(out, i, obs[i])
    for spec, array in zip(layout.specs, out, strict=True):
        for i in range(2):
            assert np.array_equal(array[i], np.asarray(spec.pick(obs[i]), spec.dtype))
    batch, single = layout.batch(obs[0])
    assert single
    assert all(np.array_equal(a[0], b[0]) for a, b in zip(batch, out, strict=True))


@pytest.mark.parametrize("kind", [*OBS, *ACTIONS])
def test_json_gives_the_same_space_back(kind: str) -> None:
    space = action_space(kind) if kind in ACTIONS[:2] or kind.startswith("box_") else observation_space(kind)
    assert space_from_json(space_to_json(space)) == space


def test_json_keeps_bounds_per_element() -> None:
    space = spaces.Box(np.array([0.0, -np.inf, -3.5]), np.array([1.0, np.inf, 2.25]), dtype=np.float64)
    assert space_from_json(space_to_json(space)) == space


@pytest.mark.parametrize("kind", ACTIONS)
def test_every_row_is_an_action_of_the_space(kind: str) -> None:
    space = action_space(kind)
    layout = ActionLayout(space)
    rng = np.random.default_rng(0)
    if layout.continuous:
        rows: Any = rng.normal(scale=5, size=(50, layout.size)).astype(np.float32)
    else:
        rows = np.stack([rng.integers(n, size=50) for n in layout.nvec], 1)
    for action in layout.to_env(rows):
        assert space.contains(action)


def test_bounded_actions_are_scaled_to_their_bounds_and_clipped() -> None:
    layout = ActionLayout(spaces.Box(np.array([0.0, -2.0]), np.array([100.0, 2.0]), dtype=np.float64))
    rows = np.array([[-1.0, 1.0], [0.0, 0.5], [7.0, -7.0]], np.float32)
    assert layout.to_env(rows).tolist() == [[0.0, 2.0], [50.0, 1.0], [100.0, -2.0]]


def test_spaces_wider_than_float32_are_left_in_their_own_units() -> None:
    limit = np.finfo(np.float32).max
    layout = ActionLayout(spaces.Box(-limit, limit, (1,)))
    assert layout.to_env(np.array([[3.0]], np.float32)).tolist() == [[3.0]]


@pytest.mark.parametrize("space", [spaces.Text(5), spaces.Sequence(spaces.Discrete(2))])
def test_unsupported_spaces_are_named(space: gym.Space[Any]) -> None:
    with pytest.raises(FlatoutError, match="not supported"):
        ObsLayout(spaces.Dict({"a": space}))
    with pytest.raises(FlatoutError, match="not supported"):
        ActionLayout(space)


VALUES: list[Any] = [
    *(
        kind(x)
        for kind in (np.int64, np.int32, np.uint8, np.int8, int, float, np.float32)
        for x in (0, 1, 4, 5)
    ),
    *(np.int64(-3), np.int64(7), -1, True, None, "1", [1], np.array(1), np.array([1]), np.bool_(True)),
]


@pytest.mark.parametrize(("n", "start"), [(2, 0), (5, 0), (3, 4), (4, -3)])
def test_fast_discrete_has_the_same_members(n: int, start: int) -> None:
    plain, fast = spaces.Discrete(n, start=start), FastDiscrete(n, start=start)
    assert [fast.contains(x) for x in VALUES] == [plain.contains(x) for x in VALUES]
    assert any(fast.contains(x) for x in VALUES)


def test_an_env_with_fast_contains_keeps_its_space() -> None:
    env = gym.make("CartPole-v1")
    env.action_space.seed(3)
    before = env.action_space
    twin = spaces.Discrete(2, seed=3)
    assert fast_contains(env) is env
    assert env.action_space is before
    assert isinstance(before, FastDiscrete)
    assert before == twin == pickle.loads(pickle.dumps(before))
    assert [before.sample() for _ in range(20)] == [twin.sample() for _ in range(20)]
    fast_contains(env)


def test_other_spaces_are_left_alone() -> None:
    env = gym.make("Pendulum-v1")
    fast_contains(env)
    assert type(env.action_space) is spaces.Box
