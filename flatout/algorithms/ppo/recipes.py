"""PPO's tuned settings per env, used where no preset is given, and its presets.

benchmarks/returns.py reproduces every recipe, benchmarks/workloads_*.py those of flatout's own envs.
"""

from __future__ import annotations

from typing import Any

from flatout.algorithms.base import Recipe
from flatout.algorithms.ppo.config import PPOConfig
from flatout.models.config import NetworkConfig


def _recipe(timesteps: int, n_envs: int, network: NetworkConfig, **settings: Any) -> Recipe:
    return Recipe(timesteps=timesteps, n_envs=n_envs, algorithm=PPOConfig(**settings), network=network)


_SMALL, _MIDDLE = NetworkConfig(network_arch=(64, 64)), NetworkConfig(network_arch=(128, 128))
_LINEAR: dict[str, Any] = {"learning_rate_schedule": "linear"}
_NORMALIZED: dict[str, Any] = {"normalize_obs": True, "normalize_reward": True}

# fmt: off
_ATARI = _recipe(
    10_000_000, 8, NetworkConfig(network_arch=(512,), activation="relu"), n_steps=128, batch_size=256, n_epochs=4,
    learning_rate=2.5e-4, **_LINEAR, clip_range=0.1, clip_range_schedule="linear", ent_coef=0.01, clip_reward=True,
)
RECIPES: dict[str, Recipe] = {
    "CartPole-v1": _recipe(
        100_000, 8, _SMALL, n_steps=32, batch_size=256, n_epochs=20, learning_rate=1e-3, **_LINEAR,
        clip_range_schedule="linear", gamma=0.98, gae_lambda=0.8,
    ),
    # The falling learning rate settles the policy that greedy evaluation shows.
    "Acrobot-v1": _recipe(
        1_000_000, 16, _SMALL, n_steps=256, batch_size=256, n_epochs=4, learning_rate=1e-3, **_LINEAR,
        gae_lambda=0.94, **_NORMALIZED,
    ),
    # The reward is constant until the hill is climbed; normalized rewards make the first climb count.
    "MountainCar-v0": _recipe(
        1_000_000, 16, _SMALL, n_steps=64, batch_size=256, n_epochs=4, learning_rate=1e-3, gae_lambda=0.98,
        **_NORMALIZED,
    ),
    # Long horizon: gamma close to 1, long rollouts.
    "LunarLander-v3": _recipe(
        1_000_000, 16, _SMALL, n_steps=1024, batch_size=64, n_epochs=4, gamma=0.999, gae_lambda=0.98,
        ent_coef=0.01,
    ),
    "Pendulum-v1": _recipe(
        100_000, 4, _SMALL, n_steps=1024, batch_size=64, n_epochs=10, learning_rate=1e-3, gamma=0.9,
    ),
    # Orders cost little and prices forget: a short horizon keeps the noise of later bars out.
    "flatout/Market-v0": _recipe(
        3_000_000, 1024, NetworkConfig(network_arch=(64, 64), log_std_init=-0.5), n_steps=32, batch_size=4096,
        n_epochs=2, learning_rate=3e-3, **_LINEAR, gamma=0.9, gae_lambda=0.5,
    ),
    # Many sites at once, because waiting for pages costs nothing.
    "flatout/Crawl-v0": _recipe(
        300_000, 64, _MIDDLE, n_steps=32, batch_size=256, n_epochs=6, learning_rate=1e-3, **_LINEAR,
        gamma=0.97, gae_lambda=0.9, ent_coef=0.01,
    ),
    # Few, large updates: steps of 256 games are cheaper than learning.
    "flatout/Snake-v0": _recipe(
        10_000_000, 256, NetworkConfig(network_arch=(64, 64), activation="relu"), n_steps=32, batch_size=2048,
        n_epochs=2, learning_rate=2e-3, **_LINEAR, ent_coef=0.01,
    ),
    # Little noise at first and a short horizon: what the next steps bring is what matters for running.
    **{f"HalfCheetah-{v}": _recipe(
        1_000_000, 1, NetworkConfig(network_arch=(256, 256), activation="relu", log_std_init=-2.0), n_steps=2048,
        batch_size=256, n_epochs=10, learning_rate=2e-4, **_LINEAR, gamma=0.98, gae_lambda=0.92, clip_range=0.1,
        ent_coef=4e-4, vf_coef=0.58, max_grad_norm=0.8, **_NORMALIZED,
    ) for v in ("v4", "v5")},
    **{f"{name}-{v}": _recipe(
        1_000_000, 1, _SMALL, n_steps=2048, batch_size=64, n_epochs=10, learning_rate=3e-4, **_LINEAR, gamma=0.99,
        gae_lambda=0.95, clip_range=0.2, ent_coef=0.0, vf_coef=0.5, max_grad_norm=0.5, **_NORMALIZED,
    ) for name in ("Hopper", "Walker2d") for v in ("v4", "v5")},
    # The settings of Schulman et al. 2017, as Stable-Baselines3's zoo has them.
    "ALE/Pong-v5": _ATARI, "ALE/Breakout-v5": _ATARI,
    "envpool:Pong-v5": _ATARI, "envpool:Breakout-v5": _ATARI,
    "flatout/Mission-v0": _recipe(
        1_000_000, 16, _MIDDLE, n_steps=128, batch_size=512, n_epochs=5, learning_rate=7e-4, **_LINEAR,
        ent_coef=0.003,
    ),
}
# fmt: on
"""By env id."""


def _preset(
    n_envs: int,
    n_steps: int,
    batch_size: int,
    n_epochs: int,
    arch: tuple[int, ...],
    n_cores: int = 1,
    **settings: Any,
) -> Recipe:
    config = PPOConfig(n_steps=n_steps, batch_size=batch_size, n_epochs=n_epochs, **settings)
    return Recipe(n_envs=n_envs, algorithm=config, network=NetworkConfig(network_arch=arch), n_cores=n_cores)


PRESETS = {
    "cpu": _preset(1, 256, 64, 4, (128, 128), 1),
    "gpu": _preset(8, 512, 256, 10, (256, 256), 4),
    "fast": _preset(16, 256, 2048, 15, (512, 512), 4),
    "heavy": _preset(32, 256, 4096, 20, (1024, 512, 256), 8),
    "beast": _preset(64, 512, 8192, 30, (1024, 512, 512, 256), 16),
    "max": _preset(32, 8192, 512, 30, (1024, 1024, 512, 256), 8),
}
_DISCRETE: dict[str, Any] = {"learning_rate": 1e-3, **_LINEAR, "ent_coef": 0.02, "normalize_reward": True}
AUTO = _preset(8, 256, 64, 10, (64, 64), **_DISCRETE), _preset(8, 256, 512, 10, (256, 256), **_DISCRETE)
"""For envs without a recipe, on a CPU and on an accelerator. The entropy bonus finds goals that are seldom reached, the falling
learning rate settles what was found (docs/untuned.md)."""
AUTO_CONTINUOUS = _preset(2, 1024, 64, 10, (64, 64)), _preset(2, 1024, 512, 10, (256, 256))
"""The same for continuous actions: a longer rollout of fewer envs. Normalized rewards and a falling learning rate made Ant learn less."""
