"""Stacked frames are stored once, and come back as the stacks that were seen: episode borders, wrap-around, lost envs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.buffers.capacity import transition_bytes
from flatout.buffers.device_replay import TensorPrioritized, TensorReplay, TensorUniform
from flatout.buffers.priority import Prioritized
from flatout.buffers.replay import Replay, Uniform
from flatout.buffers.rollout import Rollout
from flatout.envs.spaces import ActionLayout, Array, ObsLayout, StackedFrames

CPU = torch.device("cpu")
ACTION = ActionLayout(spaces.Discrete(4))
SIDE = 7


def layouts(frames: int, channels: int) -> tuple[ObsLayout, ObsLayout]:
    """Observations with stacked frames, and the same without a word of that."""
    shape, at = (frames * channels, SIDE, SIDE), spaces.Box(-9e9, 9e9, (2,))
    stacked = StackedFrames(0, 255, shape, np.uint8, frames=frames)
    plain = ObsLayout(spaces.Dict({"at": at, "image": StackedFrames(0, 255, shape, np.uint8, frames=1)}))
    return ObsLayout(spaces.Dict({"at": at, "image": stacked})), plain


class Episodes:
    """Envs with random frames and random ends, whose observations are whole stacks."""

    def __init__(self, n_envs: int, frames: int, channels: int, seed: int, p_end: float) -> None:
        self.n_envs, self._frames, self._p_end = n_envs, frames, p_end
        self._rng = np.random.default_rng(seed)
        self._size = channels
        self.stacks = np.zeros((n_envs, frames * channels, SIDE, SIDE), np.uint8)
        self._count = 0
        for n in range(n_envs):
            self.begin(n)

    def begin(self, n: int) -> None:
        self.stacks[n] = np.concatenate([self._frame()] * self._frames)

    def _frame(self) -> Array:
        return self._rng.integers(0, 256, (self._size, SIDE, SIDE)).astype(np.uint8)

    def _step(self, n: int) -> None:
        self.stacks[n] = np.concatenate([self.stacks[n][self._size :], self._frame()])

    def rollout(self, layout: ObsLayout, n_steps: int) -> Rollout:
        out, rng = Rollout.alloc(layout, ACTION, n_steps, self.n_envs), self._rng
        self._write(out, 0)
        for t in range(n_steps):
            for n in range(self.n_envs):
                self._step(n)
                out.action[t, n], out.reward[t, n] = rng.integers(4), rng.normal()
                out.terminated[t, n], out.truncated[t, n] = rng.random(2) < self._p_end
                if out.truncated[t, n]:
                    out.final_obs[0][t, n], out.final_obs[1][t, n] = self._count, self.stacks[n]
                if out.terminated[t, n] or out.truncated[t, n]:
                    self.begin(n)
            self._count += 1
            self._write(out, t + 1)
        return out

    def _write(self, out: Rollout, t: int) -> None:
        out.obs[0][t], out.obs[1][t] = self._count, self.stacks


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    n_envs=st.integers(1, 3),
    frames=st.integers(2, 5),
    channels=st.integers(1, 3),
    per_env=st.integers(6, 14),
    n_step=st.integers(1, 3),
    p_end=st.sampled_from([0.0, 0.1, 0.5]),
    seed=st.integers(0, 10**6),
)
def test_samples_are_those_of_a_replay_of_stacks(
    n_envs: int, frames: int, channels: int, per_env: int, n_step: int, p_end: float, seed: int
) -> None:
    once, whole = layouts(frames, channels)
    episodes = Episodes(n_envs, frames, channels, seed, p_end)
    for _ in range(seed % 3):  # the first observation stored may be from the middle of an episode
        episodes.rollout(once, 1)
    plain = Replay(whole, ACTION, n_envs, n_envs * per_env)
    here = Replay(once, ACTION, n_envs, n_envs * per_env)
    there = TensorReplay(once, ACTION, n_envs, n_envs * per_env, CPU)
    samplers: list[tuple[Any, Any]] = [
        (Uniform(plain, gamma=0.9, n_step=n_step), Uniform(here, gamma=0.9, n_step=n_step)),
        (Prioritized(plain, gamma=0.9, n_step=n_step), Prioritized(here, gamma=0.9, n_step=n_step)),
        (
            TensorUniform(
                TensorReplay(whole, ACTION, n_envs, n_envs * per_env, CPU), gamma=0.9, n_step=n_step
            ),
            TensorUniform(there, gamma=0.9, n_step=n_step),
        ),
        (Prioritized(plain, gamma=0.9, n_step=n_step), TensorPrioritized(there, gamma=0.9, n_step=n_step)),
    ]
    for k in range(8):
        rollout = episodes.rollout(once, 3 + (seed + k) % 5)
        for replay in (plain, here, there, samplers[2][0].replay):
            replay.add_rollout(rollout)
        assert np.array_equal(here.head, plain.head)
        for reference, sampler in samplers:
            want, got = reference.sample(16), sampler.sample(16)
            for name, a, b in zip(range(99), want.tensors(), got.tensors(), strict=False):
                assert torch.equal(a, b), f"tensor {name} at rollout {k}"
        if k == 4:  # an env is lost: the next rollout does not go on from where it was
            episodes.begin(0)


@pytest.mark.parametrize("n_rollouts", [1, 9])
def test_a_saved_replay_comes_back(n_rollouts: int) -> None:
    once, _ = layouts(4, 1)
    episodes = Episodes(2, 4, 1, seed=1, p_end=0.2)
    episodes.rollout(once, 2)
    replay = Replay(once, ACTION, 2, 24)
    for _ in range(n_rollouts):
        replay.add_rollout(episodes.rollout(once, 5))
    saved = {name: array.copy() for name, array in replay.arrays().items()}
    again, there = Replay(once, ACTION, 2, 24), TensorReplay(once, ACTION, 2, 24, CPU)
    again.restore(saved)
    there.restore(saved)
    want = Uniform(replay, gamma=0.9).sample(32)
    for got in (Uniform(again, gamma=0.9).sample(32), there.sample(want.index, gamma=0.9)):
        assert all(torch.equal(a, b) for a, b in zip(want.tensors(), got.tensors(), strict=True))


def test_a_transition_of_four_frames_takes_the_memory_of_one() -> None:
    stacked = ObsLayout(StackedFrames(0, 255, (4, 84, 84), np.uint8, frames=4))
    assert transition_bytes(stacked, ACTION) == 84 * 84 + 7
    replay = Replay(stacked, ACTION, 8, 100_000)
    assert replay.memory() == "replay: 100,000 transitions, 706.5 MB (each frame stored once)"
