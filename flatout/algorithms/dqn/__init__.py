"""Deep Q-learning (Mnih et al. 2015) with double and dueling networks, n-step returns and prioritized replay.

`loss.py` is the definition; `fused.py` is the same loss and its gradient written out for plain MLPs on the CPU.
`learner.py` fills the replay buffer and samples minibatches from it. See `ppo/__init__.py` for which code runs when.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flatout.algorithms.base import Algorithm, AlgorithmConfig, imported
from flatout.algorithms.dqn.config import DQNConfig, QLearningConfig
from flatout.algorithms.dqn.recipes import AUTO, PRESETS, RECIPES
from flatout.algorithms.space import GAMMA, NETWORK, Space, between, one_of
from flatout.models.config import NetworkConfig

if TYPE_CHECKING:
    from flatout.collect.noise import Exploration
    from flatout.envs.spaces import ActionLayout, ObsLayout
    from flatout.models.policy import QNetwork


def make_q_network(
    obs: ObsLayout, action: ActionLayout, network: NetworkConfig, config: AlgorithmConfig, seed: int
) -> QNetwork:
    """A Q-network with the options that the config has."""
    from flatout.models.policy import QNetwork, seeded

    options = {name: getattr(config, name, False) for name in ("normalize_obs", "dueling", "layer_norm")}
    with seeded(seed):
        return QNetwork(obs, action, network, **options)


def exploration(config: QLearningConfig, n_envs: int) -> Exploration:
    """Epsilon-greedy exploration, with its own epsilon for each env where `exploration_spread` asks for that."""
    import numpy as np

    from flatout.collect.noise import Exploration

    shift = np.log1p(config.exploration_spread * np.linspace(0, 1, n_envs)).astype(np.float32)
    return Exploration(shift if config.exploration_spread else None, config.exploration_hold)


SPACE: Space = {
    "n_envs": one_of(1, 4, 8, 16),
    "n_steps": one_of(1, 4, 8, 16, 32),
    "batch_size": one_of(32, 64, 128, 256),
    "buffer_size": one_of(10_000, 50_000, 100_000),
    "learning_starts": one_of(250, 500, 1000, 2000),
    "train_ratio": one_of(0.0625, 0.125, 0.25, 0.5, 1.0),
    "learning_rate": between(1e-4, 5e-3, log=True),
    "gamma": GAMMA,
    "tau": one_of(1.0, 0.05, 0.02, 0.01, 0.005),
    "target_update_interval": between(100, 5000, log=True, when=("tau", 1.0)),
    "exploration_fraction": between(0.02, 0.4, log=True),
    "exploration_final_eps": between(0.01, 0.1, log=True),
    "multi_step": one_of(1, 3, 5),
    "double": one_of(False, True),
    "dueling": one_of(False, True),
    "prioritized": one_of(False, True),
    "priority_alpha": one_of(0.4, 0.6, 0.8, when=("prioritized", True)),
    **NETWORK,
}
"""What `flatout sweep` searches."""

ALGORITHM = Algorithm(
    name="dqn",
    config=DQNConfig,
    make_learner=imported("flatout.algorithms.dqn.learner:DQNLearner"),
    make_model=make_q_network,
    exploration=exploration,
    recipes=RECIPES,
    presets=PRESETS,
    auto=AUTO,
    space=SPACE,
)
