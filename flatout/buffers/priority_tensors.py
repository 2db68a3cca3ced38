"""Draws from a replay on a device, uniform or by priority, as parallel tensor operations without a wait for the device.

The tree of sums is the one in RAM, a tensor per level: a batch of B climbs or descends it in O(B log N).
Random numbers are made on the host from (seed, draw), the same as in RAM.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from flatout.buffers.batch import ReplayBatch
from flatout.buffers.priority import FAN, LEAF_FAN, LEAST, MOST
from flatout.buffers.replay_kernels import EMPTY, draw_key, fill_uniforms
from flatout.buffers.replay_tensors import TensorReplay
from flatout.buffers.rings import check_window, n_used, nothing_stored
from flatout.envs.spaces import Array


def uniforms(seed: int, draw: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Numbers between 0 and 1 for draw number `draw`, on the device."""
    out = np.empty(shape)
    fill_uniforms(draw_key(seed, draw), out.reshape(-1))
    return torch.from_numpy(out).to(device, non_blocking=True)


class TensorSumTree:
    """Priorities and the sums above them; the last leaf is spare, and stays 0 whatever is written to it."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.spare, self._fans, self._levels = size, [LEAF_FAN], list[Tensor]()
        width = -(-(size + 1) // LEAF_FAN)
        self._levels.append(torch.zeros(width * LEAF_FAN, dtype=torch.float32, device=device))
        while width > 1:
            above = -(-width // FAN)
            self._levels.append(torch.zeros(above * FAN, dtype=torch.float64, device=device))
            self._fans.append(FAN)
            width = above
        self._levels.append(torch.zeros(1, dtype=torch.float64, device=device))

    @property
    def leaves(self) -> Tensor:
        """A priority per slot."""
        return self._levels[0][: self.spare]

    @property
    def total(self) -> Tensor:
        """The sum of all priorities."""
        return self._levels[-1]

    def write(self, index: Tensor, value: Tensor) -> None:
        """Set leaves, the last of several for one winning, and all sums above them."""
        ordered, order = torch.sort(index, stable=True)
        last = torch.searchsorted(ordered, ordered, right=True) - 1
        value = torch.where(ordered == self.spare, 0, value[order][last])
        self._levels[0][ordered] = value.float()
        node = ordered
        for fan, below, above in zip(self._fans, self._levels[:-1], self._levels[1:], strict=True):
            node = node // fan
            above[node] = _ends(below, fan, node)[:, -1]

    def find(self, mass: Tensor) -> Tensor:
        """The leaf that each mass, between 0 and the whole, falls on; never one of 0 while any is not."""
        node = torch.zeros_like(mass, dtype=torch.int64)
        for fan, level in zip(reversed(self._fans), reversed(self._levels[:-1]), strict=True):
            ends = _ends(level, fan, node)
            pick = (ends <= mass[:, None]).sum(1)
            # Beyond the end by rounding, it falls on the last that is not 0: the first with all of the sum.
            pick = torch.minimum(pick, (ends < ends[:, -1:]).sum(1))
            begins = torch.nn.functional.pad(ends, (1, 0)).gather(1, pick[:, None]).squeeze(1)
            mass, node = mass - begins, node * fan + pick
        return node


def _ends(level: Tensor, fan: int, node: Tensor) -> Tensor:
    """Where each part of these nodes ends, (B, fan)."""
    return level.view(-1, fan)[node].double().cumsum(1)


class TensorPrioritized:
    """As `Prioritized`, on the device of its replay."""

    def __init__(
        self,
        replay: TensorReplay,
        *,
        gamma: float,
        n_step: int = 1,
        alpha: float = 0.6,
        eps: float = 1e-6,
        seed: int = 0,
    ) -> None:
        check_window(replay.n_slots, n_step, replay.n_envs)
        self.replay, self._gamma, self._n_step = replay, gamma, n_step
        self._alpha, self._eps, self._seed = alpha, eps, seed
        self.tree = TensorSumTree(replay.size, replay.device)
        self._rows = torch.arange(replay.n_envs, device=replay.device)[:, None]
        self._seen = torch.zeros(replay.n_envs, dtype=torch.int64, device=replay.device)
        self._most = torch.ones((), dtype=torch.float64, device=replay.device)
        self._reach = 0
        self.n_draws = 0

    @property
    def priorities(self) -> Tensor:
        """Each slot's part of the whole; 0 where nothing can be drawn."""
        self._catch_up()
        return self.tree.leaves

    def _catch_up(self) -> None:
        """Give slots that have become eligible since last time the largest priority, and overwritten ones none."""
        it = self.replay
        n_new, self._reach = it.reach - self._reach, it.reach
        if n_new == 0:
            return
        _, last = it.ranges(self._n_step)
        # The host knows how many slots may have changed, not which: all that may have are looked at.
        n_seen = min(n_new + self._n_step, it.n_slots)
        first = torch.maximum(self._seen, it.head - it.n_slots + 1)[:, None]
        number = first + torch.arange(n_seen, device=it.device)
        slot = it.slots(self._rows, number)
        drawable = (number < last[:, None]) & (it.end[slot] != EMPTY)
        slot = torch.where(number <= it.head[:, None], slot, self.tree.spare)
        self.tree.write(slot.view(-1), torch.where(drawable, self._most, 0).view(-1))
        self._seen = last

    def sample(self, size: int, beta: float = 0.4, out: ReplayBatch | None = None) -> ReplayBatch:  # noqa: ARG002
        """Draw `size` transitions, with weights (n · P)^-beta relative to the largest of them; `out` is not used."""
        it = self.replay
        if not it.holds(self._n_step):
            raise nothing_stored(self._n_step)
        self._catch_up()
        part = torch.arange(size, device=it.device)
        mass = (part + uniforms(self._seed, self.n_draws, (size,), it.device)) / size * self.tree.total
        self.n_draws += 1
        index = self.tree.find(mass)
        priority = self.tree.leaves[index].double()
        weight = (priority.amin() / priority) ** beta
        return it.sample(index, gamma=self._gamma, n_step=self._n_step, weight=weight.float())

    def update(self, index: Tensor, serial: Tensor, priority: Tensor) -> None:
        """New priorities (|TD error|) of drawn transitions; those overwritten meanwhile are passed over."""
        self._catch_up()
        value = (priority.detach().double().abs() + self._eps) ** self._alpha
        value = torch.where(value < torch.inf, value.clamp(LEAST, MOST), self._most)
        same = (self.replay.serials(index) == serial) & (self.tree.leaves[index] > 0)
        self.tree.write(torch.where(same, index, self.tree.spare), value)
        self._most = torch.maximum(self._most, torch.where(same, value, 0).amax().float().double())

    def arrays(self) -> dict[str, Array]:
        """Priorities and counters by name, as `Prioritized` has them."""
        it = self.replay
        leaves = self.priorities.view(it.n_envs, it.n_slots)
        used = n_used(it.head.cpu().numpy(), it.n_slots)
        counters = {"most": self._most.view(1).cpu().numpy(), "n_draws": np.array([self.n_draws])}
        return {"priority": leaves[:, :used].cpu().numpy(), "seen": self._seen.cpu().numpy(), **counters}

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Become what `arrays` was taken from, once the replay has."""
        it, saved = self.replay, torch.from_numpy(arrays["priority"])
        leaves = torch.zeros(it.n_envs, it.n_slots)
        leaves[:, : saved.shape[1]] = saved
        self.tree.write(torch.arange(it.size, device=it.device), leaves.view(-1).to(it.device))
        self._seen = torch.from_numpy(arrays["seen"]).clone().to(it.device)
        self._most = torch.tensor(float(arrays["most"][0]), dtype=torch.float64, device=it.device)
        self._reach, self.n_draws = it.reach, int(arrays["n_draws"][0])


class TensorUniform:
    """As `Uniform`, on the device of its replay."""

    TRIES = 8
    """Numbers drawn for each transition: an empty slot is passed over for the next number's."""

    def __init__(self, replay: TensorReplay, *, gamma: float, n_step: int = 1, seed: int = 0) -> None:
        check_window(replay.n_slots, n_step, replay.n_envs)
        self.replay, self._gamma, self._n_step, self._seed = replay, gamma, n_step, seed
        self.n_draws = 0

    def sample(self, size: int, beta: float = 0.0, out: ReplayBatch | None = None) -> ReplayBatch:  # noqa: ARG002
        """Draw `size` transitions, each with weight 1 whatever `beta`; `out` is not used."""
        it = self.replay
        if not it.holds(self._n_step):
            raise nothing_stored(self._n_step)
        first, last = it.ranges(self._n_step)
        upto = (last - first).cumsum(0)
        number = uniforms(self._seed, self.n_draws, (size, self.TRIES), it.device)
        self.n_draws += 1
        nth = torch.minimum((number * upto[-1]).long(), upto[-1] - 1)
        row = torch.searchsorted(upto, nth, right=True)
        place = last[row] - (upto[row] - nth)
        full = it.end[it.slots(row, place)] != EMPTY
        pick = full.to(torch.uint8).argmax(1, keepdim=True)
        row, place = row.gather(1, pick).squeeze(1), place.gather(1, pick).squeeze(1)
        # None of the tries: its neighbour has a transition, as two empty slots are never side by side.
        beside = torch.where(place > first[row], place - 1, place + 1)
        place = torch.where(full.any(1), place, beside)
        return it.sample(it.slots(row, place), gamma=self._gamma, n_step=self._n_step)

    def update(self, index: Tensor, serial: Tensor, priority: Tensor) -> None:
        """Nothing: priorities do not matter here."""

    def arrays(self) -> dict[str, Array]:
        """Its counter by name."""
        return {"n_draws": np.array([self.n_draws])}

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Become what `arrays` was taken from."""
        self.n_draws = int(arrays["n_draws"][0])
