"""SAC's hyperparameters, under Stable-Baselines3's names where it has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flatout.algorithms.base import check
from flatout.algorithms.replay_config import ReplayConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class SACConfig(ReplayConfig):
    """SAC's hyperparameters."""

    AUTO_BATCH: ClassVar[tuple[int, int]] = (256, 1024)
    NOT_IN_UPDATE: ClassVar[frozenset[str]] = ReplayConfig.NOT_IN_UPDATE.union(
        ("ent_coef", "exploration_hold")
    )

    n_steps: int = 1
    buffer_size: int | str = 1_000_000
    max_grad_norm: float = 1e9
    """Clip the gradient to this norm, over all parameters together; the default clips nothing."""
    ent_coef: float = 1.0
    """Weight of the entropy bonus (the temperature); where it is tuned, its initial value."""
    tune_ent_coef: bool = True
    """Tune ent_coef so that the policy's entropy stays at target_entropy."""
    target_entropy: float | None = None
    """Entropy that ent_coef is tuned for, of actions in [-1, 1]; none: minus the number of action dimensions."""
    layer_norm: bool = False
    """Layer normalization of each hidden layer of the critics, for high train ratios."""
    dropout: float = 0.0
    """Fraction of hidden units of the critics that are dropped in each update, for high train ratios."""
    exploration_hold: int = 1
    """Steps for which the noise of exploration stays the same."""

    def __post_init__(self) -> None:
        ReplayConfig.__post_init__(self)
        check(self, "above 0", "ent_coef")
        check(self, "at least 1", "exploration_hold")
        check(self, "at least 0 and below 1", "dropout")
