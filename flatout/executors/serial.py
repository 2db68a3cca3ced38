"""Steps its envs in turn, in the collector's process: the best way for envs that cost microseconds.

Every env is seeded again at the first episode end after RESEED_STEPS steps, and its actions since then
are kept, so that a checkpoint can bring any deterministic env back by replaying at most that much.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from time import perf_counter
from typing import Any, TypeVar

import gymnasium as gym
import numpy as np

from flatout.envs import spaces
from flatout.envs.check import nan_message
from flatout.envs.spaces import Array, ObsLayout, fast_contains
from flatout.errors import EnvError, one_line
from flatout.executors.base import Episode, Step, alloc_step
from flatout.executors.supervise import RestartBudget

T = TypeVar("T")

RESEED_STEPS = 1_000
MAX_LOG = 20_000
"""Steps kept for replay; an episode that is longer starts anew after a resume."""


def env_seed(seed: int, env_id: int, count: int) -> int:
    """The seed of one env's `count`-th seeded reset; the same however envs are spread over workers."""
    return int(np.random.SeedSequence([seed, env_id, count]).generate_state(1)[0] >> 1)


class SerialExecutor:
    """Gymnasium envs behind the executor protocol; observations are written in place, also in shared memory."""

    def __init__(
        self,
        factory: Callable[[], gym.Env[Any, Any]],
        layout: ObsLayout,
        env_ids: Array,
        seed: int,
        *,
        replayable: bool = True,
        out: Step | None = None,
        budget: RestartBudget | None = None,
    ) -> None:
        self.n_envs, self.env_ids = len(env_ids), env_ids
        self._factory, self._budget = factory, budget
        n_envs = self.n_envs
        self._layout = layout
        self._seed = seed
        self._replayable = replayable
        self._envs = [fast_contains(factory()) for _ in range(n_envs)]
        self._step = out or alloc_step(layout, n_envs)
        self._float_leaves = [i for i, leaf in enumerate(layout.specs) if leaf.dtype.kind == "f"]
        # Views made once: writing through them costs half of an indexed write, which tells for cheap envs.
        plain = len(layout.specs) == 1 and not layout.specs[0].path
        self._rows = [self._step.obs[0][i, ...] for i in range(n_envs)] if plain else None
        self.infos: list[dict[str, Any]] = [{} for _ in range(n_envs)]
        """What each env's last step told, or its last reset where an episode has just begun."""
        self.final_infos: dict[int, dict[str, Any]] = {}
        """By place, what the last step of each episode told that ended in it."""
        self.notes: list[str] = []
        """Nothing: its envs are never rebuilt."""
        self._actions: Array = np.zeros(0)
        self._returns = np.zeros(n_envs)
        self._lengths = np.zeros(n_envs, np.int64)
        self._n_steps = 0
        self._seed_counts = [-1] * n_envs
        self._seeded_at = [0] * n_envs
        self._log: list[Array] = []
        self._log_start = 0
        self._mark: _Mark | None = None

    def reset(self) -> Step:
        """Begin a seeded episode in every env."""
        for i in range(self.n_envs):
            self._reseed(i)
        self._clear(slice(None))
        return self._step

    def begin(
        self,
        seeds: Sequence[int | None],
        options: Sequence[dict[str, Any] | None] | None = None,
        rows: Sequence[int] | None = None,
    ) -> Step:
        """Begin new episodes, in the places named or in all, with the caller's seeds (None: none) and options."""
        assert not self._replayable, "a replay knows only the executor's own seeds"
        places = range(self.n_envs) if rows is None else rows
        for i in places:
            self._begin(i, seeds[i], options[i] if options else None)
        self._clear(np.fromiter(places, np.intp))
        return self._step

    def apply(self, function: Callable[[gym.Env[Any, Any]], T], rows: Iterable[int] | None = None) -> list[T]:
        """What `function` returns for each env, in the places named or in all."""
        return [function(self._envs[i]) for i in (range(self.n_envs) if rows is None else rows)]

    def _clear(self, rows: Array | slice) -> None:
        self._returns[rows] = 0.0
        self._lengths[rows] = 0
        self.final_infos = {}
        for flags in (self._step.reward, self._step.terminated, self._step.truncated):
            flags[rows] = 0
        self._step.ended = []
        self._check_finite()
        self.mark()

    def send(self, actions: Array, rows: Array) -> None:
        """Take the actions of all envs; they are stepped by `recv`."""
        assert len(rows) == self.n_envs, "the serial executor steps all its envs at once"
        self._actions = actions
        if self._replayable:
            self._log.append(actions.copy())

    def recv(self) -> Step:
        """Step every env once; where an episode ends, keep its last observation and begin the next."""
        out, infos = self._step, self.infos
        obs_out, final_out, reward_out = out.obs, out.final_obs, out.reward
        write, obs_rows = self._layout.write, self._rows
        out.terminated.fill(False)
        out.truncated.fill(False)
        done: list[int] = []
        lost: list[int] = []
        start = i = 0
        while start < self.n_envs:
            try:
                places = range(start, self.n_envs)
                for i, env, action in zip(places, self._envs[start:], self._actions[start:], strict=True):
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
        self._returns += reward_out
        self._lengths += 1
        if lost:
            reward_out[lost] = self._returns[lost] = self._lengths[lost] = 0
        self.final_infos = {i: infos[i] for i in done}
        out.ended = [self._end_episode(i) for i in done]
        out.restarted = lost
        self._check_finite(bool(done))
        return out

    def mark(self) -> None:
        """Remember this moment as the one that `snapshot` describes."""
        self._mark = _Mark(
            n_steps=self._n_steps,
            seed_counts=self._seed_counts.copy(),
            seeded_at=self._seeded_at.copy(),
            returns=self._returns.copy(),
            lengths=self._lengths.copy(),
            obs=tuple(leaf.copy() for leaf in self._step.obs),
        )
        self._trim_log()

    def snapshot(self) -> dict[str, Array]:
        """The envs' state at the last mark: how each was seeded, and the actions it took since."""
        assert self._mark is not None, "reset comes first"
        mark = self._mark
        actions = self._log[: mark.n_steps - self._log_start]
        arrays = {f"obs.{i}": leaf for i, leaf in enumerate(mark.obs)}
        arrays |= {"returns": mark.returns, "lengths": mark.lengths}
        arrays["seed_counts"] = np.array(mark.seed_counts)
        arrays["ages"] = mark.n_steps - np.array(mark.seeded_at)
        arrays["actions"] = np.stack(actions) if actions else np.zeros((0, self.n_envs))
        return arrays

    def restore(self, snapshot: Mapping[str, Array], max_seconds: float = 60.0) -> list[int]:
        """Replay each env to the snapshot's moment; returns the envs that began a new episode instead."""
        actions, ages = snapshot["actions"], snapshot["ages"]
        self._log = list(actions)
        self._log_start, self._n_steps = 0, len(actions)
        self._returns[:], self._lengths[:] = snapshot["returns"], snapshot["lengths"]
        fresh: list[int] = []
        deadline = perf_counter() + max_seconds
        for i in range(self.n_envs):
            self._seed_counts[i] = int(snapshot["seed_counts"][i])
            kept = ages[i] <= len(actions) and perf_counter() < deadline
            if not (kept and self._replay(i, actions[len(actions) - ages[i] :, i], snapshot)):
                self._reseed(i)
                self._returns[i], self._lengths[i] = 0.0, 0
                fresh.append(i)
            else:
                self._seeded_at[i] = self._n_steps - int(ages[i])
        self.mark()
        return fresh

    @property
    def current(self) -> Step:
        """The envs as they stand now: what the last `reset`, `recv` or `restore` left."""
        return self._step

    def close(self) -> None:
        """Close every env; one that fails to close does not keep the others open."""
        for env in self._envs:
            try:
                env.close()
            except Exception:
                continue

    def _replay(self, i: int, actions: Array, snapshot: Mapping[str, Array]) -> bool:
        """Walk env i through its actions; true when it stands where the snapshot says."""
        env = self._envs[i]
        try:
            obs, _ = env.reset(seed=self._next_seed(i))
            for action in actions:
                obs, _, terminated, truncated, _ = env.step(action)
                if terminated or truncated:
                    obs, _ = env.reset()
            self._layout.write(self._step.obs, i, obs)
        except Exception:  # an env that cannot be replayed starts anew, and the caller says so
            return False
        return all(np.array_equal(leaf[i], snapshot[f"obs.{k}"][i]) for k, leaf in enumerate(self._step.obs))

    def _reseed(self, i: int) -> None:
        self._seed_counts[i] += 1
        self._seeded_at[i] = self._n_steps
        self._begin(i, self._next_seed(i))

    def _next_seed(self, i: int) -> int:
        return env_seed(self._seed, int(self.env_ids[i]), self._seed_counts[i])

    def _begin(self, i: int, seed: int | None, options: dict[str, Any] | None = None) -> None:
        asked = {"options": options} if options else {}
        try:
            obs, self.infos[i] = self._envs[i].reset(seed=seed, **asked)
            self._layout.write(self._step.obs, i, obs)
        except Exception as error:
            self._rebuild(i, "reset", error)

    def _rebuild(self, i: int, doing: str, error: Exception) -> None:
        """Put a new env, in a new episode, in the place of one that raised, while the budget lasts."""
        for leaf, final in zip(self._step.obs, self._step.final_obs, strict=True):
            final[i] = leaf[i]
        while True:
            what = f"env {self.env_ids[i]} raised in {doing} at step {self._n_steps + 1}: {one_line(error)}"
            if _is_ours(error):  # what it gave does not fit its space; a new env would give the same
                raise EnvError(what.replace("raised", "gave what does not fit its spaces")) from None
            if self._budget is None:
                raise EnvError(what) from error
            self._budget.spend(what, "".join(traceback.format_exception(error)))
            try:
                with suppress(Exception):
                    self._envs[i].close()
                self._envs[i] = fast_contains(self._factory())
                self._seed_counts[i] += 1
                self._seeded_at[i] = self._n_steps + (doing == "step")
                obs, self.infos[i] = self._envs[i].reset(seed=self._next_seed(i))
                self._layout.write(self._step.obs, i, obs)
                return
            except Exception as again:
                error, doing = again, "reset"

    def _end_episode(self, i: int) -> Episode:
        episode = Episode(int(self.env_ids[i]), float(self._returns[i]), int(self._lengths[i]))
        self._returns[i], self._lengths[i] = 0.0, 0
        if self._replayable and self._n_steps - self._seeded_at[i] >= RESEED_STEPS:
            self._reseed(i)
        else:
            self._begin(i, None)
        return episode

    def _trim_log(self) -> None:
        """Forget actions that no env needs for its replay, now and at the mark."""
        assert self._mark is not None
        oldest = max(min(self._mark.seeded_at), self._n_steps - MAX_LOG)
        if oldest - self._log_start > RESEED_STEPS:
            del self._log[: oldest - self._log_start]
            self._log_start = oldest

    def _check_finite(self, any_ended: bool = False) -> None:
        """Raise for the first env with a NaN or infinite observation or reward; sums are a cheap sieve."""
        out, total = self._step, np.add.reduce
        if not math.isfinite(total(out.reward)):
            self._raise_nan("reward", out.reward)
        for k in self._float_leaves:
            if not math.isfinite(total(out.obs[k], axis=None)):
                self._raise_nan("observation", out.obs[k])
            # All rows, because picking some costs more; the old ones have passed before.
            if any_ended and not math.isfinite(total(out.final_obs[k], axis=None)):
                self._raise_nan("observation", out.final_obs[k])

    def _raise_nan(self, what: str, values: Array) -> None:
        bad = ~np.isfinite(values.reshape(self.n_envs, -1)).all(axis=1)
        if bad.any():  # a float32 sum may overflow where every value is finite
            raise EnvError(nan_message(what, int(self.env_ids[bad.argmax()]), self._n_steps))


def _is_ours(error: Exception) -> bool:
    """Whether an error came from writing down what an env gave, not from the env's own code."""
    frames = traceback.extract_tb(error.__traceback__)
    return all(frame.filename in (__file__, spaces.__file__) for frame in frames)


class _Mark:
    """The small, per-env part of a moment; the action log it refers to only grows."""

    __slots__ = ("lengths", "n_steps", "obs", "returns", "seed_counts", "seeded_at")

    def __init__(
        self,
        *,
        n_steps: int,
        seed_counts: list[int],
        seeded_at: list[int],
        returns: Array,
        lengths: Array,
        obs: tuple[Array, ...],
    ) -> None:
        self.n_steps, self.seed_counts, self.seeded_at = n_steps, seed_counts, seeded_at
        self.returns, self.lengths, self.obs = returns, lengths, obs
