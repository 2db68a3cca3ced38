"""Batches of sampled transitions, and the interface of what draws them.

In RAM a batch's tensors share their memory with arrays that compiled loops fill.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

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

    COLUMNS: ClassVar = ("action", "reward", "discount", "weight", "index", "serial")

    def tensors(self) -> tuple[Tensor, ...]:
        """All its tensors: observations, next observations, the rest."""
        return (*self.obs, *self.next_obs, *(getattr(self, name) for name in self.COLUMNS))

    def to(self, device: torch.device) -> ReplayBatch:
        """The batch on a device; from pinned memory the copies may still be in transfer, in stream order."""
        n, sent = len(self.obs), [x.to(device, non_blocking=True) for x in self.tensors()]
        columns: dict[str, Any] = dict(zip(self.COLUMNS, sent[2 * n :], strict=True))
        return ReplayBatch(obs=tuple(sent[:n]), next_obs=tuple(sent[n : 2 * n]), **columns)


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
    batch.arrays = BatchArrays(
        obs=tuple(as_bytes(x.numpy(), 1) for x in batch.obs),
        next_obs=tuple(as_bytes(x.numpy(), 1) for x in batch.next_obs),
        next_index=np.empty(size, np.int64),
        **{name: getattr(batch, name).numpy() for name in ReplayBatch.COLUMNS},
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


def as_bytes(array: Array, n_lead: int) -> Array:
    """A view of the array as bytes below its leading dimensions."""
    lead, rest = array.shape[:n_lead], array.shape[n_lead:]
    return array.reshape(*lead, math.prod(rest)).view(np.uint8)
