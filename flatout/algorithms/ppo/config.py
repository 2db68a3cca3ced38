"""PPO's hyperparameters, under Stable-Baselines3's names where it has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flatout.algorithms.base import AlgorithmConfig, Schedule, check


@dataclass(frozen=True, kw_only=True, slots=True)
class PPOConfig(AlgorithmConfig):
    """PPO's hyperparameters."""

    NOT_IN_UPDATE: ClassVar[frozenset[str]] = frozenset(
        (
            "n_steps n_epochs learning_rate learning_rate_schedule gamma gae_lambda clip_range "
            "clip_range_schedule vtrace normalize_reward"
        ).split()
    )

    n_steps: int = 256
    """Env steps of each env in a rollout."""
    batch_size: int = 256
    """Transitions in a minibatch; must divide n_envs x n_steps, except for DQN."""
    n_epochs: int = 4
    """Passes over each rollout."""
    learning_rate: float = 3e-4
    """Learning rate of Adam."""
    learning_rate_schedule: Schedule = "constant"
    """`linear` lowers the learning rate to zero over the run."""
    gamma: float = 0.99
    """Discount per step."""
    gae_lambda: float = 0.95
    """λ of GAE: 0 is the one-step TD error (low variance), 1 the whole return (low bias)."""
    clip_range: float = 0.2
    """Clip the policy ratio to 1 ± this."""
    clip_range_schedule: Schedule = "constant"
    """`linear` lowers the clip range to zero over the run."""
    clip_range_vf: float | None = None
    """Clip the change of the value function to ± this; none: no clipping."""
    normalize_advantage: bool = True
    """Normalize the advantages of each minibatch to mean 0 and standard deviation 1."""
    ent_coef: float = 0.0
    """Weight of the entropy bonus."""
    vf_coef: float = 0.5
    """Weight of the value loss."""
    max_grad_norm: float = 0.5
    """Clip the gradient to this norm, over all parameters together."""
    target_kl: float | None = None
    """Skip the rest of a rollout's updates once the approximate KL divergence exceeds 1.5 times this."""
    vtrace: bool = False
    """Correct for the policy lag of overlap with V-trace."""
    normalize_obs: bool = False
    """Normalize float observations by their running mean and standard deviation."""
    normalize_reward: bool = False
    """Divide rewards by the running standard deviation of the discounted return."""

    def __post_init__(self) -> None:
        for name in ("n_steps", "batch_size", "n_epochs"):
            check(name, getattr(self, name), getattr(self, name) >= 1, "at least 1")
        for name in ("learning_rate", "clip_range", "max_grad_norm"):
            check(name, getattr(self, name), getattr(self, name) > 0, "above 0")
        for name in ("gamma", "gae_lambda"):
            check(name, getattr(self, name), 0 <= getattr(self, name) <= 1, "between 0 and 1")
        for name in ("ent_coef", "vf_coef"):
            check(name, getattr(self, name), getattr(self, name) >= 0, "0 or more")
        for name in ("clip_range_vf", "target_kl"):
            value = getattr(self, name)
            check(name, value, value is None or value > 0, "above 0, or none")
