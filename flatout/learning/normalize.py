"""Running statistics of observations and of discounted returns, merged once per rollout."""

from __future__ import annotations

import torch
from torch import Tensor

from flatout.learning.rollouts import discounted_scan

REWARD_CLIP = 10.0
EPSILON = 1e-8


class RunningMoments:
    """Running mean and variance, merged batch by batch (Chan et al. 1979), in float64."""

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self.mean = torch.zeros(shape, dtype=torch.float64, device=device)
        self.var = torch.ones(shape, dtype=torch.float64, device=device)
        self.count = torch.zeros((), dtype=torch.float64, device=device)

    def merge(self, rows: Tensor) -> None:
        """Merge rows (B, ...); out of memory leaves no trace."""
        self.set(*self.merged(rows))

    def merged(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What mean, variance and count would be with these rows."""
        rows = rows.double()
        n = float(len(rows))
        mean, var = rows.mean(0), rows.var(0, correction=0)
        total = self.count + n
        delta = mean - self.mean
        spread = self.var * self.count + var * n + delta.square() * (self.count * n / total)
        return self.mean + delta * (n / total), spread / total, total

    def set(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        """Replace mean, variance and count, in place: nothing can run out of memory."""
        self.mean.copy_(mean)
        self.var.copy_(var)
        self.count.copy_(count)

    def state(self) -> dict[str, Tensor]:
        """Mean, variance and count, for a checkpoint."""
        return {"mean": self.mean, "var": self.var, "count": self.count}


class RewardScaler:
    """Divides rewards by the running standard deviation of the discounted return (Engstrom et al. 2020)."""

    def __init__(self, n_envs: int, gamma: float, device: torch.device) -> None:
        self._gamma = gamma
        self.moments = RunningMoments((), device)
        self.carry = torch.zeros(n_envs, device=device)
        """Each env's discounted return so far, discounted once more; zero where an episode just ended."""
        self._merged: tuple[Tensor, ...] = ()

    def scaled(self, reward_tn: Tensor, ended_tn: Tensor) -> Tensor:
        """A rollout's rewards, scaled by the statistics with these included; they are kept by `commit`.

        Until then the same call gives the same again, so it can be repeated, and captured.
        """
        # y[t] = r[t] + γ (1 - ended[t-1]) y[t-1] is the scan of GAE, forwards in time.
        decay = self._gamma * (~ended_tn).float()
        first = reward_tn.clone()
        first[0] += self.carry
        before = torch.cat([torch.zeros_like(decay[:1]), decay[:-1]])
        returns_tn = discounted_scan(first.flip(0), before.flip(0)).flip(0)
        mean, var, count = self.moments.merged(returns_tn.reshape(-1))
        self._merged = mean, var, count, returns_tn[-1] * decay[-1]
        return (reward_tn / (var + EPSILON).sqrt()).clamp(-REWARD_CLIP, REWARD_CLIP).float()

    def commit(self) -> None:
        """Keep the statistics of the last `scaled`."""
        *moments, carry = self._merged
        self.moments.set(*moments)
        self.carry.copy_(carry)

    def state(self) -> dict[str, Tensor]:
        """Everything that a checkpoint needs."""
        return {**self.moments.state(), "carry": self.carry}
