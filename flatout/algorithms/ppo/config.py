"""PPO's settings, under the names RL users know; no torch here, so a command line parses in no time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from flatout.errors import FlatoutError
from flatout.models.config import Traits

Schedule = Literal["constant", "linear"]


def scheduled(value: float, schedule: Schedule, progress: float) -> float:
    """What a setting is at this point of the run; `progress` in [0, 1]."""
    return value * max(1.0 - progress, 0.0) if schedule == "linear" else value


@dataclass(frozen=True, kw_only=True, slots=True)
class PPOConfig:
    """What PPO learns from and how hard."""

    SECTION: ClassVar[str] = "ppo"

    n_steps: int = 256
    """Env steps of each env in a rollout."""
    batch_size: int = 256
    """Transitions in a minibatch; divides n_envs x n_steps, except for DQN."""
    n_epochs: int = 4
    """Passes over each rollout."""
    learning_rate: float = 3e-4
    """Adam's step size."""
    learning_rate_schedule: Schedule = "constant"
    """`linear` lowers the learning rate to zero over the run."""
    gamma: float = 0.99
    """Discount per step."""
    gae_lambda: float = 0.95
    """Trade-off between bias (0) and variance (1) of the advantages."""
    clip_range: float = 0.2
    """How far the policy's ratio may move before its gradient is cut."""
    clip_range_schedule: Schedule = "constant"
    """`linear` lowers the clip range to zero over the run."""
    clip_range_vf: float | None = None
    """The same for the value function; none: no clipping."""
    normalize_advantage: bool = True
    """Give the advantages of each minibatch mean 0 and deviation 1."""
    ent_coef: float = 0.0
    """Weight of the entropy bonus."""
    vf_coef: float = 0.5
    """Weight of the value loss."""
    max_grad_norm: float = 0.5
    """Longest gradient, over all parameters together."""
    target_kl: float | None = None
    """Leave out the rest of a rollout's updates once the policy has moved 1.5 times this far."""
    vtrace: bool = False
    """Weigh steps of a rollout that an older policy collected by V-trace; without overlap there are none."""
    normalize_obs: bool = False
    """Shift and scale float observations by their running mean and deviation."""
    normalize_reward: bool = False
    """Scale rewards by the running deviation of the discounted return."""

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

    @property
    def traits(self) -> Traits:
        """What it wants of its network."""
        return Traits(normalize_obs=self.normalize_obs)

    def updates_per_iteration(self, total_batch: int) -> float:
        """Optimizer steps per rollout."""
        return total_batch // self.batch_size * self.n_epochs


def check(name: str, value: object, fine: bool, wanted: str) -> None:
    """Refuse a setting's value that is not fine."""
    if not fine:
        raise FlatoutError(f"--{name.replace('_', '-')} is {value}; it must be {wanted}")


def choose_batch_size(total_batch: int, target: int) -> int:
    """The largest divisor of `total_batch` that is not above `target`."""
    if total_batch < 1 or target < 1:
        raise FlatoutError(f"total_batch {total_batch} and target {target} must be at least 1")
    return max(d for d in divisors(total_batch) if d <= target)


def nearest_batch_sizes(total_batch: int, batch_size: int) -> list[int]:
    """The divisors of `total_batch` just below and just above `batch_size`."""
    below = [d for d in divisors(total_batch) if d < batch_size]
    above = [d for d in divisors(total_batch) if d > batch_size]
    return below[-1:] + above[:1]


def divisors(n: int) -> list[int]:
    """All divisors of n, ascending."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]
