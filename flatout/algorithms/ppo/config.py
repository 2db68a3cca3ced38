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

    n_epochs: int = 4
    """Passes over each rollout."""
    gae_lambda: float = 0.95
    """λ of GAE: 0 is the one-step TD error (low variance), 1 the whole return (low bias)."""
    clip_range: float = 0.2
    """Clip the policy ratio to 1 ± this."""
    clip_range_schedule: Schedule = "constant"
    """`linear` lowers the clip range to zero over the run; or your own function, as for the learning rate."""
    clip_range_vf: float | None = None
    """Clip the change of the value function to ± this; none: no clipping."""
    normalize_advantage: bool = True
    """Normalize the advantages of each minibatch to mean 0 and standard deviation 1."""
    ent_coef: float = 0.0
    """Weight of the entropy bonus."""
    vf_coef: float = 0.5
    """Weight of the value loss."""
    target_kl: float | None = None
    """Skip the rest of a rollout's updates once the approximate KL divergence exceeds 1.5 times this."""
    vtrace: bool = False
    """Correct for the policy lag of overlap with V-trace."""
    normalize_reward: bool = False
    """Divide rewards by the running standard deviation of the discounted return."""

    def __post_init__(self) -> None:
        AlgorithmConfig.__post_init__(self)
        check(self, "at least 1", "n_epochs")
        check(self, "above 0", "clip_range")
        check(self, "between 0 and 1", "gae_lambda")
        check(self, "0 or more", "ent_coef", "vf_coef")
        check(self, "above 0, or none", "clip_range_vf", "target_kl")
