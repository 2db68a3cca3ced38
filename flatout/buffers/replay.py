"""Replay in RAM: the last steps of N envs, each observation stored once, the next one found by its place.

Every env has a ring of time slots and a cursor of its own, so envs may step raggedly. Where an episode was truncated
its final observation takes the slot between it and the next episode's first: what follows a step always lies one on.
B: batch, T: time steps, N: envs, M: slots of each; slot i = n · M + t.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from flatout.buffers import replay_kernels as kernel
from flatout.buffers.batch import ReplayBatch, alloc, alloc_batch, rows_of_bytes
from flatout.buffers.rings import check_saved, n_used, ring_spec, slots_per_env
from flatout.buffers.rollout import Rollout
from flatout.envs.spaces import ActionLayout, Array, ObsArrays, ObsLayout


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
        self._spec = ring_spec(obs, action)
        rings = {name: alloc(dtype, size, *shape, pin=pin) for name, (shape, dtype) in self._spec.items()}
        self._rings = rings
        self.obs: ObsArrays = tuple(rings[f"obs.{i}"] for i in range(len(obs.specs)))
        self.action, self.reward, self.end = rings["action"], rings["reward"], rings["end"]
        self.end.fill(kernel.EMPTY)
        self.head = np.zeros(n_envs, np.int64)
        """Number of the slot with each env's newest observation, from which it has not acted yet."""
        self.start = np.zeros(n_envs, np.int64)
        """Number of the slot with the first observation of each env's present episode."""
        self._begun = np.zeros(n_envs, np.bool_)
        self._all = np.arange(n_envs)
        self._bytes = [rows_of_bytes(leaf, 1) for leaf in self.obs]

    def begin(self, obs: ObsArrays, rows: Array | None = None) -> None:
        """The observations from which these envs act next (all if none are named).

        An env whose newest observation is another one has begun a new episode: the one before is cut there.
        """
        rows = self._all if rows is None else rows
        self._begun[rows] = True
        at = self.head[rows] % self.n_slots + rows * self.n_slots
        changed = self.head[rows] == 0  # nothing known yet
        fresh = self._as_bytes(obs, 1)
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
        obs: ObsArrays,
        final_obs: ObsArrays,
        rows: Array | None = None,
    ) -> None:
        """One step of each env in `rows` (all if none are named), a row of each array per env named.

        `obs` is what the env shows now, a new episode's first observation where one ended; `final_obs` is read
        only where an episode was truncated.
        """
        rows = self._all if rows is None else rows
        assert self._begun[rows].all(), "call begin with an env's first observation before its first step"
        leaves, finals = (tuple(leaf[None] for leaf in x) for x in (obs, final_obs))
        self._add(rows, action[None], reward[None], terminated[None], truncated[None], leaves, finals)

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
        obs: ObsArrays,
        final_obs: ObsArrays,
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
        self._put(obs_at, self._as_bytes(obs, 2), final_at, self._as_bytes(final_obs, 2))

    def _as_bytes(self, leaves: ObsArrays, n_lead: int) -> list[Array]:
        pairs = zip(leaves, self.obs, strict=True)
        out = [rows_of_bytes(np.ascontiguousarray(leaf, mine.dtype), n_lead) for leaf, mine in pairs]
        assert all(x.shape[-1] == y.shape[1] for x, y in zip(out, self._bytes, strict=True)), "other shapes"
        return out

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
        used = n_used(self.head, self.n_slots)
        rings = {
            name: x.reshape(self.n_envs, self.n_slots, *x.shape[1:])[:, :used]
            for name, x in self._rings.items()
        }
        return {**rings, "head": self.head, "start": self.start}

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Become what `arrays` was taken from; the envs, the capacity and the spaces must be the same."""
        check_saved(arrays, self._spec, self.n_envs, self.n_slots)
        self.head[:] = arrays["head"]
        self.end.fill(kernel.EMPTY)
        self._begun[:] = self.head > 0
        for name, array in self.arrays().items():
            array[...] = arrays[name]
