"""DQN's hyperparameters, under Stable-Baselines3's names where it has them, and those that it shares with PQN."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from flatout.algorithms.base import AlgorithmConfig, check
from flatout.algorithms.replay_config import ReplayConfig

Loss = Literal["huber", "mse"]


@dataclass(frozen=True, kw_only=True, slots=True)
class QLearningConfig(AlgorithmConfig):
    """Settings that DQN and PQN share: the Q-network, its loss and epsilon-greedy exploration."""

    EXPLORATION: ClassVar[tuple[str, ...]] = (
        "exploration_fraction",
        "exploration_initial_eps",
        "exploration_final_eps",
        "exploration_spread",
        "exploration_hold",
    )

    exploration_fraction: float = 0.1
    """Fraction of the run over which epsilon falls."""
    exploration_initial_eps: float = 1.0
    """Epsilon, the fraction of random actions, at the start."""
    exploration_final_eps: float = 0.05
    """Epsilon at the end of exploration_fraction and after."""
    exploration_spread: float = 0.0
    """Above 0, envs differ: env i of n uses epsilon to the power 1 + spread · i / (n - 1)."""
    exploration_hold: int = 1
    """Steps for which a random action is repeated."""
    learning_rate: float = 5e-4
    max_grad_norm: float = 10.0
    dueling: bool = False
    """Dueling network: a state value plus an advantage for each action."""
    loss: Loss = "huber"
    """Loss of a TD error: huber (squared below 1, linear above) or mse (squared)."""

    def __post_init__(self) -> None:
        AlgorithmConfig.__post_init__(self)
        check(self, "between 0 and 1", *self.EXPLORATION[:3])
        check(self, "0 or more", "exploration_spread")
        check(self, "at least 1", "exploration_hold")

    def epsilon(self, progress: float) -> float:
        """Epsilon at this point of the run: falls linearly, then stays."""
        return self._epsilon(progress / self.exploration_fraction if self.exploration_fraction > 0 else 1.0)

    def _epsilon(self, share: float) -> float:
        """Epsilon after this share of its fall."""
        done = min(share, 1.0)
        return self.exploration_initial_eps + done * (
            self.exploration_final_eps - self.exploration_initial_eps
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class DQNConfig(QLearningConfig, ReplayConfig):
    """DQN's hyperparameters."""

    AUTO_BATCH: ClassVar[tuple[int, int]] = (64, 256)
    NOT_IN_UPDATE: ClassVar[frozenset[str]] = ReplayConfig.NOT_IN_UPDATE.union(
        QLearningConfig.EXPLORATION, ("target_update_interval", "exploration_steps")
    )

    n_steps: int = 4
    batch_size: int = 64
    train_ratio: float = 0.25
    exploration_steps: int = 100_000
    """Env steps over which epsilon falls at most, however long the run is."""
    double: bool = True
    """Double DQN: choose the next action by the online network, value it by the target network."""
    target_update_interval: int = 1000
    """Env steps between copies to the target network, if tau is 1."""
    tau: float = 1.0
    """Below 1: soft update of the target network with this factor after every update."""

    def __post_init__(self) -> None:
        QLearningConfig.__post_init__(self)
        ReplayConfig.__post_init__(self)
        check(self, "at least 1", "target_update_interval", "exploration_steps")

    def epsilon_after(self, env_steps: int, progress: float) -> float:
        """Epsilon after so many env steps: it falls over exploration_fraction, or exploration_steps if they are fewer."""
        if self.exploration_fraction <= 0:
            return self._epsilon(1.0)
        return self._epsilon(max(progress / self.exploration_fraction, env_steps / self.exploration_steps))
