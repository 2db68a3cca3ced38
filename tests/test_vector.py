"""make_vec: the same trajectories, spaces and infos as Gymnasium's own SyncVectorEnv in SAME_STEP mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium as gym
import gymnasium.wrappers.vector as vector_wrappers
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

import flatout
from flatout.errors import EnvError, FlatoutError
from flatout.executors.base import Step
from flatout.vector import VecEnv
from tests.known import Match

N = 3


class Talkative(gym.Env[Any, Any]):
    """Its infos hold the step number in several types, some of them only at some steps."""

    observation_space = spaces.Dict(
        {"float64": spaces.Box(-1, 1, (2,), np.float64), "bytes": spaces.Box(0, 255, (3,), np.uint8)}
    )
    action_space = spaces.Discrete(2)

    def __init__(self, length: int = 4, truncate: bool = False) -> None:
        self.length, self._truncate = length, truncate

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self._obs(), {"began": self.np_random.random(), "options": str(options)}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        end = self.t == self.length
        info: dict[str, Any] = {"t": self.t, "nested": {"array": np.full(2, self.t), "text": "x" * self.t}}
        if self.t % 2:
            info["odd"] = 0.5
        return self._obs(), 0.1 * self.t, end and not self._truncate, end and self._truncate, info

    def _obs(self) -> dict[str, Any]:
        # A third of a float64 has no float32: what is rounded on the way shows.
        return {"float64": self.np_random.random(2) / 3, "bytes": np.full(3, self.t, np.uint8)}

    def double(self, x: int) -> int:
        return 2 * x


class Taciturn(Talkative):
    """Has random episode lengths, and infos only at the second and the last step."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        obs, _ = super().reset(seed=seed, options=options)
        self.length = int(self.np_random.integers(2, 9))
        return obs, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        *result, info = super().step(action)
        return *result, info if self.t in (2, self.length) else {}


def same(a: Any, b: Any) -> bool:
    """Equal in structure, dtypes and values."""
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, np.ndarray) and a.dtype == np.object_:
        return bool(b.dtype == np.object_) and all(map(same, a, b))
    if isinstance(a, np.ndarray):
        return bool(a.dtype == b.dtype and np.array_equal(a, b))
    return bool(a == b)


KINDS = ("serial", "process", "thread")


def peers(
    make: Callable[[], gym.Env[Any, Any]], kind: str = "auto", mode: AutoresetMode = AutoresetMode.SAME_STEP
) -> tuple[VecEnv, SyncVectorEnv[Any, Any]]:
    theirs = SyncVectorEnv([make] * N, autoreset_mode=mode)
    return flatout.make_vec(make, N, kind, autoreset_mode=mode), theirs


