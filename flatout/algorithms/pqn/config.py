"""PQN's hyperparameters, under Stable-Baselines3's names where it has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flatout.algorithms.base import AlgorithmConfig, Schedule, check
from flatout.algorithms.dqn.config import EpsilonGreedy, Loss, check_q_learning


@dataclass(frozen=True, kw_only=True, slots=True)
class PQNConfig(EpsilonGreedy, AlgorithmConfig):
    """PQN's hyperparameters."""

    NOT_IN_UPDATE: ClassVar[frozenset[str]] = frozenset(
        ("n_steps n_epochs learning_rate learning_rate_schedule gamma q_lambda").split()
    ).union(EpsilonGreedy.EXPLORATION)

    n_steps: int = 32
    """Env steps of each env in a rollout."""
    batch_size: int = 256
    """Transitions in a minibatch; must divide n_envs x n_steps."""
    n_epochs: int = 2
    """Passes over each rollout."""
    learning_rate: float = 5e-4
    """Learning rate of Adam."""
    learning_rate_schedule: Schedule = "linear"
    """`linear` lowers the learning rate to zero over the run."""
    gamma: float = 0.99
    """Discount per step."""
    q_lambda: float = 0.65
    """λ of the returns: 0 bootstraps after one step, 1 only at the end of the rollout."""
    dueling: bool = False
    """Dueling network: a state value plus an advantage for each action."""
    layer_norm: bool = True
    """Layer normalization of each hidden layer, which keeps Q-values bounded without a target network."""
    loss: Loss = "mse"
    """Loss of a TD error: huber (squared below 1, linear above) or mse (squared)."""
    max_grad_norm: float = 10.0
    """Clip the gradient to this norm, over all parameters together."""
    normalize_obs: bool = False
    """Normalize float observations by their running mean and standard deviation."""

    def __post_init__(self) -> None:
        check_q_learning(self)
        self.check_exploration()
        check("n_epochs", self.n_epochs, self.n_epochs >= 1, "at least 1")
        check("q_lambda", self.q_lambda, 0 <= self.q_lambda <= 1, "between 0 and 1")
