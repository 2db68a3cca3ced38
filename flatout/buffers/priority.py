"""Prioritized replay in RAM (Schaul et al. 2016, proportional, stratified): a sum tree in compiled loops.

Every sum is recomputed from its parts, so rounding errors do not accumulate and the tree does not depend on the
order of writes. A slot has priority 0 exactly while it cannot be drawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from flatout.buffers.batch import ReplayBatch, alloc_batch, as_array
from flatout.buffers.replay import Replay, Sampler
from flatout.buffers.replay_kernels import EMPTY, draw_key, first_and_end, prefetch, slot_of, uniform
from flatout.device.jit import compiled
from flatout.envs.spaces import Array

FAN, LEAF_FAN = 8, 16
"""Children of a sum, of sums (float64) and of priorities (float32): as many as a cache line holds."""
MIN_PRIORITY, MAX_PRIORITY = 1e-30, 1e30
"""Bounds of a priority that can be drawn."""


def tree_levels(size: int) -> list[int]:
    """Offsets of the levels of sums over `size` priorities in one array, lowest level first, and the end of the root's."""
    offsets, width = [0], -(-size // LEAF_FAN)
    while True:
        offsets.append(offsets[-1] + -(-width // FAN) * FAN)
        if width == 1:
            return offsets
        width = -(-width // FAN)


def alloc_leaves(size: int) -> Array:
    """Priorities of 0, padded to a whole number of sums."""
    return np.zeros(-(-size // LEAF_FAN) * LEAF_FAN, np.float32)


@compiled
def sum_up(leaves: Array, nodes: Array, offsets: Array, index: Array, n: int) -> None:
    """Recompute all sums above the first `n` leaves in `index`; overwrites `index`."""
    for level in range(-1, len(offsets) - 2):
        n_above, last = 0, -1
        for j in range(n):
            parent = index[j] // (LEAF_FAN if level < 0 else FAN)
            if parent != last:
                last = parent
                index[n_above] = parent
                n_above += 1
                total = 0.0
                if level < 0:
                    for c in range(parent * LEAF_FAN, (parent + 1) * LEAF_FAN):
                        total += np.float64(leaves[c])
                else:
                    for c in range(offsets[level] + parent * FAN, offsets[level] + (parent + 1) * FAN):
                        total += nodes[c]
                nodes[offsets[level + 1] + parent] = total
        n = n_above


@compiled
def _part(parts: Array, base: int, n: int, mass: float) -> tuple[int, float]:
    """The part, of `n`, that contains a mass, and where it begins; if rounding exceeds the end, the last that is not 0."""
    end, begin, pick = 0.0, 0.0, 0
    for c in range(n):
        end += np.float64(parts[base + c])
        if end <= mass:
            pick, begin = c + 1, end
    if pick == n:
        begin = 0.0
        while pick > 1 and not parts[base + pick - 1] > 0.0:
            pick -= 1
        pick -= 1
        for c in range(pick):
            begin += np.float64(parts[base + c])
    return pick, begin


@compiled
def find(leaves: Array, nodes: Array, offsets: Array, mass: Array, index: Array) -> None:
    """The leaf that contains each mass between 0 and the total; never a leaf of 0. Overwrites `mass`."""
    for b in range(len(index)):
        index[b] = 0
    # All of them one level at a time, so that their cache misses overlap.
    for level in range(len(offsets) - 3, -1, -1):
        for b in range(len(index)):
            pick, begin = _part(nodes, offsets[level] + index[b] * FAN, FAN, mass[b])
            mass[b] -= begin
            index[b] = index[b] * FAN + pick
            if level > 0:
                prefetch(nodes, offsets[level - 1] + index[b] * FAN)
            else:
                prefetch(leaves, index[b] * LEAF_FAN)
    for b in range(len(index)):
        pick, _ = _part(leaves, index[b] * LEAF_FAN, LEAF_FAN, mass[b])
        index[b] = index[b] * LEAF_FAN + pick


@compiled
def _draw(
    leaves: Array,
    nodes: Array,
    offsets: Array,
    key: Any,
    beta: float,
    mass: Array,
    index: Array,
    weight: Array,
) -> bool:
    """Draw one leaf from each of B equal parts of the total; weights are relative to the largest of the batch."""
    total, size = nodes[offsets[-2]], len(index)
    if not total > 0.0:
        return False
    for b in range(size):
        mass[b] = (b + uniform(key, b)) / size * total
    find(leaves, nodes, offsets, mass, index)
    least = np.inf
    for b in range(size):
        least = min(least, np.float64(leaves[index[b]]))
    for b in range(size):
        weight[b] = (least / np.float64(leaves[index[b]])) ** beta
    return True


@compiled
def stored(priority: float, eps: float, alpha: float, most: float) -> float:
    """A priority as the tree stores it; NaN and infinity become the largest priority so far."""
    value = (abs(priority) + eps) ** alpha
    if not value < np.inf:
        value = most
    return float(min(max(value, MIN_PRIORITY), MAX_PRIORITY))


@compiled
def _update(
    leaves: Array,
    nodes: Array,
    offsets: Array,
    index: Array,
    serial: Array,
    priority: Array,
    eps: float,
    alpha: float,
    most: float,
    n_slots: int,
    head: Array,
    scratch: Array,
) -> float:
    """Set the priorities of slots that still hold the step they were drawn as; returns the largest priority so far."""
    n, largest = 0, most
    for j in range(len(index)):
        slot = index[j]
        env, t = slot // n_slots, slot % n_slots
        now = head[env] - (head[env] - t) % n_slots
        if now == serial[j] and leaves[slot] > 0.0:
            leaves[slot] = stored(priority[j], eps, alpha, most)
            largest = max(largest, np.float64(leaves[slot]))
            scratch[n] = slot
            n += 1
    sum_up(leaves, nodes, offsets, scratch, n)
    return largest


@compiled
def _catch_up(
    leaves: Array,
    nodes: Array,
    offsets: Array,
    most: float,
    n_step: int,
    n_slots: int,
    head: Array,
    start: Array,
    end: Array,
    seen: Array,
    scratch: Array,
) -> None:
    """Give slots that have become eligible since the last call the largest priority so far, and overwritten ones 0."""
    n = 0
    for env in range(len(head)):
        _, last = first_and_end(env, n_step, n_slots, head, start)
        for number in range(max(seen[env], head[env] - n_slots + 1), head[env] + 1):
            slot = slot_of(env, number, n_slots)
            value = most if number < last and end[slot] != EMPTY else 0.0
            if leaves[slot] != value:
                leaves[slot] = value
                scratch[n] = slot
                n += 1
            if n == len(scratch):
                sum_up(leaves, nodes, offsets, scratch, n)
                n = 0
        seen[env] = last
    sum_up(leaves, nodes, offsets, scratch, n)


class Prioritized(Sampler[Replay]):
    """Draws transitions with probability ∝ (priority + eps)^alpha; new ones have the largest priority so far."""

    def __init__(self, replay: Replay, *, alpha: float = 0.6, eps: float = 1e-6, **how: Any) -> None:
        """`how`: the keywords of `Sampler`."""
        super().__init__(replay, **how)
        self._alpha, self._eps = alpha, eps
        levels = tree_levels(replay.size)
        self._offsets = np.array(levels)
        self._leaves, self._nodes = alloc_leaves(replay.size), np.zeros(levels[-1])
        self._tree = self._leaves, self._nodes, self._offsets
        self._seen = np.zeros(replay.n_envs, np.int64)
        """Slot numbers up to which each env's steps were eligible at the last call."""
        self._most = 1.0
        self._scratch = np.empty(4096, np.int64)

    @property
    def priorities(self) -> Array:
        """A priority per slot; 0 where nothing can be drawn."""
        self._catch_up()
        return self._leaves[: self.replay.size]

    def _catch_up(self) -> None:
        it, seen, scratch = self.replay, self._seen, self._scratch
        state = it.head, it.start, it.end
        _catch_up(*self._tree, self._most, self._n_step, it.n_slots, *state, seen, scratch)

    def sample(self, size: int, beta: float = 0.4, out: ReplayBatch | None = None) -> ReplayBatch:
        it = self.replay
        self._catch_up()
        if out is None:
            out = alloc_batch(it.obs_layout, it.action_layout, size, pin=it.pin)
        to = out.arrays
        assert to is not None, "a batch in RAM has arrays"
        key = draw_key(self._seed, self.n_draws)
        if not _draw(*self._tree, key, beta, np.empty(size), to.index, to.weight):
            raise self._nothing_stored()
        self.n_draws += 1
        return it.sample(to.index, gamma=self._gamma, n_step=self._n_step, out=out)

    def update(self, index: Tensor, serial: Tensor, priority: Tensor) -> None:
        it = self.replay
        self._catch_up()
        if len(index) > len(self._scratch):
            self._scratch = np.empty(len(index), np.int64)
        self._most = _update(
            *self._tree,
            as_array(index),
            as_array(serial),
            as_array(priority),
            self._eps,
            self._alpha,
            self._most,
            it.n_slots,
            it.head,
            self._scratch,
        )

    def arrays(self) -> dict[str, Array]:
        return super().arrays() | {
            "priority": self.replay.by_env(self.priorities, self.replay.head),
            "seen": self._seen,
            "most": np.array([self._most]),
        }

    def restore(self, arrays: Mapping[str, Array]) -> None:
        it, leaves = self.replay, self._leaves[: self.replay.size]
        leaves[:] = 0
        it.by_env(leaves, it.head)[:] = arrays["priority"]
        sum_up(*self._tree, np.arange(it.size), it.size)
        self._seen[:] = arrays["seen"]
        self._most = float(arrays["most"][0])
        super().restore(arrays)
