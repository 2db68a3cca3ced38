"""Whether a preset fits this machine."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from flatout.algorithms.base import Recipe


def memory_needed(recipe: Recipe, obs_bytes: int) -> int:
    """Bytes that a run takes at least: its rollout, the shuffled copy, parameters and Adam's state."""
    n_transitions = recipe.n_envs * recipe.algorithm.n_steps
    widths = recipe.network.network_arch
    n_params = 2 * (obs_bytes // 4 * widths[0] + sum(a * b for a, b in pairwise(widths)))
    return 3 * n_transitions * (obs_bytes + 32) + 5 * 4 * n_params


def preset_note(
    presets: Mapping[str, Recipe], preset: str, n_cores: int, memory_bytes: int, obs_bytes: int
) -> str | None:
    """What to say when a preset wants more than the machine has: which one fits."""
    recipe = presets[preset]
    needed = memory_needed(recipe, obs_bytes)
    if recipe.n_cores > n_cores:
        wants, has = f"{recipe.n_cores} cores", f"{n_cores}"
    elif needed > memory_bytes:
        wants, has = f"{needed / 1e9:.1f} GB of memory", f"{memory_bytes / 1e9:.1f} GB free"
    else:
        return None
    fitting = [
        name
        for name, other in presets.items()
        if other.n_cores <= n_cores and memory_needed(other, obs_bytes) <= memory_bytes
    ]
    fits = max(fitting, key=lambda name: presets[name].n_cores, default="auto")
    return f"preset {preset} wants {wants}, this machine has {has}; --preset {fits} fits"
