"""The quick Discrete answers as Gymnasium's does, and is the same space otherwise."""

from __future__ import annotations

import pickle
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from flatout.envs.quick import QuickDiscrete, quicken

VALUES: list[Any] = [
    *(
        kind(x)
        for kind in (np.int64, np.int32, np.uint8, np.int8, int, float, np.float32)
        for x in (0, 1, 4, 5)
    ),
    *(np.int64(-3), np.int64(7), -1, True, None, "1", [1], np.array(1), np.array([1]), np.bool_(True)),
]


@pytest.mark.parametrize(("n", "start"), [(2, 0), (5, 0), (3, 4), (4, -3)])
def test_membership_is_the_same(n: int, start: int) -> None:
    plain, quick = spaces.Discrete(n, start=start), QuickDiscrete(n, start=start)
    assert [quick.contains(x) for x in VALUES] == [plain.contains(x) for x in VALUES]
    assert any(quick.contains(x) for x in VALUES)


def test_a_quickened_env_keeps_its_space() -> None:
    env = gym.make("CartPole-v1")
    env.action_space.seed(3)
    before = env.action_space
    twin = spaces.Discrete(2, seed=3)
    assert quicken(env) is env
    assert env.action_space is before
    assert isinstance(before, QuickDiscrete)
    assert before == twin == pickle.loads(pickle.dumps(before))
    assert [before.sample() for _ in range(20)] == [twin.sample() for _ in range(20)]
    quicken(env)


def test_other_spaces_are_left_alone() -> None:
    env = gym.make("Pendulum-v1")
    quicken(env)
    assert type(env.action_space) is spaces.Box
