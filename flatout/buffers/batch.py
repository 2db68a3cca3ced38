"""Batches of sampled transitions, and the allocation of arrays and tensors.

In RAM a batch's tensors share their memory with arrays that compiled loops fill.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from flatout.envs.spaces import ActionLayout, Array, ObsLayout


@dataclass(slots=True)
class BatchArrays:
    """A batch's memory as NumPy arrays, for compiled loops; observations as bytes, (B, bytes)."""

    obs: tuple[Array, ...]
    next_obs: tuple[Array, ...]
    weight: Array
    index: Array
    next_index: Array
    """Slots of the observations to bootstrap from."""
    windows: tuple[Array, ...]
    """What `replay_kernels.windows` fills."""


@dataclass(slots=True)
class ReplayBatch:
    """B sampled transitions."""

    obs: tuple[Tensor, ...]
    action: Tensor
    """(B, size)"""
    reward: Tensor
    """Sum of the discounted rewards of up to n steps, cut at the episode's end."""
    next_obs: tuple[Tensor, ...]
    """The observation after those steps, to bootstrap from."""
    discount: Tensor
    """Factor of the bootstrapped value: γ to the number of those steps, 0 where the episode was terminated."""
    weight: Tensor
    """Importance weights."""
    index: Tensor
    """Slots of the transitions in the replay."""
    serial: Tensor
    """Slot numbers; they tell later whether a slot still holds this transition."""
    arrays: BatchArrays | None = None
    """The same memory for NumPy, if it is in RAM."""

    COLUMNS: ClassVar = ("action", "reward", "discount", "weight", "index", "serial")

    def tensors(self) -> tuple[Tensor, ...]:
        """All its tensors: observations, next observations, the rest."""
        return (*self.obs, *self.next_obs, *(getattr(self, name) for name in self.COLUMNS))

    def to(self, device: torch.device) -> ReplayBatch:
        """The batch on a device; from pinned memory the copies may still be in transfer, in stream order."""
        n, sent = len(self.obs), [x.to(device, non_blocking=True) for x in self.tensors()]
        columns: dict[str, Any] = dict(zip(self.COLUMNS, sent[2 * n :], strict=True))
        return ReplayBatch(obs=tuple(sent[:n]), next_obs=tuple(sent[n : 2 * n]), **columns)


def alloc_batch(obs: ObsLayout, action: ActionLayout, size: int, *, pin: bool = False) -> ReplayBatch:
    """A batch in ordinary or pinned memory; its weights are 1, the rest is not set."""

    def new(dtype: Any, *shape: int) -> Tensor:
        return torch.empty((size, *shape), dtype=torch_dtype(dtype), pin_memory=pin)

    batch = ReplayBatch(
        obs=tuple([new(spec.dtype, *spec.shape) for spec in obs.specs]),
        action=new(action.dtype, action.size),
        reward=new(np.float32),
        next_obs=tuple([new(spec.dtype, *spec.shape) for spec in obs.specs]),
        discount=new(np.float32),
        weight=new(np.float32).fill_(1),
        index=new(np.int64),
        serial=new(np.int64),
    )
    next_index = torch.empty(size, dtype=torch.int64)
    windows = batch.action, batch.reward, batch.discount, next_index, batch.serial
    batch.arrays = BatchArrays(
        obs=tuple(as_bytes(x.numpy(), 1) for x in batch.obs),
        next_obs=tuple(as_bytes(x.numpy(), 1) for x in batch.next_obs),
        weight=batch.weight.numpy(),
        index=batch.index.numpy(),
        next_index=next_index.numpy(),
        windows=tuple(x.numpy() for x in windows),
    )
    return batch


def alloc(dtype: Any, *shape: int, pin: bool) -> Array:
    """Zeros in ordinary memory, whose pages take no memory until they are written, or in pinned memory."""
    if not pin:
        return np.zeros(shape, dtype)
    return torch.zeros(shape, dtype=torch_dtype(dtype), pin_memory=True).numpy()


def as_array(tensor: Tensor) -> Array:
    """The tensor as a contiguous array, half precision as float32; the same memory where it is in RAM."""
    if tensor.dtype in (torch.bfloat16, torch.float16):
        tensor = tensor.float()
    return np.ascontiguousarray(tensor.numpy(force=True))


def torch_dtype(dtype: Any) -> torch.dtype:
    """The torch dtype of a NumPy dtype."""
    return torch.from_numpy(np.zeros(0, dtype)).dtype


def as_bytes(x: Any, n_lead: int) -> Any:
    """A view of a contiguous array or tensor as bytes below its leading dimensions."""
    flat = x.reshape(*x.shape[:n_lead], math.prod(x.shape[n_lead:]))
    return flat.view(np.uint8 if isinstance(x, np.ndarray) else torch.uint8)
