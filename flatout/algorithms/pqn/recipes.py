"""PQN's tuned settings per env."""

from __future__ import annotations

from typing import Any

from flatout.algorithms.base import Recipe
from flatout.algorithms.pqn.config import PQNConfig
from flatout.models.config import NetworkConfig


def _recipe(width: int, timesteps: int, n_envs: int, **settings: Any) -> Recipe:
    network = NetworkConfig(network_arch=(width, width), activation="relu")
    return Recipe(timesteps=timesteps, n_envs=n_envs, algorithm=PQNConfig(**settings), network=network)


# fmt: off
RECIPES = {
    "flatout/Snake-v0": _recipe(
        64, 10_000_000, 256, n_steps=32, batch_size=2048, n_epochs=2, learning_rate=1e-3, gamma=0.98,
        exploration_fraction=0.02, exploration_final_eps=0.01,
    ),
}
# fmt: on
"""By env id."""
AUTO = _recipe(64, 1_000_000, 8), _recipe(256, 1_000_000, 8)
"""On a CPU and on an accelerator."""
