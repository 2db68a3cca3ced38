"""DQN's hyperparameters, under Stable-Baselines3's names where it has them, and those that it shares with PQN."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import floor
from typing import ClassVar, Literal

from flatout.algorithms.base import AlgorithmConfig, check
from flatout.errors import FlatoutError

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
class DQNConfig(QLearningConfig):
    """DQN's hyperparameters."""

    USES_REPLAY: ClassVar[bool] = True
    AUTO_BATCH: ClassVar[tuple[int, int]] = (64, 256)
    NOT_IN_UPDATE: ClassVar[frozenset[str]] = frozenset(
        (
            "n_steps buffer_size train_ratio learning_starts learning_rate learning_rate_schedule gamma "
            "multi_step prioritized priority_alpha priority_beta target_update_interval tau save_replay "
            "exploration_steps"
        ).split()
    ).union(QLearningConfig.EXPLORATION)

    n_steps: int = 4
    """Env steps of each env between two rounds of updates."""
    batch_size: int = 64
    """Transitions in a minibatch; auto: by the card and its memory."""
    buffer_size: int | str = 100_000
    """Capacity of the replay buffer in transitions, or in memory such as 50GB."""
    train_ratio: float = 0.25
    """Updates per env step, counted over all envs together."""
    learning_starts: int = 1000
    """Env steps before the first update."""
    exploration_steps: int = 100_000
    """Env steps over which epsilon falls at most, however long the run is."""
    multi_step: int = 1
    """n of n-step returns: rewards summed before bootstrapping from the target network."""
    double: bool = True
    """Double DQN: choose the next action by the online network, value it by the target network."""
    prioritized: bool = False
    """Prioritized replay: sample transitions with larger TD errors more often."""
    priority_alpha: float = 0.6
    """Exponent of priorities: 0 samples uniformly, 1 in proportion to the TD error."""
    priority_beta: float = 0.4
    """Importance-sampling exponent at the start; rises to 1 over the run."""
    target_update_interval: int = 1000
    """Env steps between copies to the target network, if tau is 1."""
    tau: float = 1.0
    """Below 1: soft update of the target network with this factor after every update."""
    save_replay: bool = False
    """Save the replay buffer in checkpoints, so that a resumed run continues exactly."""

    def __post_init__(self) -> None:
        QLearningConfig.__post_init__(self)
        check(self, "at least 1", "multi_step", "target_update_interval", "exploration_steps")
        check(self, "0 or more", "train_ratio", "learning_starts", "priority_alpha")
        check(self, "above 0 and at most 1", "tau")
        check(self, "between 0 and 1", "priority_beta")

    def epsilon_after(self, env_steps: int, progress: float) -> float:
        """Epsilon after so many env steps: it falls over exploration_fraction, or exploration_steps if they are fewer."""
        if self.exploration_fraction <= 0:
            return self._epsilon(1.0)
        return self._epsilon(max(progress / self.exploration_fraction, env_steps / self.exploration_steps))

    def updates_after(self, env_steps: int) -> int:
        """Updates due after so many env steps since learning began; exact for any ratio."""
        return floor(Fraction(str(self.train_ratio)) * max(env_steps, 0))

    def updates_per_iteration(self, total_batch: int) -> float:
        return self.train_ratio * total_batch

    def fit_batch_size(self, total_batch: int, target: int) -> int:  # noqa: ARG002
        """Any batch size can be drawn from a replay buffer."""
        return target

    def check_rollout(self, n_envs: int) -> None:
        """Refuse a first update before every env has stored enough steps for an n-step return."""
        total = n_envs * self.n_steps
        n_stored = (self.learning_starts // total + 1) * self.n_steps
        if n_stored < self.multi_step:
            least = (-(-self.multi_step // self.n_steps) - 1) * total
            raise FlatoutError(
                f"--learning-starts {self.learning_starts} comes before {self.multi_step} steps of {n_envs} envs are "
                f"stored; use at least {least}"
            )

    def arithmetic(self, n_envs: int) -> str:
        total = n_envs * self.n_steps
        return (
            f"{n_envs} envs × {self.n_steps} steps = {total:,} env steps, × {self.train_ratio:g} = "
            f"{self.updates_per_iteration(total):g} updates of {self.batch_size} per iteration, "
            f"after {self.learning_starts:,} env steps"
        )
