"""The serial executor: autoreset, final observations, statistics, faults and restoring a snapshot."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from flatout.envs.make import env_factory
from flatout.envs.spaces import ActionLayout, ObsLayout
from flatout.errors import EnvError
from flatout.executors.base import EnvSet, RestartBudget, Step, step
from flatout.executors.episodes import RESEED_STEPS
from flatout.executors.serial import SerialExecutor

IDS = np.arange(3)


class Counter(gym.Env[Any, Any]):
    """Observes its own step number; reuses one observation buffer."""

    observation_space = spaces.Box(0, 1000, (1,))
    action_space = spaces.Discrete(2)

    def __init__(self, length: int = 4, truncate: bool = False) -> None:
        self._length, self._truncate = length, truncate
        self._buffer = np.zeros(1, np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._buffer[0] = 0
        return self._buffer, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._buffer[0] += 1
        end = bool(self._buffer[0] == self._length)
        return self._buffer, 2.0, end and not self._truncate, end and self._truncate, {}


def executor(make: Callable[[], gym.Env[Any, Any]], n_envs: int = 3) -> SerialExecutor:
    out = SerialExecutor(EnvSet(make, ObsLayout(make().observation_space), np.arange(n_envs), seed=5))
    out.reset()
    return out


@pytest.mark.parametrize("truncate", [False, True])
def test_an_end_gives_the_final_observation_and_the_next_episodes_first(truncate: bool) -> None:
    envs = executor(partial(Counter, 4, truncate))
    for t in range(1, 13):
        now = step(envs, np.zeros(3, np.int64))
        ended = t % 4 == 0
        assert now.obs[0][:, 0].tolist() == [t % 4] * 3
        assert now.terminated.tolist() == [ended and not truncate] * 3
        assert now.truncated.tolist() == [ended and truncate] * 3
        if ended:
            assert now.final_obs[0][:, 0].tolist() == [4.0] * 3
            assert [(e.env_id, e.total_reward, e.length) for e in now.ended] == [
                (i, 8.0, 4) for i in range(3)
            ]
        else:
            assert now.ended == []


def play(envs: SerialExecutor, layout: ActionLayout, n_steps: int, seed: int) -> list[Step]:
    rng = np.random.default_rng(seed)
    seen = []
    for _ in range(n_steps):
        if layout.continuous:
            actions = layout.to_env(rng.normal(size=(envs.n_envs, layout.size)).astype(np.float32))
        else:
            actions = layout.to_env(rng.integers(layout.nvec[0], size=(envs.n_envs, 1)))
        now = step(envs, actions)
        obs = tuple(leaf.copy() for leaf in now.obs)
        seen.append(
            Step(
                now.env_indices,
                obs,
                now.reward.copy(),
                now.terminated.copy(),
                now.truncated.copy(),
                now.final_obs,
                list(now.ended),
                [],
            )
        )
    return seen


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Acrobot-v1", "Pendulum-v1", "LunarLander-v3"])
@pytest.mark.parametrize("n_before", [1, 300, RESEED_STEPS + 700])
def test_a_snapshot_restores_envs_to_the_same_state(env_id: str, n_before: int) -> None:
    """Also envs that cannot be pickled (Box2D); after the restore they continue identically."""
    make = env_factory(env_id)
    layout = ActionLayout(make().action_space)
    first = executor(make)
    play(first, layout, n_before, seed=1)
    first.mark()
    snapshot = first.snapshot()
    want = play(first, layout, 150, seed=2)

    second = SerialExecutor(EnvSet(make, ObsLayout(make().observation_space), IDS, seed=5))
    assert second.restore(snapshot) == []
    got = play(second, layout, 150, seed=2)
    for a, b in zip(want, got, strict=True):
        assert np.array_equal(a.obs[0], b.obs[0])
        assert np.array_equal(a.reward, b.reward)
        assert a.ended == b.ended


def test_a_snapshot_is_of_the_mark_not_of_what_came_after() -> None:
    envs = executor(env_factory("CartPole-v1"))
    layout = ActionLayout(spaces.Discrete(2))
    play(envs, layout, 50, seed=1)
    envs.mark()
    before = envs.snapshot()
    play(envs, layout, 20, seed=2)
    after = envs.snapshot()
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_an_env_that_cannot_be_replayed_begins_a_new_episode() -> None:
    class Moody(Counter):
        def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
            super().reset(**kwargs)
            self._buffer[0] = np.random.default_rng().random()  # not from its seed
            return self._buffer, {}

    envs = executor(partial(Moody, 1000))
    play(envs, ActionLayout(spaces.Discrete(2)), 10, seed=0)
    envs.mark()
    fresh = SerialExecutor(EnvSet(partial(Moody, 1000), ObsLayout(Moody.observation_space), IDS, seed=5))
    assert fresh.restore(envs.snapshot()) == [0, 1, 2]
    now = step(fresh, np.zeros(3, np.int64))
    assert np.isfinite(now.obs[0]).all()


def test_the_action_log_is_bounded() -> None:
    envs = executor(partial(Counter, 10))
    for _ in range(12):
        play(envs, ActionLayout(spaces.Discrete(2)), 500, seed=0)
        envs.mark()
    assert len(envs.snapshot()["actions"]) <= 2 * RESEED_STEPS + 500


def test_the_same_seed_gives_the_same_trajectories_and_another_does_not() -> None:
    make = env_factory("CartPole-v1")
    layout = ActionLayout(spaces.Discrete(2))
    a, b = (play(executor(make), layout, 100, seed=1) for _ in range(2))
    other = SerialExecutor(EnvSet(make, ObsLayout(make().observation_space), IDS, seed=6))
    other.reset()
    c = play(other, layout, 100, seed=1)
    assert all(np.array_equal(x.obs[0], y.obs[0]) for x, y in zip(a, b, strict=True))
    assert not np.array_equal(a[0].obs[0], c[0].obs[0])


class Faulty(Counter):
    """Misbehaves at its third step, in a given way."""

    def __init__(self, fault: str) -> None:
        super().__init__(length=100)
        self._fault = fault

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = super().step(action)
        if obs[0] == 3:
            if self._fault == "raise":
                raise KeyError("speed")
            if self._fault == "nan reward":
                reward = float("nan")
            if self._fault == "nan observation":
                obs[0] = np.nan
            if self._fault == "inf observation":
                obs[0] = np.inf
            if self._fault == "nan final observation":
                obs[0], terminated = np.nan, True
        return obs, reward, terminated, truncated, info


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("raise", r"env 1 raised in step at step 3: KeyError: 'speed' \(test_serial.py:\d+\)"),
        ("nan reward", "env 1 gave a NaN reward at step 3"),
        ("nan observation", "env 1 gave a NaN observation at step 3"),
        ("nan final observation", "env 1 gave a NaN observation at step 3"),
        ("inf observation", "env 1 gave .* observation at step 3"),
    ],
)
def test_a_fault_names_env_and_step(fault: str, words: str) -> None:
    makers = iter([Counter(100), Faulty(fault), Counter(100)])
    envs = SerialExecutor(EnvSet(lambda: next(makers), ObsLayout(Counter.observation_space), IDS, seed=0))
    envs.reset()
    for _ in range(2):
        step(envs, np.zeros(3, np.int64))
    with pytest.raises(EnvError, match=words):
        step(envs, np.zeros(3, np.int64))


def test_large_but_finite_observations_are_no_fault() -> None:
    class Huge(Counter):
        observation_space = spaces.Box(-3.4e38, 3.4e38, (2,))

        def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
            super().reset(**kwargs)
            return np.full(2, 3e38, np.float32), {}

    with np.errstate(over="ignore"):
        envs = executor(Huge)
    assert np.isfinite(envs.current.obs[0]).all()


def test_an_env_that_raises_is_rebuilt_while_the_budget_lasts() -> None:
    """The others keep their episodes, the lost step is reported, the next one is complete."""

    class Bad(Counter):
        n_made = 0

        def __init__(self) -> None:
            super().__init__(length=100)
            Bad.n_made += 1
            self._fails = Bad.n_made == 2

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            if self._fails and self._buffer[0] == 5:
                raise KeyError("speed")
            return super().step(action)

    budget = RestartBudget()
    envs = SerialExecutor(EnvSet(Bad, ObsLayout(Counter.observation_space), IDS, seed=0, budget=budget))
    envs.reset()
    for _ in range(5):
        step(envs, np.zeros(3, np.int64))
    now = step(envs, np.zeros(3, np.int64))
    assert now.restarted == [1]
    assert now.obs[0][:, 0].tolist() == [6, 0, 6]
    assert now.final_obs[0][1, 0] == 5
    now = step(envs, np.zeros(3, np.int64))
    assert now.restarted == []
    assert now.obs[0][:, 0].tolist() == [7, 1, 7]
    assert budget.n_restarts == 1
    assert "env 1 raised in step at step 6: KeyError: 'speed' (test_serial.py:" in budget.notes[0]
    assert "KeyError" in budget.tracebacks[0]


def test_an_env_that_raises_in_reset_keeps_the_last_observation_of_the_episode_before() -> None:
    class Bad(Counter):
        n_made = 0

        def __init__(self) -> None:
            super().__init__(length=3)
            Bad.n_made += 1
            self._fails = Bad.n_made == 2

        def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
            if self._fails and self._buffer[0] == 3:
                raise KeyError("speed")
            return super().reset(**kwargs)

    budget = RestartBudget()
    envs = SerialExecutor(EnvSet(Bad, ObsLayout(Counter.observation_space), IDS, seed=0, budget=budget))
    envs.reset()
    for _ in range(3):
        now = step(envs, np.zeros(3, np.int64))
    assert budget.n_restarts == 1
    assert now.restarted == []
    assert [episode.length for episode in now.ended] == [3, 3, 3]
    assert now.final_obs[0][:, 0].tolist() == [3, 3, 3]
    assert now.obs[0][:, 0].tolist() == [0, 0, 0]


def test_an_env_with_a_wrong_shape_is_not_rebuilt() -> None:
    class Wide(Counter):
        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            return np.zeros(3, np.float32), *super().step(action)[1:]

    budget = RestartBudget()
    envs = SerialExecutor(EnvSet(Wide, ObsLayout(Counter.observation_space), IDS, seed=0, budget=budget))
    envs.reset()
    with pytest.raises(
        EnvError, match=r"env 0 gave what does not fit its spaces in step at step 1: .*\(3,\)"
    ):
        step(envs, np.zeros(3, np.int64))
    assert budget.n_restarts == 0
