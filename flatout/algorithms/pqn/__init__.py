"""Parallelised Q-learning (Gallici et al. 2024): Q-learning from rollouts of many envs, without replay or target network.

It shares epsilon-greedy exploration and the loss of a TD error with DQN, which is where it takes them from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flatout.algorithms.base import Algorithm
from flatout.algorithms.dqn import exploration
from flatout.algorithms.pqn.config import PQNConfig
from flatout.algorithms.pqn.recipes import RECIPES, auto
from flatout.models.config import NetworkConfig

if TYPE_CHECKING:
    from flatout.algorithms.pqn.learner import PQNLearner
    from flatout.envs.spaces import ActionLayout, ObsLayout
    from flatout.models.policy import QNetwork


def make_model(
    obs: ObsLayout, action: ActionLayout, network: NetworkConfig, config: PQNConfig, seed: int
) -> QNetwork:
    """A Q-network."""
    from flatout.models.policy import build_q

    return build_q(
        obs,
        action,
        network,
        seed,
        normalize_obs=config.normalize_obs,
        dueling=config.dueling,
        layer_norm=config.layer_norm,
    )


def make_learner(model: QNetwork, config: PQNConfig, **how: Any) -> PQNLearner:
    """A learner that trains `model`; see `Algorithm.make_learner` for the keywords."""
    from flatout.algorithms.pqn.learner import PQNLearner

    return PQNLearner(model, config, **how)


ALGORITHM = Algorithm(
    name="pqn",
    config=PQNConfig,
    make_model=make_model,
    make_learner=make_learner,
    exploration=exploration,
    recipes=RECIPES,
    auto=auto,
    first_choice_for=("flatout/Snake-v0",),
)
