"""A batch of sampled transitions: tensors, and in RAM the same memory as arrays that compiled loops fill."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatout.envs.spaces import ActionLayout, Array, ObsLayout


@dataclass(slots=True)
class BatchArrays:
    """A batch as NumPy arrays; a leaf's rows are bytes, whatever it holds."""

    obs: tuple[Array, ...]
    action: Array
    reward: Array
    next_obs: tuple[Array, ...]
    discount: Array
    weight: Array
    index: Array
    serial: Array
    next_index: Array
    """Slots of the bootstrap observations."""


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
    """What its value counts: γ to the number of those steps, 0 where the episode was terminated."""
    weight: Tensor
    """Importance weights."""
    index: Tensor
    """Slots that they lie in."""
    serial: Tensor
    """Tells later whether a slot still holds this transition."""
    arrays: BatchArrays | None = None
    """The same memory for NumPy, where it is in RAM."""

    def tensors(self) -> tuple[Tensor, ...]:
        """All its tensors: leaves, leaves of the next observations, the rest."""
        rest = (self.action, self.reward, self.discount, self.weight, self.index, self.serial)
        return (*self.obs, *self.next_obs, *rest)

    def to(self, device: torch.device) -> ReplayBatch:
        """The batch on a device; from pinned memory the copies may still be under way, in stream order."""
        n, sent = len(self.obs), tuple(x.to(device, non_blocking=True) for x in self.tensors())
        action, reward, discount, weight, index, serial = sent[2 * n :]
        return ReplayBatch(sent[:n], action, reward, sent[n : 2 * n], discount, weight, index, serial)


def alloc_batch(obs: ObsLayout, action: ActionLayout, size: int, *, pin: bool = False) -> ReplayBatch:
    """Room for a batch in ordinary or pinned memory; its weights are 1, the rest is not set."""
    new: Any = _pinned if pin else np.empty
    obs_room = tuple([new((size, *leaf.shape), leaf.dtype) for leaf in obs.specs])
    next_room = tuple([new((size, *leaf.shape), leaf.dtype) for leaf in obs.specs])
    kept = new((size, action.size), action.dtype)
    reward, discount, weight = new(size, np.float32), new(size, np.float32), new(size, np.float32)
    index, serial, next_index = new(size, np.int64), new(size, np.int64), np.empty(size, np.int64)
    weight.fill(1)
    tensor = torch.from_numpy
    return ReplayBatch(
        obs=tuple(map(tensor, obs_room)),
        action=tensor(kept),
        reward=tensor(reward),
        next_obs=tuple(map(tensor, next_room)),
        discount=tensor(discount),
        weight=tensor(weight),
        index=tensor(index),
        serial=tensor(serial),
        arrays=BatchArrays(
            obs=tuple([rows_of_bytes(leaf, 1) for leaf in obs_room]),
            action=kept,
            reward=reward,
            next_obs=tuple([rows_of_bytes(leaf, 1) for leaf in next_room]),
            discount=discount,
            weight=weight,
            index=index,
            serial=serial,
            next_index=next_index,
        ),
    )


def alloc(dtype: Any, *shape: int, pin: bool) -> Array:
    """Zeros in ordinary memory, whose pages cost nothing until they are written, or in pinned memory."""
    return _pinned(shape, dtype) if pin else np.zeros(shape, dtype)


def _pinned(shape: int | tuple[int, ...], dtype: Any) -> Array:
    out: Array = torch.zeros(shape, dtype=torch_dtype(dtype), pin_memory=True).numpy()
    return out


def as_array(tensor: Tensor) -> Array:
    """The tensor as an array of a float or integer type that NumPy has; the same memory where it is in RAM."""
    if tensor.dtype in (torch.bfloat16, torch.float16):
        tensor = tensor.float()
    return np.ascontiguousarray(tensor.numpy(force=True))


def torch_dtype(dtype: Any) -> torch.dtype:
    """Torch's name of a NumPy dtype."""
    return torch.from_numpy(np.zeros(0, dtype)).dtype


def rows_of_bytes(array: Array, n_lead: int) -> Array:
    """An array whose rows are contiguous, as bytes below its leading dimensions; the same memory."""
    lead, rest = array.shape[:n_lead], array.shape[n_lead:]
    return array.reshape(*lead, math.prod(rest)).view(np.uint8)
