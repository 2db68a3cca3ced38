"""SAC's tuned settings per env."""

from __future__ import annotations

from typing import Any

from flatout.algorithms.base import Recipe
from flatout.algorithms.sac.config import SACConfig
from flatout.models.config import NetworkConfig


def _recipe(timesteps: int, n_envs: int, widths: tuple[int, ...] = (256, 256), **settings: Any) -> Recipe:
    network = NetworkConfig(network_arch=widths, activation="relu")
    return Recipe(timesteps=timesteps, n_envs=n_envs, algorithm=SACConfig(**settings), network=network)


# fmt: off
_MUJOCO = _recipe(1_000_000, 1, n_steps=8, learning_starts=10_000)
_ALONE: dict[str, Recipe] = {
    # A reward of 100 at the top of a hill, and a cost of every action: noise that is held climbs it.
    "MountainCarContinuous-v0": _recipe(
        50_000, 1, n_steps=32, batch_size=512, gamma=0.9999, tau=0.01, learning_starts=5_000, buffer_size=50_000,
        ent_coef=0.1, tune_ent_coef=False, exploration_hold=32, widths=(64, 64),
    ),
    # Hovering until time is up is easy to find and hard to leave: noise that is held, and a gamma that counts the fuel, do.
    # 277 and 259 with two seeds; 281 and 245 after 500,000 env steps.
    "LunarLanderContinuous-v3": _recipe(
        700_000, 4, (128, 128), n_steps=4, batch_size=128, learning_rate=7.3e-4, learning_rate_schedule="linear",
        gamma=0.995, tau=0.01, learning_starts=10_000, exploration_hold=8,
    ),
    # Standing still is easy to find and hard to leave: noise that is held, returns of three steps and an update for every step do.
    "BipedalWalker-v3": _recipe(
        500_000, 4, (128, 128), n_steps=4, batch_size=128, learning_rate=7.3e-4, learning_rate_schedule="linear",
        gamma=0.98, tau=0.01, multi_step=3, learning_starts=10_000, buffer_size=300_000, exploration_hold=8,
    ),
}
"""Envs that no other algorithm has a recipe for."""
RECIPES: dict[str, Recipe] = _ALONE | {
    "Pendulum-v1": _recipe(
        20_000, 1, n_steps=8, learning_rate=1e-3, learning_starts=200, buffer_size=20_000,
    ),
    **{f"{name}-{v}": _MUJOCO for name in ("HalfCheetah", "Hopper", "Walker2d") for v in ("v4", "v5")},
}
# fmt: on
"""By env id."""
FIRST_CHOICE_FOR = tuple(_ALONE)
"""Env ids for which this algorithm's recipe reaches the target soonest."""
AUTO = _recipe(200_000, 8), _recipe(1_000_000, 8, batch_size=1024)
"""On a CPU and on an accelerator."""
