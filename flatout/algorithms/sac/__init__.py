"""Soft actor-critic (Haarnoja et al. 2018) with a tuned temperature, twin critics, n-step returns and a replay buffer.

`model.py` holds the actor and the critics, `loss.py` is the definition of what they learn; `fused.py` is the same loss
and its gradient written out for plain MLPs on the CPU. The replay buffer, sampling and the train ratio are those of
`flatout/learning/off_policy.py`. See `ppo/__init__.py` for which code runs when.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flatout.algorithms.base import Algorithm, imported
from flatout.algorithms.sac.config import SACConfig
from flatout.algorithms.sac.recipes import AUTO, FIRST_CHOICE_FOR, RECIPES
from flatout.algorithms.space import GAMMA, NETWORK, Space, between, one_of

if TYPE_CHECKING:
    from flatout.collect.noise import Exploration


def exploration(config: SACConfig, n_envs: int) -> Exploration:  # noqa: ARG001
    """The policy's own samples, with noise that stays the same for `exploration_hold` steps."""
    from flatout.collect.noise import Exploration

    return Exploration(None, config.exploration_hold)


SPACE: Space = {
    "n_envs": one_of(1, 2, 4, 8),
    "batch_size": one_of(64, 128, 256, 512),
    "train_ratio": one_of(0.25, 0.5, 1.0),
    "learning_starts": one_of(250, 500, 1000, 2000),
    "learning_rate": between(1e-4, 3e-3, log=True),
    "gamma": GAMMA,
    "tau": one_of(0.05, 0.02, 0.01, 0.005),
    "tune_ent_coef": one_of(True, False),
    "ent_coef": between(0.01, 1.0, log=True, when=("tune_ent_coef", False)),
    **NETWORK,
}
"""What `flatout sweep` searches."""

ALGORITHM = Algorithm(
    name="sac",
    config=SACConfig,
    make_learner=imported("flatout.algorithms.sac.learner:SACLearner"),
    make_model=imported("flatout.algorithms.sac.model:make_model"),
    exploration=exploration,
    recipes=RECIPES,
    auto=AUTO,
    first_choice_for=FIRST_CHOICE_FOR,
    space=SPACE,
)
