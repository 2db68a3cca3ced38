"""Random numbers for actions: a pure function of (seed, env, step), one stream per env.

Nothing depends on how envs are spread over workers or on how many steps a rollout has, and a resumed
run needs no generator state. SplitMix64 (Steele, Lea and Flood 2014), vectorised.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flatout.envs.spaces import ActionLayout

_WEYL = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True)
class Exploration:
    """How noise makes envs explore, beyond sampling from the policy."""

    shift: npt.NDArray[np.float32] | None = None
    """By env, added to all its noise; see `GreedyHead`."""
    hold: int = 1
    """Steps for which an env's noise stays the same."""


NO_EXPLORATION = Exploration()
DRAWN_AT_ONCE = 512
"""Numbers of an env that are drawn together where a rollout needs fewer."""


class ActionNoise:
    """Gumbel noise for categorical actions, normal noise for continuous ones."""

    def __init__(
        self,
        layout: ActionLayout,
        env_ids: npt.NDArray[np.int64],
        seed: int,
        exploration: Exploration = NO_EXPLORATION,
    ) -> None:
        self._shift = (
            None if exploration.shift is None else torch.from_numpy(exploration.shift[env_ids])[:, None]
        )
        self._hold = exploration.hold
        self._continuous = layout.continuous
        self._size = layout.noise_size
        self._drawn = 0, torch.zeros(0)
        """Noise that was drawn last, after the step that it begins with; one value, as several threads may draw."""
        with np.errstate(over="ignore"):
            key = _mix(np.array(seed & 0xFFFFFFFFFFFFFFFF, np.uint64) * _WEYL + _WEYL)
            self._keys = _mix(key + (env_ids.astype(np.uint64) + np.uint64(1)) * _WEYL)

    def draw(self, first_step: int, n_steps: int) -> Tensor:
        """Noise (n_steps, n_envs, size) for each env's steps from `first_step` on; not to be changed."""
        begins, block = self._drawn
        if not begins <= first_step <= begins + len(block) - n_steps:
            block = self._held(first_step, max(n_steps, DRAWN_AT_ONCE // self._size))
            self._drawn = begins, block = first_step, block
        return block[first_step - begins :][:n_steps]

    def _held(self, first_step: int, n_steps: int) -> Tensor:
        if self._hold == 1:
            return self._fresh(first_step, n_steps)
        held = torch.arange(first_step, first_step + n_steps) // self._hold
        return self._fresh(int(held[0]), int(held[-1] - held[0]) + 1)[held - held[0]]

    def _fresh(self, first_step: int, n_steps: int) -> Tensor:
        n_values = n_steps * self._size
        counter = np.arange(1, n_values + 1, dtype=np.uint64) + np.uint64(first_step * self._size)
        with np.errstate(over="ignore"):
            bits = _mix(self._keys[:, None] + counter * _WEYL)
        # 53 bits, centred in their cell: never 0 or 1, so both transforms below stay finite.
        uniform = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        values = torch.from_numpy(uniform).view(len(self._keys), n_steps, self._size).transpose(0, 1)
        noise = torch.special.ndtri(values) if self._continuous else -(-values.log()).log()
        if self._shift is not None:
            noise += self._shift
        return noise.float().contiguous()


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * _MIX1
    x = (x ^ (x >> np.uint64(27))) * _MIX2
    out: npt.NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return out
