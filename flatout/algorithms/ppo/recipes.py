"""PPO's tuned settings per env, used where no preset is given, and its presets.

benchmarks/returns.py reproduces every recipe, benchmarks/workloads_*.py those of flatout's own envs.
"""

from __future__ import annotations

from collections.abc import Callable

from flatout.algorithms.base import Recipe, auto_n_envs
from flatout.algorithms.ppo.config import PPOConfig
from flatout.models.config import NetworkConfig


def cartpole() -> Recipe:
    """Balanced for good within 100 k steps."""
    return Recipe(
        timesteps=100_000,
        n_envs=8,
        algorithm=PPOConfig(
            n_steps=32,
            batch_size=256,
            n_epochs=20,
            learning_rate=1e-3,
            learning_rate_schedule="linear",
            clip_range_schedule="linear",
            gamma=0.98,
            gae_lambda=0.8,
        ),
        network=NetworkConfig(network_arch=(64, 64)),
    )


def acrobot() -> Recipe:
    """Swings up in about 75 steps; the falling learning rate settles the policy that the greedy choice shows."""
    return Recipe(
        timesteps=1_000_000,
        n_envs=16,
        algorithm=PPOConfig(
            n_steps=256,
            batch_size=256,
            n_epochs=4,
            learning_rate=1e-3,
            learning_rate_schedule="linear",
            gae_lambda=0.94,
            normalize_obs=True,
            normalize_reward=True,
        ),
        network=NetworkConfig(network_arch=(64, 64)),
    )


def mountain_car() -> Recipe:
    """The reward says nothing until the hill is climbed; normalised rewards make the first climb count."""
    return Recipe(
        timesteps=1_000_000,
        n_envs=16,
        algorithm=PPOConfig(
            n_steps=64,
            batch_size=256,
            n_epochs=4,
            learning_rate=1e-3,
            gae_lambda=0.98,
            normalize_obs=True,
            normalize_reward=True,
        ),
        network=NetworkConfig(network_arch=(64, 64)),
    )


def lunar_lander() -> Recipe:
    """Long horizons: γ close to 1, long rollouts."""
    return Recipe(
        timesteps=1_000_000,
        n_envs=16,
        algorithm=PPOConfig(
            n_steps=1024, batch_size=64, n_epochs=4, gamma=0.999, gae_lambda=0.98, ent_coef=0.01
        ),
        network=NetworkConfig(network_arch=(64, 64)),
    )


def pendulum() -> Recipe:
    """Short horizon, continuous torque."""
    return Recipe(
        timesteps=100_000,
        n_envs=4,
        algorithm=PPOConfig(n_steps=1024, batch_size=64, n_epochs=10, learning_rate=1e-3, gamma=0.9),
        network=NetworkConfig(network_arch=(64, 64)),
    )


def market() -> Recipe:
    """Orders cost little and prices forget: a short horizon keeps the noise of later bars out."""
    return Recipe(
        timesteps=3_000_000,
        n_envs=1024,
        algorithm=PPOConfig(
            n_steps=32,
            batch_size=4096,
            n_epochs=2,
            learning_rate=3e-3,
            learning_rate_schedule="linear",
            gamma=0.9,
            gae_lambda=0.5,
        ),
        network=NetworkConfig(network_arch=(64, 64), log_std_init=-0.5),
    )


def crawl() -> Recipe:
    """Many sites at once, because waiting for pages is free; what a word promises is learned across them."""
    return Recipe(
        timesteps=300_000,
        n_envs=64,
        algorithm=PPOConfig(
            n_steps=32,
            batch_size=256,
            n_epochs=6,
            learning_rate=1e-3,
            learning_rate_schedule="linear",
            gamma=0.97,
            gae_lambda=0.9,
            ent_coef=0.01,
        ),
        network=NetworkConfig(network_arch=(128, 128)),
    )


def snake() -> Recipe:
    """256 games at once on 10 × 10; few, large updates, because games are cheaper than learning."""
    return Recipe(
        timesteps=10_000_000,
        n_envs=256,
        algorithm=PPOConfig(
            n_steps=32,
            batch_size=2048,
            n_epochs=2,
            learning_rate=2e-3,
            learning_rate_schedule="linear",
            ent_coef=0.01,
        ),
        network=NetworkConfig(network_arch=(64, 64), activation="relu"),
    )


def mission() -> Recipe:
    """Three decisions a step, which the action mask thins out; the same settings for every level."""
    return Recipe(
        timesteps=1_000_000,
        n_envs=16,
        algorithm=PPOConfig(
            n_steps=128,
            batch_size=512,
            n_epochs=5,
            learning_rate=7e-4,
            learning_rate_schedule="linear",
            ent_coef=0.003,
        ),
        network=NetworkConfig(network_arch=(128, 128)),
    )


RECIPES: dict[str, Callable[[], Recipe]] = {
    "CartPole-v1": cartpole,
    "Acrobot-v1": acrobot,
    "MountainCar-v0": mountain_car,
    "LunarLander-v3": lunar_lander,
    "Pendulum-v1": pendulum,
    "flatout/Market-v0": market,
    "flatout/Crawl-v0": crawl,
    "flatout/Snake-v0": snake,
    "flatout/Mission-v0": mission,
}
"""By env id."""


def _preset(
    n_envs: int, n_steps: int, batch_size: int, n_epochs: int, arch: tuple[int, ...], n_cores: int = 1
) -> Recipe:
    return Recipe(
        n_envs=n_envs,
        algorithm=PPOConfig(n_steps=n_steps, batch_size=batch_size, n_epochs=n_epochs),
        network=NetworkConfig(network_arch=arch),
        n_cores=n_cores,
    )


PRESETS = {
    "cpu": _preset(1, 256, 64, 4, (128, 128), 1),
    "gpu": _preset(8, 512, 256, 10, (256, 256), 4),
    "fast": _preset(16, 256, 2048, 15, (512, 512), 4),
    "heavy": _preset(32, 256, 4096, 20, (1024, 512, 256), 8),
    "beast": _preset(64, 512, 8192, 30, (1024, 512, 512, 256), 16),
    "max": _preset(32, 8192, 512, 30, (1024, 1024, 512, 256), 8),
}


def auto(on_accelerator: bool, n_cores: int) -> Recipe:
    """A start for an env without a recipe."""
    n_envs = auto_n_envs(n_cores)
    if on_accelerator:
        return _preset(n_envs, 256, 512, 10, (256, 256))
    return _preset(n_envs, 256, 128, 10, (64, 64))
