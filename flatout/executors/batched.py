"""Envs that step N at once: a `gymnasium.vector.VectorEnv` behind the executor protocol, in NumPy.

Whatever autoreset the wrapped env has becomes SAME_STEP. One that begins episodes a step late (NEXT_STEP) and
cannot reset some of its envs has steps that only reset; they are told as `restarted`, never as transitions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from flatout.envs.check import nan_message
from flatout.envs.spaces import Array, ObsLayout
from flatout.errors import EnvError, one_line
from flatout.executors.base import Episode, Step, alloc_step
from flatout.executors.serial import env_seed


class BatchedExecutor:
    """A VectorEnv behind the executor protocol; no Python loop over its envs, one copy of its observations."""

    steps_together = True
    """Every `send` must name all envs: none of them can wait for the others."""

    def __init__(
        self,
        envs: VectorEnv[Any, Any, Any],
        layout: ObsLayout,
        env_ids: Array,
        seed: int,
        *,
        out: Step | None = None,
        keep_open: bool = False,
    ) -> None:
        assert envs.num_envs == len(env_ids), "a batched env comes with its number of envs"
        self.n_envs, self.env_ids = envs.num_envs, env_ids
        self._envs, self._layout, self._seed = envs, layout, seed
        self._keep_open = keep_open
        self._step = out or alloc_step(layout, self.n_envs)
        self._float_leaves = [i for i, leaf in enumerate(layout.specs) if leaf.dtype.kind == "f"]
        mode = AutoresetMode(envs.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP))
        # Gymnasium's own classes reset by mask in any mode; of others only DISABLED promises that they can.
        known = isinstance(envs.unwrapped, SyncVectorEnv | AsyncVectorEnv)
        self._resets_itself = mode is AutoresetMode.SAME_STEP
        self._resets_late = mode is AutoresetMode.NEXT_STEP and not known
        self._mask_is_proven = False
        self._actions: Array = np.zeros(0)
        self._returns = np.zeros(self.n_envs)
        self._lengths = np.zeros(self.n_envs, np.int64)
        self._late: Array | None = None
        """Envs that the coming step only resets, if there are any."""
        self._n_steps, self._seed_count = 0, -1

    def reset(self) -> Step:
        """Begin a seeded episode in every env."""
        out = self._step
        self._seed_count += 1
        self._write_obs(self._reset(seed=env_seed(self._seed, int(self.env_ids[0]), self._seed_count)))
        for zeroed in (out.reward, out.terminated, out.truncated, self._returns, self._lengths):
            zeroed[:] = 0
        out.ended, out.restarted, self._late = [], [], None
        self._check_finite()
        return out

    def send(self, actions: Array, rows: Array) -> None:
        """Take the actions of all envs; they are stepped by `recv`."""
        assert len(rows) == self.n_envs, "a batched env steps all its envs at once"
        self._actions = actions

    def recv(self) -> Step:
        """Step all envs once; where an episode ends, keep its last observation and begin the next."""
        out, late = self._step, self._late
        obs, infos = self._step_envs()
        self._write_obs(obs)
        ended = out.terminated | out.truncated
        self._returns += out.reward
        self._lengths += 1
        out.restarted, self._late = [], None
        if late is not None:
            self._leave_out(late, ended)
        out.ended = self._end_episodes(ended)
        if out.ended:
            if self._resets_itself:
                self._take_final_obs(infos, ended)
            else:
                self._keep_final_obs(ended)
        self._check_finite()
        return out

    def mark(self) -> None:
        """Nothing to remember: a batched env cannot be brought back to a moment."""

    def snapshot(self) -> dict[str, Array]:
        """How often the envs were seeded, so that a resumed run begins with other episodes than the first."""
        return {"seed_counts": np.full(self.n_envs, self._seed_count)}

    def restore(self, snapshot: Mapping[str, Array]) -> list[int]:
        """Begin new episodes in all envs."""
        self._seed_count = int(snapshot["seed_counts"][0])
        self.reset()
        return list(range(self.n_envs))

    @property
    def current(self) -> Step:
        """The envs as they stand now: what the last `reset`, `recv` or `restore` left."""
        return self._step

    def close(self) -> None:
        """Close the batched env, whatever its own close does, unless it is its user's own."""
        if self._keep_open:
            return
        with suppress(Exception):
            self._envs.close()

    def _reset(self, **kwargs: Any) -> Any:
        try:
            obs, _ = self._envs.reset(**kwargs)
        except Exception as error:
            raise self._failure("reset", error) from error
        return obs

    def _step_envs(self) -> tuple[Any, dict[str, Any]]:
        """Step the wrapped env and take its rewards and flags; returns the rest."""
        out = self._step
        self._n_steps += 1
        try:
            obs, reward, terminated, truncated, infos = self._envs.step(self._actions)
        except Exception as error:
            raise self._failure("step", error) from error
        for name, array, values in (
            ("reward", out.reward, reward),
            ("terminated", out.terminated, terminated),
            ("truncated", out.truncated, truncated),
        ):
            if np.shape(values) != array.shape:
                raise self._wrong_shape(name, values, array)
            array[:] = values
        return obs, infos

    def _write_obs(self, obs: Any) -> None:
        for leaf, array in zip(self._layout.specs, self._step.obs, strict=True):
            values = leaf.pick(obs)
            if np.shape(values) != array.shape:
                raise self._wrong_shape("observation", values, array)
            array[...] = values

    def _leave_out(self, late: Array, ended: Array) -> None:
        """Where the step only began an episode, count nothing and report no transition."""
        if (ended & late).any():
            raise EnvError("the batched env ended an episode in the very step that began it (NEXT_STEP)")
        self._returns[late], self._lengths[late] = 0.0, 0
        self._step.reward[late] = 0.0
        self._step.restarted = np.flatnonzero(late).tolist()

    def _end_episodes(self, ended: Array) -> list[Episode]:
        places = np.flatnonzero(ended)
        if not len(places):
            return []
        columns = (self.env_ids[places], self._returns[places], self._lengths[places])
        self._returns[places], self._lengths[places] = 0.0, 0
        return [Episode(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]

    def _keep_final_obs(self, ended: Array) -> None:
        """The observations at hand are the episodes' last; the next ones' first are asked for, or come late."""
        for array, final in zip(self._step.obs, self._step.final_obs, strict=True):
            final[ended] = array[ended]
        if self._resets_late:
            self._late = ended
            return
        # Its own copy, as Gymnasium takes it out of the options.
        first = self._reset(options={"reset_mask": ended.copy()})
        for leaf, array in zip(self._layout.specs, self._step.obs, strict=True):
            values = np.asarray(leaf.pick(first))
            if not self._mask_is_proven:
                self._prove_mask(values, array, ~ended)
            array[ended] = values[ended]
        self._mask_is_proven = self._mask_is_proven or not ended.all()

    def _prove_mask(self, values: Array, array: Array, others: Array) -> None:
        """Once, at the first reset that leaves an env out: raise when that one was reset as well."""
        if not np.array_equal(values[others].astype(array.dtype), array[others]):
            raise EnvError(
                "the batched env resets all its envs where reset(options={'reset_mask': ...}) names some"
            )

    def _take_final_obs(self, infos: dict[str, Any], ended: Array) -> None:
        """Gymnasium gives them as an object array with an observation per env; as one batch is as good."""
        final = infos.get("final_obs")
        if final is None or not np.all(infos.get("_final_obs", ended)[ended]):
            raise EnvError(
                "the batched env gives no infos['final_obs'] where an episode ended; SAME_STEP autoreset needs it"
            )
        if isinstance(final, np.ndarray) and final.dtype == np.object_:
            for i in np.flatnonzero(ended).tolist():
                self._layout.write(self._step.final_obs, i, final[i])
            return
        for leaf, array in zip(self._layout.specs, self._step.final_obs, strict=True):
            array[ended] = leaf.pick(final)[ended]

    def _check_finite(self) -> None:
        """Raise for the first env with a NaN or infinite observation or reward; sums are a cheap sieve."""
        out = self._step
        arrays = [("reward", out.reward), *(("observation", out.obs[k]) for k in self._float_leaves)]
        if out.ended:
            arrays += [("observation", out.final_obs[k]) for k in self._float_leaves]
        for what, values in arrays:
            if math.isfinite(np.add.reduce(values, axis=None)):
                continue
            bad = ~np.isfinite(values.reshape(self.n_envs, -1)).all(axis=1)
            if bad.any():  # a float32 sum may overflow where every value is finite
                raise EnvError(nan_message(what, int(self.env_ids[bad.argmax()]), self._n_steps))

    def _wrong_shape(self, what: str, values: Any, array: Array) -> EnvError:
        return EnvError(
            f"the batched env's {what} has shape {np.shape(values)} at step {self._n_steps}; "
            f"its {self.n_envs} envs make {array.shape}"
        )

    def _failure(self, doing: str, error: Exception) -> EnvError:
        return EnvError(f"the batched env raised in {doing} at step {self._n_steps}: {one_line(error)}")
