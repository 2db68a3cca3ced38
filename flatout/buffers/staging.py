"""Rollouts on their way to a CUDA device: pinned memory, and copies that run beside other work.

On the CPU nothing is staged: the learner looks at the rollout's own memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from flatout.envs.spaces import Array


class Staging:
    """Two pinned copies of every array, used in turn: one may still be on its way while the other is filled."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pinned: list[dict[int, Tensor]] = [{}, {}]
        self._sent: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def to_device(self, arrays: Sequence[Array]) -> list[Tensor]:
        """The arrays as tensors on the device; on CUDA the copies may still be under way, in stream order."""
        if self.device.type != "cuda":
            return [torch.from_numpy(array).to(self.device) for array in arrays]
        self._turn ^= 1
        sent = self._sent[self._turn]
        if sent is not None:
            sent.synchronize()  # two rollouts ago: long done
        out = [self._send(i, array) for i, array in enumerate(arrays)]
        event = torch.cuda.Event()
        event.record()
        self._sent[self._turn] = event
        return out

    def _send(self, i: int, array: Array) -> Tensor:
        pinned = self._pinned[self._turn].get(i)
        if pinned is None or pinned.shape != array.shape:
            dtype = torch.from_numpy(np.zeros(0, array.dtype)).dtype
            pinned = torch.empty(array.shape, dtype=dtype, pin_memory=True)
            self._pinned[self._turn][i] = pinned
        pinned.copy_(torch.from_numpy(array))
        return pinned.to(self.device, non_blocking=True)
