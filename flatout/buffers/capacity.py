"""How many transitions a replay holds: a number, or a budget of memory such as "50GB"; checked against what is free."""

from __future__ import annotations

import math
import re

import torch

from flatout.buffers.rings import ring_spec
from flatout.device.machine import free_memory
from flatout.envs.spaces import ActionLayout, ObsLayout
from flatout.errors import FlatoutError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
SPARED = 0.1
"""Share of the free memory that is left to everything else."""
PRIORITY_BYTES = 5
"""What a transition's priority takes, with its share of the sums above it."""


def transition_bytes(obs: ObsLayout, action: ActionLayout, *, prioritized: bool = False) -> int:
    """Bytes that one transition takes: its observation, action, reward, how it ended, its priority."""
    held: int = sum(math.prod(shape) * dtype.itemsize for shape, dtype in ring_spec(obs, action).values())
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
    """The capacity that `text` asks for; refused, with the one that fits, when the device has not the memory."""
    capacity = parse_capacity(text, bytes_each)
    free = free_memory(device) if free_bytes is None else free_bytes
    fits = int(free * (1 - SPARED)) // bytes_each
    if capacity > fits:
        where = "on the device" if device.type == "cuda" else "in memory"
        raise FlatoutError(
            f"buffer size {text!r} is {capacity:,} transitions of {bytes_each:,} bytes, {_amount(capacity * bytes_each)}; "
            f"{_amount(free)} are free {where}: use at most {fits:,} transitions ({_amount(fits * bytes_each)})"
        )
    return capacity


def _amount(n_bytes: int) -> str:
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6)):
        if n_bytes >= size:
            return f"{n_bytes / size:.1f} {unit}"
    return f"{n_bytes:,} bytes"
