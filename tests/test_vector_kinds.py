"""make_vec on every executor: the same trajectories, infos and lost envs, and `auto` finds one that starts."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
import pytest
from gymnasium import spaces

import flatout
from flatout.errors import EnvError, FlatoutError
from flatout.executors.process import ProcessExecutor
from flatout.vector import VecEnv
from tests.executors.slow import AsyncCartPole
from tests.faults import Doomed, Walk
from tests.test_vector import N, Taciturn, Talkative, same


class AsyncTalkative(Talkative):
    """The same with coroutines."""

    async def reset(self, **kwargs: Any) -> Any:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().reset(**kwargs)

    async def step(self, action: Any) -> Any:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().step(action)

    async def triple(self, x: int) -> int:
        await asyncio.sleep(0)
        return 3 * x


def assert_same_steps(a: VecEnv, b: VecEnv, n_steps: int = 200) -> int:
    """Step both with the same random actions; returns how many episodes ended."""
    n_ended = 0
    a.action_space.seed(0)
    for _ in range(n_steps):
        actions = a.action_space.sample()
        got, want = a.step(actions), b.step(actions)
        assert same(got, want)
        n_ended += int(got[-1].get("_final_obs", np.zeros(1)).sum())
    return n_ended


@pytest.mark.parametrize("env", ["CartPole-v1", Talkative, Taciturn])
@pytest.mark.parametrize("kind", ["process", "thread"])
def test_a_seed_gives_the_same_steps_on_every_executor(kind: str, env: Any) -> None:
    serial, other = flatout.make_vec(env, 5, "serial", seed=3), flatout.make_vec(env, 5, kind, seed=3)
    assert (serial.kind, other.kind) == ("serial", kind)
    assert same(serial.reset(), other.reset())
    assert_same_steps(serial, other, 20)
    assert same(serial.reset(seed=11), other.reset(seed=11))
    assert assert_same_steps(serial, other) >= 10
    other.close()


@pytest.mark.parametrize(("awaits", "blocks"), [(AsyncTalkative, Talkative), (AsyncCartPole, None)])
def test_an_async_env_gives_the_same_steps_as_the_blocking_one(awaits: Any, blocks: Any) -> None:
    serial = flatout.make_vec(blocks or gym.envs.classic_control.CartPoleEnv, N, "serial")
    envs = flatout.make_vec(awaits, N)  # auto
    assert envs.kind == "async"
    assert same(serial.reset(seed=11), envs.reset(seed=11))
    assert assert_same_steps(serial, envs) >= 10
    options = {"reset_mask": np.array([False, True, False])}
    assert same(serial.reset(seed=2, options=options), envs.reset(seed=2, options=options))
    assert assert_same_steps(serial, envs, 20) >= 1
    envs.close()


def test_async_envs_can_reset_at_the_next_step() -> None:
    awaits, blocks = (
        flatout.make_vec(env, N, autoreset_mode="NEXT_STEP") for env in (AsyncTalkative, Talkative)
    )
    assert same(awaits.reset(seed=5), blocks.reset(seed=5))
    assert_same_steps(awaits, blocks, 30)
    awaits.close()


def test_methods_of_async_envs_run_on_their_event_loop() -> None:
    envs = flatout.make_vec(AsyncTalkative, N, "async")
    envs.reset()
    assert envs.call("double", 4) == (8, 8, 8)
    assert envs.call("triple", 4) == (12, 12, 12)
    envs.set_attr("length", [2, 3, 4])
    assert envs.get_attr("length") == (2, 3, 4)
    assert {*envs.executor.apply(lambda _: threading.current_thread().name)} == {"flatout-loop"}
    envs.close()
    with pytest.raises(FlatoutError, match="'serial' cannot run an async env; use 'async'"):
        flatout.make_vec(AsyncTalkative, N, "serial")


def test_methods_of_a_thread_env_run_in_its_thread() -> None:
    envs = flatout.make_vec(Talkative, N, "thread")
    names = envs.executor.apply(lambda _: threading.current_thread().name)
    assert names == [f"flatout-env-{i}" for i in range(N)]
    envs.close()


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_recv_returns_the_envs_that_are_ready(kind: str) -> None:
    """Ready envs get the next action; each env's steps and infos equal those of the serial executor."""
    serial = flatout.make_vec(Talkative, 4, "serial")
    serial.reset(seed=1)
    options: dict[str, Any] = {"n_workers": 2} if kind == "process" else {"batch_size": 1}
    envs = flatout.make_vec(Talkative, 4, kind, **options)
    envs.reset(seed=1)
    want = [serial.step(np.zeros(4, np.int64)) for _ in range(32)]
    envs.send(np.zeros(4, np.int64))
    with pytest.raises(FlatoutError, match="recv first"):
        envs.get_attr("length")
    taken = np.zeros(4, np.int64)
    while (taken < 32).any():
        rows, obs, rewards, terminations, _, infos = envs.recv()
        # Those that are through stay at an episode's end, which must not be told again.
        assert {*np.flatnonzero(infos.get("_final_obs", np.zeros(4)))} <= {*rows.tolist()}
        for k, i in enumerate(rows.tolist()):
            w_obs, w_rewards, w_terminations, _, w_infos = want[taken[i]]
            assert obs["float64"][k].tolist() == w_obs["float64"][i].tolist()
            assert (rewards[k], terminations[k]) == (w_rewards[i], w_terminations[i])
            if terminations[k]:
                assert same(infos["final_obs"][i], w_infos["final_obs"][i])
                assert infos["final_info"]["t"][i] == 4
                assert infos["began"][i] == w_infos["began"][i]
            else:
                assert infos["t"][i] == w_infos["t"][i]
                assert not infos.get("_final_obs", np.zeros(4))[i]
        taken[rows] += 1
        again = rows[taken[rows] < 32]
        if len(again):
            envs.send(np.zeros(len(again), np.int64), again)
    envs.close()


