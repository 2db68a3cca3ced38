"""What the thread and the coroutine executor have in common: order, autoreset, seeds, snapshots, faults, closing."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest
from gymnasium import spaces
from gymnasium.envs.classic_control import CartPoleEnv

from flatout.envs.spaces import ObsLayout
from flatout.errors import EnvError, FlatoutError
from flatout.executors.base import EnvSet, Episode, RestartBudget, step
from flatout.executors.episodes import RESEED_STEPS, env_seed
from flatout.executors.serial import SerialExecutor
from tests.executors.slow import Kind, Script, play

CART_POLE = ObsLayout(CartPoleEnv().observation_space)


@pytest.fixture(params=["thread", "coroutine"])
def kind(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[Kind]:
    """A kind whose executors are closed at the end and leave no thread, task or message."""
    before = set(threading.enumerate())
    kind = Kind(request.param)
    with caplog.at_level(logging.WARNING):
        yield kind
        kind.close()
    assert caplog.records == []
    left = [thread for thread in threading.enumerate() if thread not in before]
    for thread in left:  # those that a test lets hang for some seconds end by themselves
        thread.join(5.0)
    assert [thread.name for thread in left if thread.is_alive()] == []


def actions_of(i: int, t: int) -> int:
    return (i * 7 + t * t // 3) % 2


def test_each_env_keeps_its_order_and_ends_its_episodes(kind: Kind) -> None:
    envs = kind.counters(Script(length=5), 6)
    seen = play(envs, 23)
    assert max(seen.batches) <= 6
    for i in range(6):
        assert seen.obs[i] == [[t % 5] for t in range(1, 24)]
        assert seen.rewards[i] == [2.0] * 23
        assert seen.finals[i] == [[5.0]] * 4
        assert seen.ended[i] == [Episode(i, 10.0, 5)] * 4
        ends = [end for end in seen.flags[i] if any(end)]
        assert len(ends) == 4
    # Made in any order, an env either terminates or truncates, always.
    assert all(len(set(flags)) == 2 for flags in seen.flags)


@pytest.mark.parametrize("n_steps", [150, RESEED_STEPS + 200])
def test_each_envs_trajectory_is_that_of_the_serial_executor(kind: Kind, n_steps: int) -> None:
    envs = kind.make(kind.cart_pole, 3, CART_POLE)
    assert envs.reset().env_indices.tolist() == [0, 1, 2]
    serial = SerialExecutor(EnvSet(CartPoleEnv, CART_POLE, np.arange(3), 5, replayable=False))
    assert np.array_equal(serial.reset().obs[0], envs.current.obs[0])
    got, want = play(envs, n_steps, actions_of), play(serial, n_steps, actions_of)
    for part in ("obs", "rewards", "flags", "finals", "ended"):
        assert getattr(got, part) == getattr(want, part)


def test_step_equals_send_and_recv_of_all_envs(kind: Kind) -> None:
    envs = kind.counters(Script(seconds=(0.0, 0.02), length=4), 5, batch_seconds=0.0)
    for t in range(1, 9):
        now = step(envs, np.zeros(5, np.int64))
        assert now.env_indices.tolist() == list(range(5))
        assert now.obs[0][:, 0].tolist() == [t % 4] * 5
        assert len(now.ended) == (5 if t % 4 == 0 else 0)


def test_one_slow_env_does_not_delay_others(kind: Kind) -> None:
    script = Script(on_step=lambda made, t: 2.0 if made == 3 else None)
    envs = kind.counters(script, 8)
    envs.send(np.zeros(8, np.int64), np.arange(8))
    n_taken = 0
    while n_taken < 7 * 20:
        now = envs.recv()
        n_taken += len(now.env_indices)
        envs.send(np.zeros(len(now.env_indices), np.int64), now.env_indices)
    assert script.made[3].buffer[0] == 0, "it is still in its first step"


def test_envs_wait_at_the_same_time(kind: Kind) -> None:
    envs = kind.counters(Script(seconds=(0.005, 0.015)), 32)
    start = time.perf_counter()
    play(envs, 20)
    assert time.perf_counter() - start < 3.0, "in turn it would take 6.4 s"


def test_a_batch_closes_at_its_size_or_its_time(kind: Kind) -> None:
    by_size = kind.counters(Script(seconds=(0.001, 0.03)), 8, batch_size=3, batch_seconds=30.0)
    n_away = 8
    by_size.send(np.zeros(8, np.int64), np.arange(8))
    while n_away:
        n_got = len(by_size.recv().env_indices)
        assert n_got >= min(3, n_away)
        n_away -= n_got
    script = Script(on_step=lambda made, t: 2.0 if made == 0 else 0.001 * made)
    by_time = kind.counters(script, 4, batch_seconds=0.5)
    start = time.perf_counter()
    by_time.send(np.zeros(4, np.int64), np.arange(4))
    assert len(by_time.recv().env_indices) == 3
    assert 0.4 < time.perf_counter() - start < 1.9


def raise_once(where: str) -> Script:
    """The second env that is made raises: in its reset, or in its fourth step."""

    def on_reset(made: int) -> None:
        if where == "reset" and made == 1:
            raise KeyError("x")

    def on_step(made: int, t: int) -> None:
        if where == "step" and made == 1 and t == 4:
            raise KeyError("x")
        if where == "exit" and made == 1 and t == 4:
            raise SystemExit(3)

    return Script(on_reset=on_reset, on_step=on_step, length=100)


@pytest.mark.parametrize("where", ["step", "exit"])
def test_an_env_that_raises_in_step_is_rebuilt(kind: Kind, where: str) -> None:
    script = raise_once(where)
    envs = kind.counters(script, 3)
    seen = play(envs, 10)
    (lost,) = seen.restarted
    assert seen.obs[lost] == [[1], [2], [3], [0], *([t] for t in range(1, 8))]
    assert seen.rewards[lost] == [2.0] * 3 + [0.0] + [2.0] * 7
    for i in {0, 1, 2} - {lost}:
        assert seen.obs[i] == [[t] for t in range(1, 11)]
    assert envs.budget.n_restarts == 1
    cause = "KeyError: 'x'" if where == "step" else "SystemExit: 3"
    (note,) = envs.notes
    assert note.startswith(f"env {lost} was rebuilt: {cause} (test_waiting.py:")
    assert script.seeds[-1] == env_seed(5, lost, 1)
    assert not any(seen.ended)


def test_statistics_of_an_episode_that_was_lost_are_dropped(kind: Kind) -> None:
    script = raise_once("step")
    script.length = 6
    seen = play(kind.counters(script, 3), 12)
    (lost,) = seen.restarted
    assert seen.ended[lost] == [Episode(lost, 12.0, 6)]
    assert all(seen.ended[i] == [Episode(i, 12.0, 6)] * 2 for i in {0, 1, 2} - {lost})


def test_an_env_that_raises_in_its_first_reset_is_rebuilt(kind: Kind) -> None:
    envs = kind.counters(raise_once("reset"), 3)
    assert envs.budget.n_restarts == 1
    assert envs.current.restarted == []
    assert play(envs, 4).obs == [[[1], [2], [3], [4]]] * 3


def test_a_constructor_that_raises_at_the_start_ends_it(kind: Kind) -> None:
    def on_make(made: int) -> None:
        if made == 2:
            raise OSError("no server")

    script = Script(on_make=on_make)
    with pytest.raises(EnvError, match=r"env \d raised in constructor: OSError: no server \(test_waiting.py"):
        kind.counters(script, 4)
    assert script.n_closed >= 2, "those that were made are closed"


def test_a_constructor_may_fail_when_an_env_is_rebuilt(kind: Kind) -> None:
    def on_make(made: int) -> None:
        if made in (3, 4):
            raise OSError("no server yet")

    script = raise_once("step")
    script.on_make = on_make
    envs = kind.counters(script, 3)
    assert len(play(envs, 6).restarted) == 1, "one step was lost, however long the rebuilding took"
    assert [note.split(": ")[1] for note in envs.notes] == ["KeyError", "OSError", "OSError"]


def test_too_many_restarts_end_the_run_cleanly(kind: Kind) -> None:
    def on_step(made: int, t: int) -> None:
        raise RuntimeError("always")

    envs = kind.counters(Script(on_step=on_step), 2, max_restarts=4, window_seconds=60.0)
    with pytest.raises(EnvError, match=r"gave up after 4 restarts .* RuntimeError: always") as error:
        play(envs, 100)
    assert "\n" not in str(error.value)
    assert isinstance(error.value.__cause__, RuntimeError)
    assert envs.budget.n_restarts == 4


def test_a_budget_may_be_shared_with_others(kind: Kind) -> None:
    budget = RestartBudget(2, 60.0)
    budget.spend("something else")
    play(kind.counters(raise_once("step"), 3, budget=budget), 6)
    assert budget.n_restarts == 2
    with pytest.raises(EnvError, match=r"gave up after 2 restarts"):
        play(kind.counters(raise_once("step"), 3, budget=budget), 6)


def test_restarts_far_apart_do_not_end_the_run(kind: Kind) -> None:
    def on_step(made: int, t: int) -> None:
        if t == 2:
            raise RuntimeError("every second")

    script = Script(on_step=on_step, seconds=(0.02, 0.02))
    assert play(kind.counters(script, 1, max_restarts=1, window_seconds=0.01), 6).restarted == [0] * 5


def test_two_hundred_restarts_leave_nothing_behind(kind: Kind) -> None:
    def on_step(made: int, t: int) -> None:
        if t == 3:
            raise RuntimeError("every third")

    envs = kind.counters(Script(on_step=on_step), 4, max_restarts=1000)
    n_threads, n_fds = threading.active_count(), psutil.Process().num_fds()
    while envs.budget.n_restarts < 200:
        play(envs, 9)
    assert threading.active_count() <= n_threads + 2, "the last ones may be just ending"
    assert psutil.Process().num_fds() <= n_fds + 1


def test_a_hanging_step_is_abandoned_and_its_late_result_ignored(kind: Kind) -> None:
    odd: Any = (np.full(1, 999, np.float32), 999.0, True, False, {})

    class Late(kind.counter):  # type: ignore[name-defined,misc]
        """Its late step has an unusual result."""

        def advance(self, _: Any) -> Any:
            return super().advance(odd if self.number == 1 and self.n_steps == 3 else None)

    script = Script(on_step=lambda made, t: 1.0 if made == 1 and t == 3 else 0.01, length=1000)
    envs = kind.make(lambda: Late(script), 3, step_timeout=0.3)
    envs.reset()
    seen = play(envs, 120)
    (lost,) = seen.restarted
    assert envs.notes == [f"env {lost} was rebuilt: TimeoutError: no answer within 0.3 s"]
    assert seen.obs[lost] == [[1], [2], [0], *([t] for t in range(1, 119))]
    assert 999.0 not in np.concatenate([envs.current.obs[0], envs.current.final_obs[0]])
    assert not any(seen.ended)


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ((np.zeros(1), np.nan, False, False, {}), "gave a NaN reward at step 3"),
        ((np.full(1, np.nan), 0.0, False, False, {}), "gave a NaN observation at step 3"),
        ((np.full(1, np.inf), 0.0, False, False, {}), "gave a NaN observation at step 3"),
        ((np.full(1, np.nan), 0.0, True, False, {}), "gave a NaN observation at step 3"),
        ((np.zeros(3), 0.0, False, False, {}), "raised in step at step 3: ValueError: could not broadcast"),
        ((np.zeros(3), 0.0, True, False, {}), "env . at step 3: ValueError: could not broadcast"),
        ((np.zeros(1), "much", False, False, {}), "raised in step at step 3: ValueError: could not convert"),
    ],
)
def test_an_env_that_breaks_the_api_ends_the_run_without_a_restart(kind: Kind, odd: Any, words: str) -> None:
    envs = kind.counters(Script(on_step=lambda made, t: odd if made == 1 and t == 3 else None, length=99), 3)
    with pytest.raises(EnvError, match=words) as error:
        play(envs, 10)
    assert "\n" not in str(error.value)
    assert envs.budget.n_restarts == 0


def test_reset_begins_new_episodes_also_while_envs_step(kind: Kind) -> None:
    script = Script(length=100)
    envs = kind.counters(script, 4)
    play(envs, 3)
    envs.send(np.zeros(4, np.int64), np.arange(4))
    now = envs.reset()
    assert now.obs[0].tolist() == [[0]] * 4
    assert now.reward.tolist() == [0.0] * 4
    assert sorted(s for s in script.seeds[4:] if s) == sorted(env_seed(5, i, 1) for i in range(4))
    assert play(envs, 3).obs == [[[1], [2], [3]]] * 4


def test_restored_envs_begin_new_episodes_with_their_next_seeds(kind: Kind) -> None:
    first = kind.counters(Script(), 3)
    play(first, 7)
    first.mark()
    script = Script()
    second = kind.make(lambda: kind.counter(script), 3)
    assert second.restore(first.snapshot()) == [0, 1, 2]
    assert sorted(s for s in script.seeds if s) == sorted(env_seed(5, i, 1) for i in range(3))
    assert second.current.obs[0].tolist() == [[0]] * 3
    serial = SerialExecutor(EnvSet(CartPoleEnv, CART_POLE, np.arange(3), 5))
    carts = kind.make(kind.cart_pole, 3, CART_POLE)
    carts.reset()
    assert serial.restore(carts.snapshot()) == [0, 1, 2]


def test_close_closes_every_env_and_may_be_called_twice(kind: Kind) -> None:
    script = Script()
    envs = kind.counters(script, 5)
    envs.send(np.zeros(5, np.int64), np.arange(5))
    envs.close()
    envs.close()
    assert script.n_closed == 5


def test_closing_does_not_wait_for_an_env_that_hangs(kind: Kind) -> None:
    envs = kind.counters(Script(on_step=lambda made, t: 4.0 if made == 0 else 0.0), 3)
    envs.send(np.zeros(3, np.int64), np.arange(3))
    start = time.perf_counter()
    envs.close()
    assert time.perf_counter() - start < 3.5


def test_an_env_of_the_other_kind_is_refused(kind: Kind) -> None:
    other = Kind("coroutine" if kind.name == "thread" else "thread")
    with pytest.raises(
        FlatoutError, match=f"run it with executor '{'async' if kind.name == 'thread' else 'thread'}'"
    ):
        kind.make(lambda: other.counter(Script()), 2)


def test_a_buffer_that_the_caller_reuses_is_not_seen_by_envs(kind: Kind) -> None:
    script = Script(seconds=(0.02, 0.02))
    envs = kind.counters(script, 4, batch_size=4, batch_seconds=10.0)
    actions = np.arange(4)[:, None]
    envs.send(actions, np.arange(4))
    actions[:] = 9
    envs.recv()
    assert sorted(int(env.action[0]) for env in script.made) == [0, 1, 2, 3]


def test_observations_of_several_arrays(kind: Kind) -> None:
    space = spaces.Dict(a=spaces.Box(-1, 1, (2,)), b=spaces.Discrete(5))

    class Two(kind.counter):  # type: ignore[name-defined,misc]
        """Observes two arrays."""

        def begin(self, seed: int | None) -> Any:
            super().begin(seed)
            return {"a": np.zeros(2), "b": 0}, {}

        def advance(self, odd: Any) -> Any:
            _, reward, terminated, truncated, info = super().advance(odd)
            t = int(self.buffer[0])
            return {"a": np.full(2, t / 10), "b": t}, reward, terminated, truncated, info

    envs = kind.make(lambda: Two(Script(length=3)), 3, ObsLayout(space))
    envs.reset()
    for t in range(1, 7):
        now = step(envs, np.zeros(3, np.int64))
        assert now.obs[1].tolist() == [t % 3] * 3
        assert np.allclose(now.obs[0], t % 3 / 10)
        if t % 3 == 0:
            assert now.final_obs[1].tolist() == [3] * 3
