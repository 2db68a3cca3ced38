"""Prioritized replay in RAM (Schaul et al. 2016, proportional, stratified): a sum tree in compiled loops.

Every sum is recomputed from its parts, so rounding errors do not accumulate and the tree does not depend on the
order of writes. A slot has priority 0 exactly while it cannot be drawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from flatout.buffers.batch import as_array
from flatout.buffers.replay import Replay, Replayed, Sampler, load, to_host
from flatout.buffers.replay_kernels import EMPTY, Rings, draw_key, first_and_end, prefetch, slot_of, uniform
from flatout.device.jit import compiled
from flatout.envs.spaces import Array

FAN, LEAF_FAN = 8, 16
"""Children of a sum, of sums (float64) and of priorities (float32): as many as a cache line holds."""
MIN_PRIORITY, MAX_PRIORITY = 1e-30, 1e30
"""Bounds of a priority that can be drawn."""


Drawn = tuple[Array, Array, Array]
"""Slots of drawn transitions, their slot numbers then, and their new priorities."""
Tree = tuple[Array, Array, Array]
"""Priorities (leaves), the sums above them (nodes), and where each level of sums begins (offsets)."""


def alloc_tree(size: int) -> Tree:
    """A tree of `size` priorities, all 0.

    The leaves are padded to a whole number of sums; offsets are of the lowest level first, and of the root's end.
    """
    width = -(-size // LEAF_FAN)
    leaves, offsets = np.zeros(width * LEAF_FAN, np.float32), [0]
    while True:
        above = -(-width // FAN)
        offsets.append(offsets[-1] + above * FAN)
        if width == 1:
            return leaves, np.zeros(offsets[-1]), np.array(offsets)
        width = above


@compiled
def sum_up(tree: Tree, index: Array, n: int) -> None:
    """Recompute all sums above the first `n` leaves in `index`; overwrites `index`."""
    leaves, nodes, offsets = tree
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
def find(tree: Tree, mass: Array, index: Array) -> None:
    """The leaf that contains each mass between 0 and the total; never a leaf of 0. Overwrites `mass`."""
    leaves, nodes, offsets = tree
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
def _draw(tree: Tree, key: Any, beta: float, mass: Array, index: Array, weight: Array) -> bool:
    """Draw one leaf from each of B equal parts of the total; weights are relative to the largest of the batch."""
    leaves, nodes, offsets = tree
    total, size = nodes[offsets[-2]], len(index)
    if not total > 0.0:
        return False
    for b in range(size):
        mass[b] = (b + uniform(key, b)) / size * total
    find(tree, mass, index)
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
    tree: Tree, drawn: Drawn, eps: float, alpha: float, most: Array, rings: Rings, scratch: Array
) -> None:
    """Set the priorities of slots that still hold the step they were drawn as; keep `most` the largest so far."""
    index, serial, priority = drawn
    leaves, n_slots, head = tree[0], rings[0], rings[1]
    n, largest = 0, most[0]
    for j in range(len(index)):
        slot = index[j]
        env, t = slot // n_slots, slot % n_slots
        now = head[env] - (head[env] - t) % n_slots
        if now == serial[j] and leaves[slot] > 0.0:
            leaves[slot] = stored(priority[j], eps, alpha, most[0])
            largest = max(largest, np.float64(leaves[slot]))
            scratch[n] = slot
            n += 1
    sum_up(tree, scratch, n)
    most[0] = largest


@compiled
def _add_new(tree: Tree, most: float, n_step: int, rings: Rings, seen: Array, scratch: Array) -> None:
    """Give slots that have become eligible since the last call the largest priority so far, and overwritten ones 0."""
    leaves, n_slots, head, end = tree[0], rings[0], rings[1], rings[3]
    n = 0
    for env in range(len(head)):
        _, last = first_and_end(env, n_step, rings)
        for number in range(max(seen[env], head[env] - n_slots + 1), head[env] + 1):
            slot = slot_of(env, number, n_slots)
            value = most if number < last and end[slot] != EMPTY else 0.0
            if leaves[slot] != value:
                leaves[slot] = value
                scratch[n] = slot
                n += 1
            if n == len(scratch):
                sum_up(tree, scratch, n)
                n = 0
        seen[env] = last
    sum_up(tree, scratch, n)


class PrioritySampler(Sampler[Replayed]):
    """Draws transitions with probability ∝ (priority + eps)^alpha; new ones have the largest priority so far."""

    _leaves: Any
    """A priority per slot, as of the last `_catch_up`."""

    def __init__(self, replay: Replayed, *, alpha: float = 0.6, eps: float = 1e-6, **how: Any) -> None:
        """`how`: the keywords of `Sampler`."""
        super().__init__(replay, **how)
        self._alpha, self._eps = alpha, eps
        self._seen = replay.zeros(np.int64, replay.n_envs)
        """Slot numbers up to which each env's steps were eligible at the last call."""
        self._most = replay.zeros(np.float64, 1)
        """The largest priority so far."""
        self._most[:] = 1
        self._reach = 0

    @property
    def priorities(self) -> Any:
        """A priority per slot; 0 where nothing can be drawn."""
        self._catch_up()
        return self._leaves

    def _catch_up(self) -> None:
        """Set the priorities of the slots that were written since the last call."""
        reach = self.replay.reach
        if reach > self._reach:
            self._add_new(reach - self._reach)
            self._reach = reach

    def _add_new(self, n_new: int) -> None:
        """Give slots that have become eligible the largest priority so far, and overwritten ones 0.

        `n_new`: at most so many slots of each env were written.
        """
        raise NotImplementedError

    def _set_leaves(self, leaves: Array) -> None:
        """Set all priorities."""
        raise NotImplementedError

    def arrays(self) -> dict[str, Array]:
        priorities = self.replay.by_env(self.priorities, to_host(self.replay.head))
        state = {"priority": priorities, "seen": self._seen, "most": self._most}
        return super().arrays() | {name: to_host(x) for name, x in state.items()}

    def restore(self, arrays: Mapping[str, Array]) -> None:
        leaves = np.zeros(self.replay.size, np.float32)
        self.replay.by_env(leaves, to_host(self.replay.head))[:] = arrays["priority"]
        self._set_leaves(leaves)
        load(arrays, {"seen": self._seen, "most": self._most})
        self._reach = self.replay.reach
        super().restore(arrays)