def test_a_worker_is_sent_the_actions_of_all_its_envs() -> None:
    envs = flatout.make_vec(Talkative, 4, "process", n_workers=2)
    envs.reset()
    with pytest.raises(FlatoutError, match="all its envs at once"):
        envs.send(np.zeros(3, np.int64), np.arange(3))
    envs.close()


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_a_lost_env_ends_its_episode_with_its_last_observation(kind: str) -> None:
    options: dict[str, Any] = {"n_workers": 1} if kind == "process" else {}
    envs = flatout.make_vec(Doomed, N, kind, **options)
    envs.reset(seed=0)
    for _ in range(3):
        before, *_ = envs.step(np.zeros(N, np.int64))
    # The last one: the others of its worker have written their next observations by then.
    envs.set_attr("doomed", [False, False, True])
    obs, rewards, terminations, truncations, infos = envs.step(np.zeros(N, np.int64))
    lost = [True] * N if kind == "process" else [False, False, True]
    assert truncations.tolist() == infos["_final_obs"].tolist() == lost
    assert infos["final_info"]["restarted"].tolist() == lost
    assert not terminations.any()
    for i in np.flatnonzero(lost):
        assert rewards[i] == 0.0
        assert infos["final_obs"][i].tolist() == before[i].tolist()
        assert obs[i, 1] == 0
    assert len(envs.notes) == 1
    after, *_, infos = envs.step(np.zeros(N, np.int64))
    assert (after[:, 1] == obs[:, 1] + 1).all()
    assert infos == {}
    envs.close()


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_with_next_step_a_lost_env_begins_its_new_episode_one_step_later(kind: str) -> None:
    envs = flatout.make_vec(Doomed, N, kind, autoreset_mode="NEXT_STEP")
    envs.reset(seed=0)
    for _ in range(3):
        before, *_ = envs.step(np.zeros(N, np.int64))
    envs.set_attr("doomed", [False, False, True])
    obs, rewards, _, truncations, infos = envs.step(np.zeros(N, np.int64))
    assert truncations.tolist() == infos["restarted"].tolist() == [False, False, True]
    assert obs[2].tolist() == before[2].tolist()
    obs, rewards, _, truncations, infos = envs.step(np.zeros(N, np.int64))
    assert (obs[:, 1].tolist(), float(rewards[2]), bool(truncations.any())) == ([5, 5, 0], 0.0, False)
    assert envs.step(np.zeros(N, np.int64))[0][:, 1].tolist() == [6, 6, 1]
    with pytest.raises(FlatoutError, match="send and recv are for autoreset_mode 'SAME_STEP'"):
        envs.send(np.zeros(N, np.int64))
    envs.close()


def test_a_worker_lost_between_steps_is_reported_at_the_next() -> None:
    envs = flatout.make_vec(Walk, N, "process", n_workers=1)
    envs.reset(seed=0)
    before, *_ = envs.step(np.zeros(N, np.int64))
    assert isinstance(envs.executor, ProcessExecutor)
    lost = psutil.Process(envs.executor.pids[0])
    lost.kill()
    lost.wait(5)
    assert envs.get_attr("render_mode") == (None,) * N
    obs, _, _, truncations, infos = envs.step(np.zeros(N, np.int64))
    assert truncations.all()
    assert (obs[:, 1] == 0).all()
    assert np.stack(infos["final_obs"]).tolist() == before.tolist()
    envs.close()


class Secretive(Taciturn):
    """Its infos cannot be pickled."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        *result, _ = super().step(action)
        return *result, {"lock": threading.Lock()}


def test_infos_that_cannot_be_pickled_are_refused_or_left_out() -> None:
    envs = flatout.make_vec(Secretive, N, "process")
    envs.reset()
    with pytest.raises(EnvError, match=r"info cannot be sent between processes .*use infos=False") as caught:
        envs.step(np.zeros(N, np.int64))
    assert "\n" not in str(caught.value)
    envs.close()
    envs = flatout.make_vec(Secretive, N, "process", infos=False)
    envs.reset()
    assert envs.step(np.zeros(N, np.int64))[-1].keys() <= {
        "final_obs",
        "_final_obs",
        "final_info",
        "_final_info",
    }
    envs.close()


class Sleepy(Walk):
    """Waits 5 ms a step."""

    observation_space = spaces.Box(-1, 1e6, (2,))

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(0.005)
        return super().step(action)


def test_auto_measures_and_says_why() -> None:
    quick, waiting = flatout.make_vec("CartPole-v1", N), flatout.make_vec(Sleepy, 16)
    assert quick.kind == "serial"
    assert "in turn in one process" in quick.notes[0]
    assert waiting.kind == "thread"
    assert "mostly waiting" in waiting.notes[0]
    waiting.close()


def test_auto_uses_the_next_executor_if_one_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError("no memory to share")

    monkeypatch.setattr("flatout.vector.rank_kinds", lambda *args: (["process", "thread", "serial"], []))
    monkeypatch.setattr("flatout.executors.process.ProcessExecutor", refuse)
    envs = flatout.make_vec("CartPole-v1", N)
    assert envs.kind == "thread"
    assert envs.notes[0].startswith("executor process could not start (OSError: no memory to share")
    assert envs.notes[0].endswith("using thread")
    envs.reset()
    envs.close()
