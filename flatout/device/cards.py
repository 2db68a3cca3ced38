"""What makers' data sheets say of common cards: for reckoning what a card would do that is not there."""

from __future__ import annotations

from dataclasses import dataclass

from flatout.errors import FlatoutError, did_you_mean


@dataclass(frozen=True, slots=True)
class Card:
    """One kind of GPU."""

    teraflops: float
    """Single precision, at its peak."""
    memory_gb: int


CARDS = {
    "t4": Card(8.1, 16),
    "rtx3060": Card(12.7, 12),
    "rtx3070": Card(20.3, 8),
    "rtx3080": Card(29.8, 10),
    "rtx3090": Card(35.6, 24),
    "rtx4070": Card(29.1, 12),
    "rtx4090": Card(82.6, 24),
    "rtx5080": Card(56.3, 16),
    "a100": Card(19.5, 40),
    "h100": Card(66.9, 80),
}


def card(name: str) -> Card:
    """The card of that name, written in any of the usual ways."""
    key = name.lower().replace(" ", "").replace("-", "").replace("_", "").removeprefix("nvidia")
    if key not in CARDS:
        raise FlatoutError(
            f"--what-if gpu={name}: unknown card{did_you_mean(key, CARDS)} ({', '.join(CARDS)})"
        )
    return CARDS[key]
