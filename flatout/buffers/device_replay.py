"""Replay on a device: the same rings as in RAM, in tensors that never leave it, with uniform and prioritized draws.

Everything is parallel tensor operations without host syncs. The sum tree has one tensor per level: a batch of B
climbs or descends it in O(B log N). Random numbers are made on the host from (seed, draw), the same as in RAM.
B: batch, T: time steps, N: envs, M: slots of each; slot i = n · M + t.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatout.buffers.batch import ReplayBatch, Sampler, torch_dtype
from flatout.buffers.capacity import check_saved, n_used, slot_spec, slots_per_env
from flatout.buffers.priority import FAN, LEAF_FAN, MAX_PRIORITY, MIN_PRIORITY
from flatout.buffers.replay_kernels import EMPTY, GOES_ON, TERMINATED, TRUNCATED, draw_key, fill_uniforms
from flatout.buffers.rollout import Rollout, TensorRollout
from flatout.envs.spaces import ActionLayout, Array, ObsLayout

Tensors = tuple[Tensor, ...]


class TensorReplay:
    """The newest `capacity` steps of `n_envs` envs on a device; a truncation takes the memory of one step."""

    def __init__(
        self, obs: ObsLayout, action: ActionLayout, n_envs: int, capacity: int, device: torch.device
    ) -> None:
        self.obs_layout, self.action_layout, self.n_envs, self.device = obs, action, n_envs, device
        self.n_slots = slots_per_env(capacity, n_envs)
        self.capacity = (self.n_slots - 1) * n_envs
        self.size = size = self.n_slots * n_envs
        self._spec = slot_spec(obs, action)
        rings = {name: self._zeros(dtype, size, *shape) for name, (shape, dtype) in self._spec.items()}
        self._rings = rings
        self.obs: Tensors = tuple(rings[f"obs.{i}"] for i in range(len(obs.specs)))
        self.action, self.reward, self.end = rings["action"], rings["reward"], rings["end"]
        self.end.fill_(EMPTY)
        self.head = self._zeros(np.int64, n_envs)
        """Number of the slot with each env's newest observation, from which it has not acted yet."""
        self.start = self._zeros(np.int64, n_envs)
        """Number of the slot with the first observation of each env's current episode."""
        self.n_steps = self.reach = 0
        """Steps that all envs took together, and an upper bound of `head`: what the host knows without a sync."""
        self._held: set[int] = set()
        self._all = torch.arange(n_envs, device=device)

    def _zeros(self, dtype: Any, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch_dtype(dtype), device=self.device)

    def slots(self, envs: Tensor, number: Tensor) -> Tensor:
        """The slots of these envs' slot numbers."""
        return envs * self.n_slots + number % self.n_slots

    def begin(self, obs: Tensors, env_indices: Tensor | None = None) -> None:
        """Store the observations from which these envs act next; see `Replay.begin`."""
        envs = self._all if env_indices is None else env_indices
        head, start = self.head[envs], self.start[envs]
        at = self.slots(envs, head)
        changed = head == 0
        for stored, new in zip(self.obs, obs, strict=True):
            changed = changed | (_bytes(stored[at]) != _bytes(new)).any(1)
        cut = changed & (head > start)
        last = self.slots(envs, head - 1)
        self.end[last] = torch.where(cut, TRUNCATED, self.end[last])
        head = head + cut
        at = self.slots(envs, head)
        for stored, new in zip(self.obs, obs, strict=True):
            stored[at] = new
        self.end[at] = EMPTY
        self.head[envs], self.start[envs] = head, torch.where(cut, head, start)
        self.reach += 1

    def add(
        self,
        action: Tensor,
        reward: Tensor,
        terminated: Tensor,
        truncated: Tensor,
        obs: Tensors,
        final_obs: Tensors,
        env_indices: Tensor | None = None,
    ) -> None:
        """Store one step of each of these envs; see `Replay.add`."""
        envs = self._all if env_indices is None else env_indices
        obs_t, final_t = (tuple(x[None] for x in tensors) for tensors in (obs, final_obs))
        self._add(envs, action[None], reward[None], terminated[None], truncated[None], obs_t, final_t)

    def add_rollout(self, rollout: TensorRollout | Rollout) -> None:
        """Store all steps of a rollout; see `Replay.add_rollout`."""
        arrays = (rollout.action, rollout.reward, rollout.terminated, rollout.truncated)
        action, reward, terminated, truncated = (self._to_device(x) for x in arrays)
        obs = tuple(self._to_device(x) for x in rollout.obs)
        finals = tuple(x[1:] for x in obs)
        if isinstance(rollout, TensorRollout) or rollout.truncated.any():
            finals = tuple(self._to_device(x) for x in rollout.final_obs)
        self.begin(tuple(x[0] for x in obs))
        # Few enough at a time that no ring wraps around: then no slot is written twice.
        span = max(1, (self.n_slots - 1) // 2)
        for t in range(0, len(reward), span):
            now, then = slice(t, t + span), slice(t + 1, t + span + 1)
            ends = terminated[now], truncated[now]
            next_obs, final = tuple(x[then] for x in obs), tuple(x[now] for x in finals)
            self._add(self._all, action[now], reward[now], *ends, next_obs, final)

    def _to_device(self, x: Tensor | Array) -> Tensor:
        return torch.as_tensor(x).to(self.device)

    def _add(
        self,
        envs: Tensor,
        action: Tensor,
        reward: Tensor,
        terminated: Tensor,
        truncated: Tensor,
        obs: Tensors,
        final_obs: Tensors,
    ) -> None:
        n_steps = len(reward)
        cut = truncated & ~terminated
        n_cut = cut.cumsum(0)
        t = torch.arange(n_steps, device=self.device)[:, None]
        acted = self.head[envs] + t + n_cut - cut.long()
        now, followed = acted + 1, acted + 1 + cut
        here, final_at, obs_at = (self.slots(envs, number) for number in (acted, now, followed))
        for stored, new, final in zip(self.obs, obs, final_obs, strict=True):
            stored[final_at] = torch.where(cut.view(*cut.shape, *(1,) * (new.ndim - 2)), final, new)
            stored[obs_at] = new
        self.end[final_at] = EMPTY
        self.end[obs_at] = EMPTY
        how = torch.where(cut, TRUNCATED, terminated.to(torch.uint8) * TERMINATED)
        self.end[here] = how.to(torch.uint8)
        self.action[here] = action.view(n_steps, len(envs), -1).to(self.action.dtype)
        self.reward[here] = reward.float()
        began = torch.where(terminated | truncated, followed, 0).amax(0)
        self.start[envs] = torch.maximum(self.start[envs], began)
        self.head[envs] = followed[-1]
        self.n_steps += n_steps if envs is self._all else 0
        self.reach += 2 * n_steps

    def serials(self, index: Tensor) -> Tensor:
        """The slot numbers that these slots hold now."""
        head = self.head[index // self.n_slots]
        return head - (head - index) % self.n_slots

    def sample(
        self, index: Tensor, *, gamma: float, n_step: int = 1, weight: Tensor | None = None
    ) -> ReplayBatch:
        """The transitions in these slots; see `Replay.sample`. Does not check that the slots hold transitions."""
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
            obs=tuple(x[index] for x in self.obs),
            action=self.action[index].to(torch_dtype(self.action_layout.dtype)),
            reward=total.float(),
            next_obs=tuple(x[slot] for x in self.obs),
            discount=discount.float(),
            weight=torch.ones_like(total, dtype=torch.float32) if weight is None else weight,
            index=index,
            serial=serial,
        )

    def ranges(self, n_step: int) -> tuple[Tensor, Tensor]:
        """Each env's range of slot numbers whose whole n-step window is stored; some of the slots may be empty."""
        first = (self.head - self.n_slots + 1).clamp(min=0)
        return first, torch.maximum(torch.maximum(first, self.start), self.head - n_step + 1)

    def holds(self, n_step: int) -> bool:
        """Whether some whole n-step window is stored; once true, it stays true.

        Syncs with the device only until all envs have taken `n_step` steps together.
        """
        if self.n_steps < n_step and n_step not in self._held:
            first, last = self.ranges(n_step)
            if not bool((last > first).any()):
                return False
        self._held.add(n_step)
        return True

    def arrays(self) -> dict[str, Array]:
        """Everything it holds by name, copied to RAM, in the form of `Replay.arrays`."""
        head = self.head.cpu().numpy()
        used = n_used(head, self.n_slots)
        rings = {name: x[:, :used].cpu().numpy() for name, x in self._by_env().items()}
        return {**rings, "head": head, "start": self.start.cpu().numpy()}

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Set the contents to what `arrays` of a replay gave, on a device or in RAM."""
        check_saved(arrays, self._spec, self.n_envs, self.n_slots)
        self.end.fill_(EMPTY)
        for name, x in self._by_env().items():
            x[:, : arrays[name].shape[1]] = self._to_device(arrays[name])
        self.head.copy_(self._to_device(arrays["head"]))
        self.start.copy_(self._to_device(arrays["start"]))
        self.n_steps, self.reach = 0, int(arrays["head"].max())
        self._held.clear()

    def _by_env(self) -> dict[str, Tensor]:
        return {name: x.view(self.n_envs, self.n_slots, *x.shape[1:]) for name, x in self._rings.items()}


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(len(x), -1).view(torch.uint8)


def uniforms(seed: int, draw: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Numbers between 0 and 1 for draw number `draw`, on the device."""
    out = np.empty(shape)
    fill_uniforms(draw_key(seed, draw), out.reshape(-1))
    return torch.from_numpy(out).to(device, non_blocking=True)


class TensorUniform(Sampler[TensorReplay]):
    """As `Uniform`, on the device of its replay."""

    TRIES = 8
    """Candidate slots drawn for each transition: the first that is not empty is taken."""

    def sample(self, size: int, beta: float = 0.4, out: ReplayBatch | None = None) -> ReplayBatch:  # noqa: ARG002
        it = self.replay
        if not it.holds(self._n_step):
            raise self._nothing_stored()
        first, last = it.ranges(self._n_step)
        upto = (last - first).cumsum(0)
        u = uniforms(self._seed, self.n_draws, (size, self.TRIES), it.device)
        self.n_draws += 1
        nth = torch.minimum((u * upto[-1]).long(), upto[-1] - 1)
        env = torch.searchsorted(upto, nth, right=True)
        number = last[env] - (upto[env] - nth)
        full = it.end[it.slots(env, number)] != EMPTY
        pick = full.to(torch.uint8).argmax(1, keepdim=True)
        env, number = env.gather(1, pick).squeeze(1), number.gather(1, pick).squeeze(1)
        # If all candidates are empty, a neighbour is not: two empty slots are never side by side.
        beside = torch.where(number > first[env], number - 1, number + 1)
        number = torch.where(full.any(1), number, beside)
        return it.sample(it.slots(env, number), gamma=self._gamma, n_step=self._n_step)


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


class TensorPrioritized(Sampler[TensorReplay]):
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
        super().__init__(replay, gamma=gamma, n_step=n_step, seed=seed)
        self._alpha, self._eps = alpha, eps
        self.tree = TensorSumTree(replay.size, replay.device)
        self._envs = torch.arange(replay.n_envs, device=replay.device)[:, None]
        self._seen = torch.zeros(replay.n_envs, dtype=torch.int64, device=replay.device)
        self._most = torch.ones((), dtype=torch.float64, device=replay.device)
        self._reach = 0

    @property
    def priorities(self) -> Tensor:
        """A priority per slot; 0 where nothing can be drawn."""
        self._catch_up()
        return self.tree.leaves

    def _catch_up(self) -> None:
        """Give slots that have become eligible since the last call the largest priority so far, and overwritten ones 0."""
        it = self.replay
        n_new, self._reach = it.reach - self._reach, it.reach
        if n_new == 0:
            return
        _, last = it.ranges(self._n_step)
        # The host knows how many slots may have changed, not which: all candidates are checked.
        n_seen = min(n_new + self._n_step, it.n_slots)
        first = torch.maximum(self._seen, it.head - it.n_slots + 1)[:, None]
        number = first + torch.arange(n_seen, device=it.device)
        slot = it.slots(self._envs, number)
        drawable = (number < last[:, None]) & (it.end[slot] != EMPTY)
        slot = torch.where(number <= it.head[:, None], slot, self.tree.spare)
        self.tree.write(slot.view(-1), torch.where(drawable, self._most, 0).view(-1))
        self._seen = last

    def sample(self, size: int, beta: float = 0.4, out: ReplayBatch | None = None) -> ReplayBatch:  # noqa: ARG002
        it = self.replay
        if not it.holds(self._n_step):
            raise self._nothing_stored()
        self._catch_up()
        part = torch.arange(size, device=it.device)
        mass = (part + uniforms(self._seed, self.n_draws, (size,), it.device)) / size * self.tree.total
        self.n_draws += 1
        index = self.tree.find(mass)
        priority = self.tree.leaves[index].double()
        weight = (priority.amin() / priority) ** beta
        return it.sample(index, gamma=self._gamma, n_step=self._n_step, weight=weight.float())

    def update(self, index: Tensor, serial: Tensor, priority: Tensor) -> None:
        self._catch_up()
        value = (priority.detach().double().abs() + self._eps) ** self._alpha
        value = torch.where(value < torch.inf, value.clamp(MIN_PRIORITY, MAX_PRIORITY), self._most)
        same = (self.replay.serials(index) == serial) & (self.tree.leaves[index] > 0)
        self.tree.write(torch.where(same, index, self.tree.spare), value)
        self._most = torch.maximum(self._most, torch.where(same, value, 0).amax().float().double())

    def arrays(self) -> dict[str, Array]:
        it = self.replay
        leaves = self.priorities.view(it.n_envs, it.n_slots)
        used = n_used(it.head.cpu().numpy(), it.n_slots)
        return super().arrays() | {
            "priority": leaves[:, :used].cpu().numpy(),
            "seen": self._seen.cpu().numpy(),
            "most": self._most.view(1).cpu().numpy(),
        }

    def restore(self, arrays: Mapping[str, Array]) -> None:
        it, saved = self.replay, torch.from_numpy(arrays["priority"])
        leaves = torch.zeros(it.n_envs, it.n_slots)
        leaves[:, : saved.shape[1]] = saved
        self.tree.write(torch.arange(it.size, device=it.device), leaves.view(-1).to(it.device))
        self._seen = torch.from_numpy(arrays["seen"]).clone().to(it.device)
        self._most = torch.tensor(float(arrays["most"][0]), dtype=torch.float64, device=it.device)
        self._reach = it.reach
        super().restore(arrays)
