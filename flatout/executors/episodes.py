"""What every executor does with episodes: statistics, the action log for resume, and the check for NaN.

A checkpoint cannot store an env, so it stores how to replay it: the seed of its last seeded reset and the actions
since. Every env is seeded again at the first episode end after RESEED_STEPS steps, which bounds the replay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from flatout.envs.check import nan_message
from flatout.envs.spaces import Array, ObsArrays
from flatout.errors import EnvError
from flatout.executors.base import Episode, Step

RESEED_STEPS = 1_000
MAX_LOG = 20_000
"""Steps kept for replay; an env whose episode is longer begins a new one after a resume."""
ALL = -1
"""In the action log: an entry with the actions of all envs."""


def env_seed(seed: int, env_id: int, count: int) -> int:
    """The seed of an env's `count`-th seeded reset; the same however envs are spread over workers."""
    return int(np.random.SeedSequence([seed, env_id, count]).generate_state(1)[0] >> 1)


class EpisodeStatistics:
    """Return and length of each env's running episode."""

    def __init__(self, env_ids: Array) -> None:
        self._env_ids = env_ids
        self.returns = np.zeros(len(env_ids))
        self.lengths = np.zeros(len(env_ids), np.int64)

    def add(self, rewards: Array) -> None:
        """Count one step of every env."""
        self.returns += rewards
        self.lengths += 1

    def add_some(self, env_indices: slice | int, rewards: Array | float) -> None:
        """Count one step of these envs."""
        self.returns[env_indices] += rewards
        self.lengths[env_indices] += 1

    def end(self, env_indices: Sequence[int] | Array) -> list[Episode]:
        """The episodes of these envs, which end here."""
        if not len(env_indices):
            return []
        columns = (array[env_indices].tolist() for array in (self._env_ids, self.returns, self.lengths))
        episodes = [Episode(*row) for row in zip(*columns, strict=True)]
        self.clear(env_indices)
        return episodes

    def clear(self, env_indices: Sequence[int] | Array | slice = slice(None)) -> None:
        """Start the counts of these envs from zero."""
        self.returns[env_indices] = 0.0
        self.lengths[env_indices] = 0

    def restore(self, snapshot: Mapping[str, Array]) -> None:
        """Go on with the counts of a snapshot."""
        self.returns[:], self.lengths[:] = snapshot["returns"], snapshot["lengths"]


class StepCheck:
    """Raises EnvError for the first env with a NaN or infinite reward or observation in a step."""

    def __init__(self, step: Step, env_ids: Array) -> None:
        self._env_ids, self._reward = env_ids, step.reward
        self._obs = [array for array in step.obs if array.dtype.kind == "f"]
        self._final_obs = [array for array in step.final_obs if array.dtype.kind == "f"]

    def check_all(self, n_steps: int, any_ended: bool = False) -> None:
        """Check all envs after their `n_steps`-th step; sums of whole arrays are a cheap first test."""
        total = np.add.reduce
        if not math.isfinite(total(self._reward)):
            self._check_each("reward", self._reward, n_steps)
        for obs in self._obs:
            if not math.isfinite(total(obs, axis=None)):
                self._check_each("observation", obs, n_steps)
        if any_ended:  # all rows, because picking some costs more; the old ones were checked before
            for obs in self._final_obs:
                if not math.isfinite(total(obs, axis=None)):
                    self._check_each("observation", obs, n_steps)

    def _check_each(self, what: str, values: Array, n_steps: int) -> None:
        bad = ~np.isfinite(values.reshape(len(values), -1)).all(axis=1)
        if bad.any():  # a float32 sum may overflow although every value is finite
            raise EnvError(nan_message(what, int(self._env_ids[bad.argmax()]), n_steps))

    def check_some(self, env_indices: Array, n_steps: Sequence[int], ended: Array | None = None) -> None:
        """Check the observations of these envs, and the final ones of those that ended; each has its own step."""
        all_finite = _all_finite()
        checks = [(obs, ended) for obs in self._final_obs] if ended is not None else []
        for values, indices in (*checks, *((obs, env_indices) for obs in self._obs)):
            if not all_finite(values.reshape(len(values), -1), indices):
                bad = ~np.isfinite(values[indices].reshape(len(indices), -1)).all(axis=1)
                i = indices[bad.argmax()]
                raise EnvError(nan_message("observation", int(self._env_ids[i]), n_steps[i]))


