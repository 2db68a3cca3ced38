"""What a replay holds per transition, how many transitions fit, and whether saved ones fit.

A replay has a ring of M slots for each of N envs, in RAM and on a device alike.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from flatout.buffers.replay_kernels import EMPTY
from flatout.device.machine import free_memory
from flatout.envs.spaces import ActionLayout, Array, ObsLayout
from flatout.errors import FlatoutError

SlotSpec = dict[str, tuple[tuple[int, ...], Any]]

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
SPARED = 0.1
"""Share of the free memory that is left to everything else."""
PRIORITY_BYTES = 5
"""Bytes of a transition's priority, with its share of the sums above it."""


def slot_spec(obs: ObsLayout, action: ActionLayout) -> SlotSpec:
    """Shape and dtype of what a slot holds, by name; actions are bytes where they fit, of stacked frames the newest."""
    arrays: SlotSpec = {}
    for i, spec in enumerate(obs.specs):
        frame = (spec.shape[0] // spec.frames, *spec.shape[1:]) if spec.frames > 1 else spec.shape
        arrays[f"obs.{i}"] = frame, spec.dtype
    if obs.frames > 1:
        arrays["age"] = (), np.dtype(np.uint8)
    fits_a_byte = not action.continuous and max(action.nvec) <= 256
    kept = {"action": ((action.size,), np.dtype(np.uint8) if fits_a_byte else action.dtype)}
    return {**arrays, **kept, "reward": ((), np.dtype(np.float32)), "end": ((), np.dtype(np.uint8))}


def transition_bytes(obs: ObsLayout, action: ActionLayout, *, prioritized: bool = False) -> int:
    """Bytes of one transition: its observation, action, reward, how it ended, its priority."""
    held: int = sum(math.prod(shape) * dtype.itemsize for shape, dtype in slot_spec(obs, action).values())
    return held + (PRIORITY_BYTES if prioritized else 0)


def parse_capacity(text: str | int, bytes_each: int) -> int:
    """`100_000`, "1M" or "50k" transitions, or as many as "200MB" or "50GB" hold."""
    found = re.fullmatch(r"(\d[\d_,]*(?:\.\d+)?(?:e\d{1,2})?)\s*([kmgt]i?)?(b)?", str(text).strip().lower())
    unit = (found[2] or "") if found else ""
    is_bytes = found is not None and found[3] is not None
    if found is None or (unit in _BINARY and not is_bytes):
        raise FlatoutError(
            f"buffer size {text!r} is neither a number of transitions (100000, 1M) nor of bytes (200MB, 50GB)"
        )
    amount = float(found[1].replace("_", "").replace(",", "")) * (_UNITS | _BINARY)[unit]
    capacity = int(amount / bytes_each if is_bytes else amount)
    if capacity < 1:
        least = f"; one takes {bytes_each:,} bytes" if is_bytes else ""
        raise FlatoutError(f"buffer size {text!r} holds no transition{least}")
    return capacity


def fitting_capacity(
    text: str | int, bytes_each: int, device: torch.device, free_bytes: int | None = None
) -> int:
    """The capacity that `text` names; refused, with the one that fits, if the device lacks the memory."""
    capacity = parse_capacity(text, bytes_each)
    free = free_memory(device) if free_bytes is None else free_bytes
    fits = int(free * (1 - SPARED)) // bytes_each
    if capacity > fits:
        where = "on the device" if device.type != "cpu" else "in memory"
        raise FlatoutError(
            f"buffer size {text!r} is {capacity:,} transitions of {bytes_each:,} bytes, {amount(capacity * bytes_each)}; "
            f"{amount(free)} are free {where}: use at most {fits:,} transitions ({amount(fits * bytes_each)})"
        )
    return capacity


def amount(n_bytes: int) -> str:
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6)):
        if n_bytes >= size:
            return f"{n_bytes / size:.1f} {unit}"
    return f"{n_bytes:,} bytes"


def slots_per_env(capacity: int, n_envs: int) -> int:
    """Slots in each env's ring: its share of the capacity, and one for its newest observation."""
    if capacity < 2 * n_envs:
        raise FlatoutError(
            f"a replay of {capacity} transitions is too small for {n_envs} envs; use at least {2 * n_envs}"
        )
    return capacity // n_envs + 1


def n_used(head: Array, n_slots: int, n_more: int = 0) -> int:
    """How many slots of the rings were ever reached; `n_more`: slots before the one that is reached first."""
    return min(int(head.max()) + 1 + n_more, n_slots)


def check_saved(
    arrays: Mapping[str, Array], spec: SlotSpec, n_envs: int, slots: Mapping[str, tuple[int, int]]
) -> None:
    """Refuse arrays saved from a replay with other envs or spaces, or of another size once its rings were full.

    `slots`: the number of slots in each ring, and how many of them come before the first.
    """
    head = arrays["head"]
    if len(head) != n_envs:
        raise FlatoutError(f"the saved replay has {len(head)} envs, this run {n_envs}; use as many")
    for name, (shape, dtype) in spec.items():
        saved, mine = arrays.get(name), (n_envs, n_used(head, *slots[name]), *shape)
        if saved is None or saved.shape != mine or saved.dtype != dtype:
            found = "missing" if saved is None else f"{saved.dtype} {saved.shape}"
            raise FlatoutError(
                f"the saved replay's {name} is {found}, this run's {dtype} {mine}; use the same buffer size and env"
            )
    if (head < 0).any() or (arrays["start"] > head).any() or (arrays["end"] > EMPTY).any():
        raise FlatoutError("the saved replay's counters are inconsistent; train without it")
