"""Running statistics against NumPy over everything seen."""

from __future__ import annotations

import numpy as np
import torch

from flatout.learning.normalize import RewardScaler, RunningMoments

CPU = torch.device("cpu")


def test_moments_equal_those_of_all_rows_together() -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(5.0, 3.0, size=(1000, 4))
    moments = RunningMoments((4,), CPU)
    for part in np.split(rows, [1, 10, 400]):
        moments.merge(torch.from_numpy(part))
    np.testing.assert_allclose(moments.mean.numpy(), rows.mean(0))
    np.testing.assert_allclose(moments.var.numpy(), rows.var(0))


def test_rewards_are_divided_by_the_deviation_of_the_discounted_return() -> None:
    """Against a loop over steps, across two rollouts and episode ends."""
    rng = np.random.default_rng(1)
    reward, ended = rng.normal(size=(40, 3)), rng.random((40, 3)) < 0.1
    running, seen = np.zeros(3), []
    for t in range(40):
        running = running + reward[t]
        seen.append(running.copy())
        running = np.where(ended[t], 0.0, running * 0.9)
    scaler = RewardScaler(3, 0.9, CPU)
    first, second = (torch.from_numpy(x).float() for x in (reward[:25], reward[25:]))
    scaler.scaled(first, torch.from_numpy(ended[:25]))
    scaler.commit()
    again, scaled = (scaler.scaled(second, torch.from_numpy(ended[25:])) for _ in range(2))
    scaler.commit()
    assert torch.equal(again, scaled)
    np.testing.assert_allclose(scaler.moments.var.numpy(), np.var(seen), rtol=1e-5)
    np.testing.assert_allclose(scaled.numpy(), reward[25:] / np.std(seen), rtol=1e-4)
