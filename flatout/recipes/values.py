"""Settings per known env for the algorithms that learn action values, DQN and PQN; reproduced by benchmarks/dqn.py."""

from __future__ import annotations

from collections.abc import Callable

from flatout.algorithms.q_config import DQNConfig
from flatout.models.config import NetworkConfig
from flatout.recipes.recipe import Recipe


def cartpole() -> Recipe:
    """Few, long rounds of updates on a target that stands still meanwhile."""
    return Recipe(
        timesteps=50_000,
        n_envs=8,
        algorithm=DQNConfig(
            n_steps=32,
            batch_size=64,
            buffer_size=100_000,
            train_ratio=0.5,
            learning_starts=1000,
            learning_rate=2.3e-3,
            target_update_interval=256,
            exploration_fraction=0.16,
            exploration_final_eps=0.04,
        ),
        network=NetworkConfig(network_arch=(256, 256), activation="relu"),
    )


TUNED_DQN: dict[str, Callable[[], Recipe]] = {
    "CartPole-v1": cartpole,
}
"""For DQN, by env."""


TUNED_PQN: dict[str, Callable[[], Recipe]] = {}
"""For PQN, by env."""
