"""Batches of sampled transitions, and the interface of what draws them.

In RAM a batch's tensors share their memory with arrays that compiled loops fill.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from flatout.envs.spaces import ActionLayout, Array, ObsLayout
from flatout.errors import FlatoutError


@dataclass(slots=True)
class BatchArrays:
    """A batch as NumPy arrays; observations as bytes, (B, bytes)."""

    obs: tuple[Array, ...]
    action: Array
    reward: Array
    next_obs: tuple[Array, ...]
    discount: Array
    weight: Array
    index: Array
    serial: Array
    next_index: Array
    """Slots of the observations to bootstrap from."""


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

    def tensors(self) -> tuple[Tensor, ...]:
        """All its tensors: observations, next observations, the rest."""
        rest = (self.action, self.reward, self.discount, self.weight, self.index, self.serial)
        return (*self.obs, *self.next_obs, *rest)

    def to(self, device: torch.device) -> ReplayBatch:
        """The batch on a device; from pinned memory the copies may still be in transfer, in stream order."""
        n, sent = len(self.obs), tuple(x.to(device, non_blocking=True) for x in self.tensors())
        action, reward, discount, weight, index, serial = sent[2 * n :]
        return ReplayBatch(sent[:n], action, reward, sent[n : 2 * n], discount, weight, index, serial)


class Ring(Protocol):
    """What a sampler checks of its replay."""

    n_envs: int
    n_slots: int


Replayed = TypeVar("Replayed", bound=Ring)


class Sampler(Generic[Replayed]):
    """Draws n-step transitions from a replay.

    Draw number k depends on the seed, k, and what was stored and updated before it, on nothing else.
    """

    def __init__(self, replay: Replayed, *, gamma: float, n_step: int = 1, seed: int = 0) -> None:
        if n_step < 1:
            raise FlatoutError(f"n_step is {n_step}; use 1 or more")
        if replay.n_slots - 1 <= n_step:
            raise FlatoutError(
                f"{n_step}-step returns of {replay.n_envs} envs need a buffer of at least "
                f"{(n_step + 1) * replay.n_envs} transitions"
            )
        self.replay, self._gamma, self._n_step, self._seed = replay, gamma, n_step, seed
        self.n_draws = 0

    def sample(self, size: int, beta: float = 0.4, out: ReplayBatch | None = None) -> ReplayBatch:
        """Draw `size` transitions, into `out` if it is given and the replay is in RAM.

        Prioritized samplers set weights (n · P)^-beta relative to the largest of the batch; uniform ones set 1.
        """
        raise NotImplementedError

    def update(self, index: Tensor, serial: Tensor, priority: Tensor) -> None:
        """Set new priorities (|TD error|) of drawn transitions, except those that were overwritten since.

        Uniform samplers ignore it.
        """

    def arrays(self) -> dict[str, Array]:
        """Its state by name, to be saved with the replay's own arrays."""
        return {"n_draws": np.array([self.n_draws])}

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Set the state from what `arrays` gave, once the replay is restored."""
        self.n_draws = int(arrays["n_draws"][0])

    def _nothing_stored(self) -> FlatoutError:
        return FlatoutError(
            f"the replay holds no {self._n_step}-step transition yet; collect more before sampling"
        )


def alloc_batch(obs: ObsLayout, action: ActionLayout, size: int, *, pin: bool = False) -> ReplayBatch:
    """A batch in ordinary or pinned memory; its weights are 1, the rest is not set."""
    new: Any = _pinned if pin else np.empty
    obs_out = tuple([new((size, *spec.shape), spec.dtype) for spec in obs.specs])
    next_out = tuple([new((size, *spec.shape), spec.dtype) for spec in obs.specs])
    actions = new((size, action.size), action.dtype)
    reward, discount, weight = new(size, np.float32), new(size, np.float32), new(size, np.float32)
    index, serial, next_index = new(size, np.int64), new(size, np.int64), np.empty(size, np.int64)
    weight.fill(1)
    tensor = torch.from_numpy
    return ReplayBatch(
        obs=tuple(map(tensor, obs_out)),
        action=tensor(actions),
        reward=tensor(reward),
        next_obs=tuple(map(tensor, next_out)),
        discount=tensor(discount),
        weight=tensor(weight),
        index=tensor(index),
        serial=tensor(serial),
        arrays=BatchArrays(
            obs=tuple([as_bytes(x, 1) for x in obs_out]),
            action=actions,
            reward=reward,
            next_obs=tuple([as_bytes(x, 1) for x in next_out]),
            discount=discount,
            weight=weight,
            index=index,
            serial=serial,
            next_index=next_index,
        ),
    )


def alloc(dtype: Any, *shape: int, pin: bool) -> Array:
    """Zeros in ordinary memory, whose pages take no memory until they are written, or in pinned memory."""
    return _pinned(shape, dtype) if pin else np.zeros(shape, dtype)


def _pinned(shape: int | tuple[int, ...], dtype: Any) -> Array:
    out: Array = torch.zeros(shape, dtype=torch_dtype(dtype), pin_memory=True).numpy()
    return out


def as_array(tensor: Tensor) -> Array:
    """The tensor as a contiguous array, half precision as float32; the same memory where it is in RAM."""
    if tensor.dtype in (torch.bfloat16, torch.float16):
        tensor = tensor.float()
    return np.ascontiguousarray(tensor.numpy(force=True))


def torch_dtype(dtype: Any) -> torch.dtype:
    """The torch dtype of a NumPy dtype."""
    return torch.from_numpy(np.zeros(0, dtype)).dtype


def as_bytes(array: Array, n_lead: int) -> Array:
    """A view of the array as bytes below its leading dimensions."""
    lead, rest = array.shape[:n_lead], array.shape[n_lead:]
    return array.reshape(*lead, math.prod(rest)).view(np.uint8)
