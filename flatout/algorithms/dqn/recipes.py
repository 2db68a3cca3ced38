"""DQN's tuned settings per env, which benchmarks/dqn.py runs, and its presets."""

from __future__ import annotations

from collections.abc import Callable

from flatout.algorithms.base import Recipe, auto_n_envs
from flatout.algorithms.dqn.config import DQNConfig
from flatout.models.config import NetworkConfig

WIDE = NetworkConfig(network_arch=(256, 256), activation="relu")


def cartpole() -> Recipe:
    """Long rounds of updates on a target that stands still meanwhile; the falling learning rate settles the choice."""
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
            learning_rate_schedule="linear",
            target_update_interval=256,
            exploration_fraction=0.16,
            exploration_final_eps=0.04,
        ),
        network=WIDE,
    )


def acrobot() -> Recipe:
    """A swing-up in sight of the reward of every step."""
    return Recipe(
        timesteps=100_000,
        n_envs=4,
        algorithm=DQNConfig(
            n_steps=4,
            batch_size=128,
            buffer_size=50_000,
            train_ratio=0.5,
            learning_starts=1000,
            learning_rate=6.3e-4,
            learning_rate_schedule="linear",
            target_update_interval=250,
            exploration_fraction=0.12,
            exploration_final_eps=0.1,
        ),
        network=WIDE,
    )


def mountain_car() -> Recipe:
    """Single random actions cancel out; held for 32 steps they climb the hill in one episode of six, and all is kept."""
    return Recipe(
        timesteps=120_000,
        n_envs=4,
        algorithm=DQNConfig(
            n_steps=4,
            batch_size=128,
            buffer_size=120_000,
            train_ratio=0.5,
            learning_starts=1000,
            learning_rate=1e-3,
            learning_rate_schedule="linear",
            multi_step=3,
            target_update_interval=600,
            exploration_fraction=0.3,
            exploration_final_eps=0.05,
            exploration_hold=32,
            normalize_obs=True,
        ),
        network=WIDE,
    )


def lunar_lander() -> Recipe:
    """An update for every env step."""
    return Recipe(
        timesteps=100_000,
        n_envs=4,
        algorithm=DQNConfig(
            n_steps=4,
            batch_size=128,
            buffer_size=50_000,
            train_ratio=1.0,
            learning_starts=1000,
            learning_rate=6.3e-4,
            learning_rate_schedule="linear",
            target_update_interval=250,
            exploration_fraction=0.12,
            exploration_final_eps=0.1,
        ),
        network=WIDE,
    )


def snake() -> Recipe:
    """256 games at once; an update for every step of all of them together, because games are cheaper than learning."""
    return Recipe(
        timesteps=10_000_000,
        n_envs=256,
        algorithm=DQNConfig(
            n_steps=8,
            batch_size=256,
            buffer_size=500_000,
            train_ratio=1 / 256,
            learning_starts=20_000,
            learning_rate=1e-3,
            learning_rate_schedule="linear",
            gamma=0.98,
            multi_step=3,
            target_update_interval=20_000,
            exploration_fraction=0.02,
            exploration_final_eps=0.01,
        ),
        network=NetworkConfig(network_arch=(64, 64), activation="relu"),
    )


RECIPES: dict[str, Callable[[], Recipe]] = {
    "CartPole-v1": cartpole,
    "Acrobot-v1": acrobot,
    "MountainCar-v0": mountain_car,
    "LunarLander-v3": lunar_lander,
    "flatout/Snake-v0": snake,
}
"""By env id."""


def _preset(n_envs: int, batch_size: int, buffer_size: int, arch: tuple[int, ...], n_cores: int) -> Recipe:
    return Recipe(
        n_envs=n_envs,
        algorithm=DQNConfig(batch_size=batch_size, buffer_size=buffer_size),
        network=NetworkConfig(network_arch=arch, activation="relu"),
        n_cores=n_cores,
    )


PRESETS = {
    "cpu": _preset(1, 32, 10_000, (128, 128), 1),
    "gpu": _preset(8, 128, 50_000, (256, 256, 256), 4),
}


def auto(on_accelerator: bool, n_cores: int) -> Recipe:
    """A start for an env without a recipe."""
    return Recipe(
        n_envs=auto_n_envs(n_cores),
        algorithm=DQNConfig(batch_size=256 if on_accelerator else 64),
        network=NetworkConfig(network_arch=(256, 256) if on_accelerator else (64, 64), activation="relu"),
    )
