"""Replay in RAM: the last steps of N envs, each observation stored once, the next one found by its place.

Every env has a ring of time slots and a cursor of its own, so envs may step raggedly. Where an episode was truncated
its final observation takes the slot between it and the next episode's first: what follows a step always lies one on.
B: batch, T: time steps, N: envs, M: slots of each; slot i = n · M + t.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatout.buffers import replay_kernel as kernel
from flatout.buffers.rollout import Rollout
from flatout.envs.spaces import ActionLayout, Array, Leaves, ObsLayout
from flatout.errors import FlatoutError


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
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

    def to(self, device: torch.device) -> ReplayBatch:
        """The batch on a device; from pinned memory the copies may still be under way, in stream order."""
        obs, next_obs = (
            tuple(x.to(device, non_blocking=True) for x in leaves) for leaves in (self.obs, self.next_obs)
        )
        rest = (self.action, self.reward, self.discount, self.weight, self.index, self.serial)
        action, reward, discount, weight, index, serial = (x.to(device, non_blocking=True) for x in rest)
        return ReplayBatch(obs, action, reward, next_obs, discount, weight, index, serial)


def alloc_batch(obs: ObsLayout, action: ActionLayout, size: int, *, pin: bool = False) -> ReplayBatch:
    """Room for a batch in ordinary or pinned memory."""

    def room(dtype: Any, *shape: int) -> Array:
        return alloc(dtype, size, *shape, pin=pin)

    leaves, nexts = (tuple(room(leaf.dtype, *leaf.shape) for leaf in obs.leaves) for _ in range(2))
    kept = room(action_dtype(action), action.size)
    reward, discount, weight = room(np.float32), room(np.float32), room(np.float32)
    index, serial, next_index = room(np.int64), room(np.int64), room(np.int64)
    weight.fill(1)
    from_numpy = torch.from_numpy
    return ReplayBatch(
        obs=tuple(map(from_numpy, leaves)),
        action=from_numpy(kept),
        reward=from_numpy(reward),
        next_obs=tuple(map(from_numpy, nexts)),
        discount=from_numpy(discount),
        weight=from_numpy(weight),
        index=from_numpy(index),
        serial=from_numpy(serial),
        arrays=BatchArrays(
            obs=tuple(_rows_of_bytes(leaf, 1) for leaf in leaves),
            action=kept,
            reward=reward,
            next_obs=tuple(_rows_of_bytes(leaf, 1) for leaf in nexts),
            discount=discount,
            weight=weight,
            index=index,
            serial=serial,
            next_index=next_index,
        ),
    )


def alloc(dtype: Any, *shape: int, pin: bool) -> Array:
    """Zeros in ordinary memory, whose pages cost nothing until they are written, or in pinned memory."""
    if pin:
        pinned: Array = torch.zeros(shape, dtype=torch_dtype(dtype), pin_memory=True).numpy()
        return pinned
    return np.zeros(shape, dtype)


def torch_dtype(dtype: Any) -> torch.dtype:
    """Torch's name of a NumPy dtype."""
    return torch.from_numpy(np.zeros(0, dtype)).dtype


def action_dtype(action: ActionLayout) -> Any:
    """What an action's row is made of."""
    return np.float32 if action.continuous else np.int64


def slots_per_env(capacity: int, n_envs: int) -> int:
    """Slots in each env's ring: its share of the capacity, and one for its newest observation."""
    if capacity < 2 * n_envs:
        raise FlatoutError(
            f"a replay of {capacity} transitions is too small for {n_envs} envs; use at least {2 * n_envs}"
        )
    return capacity // n_envs + 1