CASES: dict[str, Callable[[], gym.Env[Any, Any]]] = {
    "CartPole": partial(gym.make, "CartPole-v1"),
    "Pendulum": partial(gym.make, "Pendulum-v1", max_episode_steps=20),
    "talkative": Talkative,
    "talkative, truncated": partial(Talkative, 3, True),
    "taciturn": Taciturn,
    **{
        f"match {kind}": partial(Match, kind)
        for kind in ("discrete", "multidiscrete", "dict", "tuple", "image")
    },
    "match box": partial(Match, "box", "box"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_every_step_equals_gymnasiums_own(case: str, kind: str) -> None:
    ours, theirs = peers(CASES[case], kind)
    assert isinstance(ours, VectorEnv)
    assert ours.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    assert ours.num_envs == N
    for name in ("single_observation_space", "single_action_space", "observation_space", "action_space"):
        assert getattr(ours, name) == getattr(theirs, name)
    ours.action_space.seed(0)
    for seed in (7, [5, None, 3], None):
        if seed == [5, None, 3]:  # an unseeded env of theirs goes on where ours does
            assert same(ours.reset(seed=5), theirs.reset(seed=5))
        assert same(ours.reset(seed=seed), theirs.reset(seed=seed))
        for _ in range(60):
            actions = ours.action_space.sample()
            got, want = ours.step(actions), theirs.step(actions)
            assert same(got, want)
            assert got[0] in ours.observation_space
    ours.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ["CartPole", "taciturn"])
def test_with_next_step_too(case: str, kind: str) -> None:
    ours, theirs = peers(CASES[case], kind, AutoresetMode.NEXT_STEP)
    ours.action_space.seed(0)
    n_ended = 0
    for seed in (7, None):  # the second reset comes right after an end in some envs
        assert same(ours.reset(seed=seed), theirs.reset(seed=seed))
        for _ in range(48):
            actions = ours.action_space.sample()
            got, want = ours.step(actions), theirs.step(actions)
            assert same(got, want)
            n_ended += int((got[2] | got[3]).sum())
    assert n_ended > N
    ours.close()


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "statistics": vector_wrappers.RecordEpisodeStatistics,
    "normalized observations": vector_wrappers.NormalizeObservation,
    "normalized rewards": vector_wrappers.NormalizeReward,
    "flat": vector_wrappers.FlattenObservation,
    "infos as a list": vector_wrappers.DictInfoToList,
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_gymnasiums_vector_wrappers_work(wrapper: str) -> None:
    pair = peers(CASES["CartPole"], "serial", AutoresetMode.NEXT_STEP)
    ours, theirs = (WRAPPERS[wrapper](envs) for envs in pair)
    assert same(ours.reset(seed=1), theirs.reset(seed=1))
    for _ in range(60):
        got, want = (list(envs.step(np.ones(N, np.int64))) for envs in (ours, theirs))
        for result in (got, want):
            if wrapper == "statistics" and "episode" in result[-1]:
                del result[-1]["episode"]["t"]  # the time
        assert same(tuple(got[:4]), tuple(want[:4]))
        assert got[4] == want[4] if wrapper == "infos as a list" else same(got[4], want[4])


@pytest.mark.parametrize("case", ["CartPole", "talkative"])
def test_send_and_recv_equal_step(case: str) -> None:
    a, b = (flatout.make_vec(CASES[case], N) for _ in range(2))
    assert same(a.reset(), b.reset())
    for _ in range(50):
        actions = np.ones(N, np.int64)
        a.send(actions)
        rows, *received = a.recv()
        assert rows.tolist() == [0, 1, 2]
        assert same(tuple(received), b.step(actions))


def trajectory(envs: VecEnv, n_steps: int = 40) -> list[Any]:
    return [envs.step(np.arange(N) % 2)[0].tolist() for _ in range(n_steps)]


def test_a_seed_determines_all_later_episodes() -> None:
    a = flatout.make_vec("CartPole-v1", N)
    a.reset(seed=1)
    trajectory(a, 7)  # whatever went before
    a.reset(seed=4)
    first = trajectory(a)
    a.reset()
    again = trajectory(a)
    b = flatout.make_vec("CartPole-v1", N, seed=9)
    b.reset(seed=4)
    assert trajectory(b) == first
    b.reset()
    assert trajectory(b) == again
    assert again != first


def test_without_a_seed_the_first_reset_uses_make_vecs_seed() -> None:
    obs = [flatout.make_vec("CartPole-v1", N, seed=seed).reset()[0].tolist() for seed in (0, 0, 1)]
    assert obs[0] == obs[1] != obs[2]
    assert len({tuple(row) for row in obs[0]}) == N


@pytest.mark.parametrize("kind", KINDS)
def test_a_reset_mask_resets_only_some_envs(kind: str) -> None:
    ours, theirs = peers(Talkative, kind)
    for envs in (ours, theirs):
        envs.reset(seed=0)
        envs.step(np.zeros(N, np.int64))
    mask = np.array([True, False, True])
    got = ours.reset(seed=8, options={"reset_mask": mask, "level": 2})
    assert same(got, theirs.reset(seed=8, options={"reset_mask": mask, "level": 2}))
    assert got[0]["bytes"][:, 0].tolist() == [0, 1, 0]
    for _ in range(6):
        assert same(ours.step(np.zeros(N, np.int64)), theirs.step(np.zeros(N, np.int64)))
    ours.close()


def test_returned_arrays_are_copies_unless_copy_is_false() -> None:
    for copy in (True, False):
        envs = flatout.make_vec("CartPole-v1", N, copy=copy)
        envs.reset()
        obs, *_ = envs.step(np.ones(N, np.int64))
        before = obs.copy()
        later, *_ = envs.step(np.ones(N, np.int64))
        assert np.array_equal(obs, before) == copy
        assert np.shares_memory(obs, later) != copy


def test_final_observations_are_not_overwritten() -> None:
    envs = flatout.make_vec(Taciturn, N)
    envs.reset(seed=0)
    given: list[dict[str, Any]] = []
    kept: list[dict[str, Any]] = []
    for _ in range(40):
        infos = envs.step(np.zeros(N, np.int64))[-1]
        given += [obs for obs in infos.get("final_obs", ()) if obs is not None]
        kept += [{k: v.copy() for k, v in obs.items()} for obs in given[len(kept) :]]
    assert len(given) > 10
    assert all(map(same, given, kept))


@pytest.mark.parametrize("kind", KINDS)
def test_env_attributes_and_methods_can_be_used(kind: str) -> None:
    envs = flatout.make_vec(Talkative, N, kind)
    envs.reset()
    assert envs.call("double", 4) == (8, 8, 8)
    envs.set_attr("length", [2, 3, 4])
    assert envs.get_attr("length") == (2, 3, 4)
    envs.step(np.zeros(N, np.int64))
    assert envs.step(np.zeros(N, np.int64))[2].tolist() == [True, False, False]
    with pytest.raises(AttributeError, match="breadth"):
        envs.get_attr("breadth")
    assert envs.executor.apply(lambda env: env.get_wrapper_attr("length"), [2, -3, 2]) == [4, 2, 4]
    envs.close()


@pytest.mark.parametrize("kind", ["serial", "process"])
def test_envs_are_rendered(kind: str) -> None:
    images = flatout.make_vec("CartPole-v1", 2, kind, env_kwargs={"render_mode": "rgb_array"})
    images.reset()
    assert [frame.shape for frame in images.render()] == [(400, 600, 3)] * 2
    images.close()


def test_a_lost_env_is_a_truncated_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    envs = flatout.make_vec("CartPole-v1", N)
    envs.reset()
    recv = envs.executor.recv

    def lose_one() -> Step:
        now = recv()
        now.final_obs[0][1] = 7.0
        return replace(now, restarted=[1])

    monkeypatch.setattr(envs.executor, "recv", lose_one)
    _, rewards, terminations, truncations, infos = envs.step(np.ones(N, np.int64))
    assert rewards.tolist() == [1.0, 0.0, 1.0]
    assert terminations.tolist() == [False] * N
    assert truncations.tolist() == infos["_final_obs"].tolist() == [False, True, False]
    assert infos["final_obs"][1].tolist() == [7.0] * 4
    assert infos["final_info"]["restarted"].tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"executor": "seriel"},
            "executor is 'seriel'; it must be one of auto, serial, .* did you mean 'serial'",
        ),
        ({"n_envs": 0}, "n_envs must be at least 1, got 0"),
        ({"n_envs": "2"}, "n_envs must be a whole number, got '2'"),
        ({"n_envs": 2, "num_envs": 3}, "n_envs is 2 and num_envs 3; both mean the same, so give one"),
        (
            {"autoreset_mode": "Disabled"},
            "autoreset_mode is 'Disabled'; it must be 'SAME_STEP' or 'NEXT_STEP'",
        ),
        ({"n_workers": 3}, "executor 'auto' takes no option 'n_workers'"),
        ({"executor": "process", "n_worker": 3}, "'process' takes no option 'n_worker'; did you mean"),
        ({"executor": "process", "n_workers": 0}, "n_workers must be at least 1, got 0"),
        ({"executor": "async"}, "'async' is for envs with async def reset and step"),
        ({"env": "CartPole-v7"}, "unknown env 'CartPole-v7'"),
    ],
)
def test_a_wrong_argument_is_one_line(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(FlatoutError, match=message) as caught:
        flatout.make_vec(**({"env": "CartPole-v1"} | arguments))
    assert "\n" not in str(caught.value)


def test_wrong_seeds_masks_and_spaces_are_one_line() -> None:
    envs = flatout.make_vec("CartPole-v1", N)
    with pytest.raises(FlatoutError, match="2 seeds for 3 envs"):
        envs.reset(seed=[1, 2])
    with pytest.raises(FlatoutError, match="an array of 3 bools"):
        envs.reset(options={"reset_mask": [True, False, True]})

    class Chatty(Talkative):
        action_space = spaces.Text(3)  # type: ignore[assignment]

    with pytest.raises(EnvError, match="action_space is a Text"):
        flatout.make_vec(Chatty)


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_actions_are_one_line_and_step_nothing(kind: str) -> None:
    envs = flatout.make_vec("CartPole-v1", num_envs=N, executor=kind)
    assert envs.num_envs == N
    envs.reset(seed=1)
    for actions, message in (
        ([0, 1], r"^2 actions for 3 envs; give an array of shape \(3,\)$"),
        ([0, 1, 0, 1], "^4 actions for 3 envs"),
        ([[0], [1], [0]], r"^actions of shape \(3, 1\) for 3 envs"),
        (1, r"^actions of shape \(\) for 3 envs"),
        ([0.0, 1.0, 0.0], r"^actions are float64; the action space Discrete\(2\) takes integers$"),
        ([0, 1, 2], r"^action 2 of env 2 is outside the action space Discrete\(2\)$"),
    ):
        with pytest.raises(FlatoutError, match=message):
            envs.step(actions)
    with pytest.raises(FlatoutError, match=r"rows must be env indices from 0 to 2, got \[0, 1, 3\]"):
        envs.send([0, 0, 0], np.array([0, 1, 3]))
    fresh = flatout.make_vec("CartPole-v1", N, "serial")
    fresh.reset(seed=1)
    assert same(envs.step([0, 1, 1]), fresh.step([0, 1, 1]))
    envs.close()


@pytest.mark.parametrize("kind", KINDS)
def test_closed_envs_refuse_everything(kind: str) -> None:
    envs = flatout.make_vec("CartPole-v1", N, kind)
    envs.reset()
    envs.close()
    envs.close()
    actions = np.zeros(N, np.int64)
    calls: list[Callable[[], Any]] = [
        envs.reset, envs.recv, envs.render, partial(envs.step, actions), partial(envs.send, actions),
        partial(envs.get_attr, "spec"), partial(envs.set_attr, "x", 1),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(
            FlatoutError, match=r"^the envs are closed; make new ones with flatout\.make_vec$"
        ):
            call()


class Odd(gym.Env[Any, Any]):
    """Its second observation is the one that it is given."""

    action_space = spaces.Discrete(2)

    def __init__(self, space: gym.Space[Any], odd: Any) -> None:
        self.observation_space, self._odd = space, odd

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self._odd, 0.0, False, False, {}


BOX = spaces.Box(-1, 1, (3,), np.float32)


@pytest.mark.parametrize("kind", ["serial", "thread"])
@pytest.mark.parametrize(
    ("space", "odd", "message"),
    [
        (
            BOX,
            np.zeros(2, np.float32),
            r"observation is float32 of shape \(2,\); its space is a Box of shape",
        ),
        (BOX, np.float32(0.5), r"observation is float32 of shape \(\); its space is a Box"),
        (BOX, None, "observation is a NoneType; its space is a Box"),
        (spaces.Discrete(3), 9, r"observation is 9, outside Discrete\(3\)"),
        (spaces.Discrete(3), 1.5, r"observation is a float; its space is Discrete\(3\)"),
        (
            spaces.Box(0, 255, (3,), np.uint8),
            np.full(3, 300),
            r"observation is array\(\[300, 300, 300\]\), outside",
        ),
        (spaces.Dict(a=BOX, b=BOX), {"a": np.zeros(3, np.float32)}, "observation lacks 'b'"),
    ],
)
def test_an_observation_out_of_its_space_is_named(
    space: gym.Space[Any], odd: Any, message: str, kind: str
) -> None:
    envs = flatout.make_vec(partial(Odd, space, odd), 1, kind)
    envs.reset()
    with pytest.raises(EnvError, match=f"^env 0 at step 1: {message}") as caught:
        envs.step([0])
    assert "\n" not in str(caught.value)
    envs.close()


def test_an_observation_out_of_its_bounds_is_noted_once() -> None:
    envs = flatout.make_vec(partial(Odd, spaces.Dict(x=BOX), {"x": np.full(3, 7, np.float32)}), N, "serial")
    envs.reset()
    for _ in range(3):
        envs.step(np.zeros(N, np.int64))
    assert envs.notes == ["env 0: observation['x'] is outside the bounds that its space declares"]
