"""Settings of algorithms that learn from a replay buffer, and their arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import ClassVar

from flatout.algorithms.base import AlgorithmConfig, check
from flatout.errors import FlatoutError


@cache
def _exact(ratio: float) -> Fraction:
    """The fraction that a decimal number means."""
    return Fraction(str(ratio))


# No slots: a class may have only one base with slots of its own, and DQN's config has another base.
@dataclass(frozen=True, kw_only=True)
class ReplayConfig(AlgorithmConfig):
    """Settings that `OffPolicyLearner` reads."""

    USES_REPLAY: ClassVar[bool] = True
    NOT_IN_UPDATE: ClassVar[frozenset[str]] = frozenset(
        (
            "n_steps buffer_size train_ratio learning_starts learning_rate learning_rate_schedule gamma "
            "multi_step prioritized priority_alpha priority_beta tau save_replay"
        ).split()
    )

    n_steps: int = 4
    """Env steps of each env between two rounds of updates."""
    batch_size: int = 256
    """Transitions in a minibatch; auto: by the card and its memory."""
    buffer_size: int | str = 100_000
    """Capacity of the replay buffer in transitions, or in memory such as 50GB."""
    train_ratio: float = 1.0
    """Updates per env step, counted over all envs together."""
    learning_starts: int = 1000
    """Env steps before the first update."""
    multi_step: int = 1
    """n of n-step returns: rewards summed before bootstrapping from the target network."""
    prioritized: bool = False
    """Prioritized replay: sample transitions with larger TD errors more often."""
    priority_alpha: float = 0.6
    """Exponent of priorities: 0 samples uniformly, 1 in proportion to the TD error."""
    priority_beta: float = 0.4
    """Importance-sampling exponent at the start; rises to 1 over the run."""
    tau: float = 0.005
    """Soft update of the target network with this factor after every update."""
    save_replay: bool = False
    """Save the replay buffer in checkpoints, so that a resumed run continues exactly."""

    def __post_init__(self) -> None:
        AlgorithmConfig.__post_init__(self)
        check(self, "at least 1", "multi_step")
        check(self, "0 or more", "train_ratio", "learning_starts", "priority_alpha")
        check(self, "above 0 and at most 1", "tau")
        check(self, "between 0 and 1", "priority_beta")

    def updates_after(self, env_steps: int) -> int:
        """Updates due after so many env steps since learning began; exact for any ratio."""
        ratio = _exact(self.train_ratio)
        return ratio.numerator * max(env_steps, 0) // ratio.denominator

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