class Replay:
    """The newest `capacity` steps of `n_envs` envs; a truncation takes the room of one step."""

    def __init__(
        self, obs: ObsLayout, action: ActionLayout, n_envs: int, capacity: int, *, pin: bool = False
    ) -> None:
        self.obs_layout, self.action_layout, self.n_envs, self.pin = obs, action, n_envs, pin
        self.n_slots = slots_per_env(capacity, n_envs)
        self.capacity = (self.n_slots - 1) * n_envs
        self.size = size = self.n_slots * n_envs
        """Slots in all; indices go up to it."""
        self.obs: Leaves = tuple(alloc(leaf.dtype, size, *leaf.shape, pin=pin) for leaf in obs.leaves)
        self.action = alloc(action_dtype(action), size, action.size, pin=pin)
        self.reward = alloc(np.float32, size, pin=pin)
        self.end = np.full(size, kernel.EMPTY, np.uint8)
        self.head = np.zeros(n_envs, np.int64)
        """Number of the slot with each env's newest observation, from which it has not acted yet."""
        self.start = np.zeros(n_envs, np.int64)
        """Number of the slot with the first observation of each env's present episode."""
        self._begun = np.zeros(n_envs, np.bool_)
        self._all = np.arange(n_envs)
        self._bytes = [_rows_of_bytes(leaf, 1) for leaf in self.obs]

    def begin(self, obs: Leaves, rows: Array | None = None) -> None:
        """The observations from which these envs act next (all if none are named).

        An env whose newest observation is another one has begun a new episode: the one before is cut there.
        """
        rows = self._all if rows is None else rows
        self._begun[rows] = True
        at = self.head[rows] % self.n_slots + rows * self.n_slots
        changed = self.head[rows] == 0  # nothing known yet
        fresh = [_rows_of_bytes(np.ascontiguousarray(leaf), 1) for leaf in obs]
        for known, new in zip(self._bytes, fresh, strict=True):
            changed |= (known[at] != new).any(1)
        if changed.any():
            kernel.begin(rows, changed, self.n_slots, self.head, self.start, self.end, at)
            self._put(at[None], [leaf[None] for leaf in fresh], np.full_like(at[None], -1), None)

    def add(
        self,
        action: Array,
        reward: Array,
        terminated: Array,
        truncated: Array,
        obs: Leaves,
        final_obs: Leaves,
        rows: Array | None = None,
    ) -> None:
        """One step of each env in `rows` (all if none are named), a row of each array per env named.

        `obs` is what the env shows now, a new episode's first observation where one ended; `final_obs` is read
        only where an episode was truncated.
        """
        rows = self._all if rows is None else rows
        assert self._begun[rows].all(), "call begin with an env's first observation before its first step"
        lifted = [np.asarray(x)[None] for x in (action, reward, terminated, truncated)]
        leaves = [tuple(leaf[None] for leaf in x) for x in (obs, final_obs)]
        self._add(rows, *lifted, *leaves)

    def add_rollout(self, rollout: Rollout) -> None:
        """All steps of a rollout; an env that did not go on where it stood has begun a new episode."""
        self.begin(tuple(leaf[0] for leaf in rollout.obs))
        ends = rollout.terminated, rollout.truncated
        followed = tuple(leaf[1:] for leaf in rollout.obs)
        self._add(self._all, rollout.action, rollout.reward, *ends, followed, rollout.final_obs)

    def _add(
        self,
        rows: Array,
        action: Array,
        reward: Array,
        terminated: Array,
        truncated: Array,
        obs: Leaves,
        final_obs: Leaves,
    ) -> None:
        obs_at, final_at = np.empty((2, *reward.shape), np.int64)
        kernel.advance(
            np.ascontiguousarray(rows, np.int64),
            np.ascontiguousarray(action, self.action.dtype).reshape(*reward.shape, -1),
            np.ascontiguousarray(reward, np.float32),
            np.ascontiguousarray(terminated, np.bool_),
            np.ascontiguousarray(truncated, np.bool_),
            self.n_slots,
            self.head,
            self.start,
            self.action,
            self.reward,
            self.end,
            obs_at,
            final_at,
        )
        finals = [_rows_of_bytes(np.ascontiguousarray(leaf), 2) for leaf in final_obs]
        self._put(obs_at, [_rows_of_bytes(np.ascontiguousarray(leaf), 2) for leaf in obs], final_at, finals)

    def _put(self, obs_at: Array, obs: list[Array], final_at: Array, final_obs: list[Array] | None) -> None:
        for out, leaf, final in zip(self._bytes, obs, final_obs or obs, strict=True):
            kernel.put(obs_at, leaf, final_at, final, out)

    def sample(
        self, index: Array, *, gamma: float, n_step: int = 1, out: ReplayBatch | None = None
    ) -> ReplayBatch:
        """The transitions in these slots, over up to `n_step` steps: never into another episode or beyond the newest step."""
        if out is None:
            out = alloc_batch(self.obs_layout, self.action_layout, len(index), pin=self.pin)
        to = out.arrays
        assert to is not None, "a batch in RAM has arrays"
        to.index[:] = index
        bad = kernel.windows(
            to.index,
            gamma,
            n_step,
            self.n_slots,
            self.head,
            self.reward,
            self.end,
            to.reward,
            to.discount,
            to.next_index,
            to.serial,
        )
        if bad >= 0:
            raise IndexError(f"slot {int(index[bad])} of the replay holds no transition")
        kernel.take(self.action, to.index, to.action)
        for known, here, there in zip(self._bytes, to.obs, to.next_obs, strict=True):
            kernel.take_two(known, to.index, to.next_index, here, there)
        return out

    def serials(self, index: Array) -> Array:
        """Numbers of the steps that these slots hold now."""
        n, t = np.divmod(index, self.n_slots)
        out: Array = self.head[n] - (self.head[n] - t) % self.n_slots
        return out

    def __len__(self) -> int:
        """Transitions that are stored now."""
        return int(np.count_nonzero(self.end != kernel.EMPTY))

    def arrays(self) -> dict[str, Array]:
        """All it holds by name, without the slots that were never reached; views, so write them out before adding more."""
        used = min(int(self.head.max()) + 1, self.n_slots)
        whole = {"action": self.action, "reward": self.reward, "end": self.end}
        whole |= {f"obs.{i}": leaf for i, leaf in enumerate(self.obs)}
        rings = {name: x.reshape(self.n_envs, self.n_slots, *x.shape[1:])[:, :used] for name, x in whole.items()}
        return {**rings, "head": self.head, "start": self.start}

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Become what `arrays` was taken from; the envs, the capacity and the spaces must be the same."""
        head = arrays["head"]
        if len(head) != self.n_envs:
            raise FlatoutError(f"the saved replay has {len(head)} envs, this run {self.n_envs}; use as many")
        self.head[:], self.start[:] = head, arrays["start"]
        self.end[:] = kernel.EMPTY
        self._begun[:] = head > 0
        for name, array in self.arrays().items():
            saved = arrays[name]
            if saved.shape != array.shape or saved.dtype != array.dtype:
                raise FlatoutError(
                    f"the saved replay's {name} is {saved.dtype} {saved.shape}, this run's {array.dtype} {array.shape}; "
                    "use the same --buffer-size and env"
                )
            array[...] = saved


def _rows_of_bytes(array: Array, n_lead: int) -> Array:
    """A contiguous array as rows of bytes below its leading dimensions."""
    lead, rest = array.shape[:n_lead], array.shape[n_lead:]
    return array.reshape(*lead, math.prod(rest)).view(np.uint8)
