"""PQN's tuned settings per env."""

from __future__ import annotations

from flatout.algorithms.base import Recipe, auto_n_envs
from flatout.algorithms.pqn.config import PQNConfig
from flatout.models.config import NetworkConfig

RECIPES: dict[str, Recipe] = {
    "flatout/Snake-v0": Recipe(
        timesteps=10_000_000,
        n_envs=256,
        algorithm=PQNConfig(
            n_steps=32,
            batch_size=2048,
            n_epochs=2,
            learning_rate=1e-3,
            gamma=0.98,
            exploration_fraction=0.02,
            exploration_final_eps=0.01,
        ),
        network=NetworkConfig(network_arch=(64, 64), activation="relu"),
    ),
}
"""By env id."""


def auto(on_accelerator: bool, n_cores: int) -> Recipe:
    """Settings for an env without a recipe."""
    arch = (256, 256) if on_accelerator else (64, 64)
    network = NetworkConfig(network_arch=arch, activation="relu")
    return Recipe(n_envs=auto_n_envs(n_cores), algorithm=PQNConfig(), network=network)
