"""Replay on a device: the same rings as in RAM, in tensors that never leave it, with uniform and prioritized draws.

Everything is parallel tensor operations without host syncs. The sum tree has one tensor per level: a batch of B
climbs or descends it in O(B log N). Random numbers are made on the host from (seed, draw), the same as in RAM.
B: batch, T: time steps, N: envs, M: slots of each; slot i = n · M + t.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from flatout.buffers.batch import ReplayBatch, torch_dtype
from flatout.buffers.priority import FAN, LEAF_FAN, MAX_PRIORITY, MIN_PRIORITY, PrioritySampler
from flatout.buffers.replay import Rings, Sampler, minibatches_at_once
from flatout.buffers.replay_kernels import EMPTY, GOES_ON, TERMINATED, TRUNCATED, draw_key, fill_uniforms
from flatout.buffers.rollout import Rollout, TensorRollout
from flatout.device.accelerator import (
    Graph,
    Packed,
    Retries,
    current_stream,
    has_streams,
    new_event,
    send,
    short_reason,
)
from flatout.envs.spaces import ActionLayout, Array, ObsLayout
from flatout.models.params import copy_all


class TensorReplay(Rings[Tensor]):
    """A replay on a device."""

    def __init__(
        self,
        obs: ObsLayout,
        action: ActionLayout,
        n_envs: int,
        capacity: int,
        device: torch.device,
        retries: Retries | None = None,
    ) -> None:
        def zeros(dtype: Any, *shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch_dtype(dtype), device=device)

        super().__init__(obs, action, n_envs, capacity, zeros, torch.arange(n_envs, device=device))
        self.device, self._retries = device, retries or Retries(device)
        self._attempt = self._retries.attempt
        self.n_steps = 0
        """Steps that every env took, at least: what the host knows without a sync."""
        self.captures = False
        """Whether to store rollouts by a captured graph."""
        self._sent: list[Packed] = []
        """Memory for a rollout from RAM: its columns and observations, and the final observations."""
        self._copied: torch.Event | None = None
        self._graphs: dict[object, Graph | None] = {}
        """By where a rollout lies; None: rollouts from there were stored eagerly so far."""

    def add_rollout(self, rollout: TensorRollout | Rollout) -> None:
        """Store all steps of a rollout; see `Replay.add_rollout`."""
        steps, obs, finals = self._attempt(lambda: self._on_device(rollout))
        key = steps[0].data_ptr(), finals[0].data_ptr()
        if not self.captures:
            self._store(steps, obs, finals)
        elif key not in self._graphs:
            self._store(steps, obs, finals)
            self._graphs[key] = None
        else:
            self._replay(key, lambda: self._store(steps, obs, finals))
        self._count(rollout.n_steps)
        self.n_steps += rollout.n_steps

    def _replay(self, key: object, store: Callable[[], None]) -> None:
        """Store by a graph, which is captured first if there is none."""
        graph = self._graphs[key]
        if graph is None:
            try:
                graph = self._graphs[key] = self._attempt(lambda: Graph(store, self.device))
            except RuntimeError as error:
                self.captures = False
                self._retries.notes.append(f"rollouts are stored without a graph: {short_reason(error)}")
                return store()
        return graph.replay()

    def _on_device(self, rollout: TensorRollout | Rollout) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """A rollout's columns, observations and final observations; from RAM always to the same memory."""
        if isinstance(rollout, TensorRollout):
            groups = rollout.columns, rollout.obs, rollout.final_obs
            (action, _, *rest), obs, last = ([x.to(self.device) for x in group] for group in groups)
            return [action, *rest], obs, last
        given, _, *others = rollout.columns
        arrays, finals = [given, *others, *rollout.obs], rollout.final_obs
        if has_streams(self.device):
            sent = self._send(arrays, finals if rollout.truncated.any() else ())
        else:
            sent = [send(x, self.device) for x in (*arrays, *finals)]
        steps, obs, last = sent[:4], sent[4 : len(arrays)], sent[len(arrays) :]
        return steps, obs, last or [x[1:] for x in obs]

    def _send(self, arrays: Sequence[Array], finals: Sequence[Array]) -> list[Tensor]:
        """Copy arrays of a rollout to the device, as one block or two, without waiting."""
        if not self._sent:
            self._sent = [Packed(arrays, self.device)]
            self._copied = new_event(self.device)
        elif self._copied is not None and not self._copied.query():
            self._copied.synchronize()  # the copy before still reads the memory
        if finals and len(self._sent) == 1:
            self._sent.append(Packed(finals, self.device))
        tensors: list[Tensor] = []
        for packed, given in zip(self._sent, (arrays, finals), strict=False):
            if given:
                for out, array in zip(packed.arrays, given, strict=True):
                    out[...] = array
                tensors += packed.to_device()
        assert self._copied is not None, "it is made with the memory"
        self._copied.record(current_stream(self.device))
        return tensors

    def _store(self, steps: list[Tensor], obs: list[Tensor], finals: list[Tensor]) -> None:
        """Store a rollout that is on the device; launches only, so that it can be captured."""
        attempt = self._attempt
        attempt(lambda: self._begin([x[0] for x in obs]))
        # Few enough at a time that no ring wraps around: then no slot is written twice.
        span = max(1, (self.n_slots - 1) // 2)
        for t in range(0, len(steps[0]), span):
            parts = [[x[t : t + span] for x in arrays] for arrays in (steps, [x[1:] for x in obs], finals)]
            attempt(partial(self._add, *parts))

    def _add(self, steps: list[Tensor], obs: list[Tensor], final_obs: list[Tensor]) -> None:
        """Store some steps; `head` changes last, so that all can be repeated if memory runs out."""
        action, reward, terminated, truncated = steps
        cut = truncated & ~terminated
        n_cut = cut.cumsum(0)
        t = torch.arange(len(reward), device=self.device)[:, None]
        acted = self.head + t + n_cut - cut.long()
        now, followed = acted + 1, acted + 1 + cut
        here, final_at, obs_at = (self.slots(self.envs, number) for number in (acted, now, followed))
        for stored, new, final, n_before in zip(self.obs, obs, final_obs, self._before, strict=True):
            if n_before:
                size = new.shape[2] // (n_before + 1)
                new, final = new[:, :, -size:], final[:, :, -size:]
            last = torch.where(cut.view(*cut.shape, *(1,) * (new.ndim - 2)), final, new)
            stored[self._frame_slots(self.envs, now, n_before)] = last
            stored[self._frame_slots(self.envs, followed, n_before)] = new
        if self.age is not None:
            self._put_ages(terminated | truncated, now, followed)
        self.end[final_at] = EMPTY
        self.end[obs_at] = EMPTY
        how = torch.where(cut, TRUNCATED, terminated.to(torch.uint8) * TERMINATED)
        self.end[here] = how.to(torch.uint8)
        self.action[here] = action.to(self.action.dtype)
        self.reward[here] = reward
        began = torch.where(terminated | truncated, followed, 0).amax(0)
        torch.maximum(self.start, began, out=self.start)
        self.head.copy_(followed[-1])

    def _put_ages(self, ended: Tensor, now: Tensor, followed: Tensor) -> None:
        """Store how many frames of its episode came before each observation; see `replay_kernels.put_ages`."""
        max_age = self.obs_layout.frames - 1
        began = self.head - self.age[self.slots(self.envs, self.head)]
        since = torch.where(ended, followed, began).cummax(0).values
        before = torch.cat([began[None], since[:-1]])
        for number, start in ((now, before), (followed, since)):
            self.age[self.slots(self.envs, number)] = (number - start).clamp(max=max_age).to(torch.uint8)

    def sample(
        self, index: Tensor, weight: Any = 1, *, gamma: float, n_step: int = 1, out: ReplayBatch | None = None
    ) -> ReplayBatch:
        assert out is None, "on a device a batch has memory of its own"
        env, serial = index // self.n_slots, self.serials(index)
        newest = self.head[env]
        total = torch.zeros(index.shape, dtype=torch.float64, device=self.device)
        discount, goes_on = torch.ones_like(total), torch.ones_like(index, dtype=torch.bool)
        number, slot = serial, index
        for _ in range(n_step):
            how = self.end[slot]
            total = total + torch.where(goes_on, discount * self.reward[slot], 0)
            discount = torch.where(goes_on, discount * gamma * (how != TERMINATED), discount)
            number = number + goes_on
            slot = self.slots(env, number)
            goes_on = goes_on & (how == GOES_ON) & (number < newest)
        return ReplayBatch(
            obs=tuple(self.observations(env, serial)),
            action=self.action[index].to(torch_dtype(self.action_layout.dtype)),
            reward=total.float(),
            next_obs=tuple(self.observations(env, number)),
            discount=discount.float(),
            weight=torch.ones_like(total, dtype=torch.float32) * weight,
            index=index,
            serial=serial,
        )

    def ranges(self, n_step: int) -> tuple[Tensor, Tensor]:
        """Each env's range of slot numbers whose whole n-step window is stored; some of the slots may be empty."""
        first = (self.head - self.n_slots + 1).clamp(min=0)
        return first, torch.maximum(torch.maximum(first, self.start), self.head - n_step + 1)

    def holds(self, n_step: int) -> bool:
        """Whether some whole n-step window is stored; syncs with the device until all envs have taken `n_step` steps."""
        if self.n_steps >= n_step:
            return True
        first, last = self.ranges(n_step)
        return bool((last > first).any())

    def restore(self, arrays: Mapping[str, Array]) -> None:
        super().restore(arrays)
        self.n_steps = int(arrays["head"].min()) // 2  # a step takes two slots at most


class Uniforms:
    """Random numbers between 0 and 1 for the next draws, on the device: a row for each draw."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed, self._device = seed, device
        self._rows = torch.zeros(0, 0, dtype=torch.float64, device=device)
        self._next = torch.zeros(1, dtype=torch.int64, device=device)
        self._prepared: tuple[tuple[int, ...], Tensor] = (), torch.zeros(0)
        """Which draws, and their numbers."""

    def prepare(self, *draws: int) -> None:
        """Make the numbers of the next `load`, while the device has work."""
        self._prepared = draws, self._drawn(*draws)

    def _drawn(self, first_draw: int, n_draws: int, width: int) -> Tensor:
        drawn = torch.empty(n_draws, width, dtype=torch.float64, pin_memory=has_streams(self._device))
        for i, row in enumerate(drawn.numpy()):
            fill_uniforms(draw_key(self._seed, first_draw + i), row)
        return drawn

    def load(self, first_draw: int, n_draws: int, width: int) -> bool:
        """Send the numbers of so many draws to the device; false if they have the same memory as before."""
        draws = first_draw, n_draws, width
        drawn = self._prepared[1] if self._prepared[0] == draws else self._drawn(*draws)
        moved = self._rows.shape[1] != width or len(self._rows) < n_draws
        if moved:
            self._rows = torch.zeros(2 * n_draws, width, dtype=torch.float64, device=self._device)
        self._rows[:n_draws].copy_(drawn, non_blocking=True)
        self.rewind()
        return moved

    def rewind(self) -> None:
        """Begin with the first row again."""
        self._next.zero_()

    def take(self) -> Tensor:
        """The numbers of the next draw."""
        row = self._rows.index_select(0, self._next).view(-1)
        self._next.add_(1)
        return row


class UniformDraws:
    """The minibatches of captured updates, drawn uniformly: one launch draws many, an update takes the next of them."""

    def __init__(self, sampler: TensorUniform, size: int) -> None:
        self._sampler, self._size = sampler, size
        self.n_at_once = minibatches_at_once(size)
        """Minibatches of one draw."""
        self._row = torch.zeros(1, dtype=torch.int64, device=sampler.replay.device)
        """The minibatch that the next update takes."""
        self._drawn: ReplayBatch | None = None
        self._draw: Graph | None = None
        self._first = 0

    def begin(self, n: int, beta: float) -> bool:  # noqa: ARG002
        """Prepare `n` minibatches; true if memory moved, so that a capture is out of date."""
        sampler, n_rows = self._sampler, self._size * self.n_at_once
        if self._drawn is None:
            self._drawn = sampler.sample(n_rows)
            sampler.n_draws -= 1
        self._first = sampler.n_draws
        return sampler.load(-(-n // self.n_at_once), n_rows) or self._draw is None

    def capture(self) -> None:
        """Capture the draw of the next minibatches."""
        warm_up = partial(self._sampler.sample, self._size * self.n_at_once)
        self._row.zero_()
        self._sampler.rewind()
        self._draw = Graph(self._draw_next, self._sampler.replay.device, warm_up)
        self._sampler.rewind()

    def _draw_next(self) -> None:
        assert self._drawn is not None, "begin has made it"
        copy_all(self._drawn.tensors(), self._sampler.sample(self._size * self.n_at_once).tensors())
        self._row.zero_()

    def refill(self, n_done: int) -> None:
        """Before update number `n_done`: draw the next minibatches, if those drawn are used up."""
        assert self._draw is not None, "it is captured"
        if n_done % self.n_at_once == 0:
            self._draw.replay()

    def next(self) -> ReplayBatch:
        """The next minibatch; part of a captured update."""
        drawn = self._drawn
        assert drawn is not None, "begin has made it"

        def taken(x: Tensor) -> Tensor:
            return x.view(self.n_at_once, self._size, *x.shape[1:]).index_select(0, self._row)[0]

        batch = ReplayBatch(
            obs=tuple(map(taken, drawn.obs)),
            action=taken(drawn.action),
            reward=taken(drawn.reward),
            next_obs=tuple(map(taken, drawn.next_obs)),
            discount=taken(drawn.discount),
            weight=drawn.weight[: self._size],  # all 1
            index=drawn.index[: self._size],  # only priorities need the right ones
            serial=drawn.serial[: self._size],
        )
        self._row.add_(1)
        return batch

    def advance(self, priority: Tensor) -> None:
        """Nothing: draws do not depend on updates."""

    def end(self, n: int) -> None:
        """After `n` minibatches: a draw that nobody learned from did not happen."""
        n_draws = -(-n // self.n_at_once)
        self._sampler.n_draws = self._first + n_draws
        self._sampler.is_loaded = False
        if n:
            self._sampler.prepare(n_draws, self._size * self.n_at_once)


class PrioritizedDraws:
    """The minibatches of captured updates: `batch` is learned from, then `advance` puts the next one in its place."""

    batch: ReplayBatch

    def __init__(self, sampler: TensorPrioritized, size: int) -> None:
        self._sampler, self._size = sampler, size
        self.n_at_once = minibatches_at_once(size)
        """As many as uniform draws have; here each is drawn by itself."""
        self._beta = torch.zeros((), dtype=torch.float64, device=sampler.replay.device)
        self._first = 0
        self._moved = True

    def begin(self, n: int, beta: float) -> bool:
        """Prepare `n` minibatches and draw the first; true if memory moved, so that a capture is out of date.

        It can be repeated if memory runs out.
        """
        sampler, self._first = self._sampler, self._sampler.n_draws
        self._moved |= sampler.load(n + 1, self._size)
        self._beta.fill_(beta)
        drawn = sampler.sample(self._size, self._beta)
        if not hasattr(self, "batch"):
            self.batch = drawn
        else:
            copy_all(self.batch.tensors(), drawn.tensors())
        moved, self._moved = self._moved, False
        return moved

    def capture(self) -> None:
        """Nothing: draws are a part of the captured update."""

    def refill(self, n_done: int) -> None:
        """Nothing: `advance` draws."""

    def next(self) -> ReplayBatch:
        """The minibatch to learn from."""
        return self.batch

    def advance(self, priority: Tensor) -> None:
        """Draw the next minibatch, then set the priorities of this one, as prefetching does."""
        drawn = self._sampler.sample(self._size, self._beta)
        self._sampler.update(self.batch.index, self.batch.serial, priority)
        copy_all(self.batch.tensors(), drawn.tensors())

    def end(self, n: int) -> None:
        """After `n` minibatches: a draw that nobody learned from did not happen."""
        self._sampler.n_draws = self._first + n
        self._sampler.is_loaded = False
        if n:
            self._sampler.prepare(n + 1, self._size)


class _Loads:
    """Random numbers of a sampler: loaded for one draw at a time, or for many at once."""

    replay: TensorReplay
    n_draws: int
    _seed: int
    is_loaded = False
    """Whether the numbers of the next draws were loaded at once."""

    @cached_property
    def _uniforms(self) -> Uniforms:
        return Uniforms(self._seed, self.replay.device)

    def width(self, size: int) -> int:
        """Numbers for one draw of `size` transitions."""
        return size

    def load(self, n_draws: int, size: int) -> bool:
        """Load the numbers of the next draws; true if they moved."""
        self.is_loaded = True
        return self._uniforms.load(self.n_draws, n_draws, self.width(size))

    def prepare(self, n_draws: int, size: int) -> None:
        """Make the numbers that `load` with the same arguments sends next."""
        self._uniforms.prepare(self.n_draws, n_draws, self.width(size))

    def rewind(self) -> None:
        """Begin with the first of the loaded numbers again."""
        self._uniforms.rewind()

    def take(self, size: int) -> Tensor:
        """The numbers of the next draw."""
        if not self.is_loaded:
            self._uniforms.load(self.n_draws, 1, self.width(size))
        return self._uniforms.take()


class TensorUniform(_Loads, Sampler[TensorReplay]):
    """As `Uniform`, on the device of its replay."""

    SPARE = 64
    """Candidates besides two for each transition and eight standard deviations: at most every second slot is empty, so these
    never run out."""

    def width(self, size: int) -> int:
        return 2 * size + int(8 * (2 * size) ** 0.5) + self.SPARE

    def _draw(self, size: int, beta: float | Tensor) -> tuple[Tensor, int] | None:  # noqa: ARG002
        it = self.replay
        if not it.holds(self._n_step):
            return None
        first, last = it.ranges(self._n_step)
        upto = (last - first).cumsum(0)
        nth = torch.minimum((self.take(size) * upto[-1]).long(), upto[-1] - 1)
        env = torch.searchsorted(upto, nth, right=True)
        number = last[env] - (upto[env] - nth)
        full = it.end[it.slots(env, number)] != EMPTY
        # The first candidates that are not empty, in their order.
        wanted = torch.arange(1, size + 1, device=it.device)
        pick = torch.searchsorted(full.cumsum(0), wanted).clamp(max=len(nth) - 1)
        env, number = env[pick], number[pick]
        # If they did run out: a neighbour of the last one, as two empty slots are never side by side.
        beside = torch.where(number > first[env], number - 1, number + 1)
        number = torch.where(full[pick], number, beside)
        return it.slots(env, number), 1


class TensorSumTree:
    """Priorities and the sums above them; the last leaf is spare: writes to it have no effect."""

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
        """Set leaves, and recompute all sums above them; of several values for one leaf the last counts."""
        ordered, order = torch.sort(index, stable=True)
        last = torch.searchsorted(ordered, ordered, right=True) - 1
        value = torch.where(ordered == self.spare, 0, value[order][last])
        self._levels[0][ordered] = value.float()
        node = ordered
        for fan, below, above in zip(self._fans, self._levels[:-1], self._levels[1:], strict=True):
            node = node // fan
            above[node] = _ends(below, fan, node)[:, -1]

    def find(self, mass: Tensor) -> Tensor:
        """The leaf that contains each mass between 0 and the total; never a leaf of 0 while any is not 0."""
        node = torch.zeros_like(mass, dtype=torch.int64)
        for fan, level in zip(reversed(self._fans), reversed(self._levels[:-1]), strict=True):
            ends = _ends(level, fan, node)
            pick = (ends <= mass[:, None]).sum(1)
            # If rounding exceeds the end, take the last that is not 0: the first with all of the sum.
            pick = torch.minimum(pick, (ends < ends[:, -1:]).sum(1))
            begins = torch.nn.functional.pad(ends, (1, 0)).gather(1, pick[:, None]).squeeze(1)
            mass, node = mass - begins, node * fan + pick
        return node


def _ends(level: Tensor, fan: int, node: Tensor) -> Tensor:
    """Cumulative sums over the children of these nodes, (B, fan)."""
    return level.view(-1, fan)[node].double().cumsum(1)


class TensorPrioritized(_Loads, PrioritySampler[TensorReplay]):
    """As `Prioritized`, on the device of its replay."""

    def __init__(self, replay: TensorReplay, **how: Any) -> None:
        """`how`: the keywords of `PrioritySampler`."""
        super().__init__(replay, **how)
        self.tree = TensorSumTree(replay.size, replay.device)
        self._leaves = self.tree.leaves

    def _add_new(self, n_new: int) -> None:
        it = self.replay
        _, last = it.ranges(self._n_step)
        # The host knows how many slots may have changed, not which: all candidates are checked.
        n_seen = min(n_new + self._n_step, it.n_slots)
        first = torch.maximum(self._seen, it.head - it.n_slots + 1)[:, None]
        number = first + torch.arange(n_seen, device=it.device)
        slot = it.slots(it.envs[:, None], number)
        drawable = (number < last[:, None]) & (it.end[slot] != EMPTY)
        slot = torch.where(number <= it.head[:, None], slot, self.tree.spare)
        self.tree.write(slot.view(-1), torch.where(drawable, self._most, 0).view(-1))
        self._seen.copy_(last)

    def _draw(self, size: int, beta: float | Tensor) -> tuple[Tensor, Tensor] | None:
        it = self.replay
        if not it.holds(self._n_step):
            return None
        self._catch_up()
        part = torch.arange(size, device=it.device)
        mass = (part + self.take(size)) / size * self.tree.total
        index = self.tree.find(mass)
        priority = self._leaves[index].double()
        return index, ((priority.amin() / priority) ** beta).float()

    def update(self, index: Tensor, serial: Tensor, priority: Tensor) -> None:
        self._catch_up()
        value = (priority.detach().double().abs() + self._eps) ** self._alpha
        value = torch.where(value < torch.inf, value.clamp(MIN_PRIORITY, MAX_PRIORITY), self._most)
        same = (self.replay.serials(index) == serial) & (self._leaves[index] > 0)
        self.tree.write(torch.where(same, index, self.tree.spare), value)
        torch.maximum(self._most, torch.where(same, value, 0).amax().float().double(), out=self._most)

    def _set_leaves(self, leaves: Array) -> None:
        it = self.replay
        self.tree.write(torch.arange(it.size, device=it.device), torch.from_numpy(leaves).to(it.device))