@cache
def _all_finite() -> Callable[[Array, Array], bool]:
    from flatout.executors.loops import all_finite  # here, because importing Numba takes a moment

    return all_finite


@dataclass(slots=True)
class _EnvMark:
    """One env at the moment that a mark should describe."""

    values: dict[str, Any]
    span: tuple[int, int]


class ActionLog:
    """How to replay each env: its last seed and, if `replayable`, the actions since.

    All envs may step together (`add`) or each at its own pace (`add_one`).
    """

    def __init__(self, env_ids: Array, seed: int, *, replayable: bool) -> None:
        n_envs = len(env_ids)
        self.replayable = replayable
        self._env_ids, self._seed = env_ids, seed
        self._seed_counts = [-1] * n_envs
        self._next_seeds: dict[int, int] = {}
        self._entries: list[tuple[int, Any]] = []
        """(env index, its action), or (ALL, actions of all envs)."""
        self._n_dropped = 0
        """Entries dropped from the front; positions in the log count them."""
        self._n_together = 0
        self._n_alone = [0] * n_envs
        self._seeded_at = [0] * n_envs
        """Position of each env's first entry since it was seeded."""
        self._steps_before = [0] * n_envs
        """Steps that each env had taken when it was seeded."""
        self._mark: dict[str, Array] = {}
        self._spans: list[tuple[int, int]] = []
        """Positions of the marked entries of each env: first, and one after the last."""
        self._remembered: dict[int, _EnvMark] = {}

    def next_seed(self, i: int) -> int:
        """The seed of a new episode of env i that begins now."""
        self._seed_counts[i] += 1
        self._seeded_at[i] = self._position
        self._steps_before[i] = self._n_together + self._n_alone[i]
        self._next_seeds.pop(i, None)
        return self._seed_of(i, self._seed_counts[i])

    def is_due(self, i: int, n_coming: int = 0) -> bool:
        """Whether env i should be seeded when its episode ends, after `n_coming` more steps."""
        return self.replayable and self._age(i) + n_coming >= RESEED_STEPS

    def seed_at_end(self, i: int) -> int | None:
        """The seed of env i's next reset if its coming step ends the episode; None for most steps."""
        if not self.is_due(i, 1):
            return None
        if i not in self._next_seeds:
            self._next_seeds[i] = self._seed_of(i, self._seed_counts[i] + 1)
        return self._next_seeds[i]

    def add(self, actions: Array) -> None:
        """All envs take these actions."""
        if self.replayable:
            self._entries.append((ALL, actions.copy()))
            self._n_together += 1

    def add_one(self, i: int, action: Any, *, ended: bool) -> None:
        """Env i has taken this action; where it ended an episode, `seed_at_end` was used."""
        if ended and self.seed_at_end(i) is not None:
            self.next_seed(i)
        else:
            self._entries.append((i, action))
            self._n_alone[i] += 1

    def mark(self, obs: ObsArrays, statistics: EpisodeStatistics) -> None:
        """Remember the current state; entries are only appended, so positions are enough."""
        n_envs, end = len(self._seeded_at), self._position
        # Without actions no env may seem to be zero steps away from its seed.
        ages = [self._age(i) if self.replayable else 1 for i in range(n_envs)]
        self._mark = {f"obs.{k}": array.copy() for k, array in enumerate(obs)}
        self._mark |= {"returns": statistics.returns.copy(), "lengths": statistics.lengths.copy()}
        self._mark |= {"seed_counts": np.array(self._seed_counts), "ages": np.array(ages)}
        self._spans = [(start, end) for start in self._seeded_at]
        for i, then in self._remembered.items():
            for name, value in then.values.items():
                self._mark[name][i] = value
            self._spans[i] = then.span
        self._remembered = {}
        self._trim()

    def remember(self, env_indices: Array, obs: ObsArrays, statistics: EpisodeStatistics) -> None:
        """Let the next mark describe these envs as they are now; the first call for an env counts."""
        for i in env_indices.tolist():
            if i not in self._remembered:
                values: dict[str, Any] = {f"obs.{k}": array[i].copy() for k, array in enumerate(obs)}
                values |= {"returns": statistics.returns[i], "lengths": statistics.lengths[i]}
                values |= {"seed_counts": self._seed_counts[i]}
                values |= {"ages": self._age(i)} if self.replayable else {}
                self._remembered[i] = _EnvMark(values, (self._seeded_at[i], self._position))

    def snapshot(self) -> dict[str, Array]:
        """The last mark; the envs' actions (time, env, …) are aligned at their end."""
        assert self._mark, "call reset first"
        ages = self._mark["ages"]
        n_envs, longest = len(ages), int(np.max(ages, where=ages <= MAX_LOG, initial=0))
        actions: Array = np.zeros((0, n_envs))
        if self.replayable and longest and not any(self._n_alone):
            end = self._spans[0][1] - self._n_dropped
            actions = np.stack([row for _, row in self._entries[end - longest : end]])
        elif self.replayable and longest:
            actions = self._align([self._actions_of(i) for i in range(n_envs)], longest)
        return {**self._mark, "actions": actions}

    def restore(self, snapshot: Mapping[str, Array]) -> list[tuple[int, Array] | None]:
        """Go on from a snapshot; returns each env's seed and actions, None where it must begin a new episode."""
        actions, n_kept = snapshot["actions"], len(snapshot["actions"])
        self._entries, self._n_dropped = [(ALL, row) for row in actions], 0
        self._n_together, self._n_alone = n_kept, [0] * len(self._n_alone)
        self._next_seeds = {}
        replays: list[tuple[int, Array] | None] = []
        for i, (count, age) in enumerate(zip(snapshot["seed_counts"], snapshot["ages"], strict=True)):
            self._seed_counts[i] = int(count)
            if not self.replayable or age > n_kept or count < 0:
                replays.append(None)
                continue
            self._seeded_at[i] = self._steps_before[i] = n_kept - int(age)
            replays.append((self._seed_of(i, int(count)), actions[n_kept - age :, i]))
        return replays

    @property
    def _position(self) -> int:
        return self._n_dropped + len(self._entries)

    def _age(self, i: int) -> int:
        """Steps that env i has taken since it was seeded."""
        return self._n_together + self._n_alone[i] - self._steps_before[i]

    def _actions_of(self, i: int) -> list[Any]:
        if self._mark["ages"][i] > MAX_LOG:
            return []
        start, end = (position - self._n_dropped for position in self._spans[i])
        return [a[i] if who == ALL else a for who, a in self._entries[start:end] if who in (ALL, i)]

    def _align(self, by_env: list[list[Any]], longest: int) -> Array:
        one = np.asarray(next(actions[0] for actions in by_env if actions))
        out = np.zeros((longest, len(by_env), *one.shape), one.dtype)
        for i, actions in enumerate(by_env):
            if actions:
                out[longest - len(actions) :, i] = actions
        return out

    def _trim(self) -> None:
        """Drop entries that no env needs for its replay, now or at the mark."""
        ages = self._mark["ages"]
        starts = [start for (start, _), age in zip(self._spans, ages, strict=True) if age <= MAX_LOG]
        oldest = min(starts, default=self._position)
        if oldest - self._n_dropped > RESEED_STEPS:
            del self._entries[: oldest - self._n_dropped]
            self._n_dropped = oldest

    def _seed_of(self, i: int, count: int) -> int:
        return env_seed(self._seed, int(self._env_ids[i]), count)


def merge_snapshots(parts: list[dict[str, Array]]) -> dict[str, Array]:
    """Snapshots of consecutive envs as one, as if one executor had taken it."""
    like = max((part["actions"] for part in parts), key=len)
    n_actions = len(like)
    merged: dict[str, list[Array]] = {name: [] for name in parts[0]}
    for part in parts:
        for name, array in part.items():
            if name == "actions":  # all end at the same time, some begin later
                actions = np.zeros((n_actions, array.shape[1], *like.shape[2:]), like.dtype)
                actions[n_actions - len(array) :] = array.reshape(len(array), *actions.shape[1:])
                merged[name].append(actions)
            elif name == "ages":  # actions that were not kept must not seem to be there
                merged[name].append(np.where(array > len(part["actions"]), n_actions + 1, array))
            else:
                merged[name].append(array)
    return {name: np.concatenate(arrays, axis=int(name == "actions")) for name, arrays in merged.items()}


def part_of_snapshot(snapshot: Mapping[str, Array], first: int, end: int) -> dict[str, Array]:
    """The part of a snapshot that belongs to the envs from `first` to before `end`."""
    return {
        name: array[:, first:end] if name == "actions" else array[first:end]
        for name, array in snapshot.items()
    }
