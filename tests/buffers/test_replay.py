"""Replay against plain lists: all kinds of episode ends, wrap-around, lost envs, in RAM and on a device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.buffers.batch import ReplayBatch
from flatout.buffers.device_replay import TensorPrioritized, TensorReplay, TensorUniform
from flatout.buffers.priority import Prioritized
from flatout.buffers.replay import Replay, Uniform
from flatout.buffers.rollout import Rollout, TensorRollout
from flatout.envs.spaces import ActionLayout, Array, ObsLayout
from flatout.errors import FlatoutError
from tests.buffers.plain_replay import ACTION, OBS, Filled, PlainReplay, expected

ends = st.sampled_from([0.0, 0.05, 0.3, 1.0])


def check(batch: ReplayBatch, plain: PlainReplay, gamma: float, n_step: int) -> None:
    """Compare all of a batch with the plain lists; terminated steps have no bootstrap observation."""
    want = expected(plain, batch.index.numpy(), gamma, n_step)
    alive = want["discount"] > 0
    for name, got in (("obs", batch.obs), ("next_obs", batch.next_obs)):
        rows = alive if name == "next_obs" else slice(None)
        for leaf, right in zip(got, want[name], strict=True):
            assert leaf.numpy().dtype == right.dtype
            np.testing.assert_array_equal(leaf.numpy()[rows], right[rows])
    np.testing.assert_array_equal(batch.action.numpy(), want["action"])
    np.testing.assert_array_equal(batch.serial.numpy(), want["serial"])
    np.testing.assert_allclose(batch.reward.numpy(), want["reward"], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(batch.discount.numpy(), want["discount"], rtol=1e-6)
    # By what observations say of themselves: one episode, as many steps on as the discount tells, and no more than n.
    (before, _), (after, _) = batch.obs, batch.next_obs
    went = (after - before).numpy()[alive]
    assert (went[:, 0] == 0).all()
    assert ((went[:, 1] >= 1) & (went[:, 1] <= n_step)).all()
    np.testing.assert_allclose(batch.discount.numpy()[alive], gamma ** went[:, 1], rtol=1e-5)


@settings(max_examples=120, deadline=None)
@given(
    n_envs=st.integers(1, 4),
    per_env=st.integers(6, 12),
    n_step=st.integers(1, 5),
    p_terminated=ends,
    p_truncated=ends,
    n_events=st.integers(1, 25),
    seed=st.integers(0, 2**32 - 1),
)
def test_samples_equal_those_of_plain_lists(
    n_envs: int,
    per_env: int,
    n_step: int,
    p_terminated: float,
    p_truncated: float,
    n_events: int,
    seed: int,
) -> None:
    filled = Filled(n_envs, per_env, seed, p_terminated=p_terminated, p_truncated=p_truncated)
    gamma = 0.9
    here = Prioritized(filled.replay, gamma=gamma, n_step=n_step)
    there = TensorPrioritized(filled.tensors, gamma=gamma, n_step=n_step)
    for event in range(n_events):
        filled.anything()
        if event % 3 and event < n_events - 1:
            continue  # several events between two looks at it
        eligible = sorted(filled.plain.eligible(n_step))
        assert np.flatnonzero(here.priorities).tolist() == eligible
        assert there.priorities.nonzero().squeeze(1).tolist() == eligible
        index = np.array(eligible, np.int64)
        if len(index):
            check(filled.replay.sample(index, gamma=gamma, n_step=n_step), filled.plain, gamma, n_step)
            lifted = torch.from_numpy(index)
            check(filled.tensors.sample(lifted, gamma=gamma, n_step=n_step), filled.plain, gamma, n_step)
            check(Uniform(filled.replay, gamma=gamma, n_step=n_step).sample(8), filled.plain, gamma, n_step)
            drawn = TensorUniform(filled.tensors, gamma=gamma, n_step=n_step).sample(8)
            check(drawn, filled.plain, gamma, n_step)
            assert set(drawn.index.tolist()) <= set(eligible)
        else:
            with pytest.raises(FlatoutError, match="collect more before sampling"):
                there.sample(8)


def test_an_incomplete_n_step_window_ends_at_the_newest_step() -> None:
    filled = Filled(1, 8, 0, p_terminated=0, p_truncated=0)
    for _ in range(3):
        filled.step()
    batch = filled.replay.sample(np.array([1]), gamma=0.5, n_step=5)
    rewards = [step.reward for step in filled.plain.steps[0][1:]]
    assert batch.reward.item() == pytest.approx(rewards[0] + 0.5 * rewards[1])
    assert batch.discount.item() == 0.25
    assert batch.next_obs[0].tolist() == [list(map(float, filled.plain.now[0]))]


def test_slots_without_a_transition_are_refused() -> None:
    filled = Filled(2, 8, 0, p_terminated=0, p_truncated=1)
    filled.step()
    for index in (1, 2, 5, -1, 10_000):  # a final observation, the newest one, never reached, outside
        with pytest.raises(IndexError, match=f"slot {index} of the replay holds no transition"):
            filled.replay.sample(np.array([0, index]), gamma=0.9)


@pytest.mark.parametrize("n_step", [1, 3])
def test_uniform_sampling_is_uniform(n_step: int) -> None:
    filled = Filled(3, 9, 5, p_truncated=0.3)
    for _ in range(40):
        filled.anything()
    eligible = sorted(filled.plain.eligible(n_step))
    for sampler in (
        Uniform(filled.replay, gamma=0.9, n_step=n_step, seed=1),
        TensorUniform(filled.tensors, gamma=0.9, n_step=n_step, seed=1),
    ):
        drawn = torch.cat([sampler.sample(1000).index for _ in range(20)]).numpy()
        counts = np.bincount(drawn, minlength=filled.replay.size)[eligible]
        assert counts.sum() == len(drawn)
        assert chi_square_is_plausible(counts, np.full(len(eligible), len(drawn) / len(eligible)))


def chi_square_is_plausible(counts: Array, mean: Array) -> bool:
    """Whether p is above 1 in 10,000 (Wilson and Hilferty's normal approximation)."""
    freedom = len(counts) - 1
    statistic = ((counts - mean) ** 2 / mean).sum()
    normal = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5
    return bool(normal < 3.72)


def test_state_is_restored_exactly_in_ram_and_on_a_device() -> None:
    filled = Filled(3, 9, 7)
    for n_events in (2, 30):  # before and after the rings were gone around
        for _ in range(n_events):
            filled.anything()
        saved = {name: array.copy() for name, array in filled.replay.arrays().items()}
        for name, array in filled.tensors.arrays().items():
            if name in ("head", "start", "end"):
                np.testing.assert_array_equal(array, saved[name])
        again, there = Replay(OBS, ACTION, 3, 27), TensorReplay(OBS, ACTION, 3, 27, torch.device("cpu"))
        again.restore(saved)
        there.restore(saved)
        index = np.array(sorted(filled.plain.eligible(2)))
        check(again.sample(index, gamma=0.9, n_step=2), filled.plain, 0.9, 2)
        check(there.sample(torch.from_numpy(index), gamma=0.9, n_step=2), filled.plain, 0.9, 2)
        assert {k: v.tobytes() for k, v in again.arrays().items()} == {
            k: v.tobytes() for k, v in saved.items()
        }
        assert {k: v.tobytes() for k, v in there.arrays().items()} == {
            k: v.tobytes() for k, v in saved.items()
        }


def test_the_state_of_another_replay_is_refused() -> None:
    filled = Filled(3, 9, 7)
    for _ in range(30):
        filled.anything()
    saved = filled.replay.arrays()
    with pytest.raises(FlatoutError, match="the saved replay has 3 envs, this run 2; use as many"):
        Replay(OBS, ACTION, 2, 27).restore(saved)
    with pytest.raises(FlatoutError, match="use the same buffer size and env"):
        Replay(OBS, ACTION, 3, 60).restore(saved)
    other = ObsLayout(spaces.Box(-1, 1, (4,)))
    with pytest.raises(
        FlatoutError, match=r"obs\.0 is float32 \(3, 10, 2\), this run's float32 \(3, 10, 4\)"
    ):
        Replay(other, ACTION, 3, 27).restore(saved)


def test_a_rollout_on_the_device_is_stored_as_one_in_ram() -> None:
    filled = Filled(2, 20, 3)
    filled.rollout(7)
    source = Rollout.alloc(OBS, ACTION, 7, 2)
    on_device = TensorRollout(OBS, ACTION, 7, 2, torch.device("cpu"))
    rng = np.random.default_rng(0)
    source.truncated[:] = rng.random((7, 2)) < 0.4
    source.obs[0][:], source.final_obs[0][:] = rng.normal(size=(8, 2, 2)), rng.normal(size=(7, 2, 2))
    on_device.truncated.copy_(torch.from_numpy(source.truncated))
    for to, leaf in zip(
        (*on_device.obs, *on_device.final_obs), (*source.obs, *source.final_obs), strict=True
    ):
        to.copy_(torch.from_numpy(leaf))
    filled.replay.add_rollout(source)
    filled.tensors.add_rollout(on_device)
    one, other = filled.replay.arrays(), filled.tensors.arrays()
    for name, array in one.items():
        np.testing.assert_array_equal(array, other[name])
    index = np.flatnonzero(Prioritized(filled.replay, gamma=0.9).priorities)
    here = filled.replay.sample(index, gamma=0.9)
    there = filled.tensors.sample(torch.from_numpy(index), gamma=0.9)
    assert torch.equal(here.obs[0], there.obs[0])
    assert torch.equal(here.next_obs[0], there.next_obs[0])


def test_continuous_actions_and_scalar_observations_keep_their_dtype() -> None:
    obs = ObsLayout(spaces.Tuple((spaces.Discrete(5), spaces.MultiBinary(3))))
    replay = Replay(obs, ActionLayout(spaces.Box(-1, 1, (2,))), 2, 10)
    rollout = Rollout.alloc(obs, replay.action_layout, 1, 2)
    second = [[1, 1, 1], [0, 0, 0]]
    rollout.obs[0][:] = [[3, 4], [1, 2]]
    rollout.obs[1][:] = [[[0, 1, 1], [1, 0, 0]], second]
    rollout.action[0] = [[0.5, -1], [1, 0]]
    replay.add_rollout(rollout)
    batch = replay.sample(np.array([0, 6]), gamma=0.9)
    assert batch.obs[0].tolist() == [3, 4]
    assert batch.next_obs[1].tolist() == second
    assert [leaf.dtype for leaf in batch.obs] == [torch.int64, torch.int8]
    assert batch.action.tolist() == [[0.5, -1], [1, 0]]
    assert batch.action.dtype == torch.float32


def test_device_replay_never_waits_for_the_device() -> None:
    """On `meta` a host sync or a device mix-up raises."""
    meta = torch.device("meta")
    replay = TensorReplay(OBS, ACTION, 4, 40, meta)
    samplers: list[TensorPrioritized | TensorUniform] = [
        TensorPrioritized(replay, gamma=0.9, n_step=3),
        TensorUniform(replay, gamma=0.9, n_step=3),
    ]
    rollout = TensorRollout(OBS, ACTION, 5, 4, meta)
    for _ in range(3):
        replay.add_rollout(rollout)
        for sampler in samplers:
            batch = sampler.sample(16)
            assert batch.next_obs[1].shape == (16, 1, 7, 7)
            assert batch.obs[1].dtype == torch.uint8
            sampler.update(batch.index, batch.serial, batch.reward)


def test_a_replay_too_small_is_refused() -> None:
    with pytest.raises(
        FlatoutError, match="a replay of 7 transitions is too small for 4 envs; use at least 8"
    ):
        Replay(OBS, ACTION, 4, 7)
    with pytest.raises(
        FlatoutError, match="3-step returns of 4 envs need a buffer of at least 16 transitions"
    ):
        Uniform(Replay(OBS, ACTION, 4, 12), gamma=0.9, n_step=3)
    with pytest.raises(FlatoutError, match="n_step is 0"):
        Uniform(Replay(OBS, ACTION, 4, 12), gamma=0.9, n_step=0)
    for sampler in (Uniform, Prioritized):
        with pytest.raises(FlatoutError, match="holds no 2-step transition yet; collect more"):
            sampler(Replay(OBS, ACTION, 4, 12), gamma=0.9, n_step=2).sample(4)
