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


def card(name: str) -> Card:
    """A card by name; case, spaces, hyphens and a leading `nvidia` do not matter."""
    key = name.lower().replace(" ", "").replace("-", "").replace("_", "").removeprefix("nvidia")
    if key not in CARDS:
        known = ", ".join(CARDS)
        raise FlatoutError(f"--what-if gpu={name}: unknown card{did_you_mean(key, CARDS)} ({known})")
    return CARDS[key]
