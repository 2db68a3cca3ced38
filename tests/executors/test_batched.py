"""Batched envs in every autoreset mode: the same closed-form episodes, and no transition spans two."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space

from flatout.envs.spaces import Array, ObsLayout
from flatout.errors import EnvError
from flatout.executors.base import Step, step
from flatout.executors.batched import BatchedExecutor

SAME_STEP, NEXT_STEP, DISABLED = AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED
N = 3


class Counters(VectorEnv[Any, Any, Array]):
    """Env i counts to LENGTHS[i]; it observes (episode, count) and earns its count. Reuses its buffers."""

    LENGTHS = np.array([2, 3, 5])
    TRUNCATES = np.array([False, True, True])

    def __init__(self, mode: AutoresetMode, n_envs: int = N, as_objects: bool = True) -> None:
        self.metadata = {"autoreset_mode": mode}
        self.num_envs, self._mode, self._as_objects = n_envs, mode, as_objects
        self.single_observation_space = spaces.Dict(
            {"episode": spaces.Discrete(10_000), "count": spaces.Box(0, 100, (2,))}
        )
        self.observation_space = batch_space(self.single_observation_space, n_envs)
        self.single_action_space = spaces.Discrete(2)
        self.action_space = batch_space(self.single_action_space, n_envs)
        self._lengths = np.resize(self.LENGTHS, n_envs)
        self._truncates = np.resize(self.TRUNCATES, n_envs)
        self._reward = np.zeros(n_envs)
        self._late = np.zeros(n_envs, np.bool_)
        self.seeds: list[int | None] = []

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        mask = (options or {}).get("reset_mask")
        if mask is None:
            self.seeds.append(seed)
            self._episode = np.zeros(self.num_envs, np.int64)
            self._count = np.zeros((self.num_envs, 2))
        else:
            assert self._mode is DISABLED
            self._begin(mask)
        self._late = np.zeros(self.num_envs, np.bool_)
        return self._obs(), {}

    def step(self, actions: Array) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        assert actions.shape == (self.num_envs,)
        infos: dict[str, Any] = {}
        late, stepped = self._late, ~self._late
        self._begin(late)
        self._count[stepped] += 1
        self._reward[:] = self._count[:, 0] * stepped
        done = stepped & (self._count[:, 0] >= self._lengths)
        if self._mode is SAME_STEP and done.any():
            final = {key: value.copy() for key, value in self._obs().items()}
            infos = {
                "final_obs": self._objects(final, done) if self._as_objects else final,
                "_final_obs": done,
            }
            self._begin(done)
        self._late = done if self._mode is NEXT_STEP else np.zeros_like(done)
        return self._obs(), self._reward, done & ~self._truncates, done & self._truncates, infos

    def _begin(self, mask: Array) -> None:
        self._episode[mask] += 1
        self._count[mask] = 0

    def _obs(self) -> dict[str, Array]:
        return {"episode": self._episode, "count": self._count}

    def _objects(self, obs: dict[str, Array], done: Array) -> Array:
        out = np.full(self.num_envs, None, np.object_)
        for i in np.flatnonzero(done):
            out[i] = {key: value[i] for key, value in obs.items()}
        return out


def executor(envs: VectorEnv[Any, Any, Any], seed: int = 5) -> BatchedExecutor:
    layout = ObsLayout(envs.single_observation_space)
    return BatchedExecutor(envs, layout, np.arange(envs.num_envs) + 10, seed)


def play(envs: BatchedExecutor, n_steps: int) -> Step:
    for _ in range(n_steps):
        now = step(envs, np.zeros(N, np.int64))
    return now


def test_a_transition_is_known_in_closed_form() -> None:
    for as_objects in (True, False):
        envs = executor(Counters(SAME_STEP, as_objects=as_objects))
        check_closed_form(envs)
    check_closed_form(executor(Counters(DISABLED)))


def check_closed_form(envs: BatchedExecutor) -> None:
    """The executor sorts Dict keys as the space does: `count`, then `episode`."""
    now = envs.reset()
    assert now.obs[0].tolist() == [[0.0, 0.0]] * N
    for t in range(1, 61):
        now = step(envs, np.zeros(N, np.int64))
        count, episode = t % Counters.LENGTHS, t // Counters.LENGTHS
        ended = count == 0
        assert now.obs[0][:, 0].tolist() == count.tolist()
        assert now.obs[1].tolist() == episode.tolist()
        assert now.reward.tolist() == np.where(ended, Counters.LENGTHS, count).tolist()
        assert now.terminated.tolist() == (ended & ~Counters.TRUNCATES).tolist()
        assert now.truncated.tolist() == (ended & Counters.TRUNCATES).tolist()
        assert now.final_obs[0][ended, 0].tolist() == Counters.LENGTHS[ended].tolist()
        assert now.final_obs[1][ended].tolist() == (episode[ended] - 1).tolist()
        assert now.restarted == []
        episodes = {e.env_id: (e.total_reward, e.length) for e in now.ended}
        assert episodes == {
            int(i) + 10: (sum(range(n + 1)), n) for i, n in enumerate(Counters.LENGTHS) if ended[i]
        }


def test_a_step_that_only_resets_is_no_transition() -> None:
    """NEXT_STEP: what is left without `restarted` is exactly the closed form, env by env."""
    envs = executor(Counters(NEXT_STEP))
    envs.reset()
    seen: list[list[tuple[Any, ...]]] = [[] for _ in range(N)]
    at = [(0.0, 0)] * N
    episodes: list[Any] = []
    for _ in range(60):
        now = step(envs, np.zeros(N, np.int64))
        episodes += now.ended
        for i in range(N):
            after = (float(now.obs[0][i, 0]), int(now.obs[1][i]))
            if i in now.restarted:
                assert (now.reward[i], now.terminated[i], now.truncated[i]) == (0.0, False, False)
                at[i] = after
                continue
            ended = bool(now.terminated[i] or now.truncated[i])
            last = (float(now.final_obs[0][i, 0]), int(now.final_obs[1][i])) if ended else after
            seen[i].append(
                (*at[i], *last, float(now.reward[i]), bool(now.terminated[i]), bool(now.truncated[i]))
            )
            at[i] = after
    for i, length in enumerate(Counters.LENGTHS.tolist()):
        assert len(seen[i]) == 60 - 60 // (length + 1)
        for k, transition in enumerate(seen[i]):
            episode, count = divmod(k, length)
            end, cut = count + 1 == length, bool(Counters.TRUNCATES[i])
            assert transition == (count, episode, count + 1, episode, count + 1, end and not cut, end and cut)
        mine = [(e.total_reward, e.length) for e in episodes if e.env_id == i + 10]
        assert mine == [(sum(range(length + 1)), length)] * len(mine)
        assert len(mine) == (60 + 1) // (length + 1)


@pytest.mark.parametrize("mode", [SAME_STEP, NEXT_STEP, DISABLED])
def test_gymnasiums_own_vector_env_gives_the_same_in_all_modes(mode: AutoresetMode) -> None:
    """SyncVectorEnv resets by mask in any mode, so that its NEXT_STEP has no step that only resets either."""

    def trajectory(mode: AutoresetMode) -> list[tuple[Any, ...]]:
        made = SyncVectorEnv([lambda: gym.make("CartPole-v1", max_episode_steps=20)] * 4, autoreset_mode=mode)
        envs = executor(made)
        rng = np.random.default_rng(0)
        envs.reset()
        steps = []
        for _ in range(100):
            now = step(envs, rng.integers(2, size=4))
            assert now.restarted == []
            ended = now.terminated | now.truncated
            arrays = (now.obs[0], now.reward, now.terminated, now.truncated, now.final_obs[0][ended])
            steps.append((*(a.tolist() for a in arrays), now.ended))
        return steps

    got = trajectory(mode)
    assert got == trajectory(SAME_STEP)
    assert sum(len(s[-1]) for s in got) > 15


def test_seeds_are_new_after_each_reset_and_restore() -> None:
    wrapped = Counters(SAME_STEP)
    envs = executor(wrapped)
    envs.reset()
    step(envs, np.zeros(N, np.int64))
    envs.mark()
    snapshot = envs.snapshot()
    envs.reset()
    again = Counters(SAME_STEP)
    resumed = executor(again)
    assert resumed.restore(snapshot) == [0, 1, 2]
    assert resumed.current.obs[0].tolist() == [[0.0, 0.0]] * N
    assert again.seeds == wrapped.seeds[1:]
    assert wrapped.seeds[0] != wrapped.seeds[1]
    assert len(play(resumed, 2).ended) == 1


class Broken(Counters):
    """Does one thing wrong, from the second step on."""

    def __init__(self, fault: str, mode: AutoresetMode = SAME_STEP) -> None:
        super().__init__(mode)
        self._fault, self._t = fault, 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        if self._fault == "ignored mask" and options:
            options = None
        return super().reset(seed=seed, options=options)

    def step(self, actions: Array) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        obs, reward, terminated, truncated, infos = super().step(actions)
        self._t += 1
        if self._t < 2:
            return obs, reward, terminated, truncated, infos
        if self._fault == "raise":
            raise ValueError("broken\npipe")
        if self._fault == "no final":
            infos = {}
        if self._fault == "wrong reward":
            reward = reward[:, None]
        if self._fault == "wrong obs":
            obs = obs | {"count": obs["count"][:2]}
        if self._fault == "nan obs":
            obs = obs | {"count": np.where(np.arange(N)[:, None] == 1, np.nan, obs["count"])}
        if self._fault == "nan final":
            infos["final_obs"][0]["count"][0] = np.inf
        if self._fault == "nan reward":
            reward = np.array([0.0, 0.0, np.nan])
        if self._fault == "end at begin" and self._t > 2:
            terminated = np.ones(N, np.bool_)
        return obs, reward, terminated, truncated, infos


@pytest.mark.parametrize(
    ("fault", "mode", "message"),
    [
        ("raise", SAME_STEP, "the batched env raised in step at step 2: ValueError: broken pipe"),
        ("no final", SAME_STEP, "gives no infos\\['final_obs'\\] where an episode ended"),
        ("wrong reward", SAME_STEP, "reward has shape \\(3, 1\\) at step 2; its 3 envs make \\(3,\\)"),
        ("wrong obs", SAME_STEP, "observation has shape \\(2, 2\\) at step 2; its 3 envs make \\(3, 2\\)"),
        ("nan obs", SAME_STEP, "env 11 gave a NaN observation at step 2"),
        ("nan final", SAME_STEP, "env 10 gave a NaN observation at step 2"),
        ("nan reward", SAME_STEP, "env 12 gave a NaN reward at step 2"),
        ("ignored mask", DISABLED, "resets all its envs where reset\\(options"),
        ("end at begin", NEXT_STEP, "ended an episode in the very step that began it"),
    ],
)
def test_a_fault_is_one_line(fault: str, mode: AutoresetMode, message: str) -> None:
    envs = executor(Broken(fault, mode))
    envs.reset()
    with pytest.raises(EnvError, match=message) as caught:
        play(envs, 4)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("mode", [SAME_STEP, NEXT_STEP, DISABLED])
def test_a_step_costs_no_more_per_env_with_many_envs(mode: AutoresetMode) -> None:
    def seconds_per_env(n_envs: int) -> float:
        envs = executor(Counters(mode, n_envs, as_objects=False))
        envs.reset()
        actions = np.zeros(n_envs, np.int64)
        times = []
        for _ in range(60):
            began = perf_counter()
            step(envs, actions)
            times.append(perf_counter() - began)
        return min(times) / n_envs

    assert seconds_per_env(1024) < 1.2 * seconds_per_env(8)
