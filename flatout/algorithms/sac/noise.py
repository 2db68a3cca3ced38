"""Random numbers of updates: a pure function of (seed, number of the update), on any device and in a captured graph.

SplitMix64 (Steele, Lea and Flood 2014) in tensor operations; int64 wraps around as uint64 does. On the CPU a compiled loop
gives the same bits in a tenth of the time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatout.buffers.replay_kernels import draw_key
from flatout.device.jit import compiled
from flatout.envs.spaces import Array

DRAWN_AT_ONCE = 8
"""Updates whose noise is drawn together."""
FAR = 2**40
"""A draw's number that a replay buffer's sampler, which has the same seed, never reaches."""


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


_WEYL, _MIX1, _MIX2 = map(_signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def noise_key(seed: int) -> int:
    """The key of a run's noise."""
    return _signed(int(draw_key(seed, FAR)))


def mix(x: Tensor) -> Tensor:
    """Scrambles the bits of each number."""
    # `>>` copies the sign; the masks make its bits zero.
    x = (x ^ ((x >> 30) & (2**34 - 1))) * _MIX1
    x = (x ^ ((x >> 27) & (2**37 - 1))) * _MIX2
    return x ^ ((x >> 31) & (2**33 - 1))


def uniform(bits: Tensor) -> Tensor:
    """Scrambled bits as float32 numbers strictly between 0 and 1."""
    return (((bits >> 41) & (2**23 - 1)).float() + 0.5) * 2.0**-23


def normal(key: int, numbers: Tensor, size: int) -> Tensor:
    """Standard normal numbers for each of these updates, (updates, size)."""
    if numbers.device.type == "cpu":
        signed = torch.empty(len(numbers), size)
        fill_signed(np.uint64(key % 2**64), numbers.numpy().view(np.uint64), signed.numpy())
    else:
        place = torch.arange(1, size + 1, device=numbers.device) * _WEYL
        signed = 2 * uniform(mix(mix(numbers * _WEYL + key)[:, None] + place)) - 1
    return signed.erfinv_().mul_(2**0.5)


_U_WEYL, _U_MIX1, _U_MIX2 = (np.uint64(word % 2**64) for word in (_WEYL, _MIX1, _MIX2))
_U27, _U30, _U31, _U41 = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(41)
_ONE, _HALF, _FINEST = np.float32(1), np.float32(0.5), np.float32(2.0**-22)


@compiled
def _mixed(x: Any) -> Any:
    x = (x ^ (x >> _U30)) * _U_MIX1
    x = (x ^ (x >> _U27)) * _U_MIX2
    return x ^ (x >> _U31)


@compiled
def fill_signed(key: Any, numbers: Array, out: Array) -> None:
    """Uniform numbers between -1 and 1 for each of these updates."""
    for i in range(len(numbers)):
        own = _mixed(numbers[i] * _U_WEYL + key)
        for j in range(out.shape[1]):
            bits = _mixed(own + np.uint64(j + 1) * _U_WEYL)
            out[i, j] = (np.float32(np.int64(bits >> _U41)) + _HALF) * _FINEST - _ONE


class UpdateNoise:
    """`normal` for one update after another on the CPU, drawn for several at once."""

    def __init__(self, key: int) -> None:
        self._key, self._drawn = key, (0, torch.zeros(0, 0))

    def draw(self, first: int, n: int, size: int) -> Tensor:
        """For `n` updates from number `first` on, (n, size); not to be changed."""
        begins, block = self._drawn
        if not begins <= first <= begins + len(block) - n or block.shape[1] != size:
            block = normal(self._key, torch.arange(first, first + max(n, DRAWN_AT_ONCE)), size)
            self._drawn = begins, block = first, block
        return block[first - begins :][:n]


def kept(bits: Tensor, width: int, salt: int, dropout: float) -> Tensor:
    """What dropout multiplies the units of both critics with, (2, B, width); `bits` (B, 1) are each sample's own."""
    place = torch.arange(1, 2 * width + 1, device=bits.device).view(2, 1, width) * _WEYL
    u = uniform(mix(mix(bits * _MIX1 + salt) + place))
    return (u >= dropout).float() / (1 - dropout)
