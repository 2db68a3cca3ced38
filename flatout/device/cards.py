"""Data sheets of common cards: for predictions about cards that this machine does not have, and for batch sizes by card."""

from __future__ import annotations

from dataclasses import dataclass

from flatout.errors import FlatoutError, did_you_mean


@dataclass(frozen=True, slots=True)
class Card:
    """A card by its data sheet."""

    fp32: float
    """Peak single precision, in 10¹² operations a second."""
    tf32: float
    """The same for matrix products with TF32; equal to `fp32` on cards without it."""
    bf16: float
    """The same for 16-bit matrix products that sum in 32 bits."""
    bandwidth: float
    """Memory, in 10⁹ bytes a second."""
    memory: float
    """In 10⁹ bytes."""
    link: float
    """The link to the host, in 10⁹ bytes a second in one direction."""


CARDS = {
    "t4": Card(8.1, 8.1, 65.0, 300, 16, 12),
    "rtx3060": Card(12.7, 12.7, 25.5, 360, 12, 24),
    "rtx3070": Card(20.3, 20.3, 40.6, 448, 8, 24),
    "rtx3080": Card(29.8, 29.8, 59.5, 760, 10, 24),
    "rtx3090": Card(35.6, 35.6, 71.0, 936, 24, 24),
    "rtx4070": Card(29.1, 29.1, 58.3, 504, 12, 24),
    "rtx4090": Card(82.6, 82.6, 165.2, 1008, 24, 24),
    "rtx5080": Card(56.3, 56.3, 112.6, 960, 16, 48),
    "a100": Card(19.5, 156.0, 312.0, 1555, 40, 24),
    "h100": Card(67.0, 494.0, 989.0, 3350, 80, 50),
}

BATCH_SIZES = {
    "rtx3060": (64, 128),
    "rtx3070": (64, 128),
    "rtx3080": (256, 512),
    "rtx3090": (256, 512),
    "rtx4090": (512, 1024),
    "a100": (1024, 2048),
    "t4": (128, 128),
}
"""Smallest and largest batch of off-policy learning that suits a card."""
BY_MEMORY = ((80, 2048), (40, 1024), (24, 512), (16, 256), (6, 128), (0, 64))
"""The same batch for other cards: memory from which on it suits, in 10⁹ bytes, and its size."""


def replay_batch_size(name: str, memory_bytes: int) -> int:
    """The batch of off-policy learning on a card of this name and memory; within the card's range if it is listed."""
    # Drivers report somewhat less than what the data sheet says.
    size = next(size for least, size in BY_MEMORY if memory_bytes / 1e9 >= 0.95 * least)
    found = next((sizes for known, sizes in BATCH_SIZES.items() if known in _key(name)), (size, size))
    return min(max(size, found[0]), found[1])


def is_listed(name: str) -> bool:
    """Whether the batch of off-policy learning is known for a card of this name."""
    return any(known in _key(name) for known in BATCH_SIZES)


def _key(name: str) -> str:
    """A card's name in the form of the tables: case, spaces, hyphens and a leading `nvidia` do not matter."""
    return name.lower().replace(" ", "").replace("-", "").replace("_", "").removeprefix("nvidia")


def card(name: str) -> Card:
    """A card by name."""
    key = _key(name)
    if key not in CARDS:
        known = ", ".join(CARDS)
        raise FlatoutError(f"--what-if gpu={name}: unknown card{did_you_mean(key, CARDS)} ({known})")
    return CARDS[key]
