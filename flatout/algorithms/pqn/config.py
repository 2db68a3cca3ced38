"""PQN's hyperparameters, under Stable-Baselines3's names where it has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flatout.algorithms.base import Schedule, check
from flatout.algorithms.dqn.config import Loss, QLearningConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class PQNConfig(QLearningConfig):
    """PQN's hyperparameters."""

    NOT_IN_UPDATE: ClassVar[frozenset[str]] = frozenset(
        ("n_steps n_epochs learning_rate learning_rate_schedule gamma q_lambda").split()
    ).union(QLearningConfig.EXPLORATION)

    n_steps: int = 32
    learning_rate_schedule: Schedule = "linear"
    loss: Loss = "mse"
    n_epochs: int = 2
    """Passes over each rollout."""
    q_lambda: float = 0.65
    """λ of the returns: 0 bootstraps after one step, 1 only at the end of the rollout."""
    layer_norm: bool = True
    """Layer normalization of each hidden layer, which keeps Q-values bounded without a target network."""

    def __post_init__(self) -> None:
        QLearningConfig.__post_init__(self)
        check(self, "at least 1", "n_epochs")
        check(self, "between 0 and 1", "q_lambda")
