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
        rows = rows.double()
        n = float(len(rows))
        mean, var = rows.mean(0), rows.var(0, correction=0)
        total = self.count + n
        delta = mean - self.mean
        spread = self.var * self.count + var * n + delta.square() * (self.count * n / total)
        step, var = delta * (n / total), spread / total
        # From here on everything happens in place: nothing can run out of memory.
        self.mean += step
        self.var.copy_(var)
        self.count.copy_(total)

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

    def merge(self, reward_tn: Tensor, ended_tn: Tensor) -> None:
        """Merge a rollout's rewards; out of memory leaves no trace."""
        # y[t] = r[t] + γ (1 - ended[t-1]) y[t-1] is the scan of GAE, forwards in time.
        decay = self._gamma * (~ended_tn).float()
        first = reward_tn.clone()
        first[0] += self.carry
        before = torch.cat([torch.zeros_like(decay[:1]), decay[:-1]])
        returns_tn = discounted_scan(first.flip(0), before.flip(0)).flip(0)
        carry = returns_tn[-1] * decay[-1]
        self.moments.merge(returns_tn.reshape(-1))
        self.carry.copy_(carry)

    def scale(self, reward_tn: Tensor) -> Tensor:
        """The rewards, scaled by the statistics so far."""
        scaled = reward_tn / (self.moments.var + EPSILON).sqrt()
        return scaled.clamp(-REWARD_CLIP, REWARD_CLIP).float()

    def state(self) -> dict[str, Tensor]:
        """Everything that a checkpoint needs."""
        return {**self.moments.state(), "carry": self.carry}
