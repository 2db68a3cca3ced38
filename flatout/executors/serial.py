"""Steps its envs in turn, in the calling process: the fastest way for envs whose step takes microseconds."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping
from contextlib import suppress
from time import perf_counter
from typing import Any, TypeVar

import gymnasium as gym
import numpy as np

from flatout.envs import spaces
from flatout.envs.spaces import Array, fast_contains
from flatout.envs.validate import broke_api
from flatout.errors import EnvError, one_line
from flatout.executors.base import (
    NOT_IN_ENV,
    EnvCall,
    EnvIndices,
    EnvSet,
    Executor,
    Options,
    Seeds,
    Step,
    alloc_step,
)
from flatout.executors.episodes import ActionLog, EpisodeStatistics, StepCheck

T = TypeVar("T")

REPLAY_SECONDS = 60.0


class SerialExecutor(Executor):
    """Gymnasium envs in one process; observations are written in place, also to shared memory."""

    steps_together = True

    def __init__(self, envs: EnvSet) -> None:
        n_envs = self.n_envs = len(envs.env_ids)
        self.env_ids = envs.env_ids
        self._factory, self._layout, self._budget = envs.factory, envs.obs, envs.budget
        self._at = (np.zeros(2, np.int64) if envs.at is None else envs.at).data
        """The env and the step that it has come to; a view, because writing to it costs a third of an array's."""
        self._envs = [self._made(i) for i in range(n_envs)]
        self._at[0] = NOT_IN_ENV
        self.current = envs.out or alloc_step(envs.obs, n_envs)
        # Views made once: writing through them costs half of an indexed write, which matters for cheap envs.
        as_given = envs.obs.stored_as_given
        self._obs_rows = [self.current.obs[0][i, ...] for i in range(n_envs)] if as_given else None
        self.infos: list[dict[str, Any]] = [{} for _ in range(n_envs)]
        self.final_infos: dict[int, dict[str, Any]] = {}
        self._actions: Array = np.zeros(0)
        self._n_steps = 0
        self._statistics = EpisodeStatistics(envs.env_ids)
        self._log = ActionLog(envs.env_ids, envs.seed, replayable=envs.replayable)
        self._check = StepCheck(self.current, envs.env_ids)

    def reset(self) -> Step:
        """Begin a seeded episode in every env."""
        for i in range(self.n_envs):
            self._begin(i, self._log.next_seed(i))
        return self._begun(np.arange(self.n_envs))

    def reset_envs(self, seeds: Seeds, options: Options = None, env_indices: EnvIndices = None) -> Step:
        assert not self._log.replayable, "a replay needs the executor's own seeds"
        indices = range(self.n_envs) if env_indices is None else env_indices
        for i in indices:
            self._begin(i, seeds[i], options[i] if options else None)
        return self._begun(np.fromiter(indices, np.intp))

    def apply(self, function: EnvCall[T], env_indices: Iterable[int] | None = None) -> list[T]:
        results = []
        for i in range(self.n_envs) if env_indices is None else env_indices:
            self._at[0] = i
            results.append(function(self._envs[i]))
        self._at[0] = NOT_IN_ENV
        return results

    def send(self, actions: Array, env_indices: Array) -> None:
        """Take the actions of all envs; `recv` steps them."""
        assert len(env_indices) == self.n_envs, "the serial executor steps all its envs at once"
        self._actions = actions
        self._log.add(actions)

    def recv(self) -> Step:
        """Step every env once; where an episode ends, keep its last observation and begin the next."""
        out, infos = self.current, self.infos
        obs_out, final_out, reward_out = out.obs, out.final_obs, out.reward
        write, obs_rows = self._layout.write, self._obs_rows
        out.terminated.fill(False)
        out.truncated.fill(False)
        done: list[int] = []
        lost: list[int] = []
        at = self._at
        at[1] = self._n_steps
        start = i = 0
        while start < self.n_envs:
            try:
                indices = range(start, self.n_envs)
                for i, env, action in zip(indices, self._envs[start:], self._actions[start:], strict=True):
                    at[0] = i
                    obs, reward_out[i], terminated, truncated, infos[i] = env.step(action)
                    if terminated or truncated:
                        write(final_out, i, obs)
                        out.terminated[i], out.truncated[i] = terminated, truncated
                        done.append(i)
                    elif obs_rows is not None:
                        obs_rows[i][...] = obs
                    else:
                        write(obs_out, i, obs)
                start = self.n_envs
            except Exception as error:
                self._rebuild(i, "step", error)
                lost.append(i)
                start = i + 1
        self._n_steps += 1
        self._statistics.add(reward_out)
        if lost:
            reward_out[lost] = 0.0
            self._statistics.clear(lost)
        self.final_infos = {i: infos[i] for i in done}
        out.ended, out.restarted = self._statistics.end(done), lost
        for i in done:
            self._begin(i, self._log.next_seed(i) if self._log.is_due(i) else None)
        at[0] = NOT_IN_ENV
        self._check.check_all(self._n_steps, bool(done))
        return out

    def mark(self) -> None:
        self._log.mark(self.current.obs, self._statistics)

    def snapshot(self) -> dict[str, Array]:
        """Each env's seed, and the actions from then to the last mark."""
        return self._log.snapshot()

    def restore(self, snapshot: Mapping[str, Array]) -> list[int]:
        """Replay each env to the snapshot; returns the envs that began a new episode instead."""
        self._statistics.restore(snapshot)
        deadline = perf_counter() + REPLAY_SECONDS
        fresh: list[int] = []
        for i, replay in enumerate(self._log.restore(snapshot)):
            in_time = replay is not None and perf_counter() < deadline
            if replay is None or not in_time or not self._replay(i, *replay, snapshot):
                self._begin(i, self._log.next_seed(i))
                fresh.append(i)
        self._at[0] = NOT_IN_ENV
        self._statistics.clear(fresh)
        self.mark()
        return fresh

    def close(self) -> None:
        """Close every env; one that fails to close does not keep the others open."""
        for env in self._envs:
            with suppress(Exception):
                env.close()

    def _made(self, i: int) -> gym.Env[Any, Any]:
        self._at[0] = i
        return fast_contains(self._factory())

    def _replay(self, i: int, seed: int, actions: Array, snapshot: Mapping[str, Array]) -> bool:
        """Replay env i; true when its observation is then that of the snapshot."""
        env, self._at[0] = self._envs[i], i
        try:
            obs, _ = env.reset(seed=seed)
            for self._at[1], action in enumerate(actions):
                obs, _, terminated, truncated, _ = env.step(action)
                if terminated or truncated:
                    obs, _ = env.reset()
            self._layout.write(self.current.obs, i, obs)
        except Exception:  # an env that cannot be replayed begins a new episode, and the caller reports it
            return False
        return all(
            np.array_equal(array[i], snapshot[f"obs.{k}"][i]) for k, array in enumerate(self.current.obs)
        )

    def _begin(self, i: int, seed: int | None, options: dict[str, Any] | None = None) -> None:
        extra = {"options": options} if options else {}
        self._at[0] = i
        try:
            obs, self.infos[i] = self._envs[i].reset(seed=seed, **extra)
            self._layout.write(self.current.obs, i, obs)
        except Exception as error:
            self._rebuild(i, "reset", error)

    def _begun(self, env_indices: Array) -> Step:
        """The state after resets of these envs."""
        self._at[0] = NOT_IN_ENV
        self._statistics.clear(env_indices)
        self.final_infos = {}
        self.current.begin(env_indices)
        self._check.check_all(self._n_steps)
        self.mark()
        return self.current

    def _rebuild(self, i: int, doing: str, error: Exception) -> None:
        """Replace an env that raised by a new one in a new episode, while the budget lasts."""
        if doing == "step":
            for obs, final in zip(self.current.obs, self.current.final_obs, strict=True):
                final[i] = obs[i]
        while True:
            if isinstance(error, EnvError):  # it broke Gymnasium's API, as a new env would
                raise EnvError(broke_api(int(self.env_ids[i]), doing, self._n_steps + 1, error)) from None
            what = f"env {self.env_ids[i]} raised in {doing} at step {self._n_steps + 1}: {one_line(error)}"
            if _is_ours(error):  # its observation does not fit its space; a new env would do the same
                raise EnvError(what.replace("raised", "gave what does not fit its spaces")) from None
            if self._budget is None:
                raise EnvError(what) from error
            self._budget.spend(what, "".join(traceback.format_exception(error)))
            try:
                with suppress(Exception):
                    self._envs[i].close()
                self._envs[i] = self._made(i)
                obs, self.infos[i] = self._envs[i].reset(seed=self._log.next_seed(i))
                self._layout.write(self.current.obs, i, obs)
                return
            except Exception as again:
                error, doing = again, "reset"


def _is_ours(error: Exception) -> bool:
    """Whether an error came from storing what an env returned, not from the env's own code."""
    frames = traceback.extract_tb(error.__traceback__)
    return all(frame.filename in (__file__, spaces.__file__) for frame in frames)
