"""Random numbers of updates: a pure function of (seed, number of the update), on any device and in a captured graph.

SplitMix64 (Steele, Lea and Flood 2014) in tensor operations; int64 wraps around as uint64 does.
`fused.UpdateNoise` gives the same numbers on the CPU in a tenth of the time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flatout.buffers.replay_kernels import draw_key

FAR = 2**40
"""A draw's number that a replay buffer's sampler, which has the same seed, never reaches."""


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


WEYL, MIX1, MIX2 = map(_signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def noise_key(seed: int) -> int:
    """The key of a run's noise."""
    return _signed(int(draw_key(seed, FAR)))


def mix(x: Tensor) -> Tensor:
    """Scrambles the bits of each number."""
    # `>>` copies the sign; the masks make its bits zero.
    x = (x ^ ((x >> 30) & (2**34 - 1))) * MIX1
    x = (x ^ ((x >> 27) & (2**37 - 1))) * MIX2
    return x ^ ((x >> 31) & (2**33 - 1))


def uniform(bits: Tensor) -> Tensor:
    """Scrambled bits as float32 numbers strictly between 0 and 1."""
    return (((bits >> 41) & (2**23 - 1)).float() + 0.5) * 2.0**-23


def normal(key: int, numbers: Tensor, size: int) -> Tensor:
    """Standard normal numbers for each of these updates, (updates, size)."""
    place = torch.arange(1, size + 1, device=numbers.device) * WEYL
    bits = mix(mix(numbers * WEYL + key)[:, None] + place)
    return torch.erfinv(2 * uniform(bits) - 1) * 2**0.5


def kept(bits: Tensor, width: int, salt: int, dropout: float) -> Tensor:
    """What dropout multiplies the units of both critics with, (2, B, width); `bits` (B, 1) are each sample's own."""
    place = torch.arange(1, 2 * width + 1, device=bits.device).view(2, 1, width) * WEYL
    u = uniform(mix(mix(bits * MIX1 + salt) + place))
    return (u >= dropout).float() / (1 - dropout)
