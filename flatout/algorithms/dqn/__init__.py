"""Deep Q-learning (Mnih et al. 2015) with double and dueling networks, n-step returns and prioritized replay.

`loss.py` is the definition; `fused.py` is the same loss and its gradient written out for plain MLPs on the CPU.
`experience.py` fills the replay buffer and draws minibatches from it. See `ppo/__init__.py` for which code runs when.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flatout.algorithms.base import Algorithm
from flatout.algorithms.dqn.config import DQNConfig, EpsilonGreedy
from flatout.algorithms.dqn.recipes import PRESETS, RECIPES, auto
from flatout.models.config import NetworkConfig

if TYPE_CHECKING:
    from flatout.algorithms.dqn.learner import DQNLearner
    from flatout.collect.noise import Exploration
    from flatout.envs.spaces import ActionLayout, ObsLayout
    from flatout.models.policy import QNetwork


def make_model(
    obs: ObsLayout, action: ActionLayout, network: NetworkConfig, config: DQNConfig, seed: int
) -> QNetwork:
    """A Q-network."""
    from flatout.models.policy import build_q

    return build_q(obs, action, network, seed, normalize_obs=config.normalize_obs, dueling=config.dueling)


def make_learner(model: QNetwork, config: DQNConfig, **how: Any) -> DQNLearner:
    """A learner that trains `model`; see `Algorithm.make_learner` for the keywords."""
    from flatout.algorithms.dqn.learner import DQNLearner

    return DQNLearner(model, config, **how)


def exploration(config: EpsilonGreedy, n_envs: int) -> Exploration:
    """Epsilon-greedy exploration, with its own epsilon for each env where `exploration_spread` asks for that."""
    import numpy as np

    from flatout.collect.noise import Exploration

    shift = np.log1p(config.exploration_spread * np.linspace(0, 1, n_envs)).astype(np.float32)
    return Exploration(shift if config.exploration_spread else None, config.exploration_hold)


ALGORITHM = Algorithm(
    name="dqn",
    config=DQNConfig,
    make_model=make_model,
    make_learner=make_learner,
    exploration=exploration,
    recipes=RECIPES,
    presets=PRESETS,
    auto=auto,
)
