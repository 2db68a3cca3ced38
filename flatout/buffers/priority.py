"""Prioritized replay in RAM: draws in proportion to priority from a tree of sums, in compiled loops.

Schaul et al. 2016, proportional and stratified. Every sum is made anew from its eight parts, so none ever drifts and
a tree is the same whatever order it was written in. A slot has priority 0 exactly while it cannot be drawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatout.buffers.compiled import compiled, draw_key, uniform
from flatout.buffers.replay import Replay, ReplayBatch, alloc_batch
from flatout.buffers.replay_kernel import EMPTY, first_and_end
from flatout.envs.spaces import Array
from flatout.errors import FlatoutError

FAN = 8
"""Parts of a sum: as many as a line of the processor's cache holds."""
LEAST, MOST = 1e-100, 1e100
"""Bounds of a priority that can be drawn: no sum over- or underflows between them."""


def tree_levels(size: int) -> list[int]:
    """Where each level begins in an array that holds the tree, leaves first, and where the last, the root, ends."""
    offsets, width = [0], size
    while True:
        offsets.append(offsets[-1] + -(-width // FAN) * FAN)
        if width == 1:
            return offsets
        width = -(-width // FAN)


@compiled
def _sum_up(nodes: Array, offsets: Array, index: Array, n: int) -> None:
    """Make all sums above the first `n` leaves in `index` anew; `index` is used up."""
    for level in range(len(offsets) - 2):
        below, above = offsets[level], offsets[level + 1]
        n_above, last = 0, -1
        for j in range(n):
            parent = index[j] // FAN
            if parent != last:
                last = parent
                index[n_above] = parent
                n_above += 1
                total = 0.0
                for c in range(below + parent * FAN, below + parent * FAN + FAN):
                    total += nodes[c]
                nodes[above + parent] = total
        n = n_above


@compiled
def write(nodes: Array, offsets: Array, index: Array, value: Array) -> None:
    """Set leaves, the last of several for one winning, and the sums above them; `index` is used up."""
    for j in range(len(index)):
        nodes[index[j]] = value[j]
    _sum_up(nodes, offsets, index, len(index))


@compiled
def find(nodes: Array, offsets: Array, mass: Array, index: Array) -> None:
    """The leaf that each mass, between 0 and the whole, falls on; never one of 0. `mass` is used up."""
    for b in range(len(index)):
        index[b] = 0
    # All of them a level at a time, so that their waits for memory overlap.
    for level in range(len(offsets) - 3, -1, -1):
        for b in range(len(index)):
            base = offsets[level] + index[b] * FAN
            end, begin, pick = 0.0, 0.0, 0
            for c in range(FAN):
                part = nodes[base + c]
                # Beyond the end by rounding, it falls on the last that is not 0.
                if part > 0.0 and end <= mass[b]:
                    pick, begin = c, end
                end += part
            mass[b] -= begin
            index[b] = index[b] * FAN + pick


@compiled
def _draw(nodes: Array, offsets: Array, key: Any, beta: float, mass: Array, index: Array, weight: Array) -> bool:
    """Draw one leaf from each of B equal parts of the whole; weights are relative to the largest among them."""
    total, size = nodes[offsets[-2]], len(index)
    if not total > 0.0:
        return False
    for b in range(size):
        mass[b] = (b + uniform(key, b)) / size * total
    find(nodes, offsets, mass, index)
    least = np.inf
    for b in range(size):
        least = min(least, nodes[index[b]])
    for b in range(size):
        weight[b] = (nodes[index[b]] / least) ** -beta
    return True


@compiled
def stored(priority: float, eps: float, alpha: float, most: float) -> float:
    """A priority as the tree keeps it; what is no number or infinite counts as the largest seen."""
    value = (abs(priority) + eps) ** alpha
    if not value < np.inf:
        return most
    return min(max(value, LEAST), MOST)


@compiled
def _update(
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
    """Set the priorities of slots that still hold the step they were drawn as; returns the largest seen."""
    n_envs, n = len(head), 0
    for j in range(len(index)):
        slot = index[j]
        t, env = slot // n_envs, slot % n_envs
        now = head[env] - (head[env] - t) % n_slots
        if now == serial[j] and nodes[slot] > 0.0:
            nodes[slot] = stored(priority[j], eps, alpha, most)
            most = max(most, nodes[slot])
            scratch[n] = slot
            n += 1
    _sum_up(nodes, offsets, scratch, n)
    return most


@compiled
def _catch_up(
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
    """Give slots that have become eligible since last time the largest priority, and overwritten ones none."""
    n_envs, longest = len(head), 0
    for env in range(n_envs):
        seen[env] = max(seen[env], head[env] - n_slots + 1)
        longest = max(longest, head[env] + 1 - seen[env])
    n = 0
    for j in range(longest):
        for env in range(n_envs):
            number = seen[env] + j
            if number > head[env]:
                continue
            _, last = first_and_end(env, n_step, n_slots, head, start)
            slot = number % n_slots * n_envs + env
            value = most if number < last and end[slot] != EMPTY else 0.0
            if nodes[slot] != value:
                nodes[slot] = value
                scratch[n] = slot
                n += 1
                if n == len(scratch):
                    _sum_up(nodes, offsets, scratch, n)
                    n = 0
    _sum_up(nodes, offsets, scratch, n)
    for env in range(n_envs):
        _, seen[env] = first_and_end(env, n_step, n_slots, head, start)


class Prioritized:
    """Draws transitions of a replay with probability ∝ (priority + eps)^alpha; new ones with the largest so far.

    Draw number k is a function of the seed, k, and what was stored and updated before it.
    """

    def __init__(
        self, replay: Replay, *, gamma: float, n_step: int = 1, alpha: float = 0.6, eps: float = 1e-6, seed: int = 0
    ) -> None:
        check_window(replay.n_slots, n_step, replay.n_envs)
        self.replay, self._gamma, self._n_step = replay, gamma, n_step
        self._alpha, self._eps, self._seed = alpha, eps, seed
        levels = tree_levels(replay.size)
        self._offsets = np.array(levels)
        self._nodes = np.zeros(levels[-1])
        self._seen = np.zeros(replay.n_envs, np.int64)
        """Slot numbers up to which each env's steps were eligible last time."""
        self._most = 1.0
        self._scratch = np.empty(4096, np.int64)
        self.n_draws = 0

    @property
    def priorities(self) -> Array:
        """Each slot's part of the whole; 0 where nothing can be drawn."""
        self._catch_up()
        return self._nodes[: self.replay.size]

    def _catch_up(self) -> None:
        it = self.replay
        state = (it.n_slots, it.head, it.start, it.end)
        _catch_up(self._nodes, self._offsets, self._most, self._n_step, *state, self._seen, self._scratch)

    def sample(self, size: int, beta: float = 0.4, out: ReplayBatch | None = None) -> ReplayBatch:
        """Draw `size` transitions, with weights (n · P)^-beta relative to the largest of them."""
        it = self.replay
        self._catch_up()
        if out is None:
            out = alloc_batch(it.obs_layout, it.action_layout, size, pin=it.pin)
        index, key = np.empty(size, np.int64), draw_key(self._seed, self.n_draws)
        if not _draw(self._nodes, self._offsets, key, beta, np.empty(size), index, out.weight.numpy()):
            raise nothing_stored(self._n_step)
        self.n_draws += 1
        return it.sample(index, gamma=self._gamma, n_step=self._n_step, out=out)

    def update(self, index: Tensor, serial: Tensor, priority: Tensor) -> None:
        """New priorities (|TD error|) of drawn transitions; those overwritten meanwhile are passed over."""
        it = self.replay
        self._catch_up()
        if len(index) > len(self._scratch):
            self._scratch = np.empty(len(index), np.int64)
        given = priority.detach().to("cpu", torch.float64).numpy()
        self._most = _update(
            self._nodes,
            self._offsets,
            index.numpy(),
            serial.numpy(),
            given,
            self._eps,
            self._alpha,
            self._most,
            it.n_slots,
            it.head,
            self._scratch,
        )

    def arrays(self) -> dict[str, Array]:
        """Priorities and counters by name; with the replay's own arrays all that is needed to go on."""
        used = len(self.replay.arrays()["end"])
        counters = {"most": np.array([self._most]), "n_draws": np.array([self.n_draws])}
        return {"priority": self.priorities[:used].copy(), "seen": self._seen.copy(), **counters}

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Become what `arrays` was taken from, once the replay has; the sums follow from the priorities."""
        self._nodes[:] = 0
        leaves = arrays["priority"]
        write(self._nodes, self._offsets, np.arange(len(leaves)), leaves)
        self._seen[:] = arrays["seen"]
        self._most, self.n_draws = float(arrays["most"][0]), int(arrays["n_draws"][0])


def check_window(n_slots: int, n_step: int, n_envs: int) -> None:
    """Refuse a replay in which no n-step window could be whole."""
    if n_step < 1:
        raise FlatoutError(f"n_step is {n_step}; use 1 or more")
    if n_slots - 1 <= n_step:
        least = (n_step + 1) * n_envs
        raise FlatoutError(f"{n_step}-step returns of {n_envs} envs need a buffer of at least {least} transitions")


def nothing_stored(n_step: int) -> FlatoutError:
    """What a draw from an empty replay says."""
    return FlatoutError(f"the replay holds no {n_step}-step transition yet; collect more before sampling")
