"""Settings of the algorithms that learn action values, under Stable-Baselines3's names where it has them; no torch here."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import floor
from typing import Any, ClassVar, Literal

from flatout.algorithms.ppo.config import Schedule, check
from flatout.models.config import Traits

Loss = Literal["huber", "mse"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DQNConfig:
    """What DQN learns from and how hard."""

    SECTION: ClassVar[str] = "dqn"

    n_steps: int = 4
    """Env steps of each env between two rounds of updates."""
    batch_size: int = 64
    """Transitions in an update."""
    buffer_size: int | str = 100_000
    """Transitions that are kept to learn from, or the memory they may take, such as 50GB."""
    train_ratio: float = 0.25
    """Updates per env step, over all envs together."""
    learning_starts: int = 1000
    """Env steps before the first update."""
    learning_rate: float = 5e-4
    """Adam's step size."""
    learning_rate_schedule: Schedule = "constant"
    """`linear` lowers the learning rate to zero over the run."""
    gamma: float = 0.99
    """Discount per step."""
    multi_step: int = 1
    """Steps whose rewards are summed before values take over."""
    double: bool = True
    """Choose the next action by the network that learns, value it by the target network."""
    dueling: bool = False
    """Values as a state's value plus an advantage for each action."""
    prioritized: bool = False
    """Draw transitions the more often the more they surprised."""
    priority_alpha: float = 0.6
    """How much surprise counts: 0 not at all, 1 in proportion."""
    priority_beta: float = 0.4
    """How much of the bias of such draws is undone at first; all of it at the end of the run."""
    target_update_interval: int = 1000
    """Env steps between two copies to the target network, where tau is 1."""
    tau: float = 1.0
    """Below 1: the target network follows by this share after every update."""
    exploration_fraction: float = 0.1
    """Share of the run over which random actions become rarer."""
    exploration_initial_eps: float = 1.0
    """Share of random actions at first."""
    exploration_final_eps: float = 0.05
    """Share of random actions in the end."""
    exploration_spread: float = 0.0
    """Above 0 envs differ: the last one's share of random actions is eps to the power of 1 + this."""
    exploration_hold: int = 1
    """Steps for which a random action is held, so that it leads somewhere."""
    loss: Loss = "huber"
    """How errors count: squared, and from 1 on in proportion (huber), or squared (mse)."""
    max_grad_norm: float = 10.0
    """Longest gradient, over all parameters together."""
    normalize_obs: bool = False
    """Shift and scale float observations by their running mean and deviation."""
    save_replay: bool = False
    """Keep the stored transitions in checkpoints, so that a run goes on as if it had not been stopped."""

    def __post_init__(self) -> None:
        _check_common(self)
        for name in ("multi_step", "target_update_interval"):
            check(name, getattr(self, name), getattr(self, name) >= 1, "at least 1")
        for name in ("train_ratio", "learning_starts", "exploration_spread", "priority_alpha"):
            check(name, getattr(self, name), getattr(self, name) >= 0, "0 or more")
        check("tau", self.tau, 0 < self.tau <= 1, "above 0 and at most 1")
        check("priority_beta", self.priority_beta, 0 <= self.priority_beta <= 1, "between 0 and 1")

    @property
    def traits(self) -> Traits:
        """What it wants of its network."""
        return Traits(kind="values", normalize_obs=self.normalize_obs, dueling=self.dueling)

    def updates_after(self, env_steps: int) -> int:
        """Updates that the ratio asks for once so many steps were taken since learning began; exact for any ratio."""
        return floor(Fraction(str(self.train_ratio)) * max(env_steps, 0))

    def updates_per_iteration(self, total_batch: int) -> float:
        """Optimizer steps per rollout, on average."""
        return self.train_ratio * total_batch

    def epsilon(self, progress: float) -> float:
        """Share of random actions at this point of the run."""
        return epsilon_at(self, progress)


@dataclass(frozen=True, kw_only=True, slots=True)
class PQNConfig:
    """What PQN learns from and how hard."""

    SECTION: ClassVar[str] = "pqn"

    n_steps: int = 32
    """Env steps of each env in a rollout."""
    batch_size: int = 256
    """Transitions in a minibatch; divides n_envs x n_steps."""
    n_epochs: int = 2
    """Passes over each rollout."""
    learning_rate: float = 5e-4
    """Adam's step size."""
    learning_rate_schedule: Schedule = "linear"
    """`linear` lowers the learning rate to zero over the run."""
    gamma: float = 0.99
    """Discount per step."""
    q_lambda: float = 0.65
    """Trade-off between one step (0) and the whole rest of the rollout (1) in what values are learned from."""
    dueling: bool = False
    """Values as a state's value plus an advantage for each action."""
    layer_norm: bool = True
    """Normalise each hidden layer, which keeps values bounded without a target network."""
    exploration_fraction: float = 0.1
    """Share of the run over which random actions become rarer."""
    exploration_initial_eps: float = 1.0
    """Share of random actions at first."""
    exploration_final_eps: float = 0.05
    """Share of random actions in the end."""
    exploration_spread: float = 0.0
    """Above 0 envs differ: the last one's share of random actions is eps to the power of 1 + this."""
    exploration_hold: int = 1
    """Steps for which a random action is held, so that it leads somewhere."""
    loss: Loss = "mse"
    """How errors count: squared, and from 1 on in proportion (huber), or squared (mse)."""
    max_grad_norm: float = 10.0
    """Longest gradient, over all parameters together."""
    normalize_obs: bool = False
    """Shift and scale float observations by their running mean and deviation."""

    def __post_init__(self) -> None:
        _check_common(self)
        check("n_epochs", self.n_epochs, self.n_epochs >= 1, "at least 1")
        check("q_lambda", self.q_lambda, 0 <= self.q_lambda <= 1, "between 0 and 1")
        check("exploration_spread", self.exploration_spread, self.exploration_spread >= 0, "0 or more")

    @property
    def traits(self) -> Traits:
        """What it wants of its network."""
        return Traits(
            kind="values",
            normalize_obs=self.normalize_obs,
            dueling=self.dueling,
            layer_norm=self.layer_norm,
        )

    def updates_per_iteration(self, total_batch: int) -> float:
        """Optimizer steps per rollout."""
        return total_batch // self.batch_size * self.n_epochs

    def epsilon(self, progress: float) -> float:
        """Share of random actions at this point of the run."""
        return epsilon_at(self, progress)


def epsilon_at(config: DQNConfig | PQNConfig, progress: float) -> float:
    """Falls linearly from the first to the final share, then stays."""
    done = min(progress / config.exploration_fraction, 1.0) if config.exploration_fraction > 0 else 1.0
    return config.exploration_initial_eps + done * (
        config.exploration_final_eps - config.exploration_initial_eps
    )


def _check_common(config: Any) -> None:
    for name in ("n_steps", "batch_size", "exploration_hold"):
        check(name, getattr(config, name), getattr(config, name) >= 1, "at least 1")
    for name in ("learning_rate", "max_grad_norm"):
        check(name, getattr(config, name), getattr(config, name) > 0, "above 0")
    eps = ("exploration_fraction", "exploration_initial_eps", "exploration_final_eps")
    for name in ("gamma", *eps):
        check(name, getattr(config, name), 0 <= getattr(config, name) <= 1, "between 0 and 1")
