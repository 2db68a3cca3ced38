"""The presets, from one small CPU to a big machine, and the rule behind `auto`."""

from __future__ import annotations

from flatout.algorithms.config import PPOConfig
from flatout.models.config import NetworkConfig
from flatout.recipes.recipe import Recipe


def _preset(
    n_envs: int, n_steps: int, batch_size: int, n_epochs: int, arch: tuple[int, ...], n_cores: int
) -> Recipe:
    return Recipe(
        n_envs=n_envs,
        ppo=PPOConfig(n_steps=n_steps, batch_size=batch_size, n_epochs=n_epochs),
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


def auto(device: str, n_cores: int) -> Recipe:
    """A sensible start for an unknown env: 8 to 32 envs by cores, a network by device."""
    n_envs = min(max(8, 2 * n_cores), 32)
    if device.startswith("cuda"):
        return _preset(n_envs, 256, 512, 10, (256, 256), 1)
    return _preset(n_envs, 256, 128, 10, (64, 64), 1)


def fitting_preset(n_cores: int) -> str:
    """The largest preset that wants no more than this many cores."""
    fitting = [name for name, recipe in PRESETS.items() if recipe.n_cores <= n_cores]
    return max(fitting, key=lambda name: PRESETS[name].n_cores)
