"""Returns against a slow reference, with all kinds of episode ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.learning.rollouts import discounted_scan, gae, lambda_returns


def slow_gae(
    reward: npt.NDArray[Any],
    value: npt.NDArray[Any],
    next_value: npt.NDArray[Any],
    terminated: npt.NDArray[Any],
    truncated: npt.NDArray[Any],
    gamma: float,
    lam: float,
) -> npt.NDArray[Any]:
    """GAE by its definition: one env, one step at a time, backwards."""
    n_steps, n_envs = reward.shape
    out = np.zeros_like(reward)
    for n in range(n_envs):
        running = 0.0
        for t in reversed(range(n_steps)):
            future = 0.0 if terminated[t, n] else gamma * next_value[t, n]
            delta = reward[t, n] + future - value[t, n]
            if terminated[t, n] or truncated[t, n]:
                running = 0.0
            running = delta + gamma * lam * running
            out[t, n] = running
    return out


@settings(max_examples=200, deadline=None)
@given(
    n_steps=st.integers(1, 40),
    n_envs=st.integers(1, 4),
    p_term=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    p_trunc=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    gamma=st.floats(0, 1),
    lam=st.floats(0, 1),
    seed=st.integers(0, 2**32 - 1),
)
def test_gae_equals_the_slow_reference(
    n_steps: int, n_envs: int, p_term: float, p_trunc: float, gamma: float, lam: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    shape = (n_steps, n_envs)
    reward, value, next_value = rng.normal(size=(3, *shape))
    terminated, truncated = rng.random(shape) < p_term, rng.random(shape) < p_trunc
    arrays = (reward, value, next_value, terminated, truncated)
    got = gae(*map(torch.from_numpy, arrays), gamma=gamma, gae_lambda=lam)
    np.testing.assert_allclose(got.numpy(), slow_gae(*arrays, gamma, lam), rtol=1e-9, atol=1e-9)


def test_constant_reward_without_end_is_a_geometric_sum() -> None:
    reward = torch.ones(50, 1, dtype=torch.float64)
    zero, never = torch.zeros_like(reward), torch.zeros_like(reward, dtype=torch.bool)
    got = gae(reward, zero, zero, never, never, gamma=0.9, gae_lambda=1.0)
    assert got[0, 0].item() == pytest.approx((1 - 0.9**50) / (1 - 0.9))


def test_truncated_bootstraps_and_terminated_does_not() -> None:
    reward, value = torch.zeros(1, 3), torch.zeros(1, 3)
    next_value = torch.full((1, 3), 10.0)
    terminated = torch.tensor([[False, True, True]])
    truncated = torch.tensor([[True, False, True]])
    got = gae(reward, value, next_value, terminated, truncated, gamma=0.5, gae_lambda=1.0)
    assert got.tolist() == [[5.0, 0.0, 0.0]]


def test_no_advantage_leaks_over_an_episode_end() -> None:
    """A huge reward after the end of an episode must not be seen before it."""
    reward = torch.tensor([[0.0], [0.0], [1e6]])
    zero = torch.zeros(3, 1)
    ended = torch.tensor([[False], [True], [False]])
    never = torch.zeros(3, 1, dtype=torch.bool)
    for terminated, truncated in ((ended, never), (never, ended), (ended, ended)):
        got = gae(reward, zero, zero, terminated, truncated, gamma=1.0, gae_lambda=1.0)
        assert got.flatten().tolist() == [0.0, 0.0, 1e6]


@pytest.mark.parametrize("n_steps", [1, 2, 3, 7, 8, 9, 1000])
def test_scan_solves_its_recurrence(n_steps: int) -> None:
    generator = torch.Generator().manual_seed(n_steps)
    x, decay = torch.rand(2, n_steps, 3, generator=generator, dtype=torch.float64)
    y = discounted_scan(x, decay)
    following = torch.cat([y[1:], torch.zeros(1, 3)])
    torch.testing.assert_close(y, x + decay * following)


@settings(max_examples=40, deadline=None)
@given(
    n_steps=st.integers(1, 9),
    seed=st.integers(0, 10_000),
    mix=st.sampled_from([0.0, 0.3, 0.65, 1.0]),
)
def test_lambda_returns_equal_their_definition(n_steps: int, seed: int, mix: float) -> None:
    rng = np.random.default_rng(seed)
    reward, next_value = rng.normal(size=(2, n_steps, 3))
    terminated, truncated = rng.random((2, n_steps, 3)) < 0.2
    want = np.zeros_like(reward)
    for n in range(3):
        for t in reversed(range(n_steps)):
            thought = 0.0 if terminated[t, n] else next_value[t, n]
            ends = t == n_steps - 1 or terminated[t, n] or truncated[t, n]
            came = thought if ends else want[t + 1, n]
            want[t, n] = reward[t, n] + 0.9 * (mix * came + (1 - mix) * thought)
    got = lambda_returns(
        *map(torch.from_numpy, (reward, next_value, terminated, truncated)), gamma=0.9, mix=mix
    )
    np.testing.assert_allclose(got.numpy(), want, atol=1e-12)