class Prioritized(PrioritySampler[Replay]):
    """In RAM."""

    def __init__(self, replay: Replay, **how: Any) -> None:
        """`how`: the keywords of `PrioritySampler`."""
        super().__init__(replay, **how)
        self._tree = alloc_tree(replay.size)
        self._leaves = self._tree[0][: replay.size]
        self._scratch = np.empty(4096, np.int64)

    def _add_new(self, n_new: int) -> None:  # noqa: ARG002
        _add_new(self._tree, self._most[0], self._n_step, self.replay.state, self._seen, self._scratch)

    def _draw(self, size: int, beta: float) -> tuple[Array, Array] | None:
        self._catch_up()
        index, weight = np.empty(size, np.int64), np.empty(size, np.float32)
        key = draw_key(self._seed, self.n_draws)
        return (index, weight) if _draw(self._tree, key, beta, np.empty(size), index, weight) else None

    def update(self, index: Tensor, serial: Tensor, priority: Tensor) -> None:
        self._catch_up()
        if len(index) > len(self._scratch):
            self._scratch = np.empty(len(index), np.int64)
        drawn = as_array(index), as_array(serial), as_array(priority)
        _update(self._tree, drawn, self._eps, self._alpha, self._most, self.replay.state, self._scratch)

    def _set_leaves(self, leaves: Array) -> None:
        self._leaves[:] = leaves
        sum_up(self._tree, np.arange(len(leaves)), len(leaves))
