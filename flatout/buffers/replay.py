"""Replay in RAM: the newest steps of N envs, each observation stored once.

Every env has its own ring of time slots and its own write position, so envs may step at different times. A step's
next observation is in the next slot. Where an episode was truncated, its final observation takes a slot of its own
before the first observation of the next episode.
B: batch, T: time steps, N: envs, M: slots of each; slot i = n · M + t.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from flatout.buffers import replay_kernels as kernel
from flatout.buffers.batch import ReplayBatch, Sampler, alloc, alloc_batch, as_bytes
from flatout.buffers.capacity import check_saved, n_used, slot_spec, slots_per_env
from flatout.buffers.rollout import Rollout
from flatout.envs.spaces import ActionLayout, Array, ObsArrays, ObsLayout


class Replay:
    """The newest `capacity` steps of `n_envs` envs; a truncation takes the memory of one step."""

    def __init__(
        self, obs: ObsLayout, action: ActionLayout, n_envs: int, capacity: int, *, pin: bool = False
    ) -> None:
        self.obs_layout, self.action_layout, self.n_envs, self.pin = obs, action, n_envs, pin
        self.n_slots = slots_per_env(capacity, n_envs)
        self.capacity = (self.n_slots - 1) * n_envs
        self.size = size = self.n_slots * n_envs
        """Slots of all envs."""
        self._spec = slot_spec(obs, action)
        rings = {name: alloc(dtype, size, *shape, pin=pin) for name, (shape, dtype) in self._spec.items()}
        self._rings = rings
        self.obs: ObsArrays = tuple(rings[f"obs.{i}"] for i in range(len(obs.specs)))
        self.action, self.reward, self.end = rings["action"], rings["reward"], rings["end"]
        self.end.fill(kernel.EMPTY)
        self.head = np.zeros(n_envs, np.int64)
        """Number of the slot with each env's newest observation, from which it has not acted yet."""
        self.start = np.zeros(n_envs, np.int64)
        """Number of the slot with the first observation of each env's current episode."""
        self._begun = np.zeros(n_envs, np.bool_)
        self._all = np.arange(n_envs)
        self._obs_bytes = [as_bytes(x, 1) for x in self.obs]

    def begin(self, obs: ObsArrays, env_indices: Array | None = None) -> None:
        """Store the observations from which these envs (default: all) act next.

        An env whose newest observation is a different one has started a new episode: the one before is truncated.
        """
        envs = self._all if env_indices is None else env_indices
        self._begun[envs] = True
        at = self.head[envs] % self.n_slots + envs * self.n_slots
        changed = self.head[envs] == 0  # nothing stored yet
        new_bytes = self._as_bytes(obs, 1)
        for stored, new in zip(self._obs_bytes, new_bytes, strict=True):
            changed |= (stored[at] != new).any(1)
        if changed.any():
            kernel.begin(envs, changed, self.n_slots, self.head, self.start, self.end, at)
            self._put(at[None], [x[None] for x in new_bytes], np.full_like(at[None], -1), None)

    def add(
        self,
        action: Array,
        reward: Array,
        terminated: Array,
        truncated: Array,
        obs: ObsArrays,
        final_obs: ObsArrays,
        env_indices: Array | None = None,
    ) -> None:
        """Store one step of each of these envs (default: all).

        `obs` follows the step: where an episode ended, it is the first observation of the next one. `final_obs` is
        read only where an episode was truncated.
        """
        envs = self._all if env_indices is None else env_indices
        assert self._begun[envs].all(), "call begin with an env's first observation before its first step"
        obs_t, final_t = (tuple(x[None] for x in arrays) for arrays in (obs, final_obs))
        self._add(envs, action[None], reward[None], terminated[None], truncated[None], obs_t, final_t)

    def add_rollout(self, rollout: Rollout) -> None:
        """Store all steps of a rollout; an env that does not continue from its newest observation was reset."""
        self.begin(tuple(x[0] for x in rollout.obs))
        ends = rollout.terminated, rollout.truncated
        next_obs = tuple(x[1:] for x in rollout.obs)
        self._add(self._all, rollout.action, rollout.reward, *ends, next_obs, rollout.final_obs)

    def _add(
        self,
        envs: Array,
        action: Array,
        reward: Array,
        terminated: Array,
        truncated: Array,
        obs: ObsArrays,
        final_obs: ObsArrays,
    ) -> None:
        obs_at, final_at = np.empty((2, *reward.shape), np.int64)
        kernel.advance(
            np.ascontiguousarray(envs, np.int64),
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

    def _as_bytes(self, arrays: ObsArrays, n_lead: int) -> list[Array]:
        pairs = zip(arrays, self.obs, strict=True)
        out = [as_bytes(np.ascontiguousarray(x, mine.dtype), n_lead) for x, mine in pairs]
        assert all(x.shape[-1] == y.shape[1] for x, y in zip(out, self._obs_bytes, strict=True)), "shapes"
        return out

    def _put(self, obs_at: Array, obs: list[Array], final_at: Array, final_obs: list[Array] | None) -> None:
        for out, new, final in zip(self._obs_bytes, obs, final_obs or obs, strict=True):
            kernel.put(obs_at, new, final_at, final, out)

    def sample(
        self, index: Array, *, gamma: float, n_step: int = 1, out: ReplayBatch | None = None
    ) -> ReplayBatch:
        """The transitions in these slots, over up to `n_step` steps of one episode, at most to the newest step."""
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
        for stored, obs, next_obs in zip(self._obs_bytes, to.obs, to.next_obs, strict=True):
            kernel.take_two(stored, to.index, to.next_index, obs, next_obs)
        return out

    def serials(self, index: Array) -> Array:
        """The slot numbers that these slots hold now."""
        n, t = np.divmod(index, self.n_slots)
        out: Array = self.head[n] - (self.head[n] - t) % self.n_slots
        return out

    def __len__(self) -> int:
        """Transitions that are stored now."""
        return int(np.count_nonzero(self.end != kernel.EMPTY))

    def arrays(self) -> dict[str, Array]:
        """Everything it holds by name, without the slots that were never reached: views, to be saved before more is added."""
        used = n_used(self.head, self.n_slots)
        rings = {
            name: x.reshape(self.n_envs, self.n_slots, *x.shape[1:])[:, :used]
            for name, x in self._rings.items()
        }
        return {**rings, "head": self.head, "start": self.start}

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Set the contents to what `arrays` gave; the number of envs, the capacity and the spaces must be the same."""
        check_saved(arrays, self._spec, self.n_envs, self.n_slots)
        self.head[:] = arrays["head"]
        self.end.fill(kernel.EMPTY)
        self._begun[:] = self.head > 0
        for name, array in self.arrays().items():
            array[...] = arrays[name]


class Uniform(Sampler[Replay]):
    """Draws every transition whose n-step window is stored with the same probability."""

    def __init__(self, replay: Replay, *, gamma: float, n_step: int = 1, seed: int = 0) -> None:
        super().__init__(replay, gamma=gamma, n_step=n_step, seed=seed)
        self._upto = np.zeros(replay.n_envs, np.int64)

    def sample(self, size: int, beta: float = 0.4, out: ReplayBatch | None = None) -> ReplayBatch:  # noqa: ARG002
        it, index = self.replay, np.empty(size, np.int64)
        if out is not None:
            out.weight.fill_(1)
        key = kernel.draw_key(self._seed, self.n_draws)
        state = it.head, it.start, it.end
        if not kernel.draw_uniform(key, self._n_step, it.n_slots, *state, self._upto, index):
            raise self._nothing_stored()
        self.n_draws += 1
        return it.sample(index, gamma=self._gamma, n_step=self._n_step, out=out)
