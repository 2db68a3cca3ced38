"""Batched envs in NumPy: a `gymnasium.vector.VectorEnv` behind the executor protocol.

Every autoreset mode becomes SAME_STEP. An env that begins episodes one step late (NEXT_STEP) and cannot reset some of
its envs has steps that only reset; they are reported as `restarted`, never as transitions.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from flatout.envs.spaces import Array, ObsLayout
from flatout.errors import EnvError, one_line
from flatout.executors.base import Executor, Step, alloc_step
from flatout.executors.episodes import EpisodeStatistics, StepCheck, env_seed


class WrappedEnvs:
    """A batched env in NumPy or tensors: its seeds, its failures, and the shapes of what it returns."""

    def __init__(
        self, envs: Any, layout: ObsLayout, env_ids: Array, seed: int, *, keep_open: bool = False
    ) -> None:
        assert envs.num_envs == len(env_ids), "a batched env comes with its number of envs"
        self.n_envs, self.env_ids = len(env_ids), env_ids
        self._envs, self._layout, self._seed = envs, layout, seed
        self._keep_open = keep_open
        self.n_steps = 0
        """Steps taken so far by each env."""
        self._seed_count = -1

    def snapshot(self) -> dict[str, Array]:
        """How often the envs were seeded, so that a resumed run does not repeat the first episodes."""
        return {"seed_counts": np.full(self.n_envs, self._seed_count)}

    def restore(self, snapshot: Mapping[str, Array]) -> list[int]:
        """Begin new episodes in all envs, because a batched env cannot be replayed."""
        self._seed_count = int(snapshot["seed_counts"][0])
        self.reset()
        return list(range(self.n_envs))

    def reset(self) -> Any:
        """Begin a seeded episode in every env; rewards are zero."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the batched env, unless it belongs to the user."""
        if not self._keep_open:
            with suppress(Exception):  # not every one has it
                self._envs.close()

    def _reset(self, **kwargs: Any) -> Any:
        """The first observations; with the next seed, unless there are options."""
        if not kwargs:
            self._seed_count += 1
            kwargs = {"seed": env_seed(self._seed, int(self.env_ids[0]), self._seed_count)}
        try:
            return self._envs.reset(**kwargs)[0]
        except Exception as error:
            raise self._failure("reset", error) from error

    def _step(self, actions: Any) -> Any:
        self.n_steps += 1
        try:
            return self._envs.step(actions)
        except Exception as error:
            failure = self._failure("step", error)
            self.n_steps -= 1
            raise failure from error

    def _check_shape(self, what: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
        if shape != expected:
            raise EnvError(
                f"the batched env's {what} has shape {tuple(shape)} at step {self.n_steps}; "
                f"its {self.n_envs} envs make {expected}"
            )

    def _failure(self, doing: str, error: Exception) -> EnvError:
        return EnvError(f"the batched env raised in {doing} at step {self.n_steps}: {one_line(error)}")


class BatchedExecutor(WrappedEnvs, Executor):
    """A VectorEnv; no Python loop over its envs, one copy of its observations."""

    steps_together = True

    def __init__(
        self,
        envs: VectorEnv[Any, Any, Any],
        layout: ObsLayout,
        env_ids: Array,
        seed: int,
        *,
        keep_open: bool = False,
    ) -> None:
        WrappedEnvs.__init__(self, envs, layout, env_ids, seed, keep_open=keep_open)
        self.current = alloc_step(layout, self.n_envs)
        self._statistics = EpisodeStatistics(env_ids)
        self._check = StepCheck(self.current, env_ids)
        mode = AutoresetMode(envs.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP))
        # Gymnasium's own classes reset by mask in any mode; of others only DISABLED promises that they can.
        known = isinstance(envs.unwrapped, SyncVectorEnv | AsyncVectorEnv)
        self._resets_itself = mode is AutoresetMode.SAME_STEP
        self._resets_late = mode is AutoresetMode.NEXT_STEP and not known
        self._mask_is_proven = False
        self._actions: Array = np.zeros(0)
        self._late: Array | None = None
        """Mask of the envs that the next step only resets, if there are any."""

    def reset(self) -> Step:
        """Begin a seeded episode in every env."""
        self._write_obs(self._reset())
        self.current.begin()
        self._statistics.clear()
        self._late = None
        self._check.check_all(self.n_steps)
        return self.current

    def send(self, actions: Array, env_indices: Array) -> None:
        """Take the actions of all envs; `recv` steps them."""
        assert len(env_indices) == self.n_envs, "a batched env steps all its envs at once"
        self._actions = actions

    def recv(self) -> Step:
        """Step all envs once; where an episode ends, keep its last observation and begin the next."""
        out, late = self.current, self._late
        obs, reward, terminated, truncated, infos = self._step(self._actions)
        for name, array, values in (
            ("reward", out.reward, reward),
            ("terminated", out.terminated, terminated),
            ("truncated", out.truncated, truncated),
        ):
            self._check_shape(name, np.shape(values), array.shape)
            array[:] = values
        self._write_obs(obs)
        ended = out.terminated | out.truncated
        self._statistics.add(out.reward)
        out.restarted, self._late = [], None
        if late is not None:
            self._leave_out(late, ended)
        out.ended = self._statistics.end(np.flatnonzero(ended))
        if out.ended:
            if self._resets_itself:
                self._take_final_obs(infos, ended)
            else:
                self._keep_final_obs(ended)
        self._check.check_all(self.n_steps, bool(out.ended))
        return out

    def _write_obs(self, obs: Any) -> None:
        for spec, array in zip(self._layout.specs, self.current.obs, strict=True):
            values = spec.pick(obs)
            self._check_shape("observation", np.shape(values), array.shape)
            array[...] = values

    def _leave_out(self, late: Array, ended: Array) -> None:
        """Report no transition where the step only began an episode."""
        if (ended & late).any():
            raise EnvError("the batched env ended an episode in the very step that began it (NEXT_STEP)")
        self._statistics.clear(late)
        self.current.reward[late] = 0.0
        self.current.restarted = np.flatnonzero(late).tolist()

    def _keep_final_obs(self, ended: Array) -> None:
        """Keep the current observations as final ones; reset these envs now, unless the next step does."""
        for array, final in zip(self.current.obs, self.current.final_obs, strict=True):
            final[ended] = array[ended]
        if self._resets_late:
            self._late = ended
            return
        # Its own copy, as Gymnasium takes it out of the options.
        first = self._reset(options={"reset_mask": ended.copy()})
        for spec, array in zip(self._layout.specs, self.current.obs, strict=True):
            values = np.asarray(spec.pick(first))
            if not self._mask_is_proven:
                self._prove_mask(values, array, ~ended)
            array[ended] = values[ended]
        self._mask_is_proven = self._mask_is_proven or not ended.all()

    def _prove_mask(self, values: Array, array: Array, others: Array) -> None:
        """At the first reset of some envs: raise if others were reset as well."""
        if not np.array_equal(values[others].astype(array.dtype), array[others]):
            raise EnvError(
                "the batched env resets all its envs where reset(options={'reset_mask': ...}) names some"
            )

    def _take_final_obs(self, infos: dict[str, Any], ended: Array) -> None:
        """Take them from the infos: an object array with an observation per env, as Gymnasium has it, or a batch."""
        final = infos.get("final_obs")
        if final is None or not np.all(infos.get("_final_obs", ended)[ended]):
            raise EnvError(
                "the batched env gives no infos['final_obs'] where an episode ended; SAME_STEP autoreset needs it"
            )
        if isinstance(final, np.ndarray) and final.dtype == np.object_:
            for i in np.flatnonzero(ended).tolist():
                self._layout.write(self.current.final_obs, i, final[i])
            return
        for spec, array in zip(self._layout.specs, self.current.final_obs, strict=True):
            array[ended] = spec.pick(final)[ended]
