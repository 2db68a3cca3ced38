"""Async envs: recognised, made without wrappers that cannot await, checked, masked and stepped."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit

from flatout.envs.check import check
from flatout.envs.make import blocking, env_factory, is_async
from flatout.envs.wrappers import Blocking, MaskFromInfo
from flatout.errors import EnvError

ENV_ID = "AsyncWalkTest-v0"


class AsyncWalk(gym.Env[Any, Any]):
    """Ten steps of a clean env that awaits."""

    observation_space: Any = spaces.Box(-10, 10, (2,))
    action_space: Any = spaces.Discrete(3)
    length = 10

    def __init__(self, render_mode: str | None = None) -> None:
        self.t, self.n_steps, self.n_closed = 0, 0, 0

    def obs(self) -> Any:
        return np.array([self.t, 0], np.float32)

    def info(self) -> dict[str, Any]:
        return {}

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:  # type: ignore[override]
        super().reset(seed=seed)
        await asyncio.sleep(0.001)
        self.t = 0
        return self.obs(), self.info()

    async def step(self, action: Any) -> Any:  # type: ignore[override]
        await asyncio.sleep(0.001)
        self.t += 1
        self.n_steps += 1
        return self.obs(), 1.0, self.t == self.length, False, self.info()

    async def close(self) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        self.n_closed += 1


class AsyncMasked(AsyncWalk):
    """Its mask comes in the info."""

    def info(self) -> dict[str, Any]:
        return {"action_mask": np.array([0, 1, self.t % 2])}


class Session(AsyncWalk):
    """Opens its client in the constructor, where a loop must run."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.get_running_loop()

    async def step(self, action: Any) -> Any:  # type: ignore[override]
        assert asyncio.get_running_loop() is self.loop, "a session belongs to its loop"
        return await super().step(action)


class HalfAsync(AsyncWalk):
    """Only step is async."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self.obs(), {}


@pytest.fixture(autouse=True)
def _no_loop_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


@pytest.fixture
def registered() -> Iterator[str]:
    gym.register(ENV_ID, entry_point=f"{__name__}:AsyncWalk", max_episode_steps=4)
    yield ENV_ID
    gym.registry.pop(ENV_ID)


def test_async_envs_are_recognised() -> None:
    assert is_async(AsyncWalk())
    assert not is_async(gym.make("CartPole-v1"))
    assert not is_async(HalfAsync())
    assert is_async(MaskFromInfo(AsyncMasked()))


async def lengths(env: Any, n_steps: int) -> list[tuple[int, bool, bool]]:
    """How long each episode was and how it ended."""
    found, t = [], 0
    await env.reset(seed=0)
    for _ in range(n_steps):
        _, _, terminated, truncated, _ = await env.step(0)
        t += 1
        if terminated or truncated:
            found.append((t, terminated, truncated))
            t = 0
            await env.reset()
    return found


def test_a_registered_env_keeps_its_time_limit_and_no_wrapper_that_cannot_await(registered: str) -> None:
    env = env_factory(registered)()
    assert is_async(env)
    assert asyncio.run(lengths(env, 13)) == [(4, False, True)] * 3
    longer = env_factory(registered, {"max_episode_steps": 12})()
    assert asyncio.run(lengths(longer, 21)) == [(10, True, False)] * 2


def test_additional_wrappers_of_a_registered_async_env_are_refused() -> None:
    wrapper = gym.envs.registration.WrapperSpec("Clip", "gymnasium.wrappers:ClipReward", {"min_reward": 0})
    gym.register(ENV_ID, entry_point=f"{__name__}:AsyncWalk", additional_wrappers=(wrapper,))
    try:
        with pytest.raises(EnvError, match="is async and registered with additional wrappers"):
            env_factory(ENV_ID)()
    finally:
        gym.registry.pop(ENV_ID)


@pytest.mark.parametrize("source", [AsyncWalk, Session])
def test_an_async_env_passes_the_check(source: Any) -> None:
    info = check(env_factory(source))
    assert info.is_async
    assert info.warnings == ()
    assert info.observation_space == AsyncWalk.observation_space
    assert not check(env_factory("CartPole-v1")).is_async


def test_the_check_works_inside_a_running_event_loop(registered: str) -> None:
    async def notebook() -> bool:
        return check(env_factory(registered)).is_async

    assert asyncio.run(notebook())


def test_the_check_steps_and_closes_an_async_env() -> None:
    made: list[AsyncWalk] = []

    def make() -> AsyncWalk:
        made.append(AsyncWalk())
        return made[0]

    check(env_factory(make), max_steps=25, max_seconds=30.0)
    assert made[0].n_steps == 25
    assert made[0].n_closed == 1


def test_an_async_envs_mask_moves_into_the_observation() -> None:
    info = check(env_factory(AsyncMasked))
    assert info.is_async
    assert info.factory.mask_in_info
    env: Any = pickle.loads(pickle.dumps(info.factory))()
    assert is_async(env)
    assert env.observation_space == info.observation_space

    async def masks() -> list[list[int]]:
        first, _ = await env.reset(seed=1)
        second = (await env.step(1))[0]
        return [first["action_mask"].tolist(), second["action_mask"].tolist()]

    assert asyncio.run(masks()) == [[0, 1, 0], [0, 1, 1]]


def failure(source: Any) -> str:
    with pytest.raises(EnvError) as error:
        check(env_factory(source))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_faults_of_async_envs_are_reported_as_those_of_others() -> None:
    async def raising(self: Any, action: Any) -> Any:
        await asyncio.sleep(0)
        raise KeyError("x")

    async def four(self: Any, action: Any) -> Any:
        return self.obs(), 1.0, False, {}

    def variant(step: Any) -> Any:
        return type("Variant", (AsyncWalk,), {"step": step})

    assert "raised in step 1: KeyError: 'x' (test_wrappers.py:" in failure(variant(raising))
    assert "step() returned 4 values; Gymnasium's step returns 5" in failure(variant(four))
    assert "step() is async; give both reset and step an async def" in failure(HalfAsync)


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_a_wrapper_that_does_not_await_is_reported() -> None:
    assert "a wrapper does not await the async env's step()" in failure(lambda: TimeLimit(AsyncWalk(), 5))


def test_a_blocking_env_is_like_any_other() -> None:
    env = blocking(AsyncWalk)
    assert isinstance(env, Blocking)
    assert not is_async(env)
    limited = TimeLimit(env, 3)
    obs, _ = limited.reset(seed=3)
    assert obs.tolist() == [0, 0]
    assert [limited.step(0)[3] for _ in range(3)] == [False, False, True]
    limited.close()
    sync = blocking(lambda: gym.make("CartPole-v1"))
    assert not isinstance(sync.unwrapped, Blocking)
    with pytest.raises(RuntimeError, match="no running event loop"):
        blocking(_fail)


def _fail() -> gym.Env[Any, Any]:
    raise RuntimeError("no running event loop")


def test_the_mask_wrapper_of_an_async_env_is_async() -> None:
    factory = replace(env_factory(AsyncMasked), mask_in_info=True)
    assert isinstance(factory(), MaskFromInfo)
