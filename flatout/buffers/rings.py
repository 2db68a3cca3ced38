"""What the replays in RAM and on a device have in common: rings of M slots for each of N envs, saved in one form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flatout.buffers.replay_kernels import EMPTY
from flatout.envs.spaces import ActionLayout, Array, ObsLayout
from flatout.errors import FlatoutError


def ring_spec(obs: ObsLayout, action: ActionLayout) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Shape and dtype of what a slot holds, by name."""
    leaves = {f"obs.{i}": (leaf.shape, leaf.dtype) for i, leaf in enumerate(obs.specs)}
    kept = {"action": ((action.size,), _narrow(action))}
    return {**leaves, **kept, "reward": ((), np.dtype(np.float32)), "end": ((), np.dtype(np.uint8))}


def _narrow(action: ActionLayout) -> np.dtype[Any]:
    """A type that holds all actions: a byte where that will do, less memory and less to wait for at random places."""
    return np.dtype(np.uint8 if not action.continuous and max(action.nvec) <= 256 else action.dtype)


def slots_per_env(capacity: int, n_envs: int) -> int:
    """Slots in each env's ring: its share of the capacity, and one for its newest observation."""
    if capacity < 2 * n_envs:
        raise FlatoutError(
            f"a replay of {capacity} transitions is too small for {n_envs} envs; use at least {2 * n_envs}"
        )
    return capacity // n_envs + 1


def check_window(n_slots: int, n_step: int, n_envs: int) -> None:
    """Refuse a replay in which no n-step window could be whole."""
    if n_step < 1:
        raise FlatoutError(f"n_step is {n_step}; use 1 or more")
    if n_slots - 1 <= n_step:
        least = (n_step + 1) * n_envs
        raise FlatoutError(
            f"{n_step}-step returns of {n_envs} envs need a buffer of at least {least} transitions"
        )


def nothing_stored(n_step: int) -> FlatoutError:
    """What a draw from an empty replay says."""
    return FlatoutError(f"the replay holds no {n_step}-step transition yet; collect more before sampling")


def n_used(head: Array, n_slots: int) -> int:
    """How many slots of the rings were ever reached."""
    return min(int(head.max()) + 1, n_slots)


def check_saved(
    arrays: Mapping[str, Array], spec: Mapping[str, tuple[tuple[int, ...], Any]], n_envs: int, n_slots: int
) -> None:
    """Refuse saved arrays of another replay: other envs, spaces, or size once its rings have been gone around."""
    head = arrays["head"]
    if len(head) != n_envs:
        raise FlatoutError(f"the saved replay has {len(head)} envs, this run {n_envs}; use as many")
    used = n_used(head, n_slots)
    for name, (shape, dtype) in spec.items():
        saved, mine = arrays.get(name), (n_envs, used, *shape)
        if saved is None or saved.shape != mine or saved.dtype != dtype:
            found = "missing" if saved is None else f"{saved.dtype} {saved.shape}"
            raise FlatoutError(
                f"the saved replay's {name} is {found}, this run's {dtype} {mine}; use the same buffer size and env"
            )
    if (head < 0).any() or (arrays["start"] > head).any() or (arrays["end"] > EMPTY).any():
        raise FlatoutError("the saved replay's counters make no sense; train without it")
