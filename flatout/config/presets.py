"""The presets, from one small CPU to a big machine, and the rule behind `auto`."""

from __future__ import annotations

from itertools import pairwise

from flatout.algorithms.dqn.config import DQNConfig, PQNConfig
from flatout.algorithms.ppo.config import PPOConfig
from flatout.algorithms.recipe import Recipe
from flatout.errors import FlatoutError
from flatout.models.config import NetworkConfig


def _preset(
    n_envs: int, n_steps: int, batch_size: int, n_epochs: int, arch: tuple[int, ...], n_cores: int
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

ALGORITHMS = {"ppo": PPOConfig, "dqn": DQNConfig, "pqn": PQNConfig}


def _dqn_preset(
    n_envs: int, batch_size: int, buffer_size: int, arch: tuple[int, ...], n_cores: int
) -> Recipe:
    return Recipe(
        n_envs=n_envs,
        algorithm=DQNConfig(batch_size=batch_size, buffer_size=buffer_size),
        network=NetworkConfig(network_arch=arch, activation="relu"),
        n_cores=n_cores,
    )


DQN_PRESETS = {
    "cpu": _dqn_preset(1, 32, 10_000, (128, 128), 1),
    "gpu": _dqn_preset(8, 128, 50_000, (256, 256, 256), 4),
}


def preset_recipe(algo: str, preset: str) -> Recipe:
    """A preset's settings for an algorithm that has them."""
    presets = {"ppo": PRESETS, "dqn": DQN_PRESETS}.get(algo, {})
    if preset not in presets:
        there = ", ".join([*presets, "auto"])
        raise FlatoutError(f"--preset {preset} has no settings for {algo.upper()}; there {_are(there)}")
    return presets[preset]


def _are(names: str) -> str:
    return f"are {names}" if "," in names else f"is {names}"


def auto(device: str, n_cores: int, algo: str = "ppo") -> Recipe:
    """A sensible start for an unknown env: 8 to 32 envs by cores, a network by device."""
    n_envs = min(max(8, 2 * n_cores), 32)
    on_gpu = device.startswith("cuda")
    if algo != "ppo":
        return Recipe(
            n_envs=n_envs,
            algorithm=DQNConfig(batch_size=256 if on_gpu else 64) if algo == "dqn" else PQNConfig(),
            network=NetworkConfig(network_arch=(256, 256) if on_gpu else (64, 64), activation="relu"),
        )
    if on_gpu:
        return _preset(n_envs, 256, 512, 10, (256, 256), 1)
    return _preset(n_envs, 256, 128, 10, (64, 64), 1)


def memory_needed(recipe: Recipe, obs_bytes: int) -> int:
    """Bytes that a run takes at least: its rollout, the shuffled copy, parameters and Adam's state."""
    n_transitions = recipe.n_envs * recipe.ppo.n_steps
    widths = recipe.network.network_arch
    n_params = 2 * (obs_bytes // 4 * widths[0] + sum(a * b for a, b in pairwise(widths)))
    return 3 * n_transitions * (obs_bytes + 32) + 5 * 4 * n_params


def preset_note(preset: str, n_cores: int, memory_bytes: int, obs_bytes: int) -> str | None:
    """What to say when a preset wants more than the machine has: which one fits."""
    recipe = PRESETS[preset]
    needed = memory_needed(recipe, obs_bytes)
    if recipe.n_cores > n_cores:
        wants, has = f"{recipe.n_cores} cores", f"{n_cores}"
    elif needed > memory_bytes:
        wants, has = f"{needed / 1e9:.1f} GB of memory", f"{memory_bytes / 1e9:.1f} GB free"
    else:
        return None
    fitting = [
        name
        for name, other in PRESETS.items()
        if other.n_cores <= n_cores and memory_needed(other, obs_bytes) <= memory_bytes
    ]
    fits = max(fitting, key=lambda name: PRESETS[name].n_cores, default="auto")
    return f"preset {preset} wants {wants}, this machine has {has}; --preset {fits} fits"
