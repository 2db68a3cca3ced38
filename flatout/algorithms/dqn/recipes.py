"""DQN's tuned settings per env, which benchmarks/dqn.py runs, and its presets."""

from __future__ import annotations

from typing import Any

from flatout.algorithms.base import Recipe
from flatout.algorithms.dqn.config import DQNConfig
from flatout.models.config import NetworkConfig


def _network(*widths: int) -> NetworkConfig:
    return NetworkConfig(network_arch=widths, activation="relu")


def _recipe(timesteps: int, n_envs: int, network: NetworkConfig, **settings: Any) -> Recipe:
    config = DQNConfig(learning_rate_schedule="linear", **settings)
    return Recipe(timesteps=timesteps, n_envs=n_envs, algorithm=config, network=network)


# fmt: off
_ATARI = Recipe(
    timesteps=10_000_000, n_envs=8, network=_network(512), algorithm=DQNConfig(
        n_steps=4, batch_size=32, buffer_size=200_000, train_ratio=0.25, learning_starts=20_000, learning_rate=1e-4,
        target_update_interval=8_000, exploration_fraction=0.1, exploration_final_eps=0.01, clip_reward=True,
    ),
)
RECIPES: dict[str, Recipe] = {
    # Long rounds of updates on a target network that stays the same meanwhile.
    "CartPole-v1": _recipe(
        50_000, 8, _network(256, 256), n_steps=32, batch_size=64, buffer_size=100_000, train_ratio=0.5,
        learning_rate=2.3e-3, target_update_interval=256, exploration_fraction=0.16, exploration_final_eps=0.04,
    ),
    "Acrobot-v1": _recipe(
        100_000, 4, _network(256, 256), n_steps=4, batch_size=128, buffer_size=50_000, train_ratio=0.5,
        learning_rate=6.3e-4, target_update_interval=250, exploration_fraction=0.12, exploration_final_eps=0.1,
    ),
    # Single random actions cancel out; held for 32 steps they climb the hill in one episode of six.
    "MountainCar-v0": _recipe(
        120_000, 4, _network(256, 256), n_steps=4, batch_size=128, buffer_size=120_000, train_ratio=0.5,
        learning_rate=1e-3, multi_step=3, target_update_interval=600, exploration_fraction=0.3,
        exploration_final_eps=0.05, exploration_hold=32, normalize_obs=True,
    ),
    # An update for every env step.
    "LunarLander-v3": _recipe(
        100_000, 4, _network(256, 256), n_steps=4, batch_size=128, buffer_size=50_000, train_ratio=1.0,
        learning_rate=6.3e-4, target_update_interval=250, exploration_fraction=0.12, exploration_final_eps=0.1,
    ),
    "ALE/Pong-v5": _ATARI, "ALE/Breakout-v5": _ATARI,
    "envpool:Pong-v5": _ATARI, "envpool:Breakout-v5": _ATARI,
    # One update for a step of all 256 games, because games are cheaper than learning.
    "flatout/Snake-v0": _recipe(
        10_000_000, 256, _network(64, 64), n_steps=8, batch_size=256, buffer_size=500_000, train_ratio=1 / 256,
        learning_starts=20_000, learning_rate=1e-3, gamma=0.98, multi_step=3, target_update_interval=20_000,
        exploration_fraction=0.02, exploration_final_eps=0.01,
    ),
}
# fmt: on
"""By env id."""


def _preset(n_envs: int, batch_size: int, buffer_size: int, network: NetworkConfig, n_cores: int) -> Recipe:
    config = DQNConfig(batch_size=batch_size, buffer_size=buffer_size)
    return Recipe(n_envs=n_envs, algorithm=config, network=network, n_cores=n_cores)


PRESETS = {
    "cpu": _preset(1, 32, 10_000, _network(128, 128), 1),
    "gpu": _preset(8, 128, 50_000, _network(256, 256, 256), 4),
}
AUTO = _preset(8, 64, 100_000, _network(64, 64), 1), _preset(8, 256, 100_000, _network(256, 256), 1)
"""On a CPU and on an accelerator."""
