"""What every executor does with episodes: statistics, the action log for resume, and the check for NaN.

A checkpoint cannot store an env, so it stores how to replay it: the seed of its last seeded reset and the actions
since. Every env is seeded again at the first episode end after RESEED_STEPS steps, which bounds the replay.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache

import numpy as np

from flatout.envs.spaces import Array, ObsArrays
from flatout.envs.validate import nan_message
from flatout.errors import EnvError
from flatout.executors.base import Episode, Step

RESEED_STEPS = 1_000
WINDOW = 100
"""Episodes over which returns and lengths are reported."""
MAX_LOG = 20_000
"""Steps kept for replay; an env whose episode is longer begins a new one after a resume."""


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


class LastEpisodes(deque[float]):
    """The returns or the lengths of the last episodes."""

    def __init__(self, values: Iterable[float] = ()) -> None:
        super().__init__(values, maxlen=WINDOW)

    @property
    def mean(self) -> float | None:
        """None until an episode has ended."""
        return float(np.mean(list(self))) if self else None

    @property
    def std(self) -> float | None:
        """Standard deviation."""
        return float(np.std(list(self))) if self else None

    def reached(self, target: float) -> bool:
        """Whether the mean of a full window is at least this."""
        return len(self) == WINDOW and float(np.mean(list(self))) >= target


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


class ActionLog:
    """How to replay each env: its last seed and, if `replayable`, the actions since. All envs step together."""

    def __init__(self, env_ids: Array, seed: int, *, replayable: bool) -> None:
        self.replayable = replayable
        self._env_ids, self._seed = env_ids, seed
        self._seed_counts = [-1] * len(env_ids)
        self._actions: list[Array] = []
        """The actions of all envs, by step."""
        self._n_dropped = 0
        """Steps dropped from the front of the log."""
        self._seeded_at = [0] * len(env_ids)
        """Steps taken, of those logged, when each env was seeded."""
        self._mark: dict[str, Array] = {}
        self._marked_at = 0

    @property
    def _n_steps(self) -> int:
        return self._n_dropped + len(self._actions)

    def next_seed(self, i: int) -> int:
        """The seed of a new episode of env i that begins now."""
        self._seed_counts[i] += 1
        self._seeded_at[i] = self._n_steps
        return self._seed_of(i)

    def is_due(self, i: int) -> bool:
        """Whether env i, whose episode ends now, should be seeded again."""
        return self.replayable and self._n_steps - self._seeded_at[i] >= RESEED_STEPS

    def add(self, actions: Array) -> None:
        """All envs take these actions."""
        if self.replayable:
            self._actions.append(actions.copy())

    def mark(self, obs: ObsArrays, statistics: EpisodeStatistics) -> None:
        """Remember the current state; actions are only appended, so a position is enough."""
        self._marked_at = self._n_steps
        ages = self._marked_at - np.array(self._seeded_at)
        if not self.replayable:  # without actions no env may seem to be zero steps away from its seed
            ages[:] = 1
        self._mark = {f"obs.{k}": array.copy() for k, array in enumerate(obs)}
        self._mark |= {"returns": statistics.returns.copy(), "lengths": statistics.lengths.copy()}
        self._mark |= {"seed_counts": np.array(self._seed_counts), "ages": ages}
        oldest = self._marked_at - int(np.max(ages, where=ages <= MAX_LOG, initial=0))
        if oldest - self._n_dropped > RESEED_STEPS:  # no env needs what came before
            del self._actions[: oldest - self._n_dropped]
            self._n_dropped = oldest

    def snapshot(self) -> dict[str, Array]:
        """The last mark, with the actions (time, env, …) that led to it."""
        assert self._mark, "call reset first"
        ages = self._mark["ages"]
        longest, end = int(np.max(ages, where=ages <= MAX_LOG, initial=0)), self._marked_at - self._n_dropped
        kept = self._actions[end - longest : end]
        return {**self._mark, "actions": np.stack(kept) if kept else np.zeros((0, len(ages)))}

    def restore(self, snapshot: Mapping[str, Array]) -> list[tuple[int, Array] | None]:
        """Go on from a snapshot; returns each env's seed and actions, None where it must begin a new episode."""
        actions, n_kept = snapshot["actions"], len(snapshot["actions"])
        self._actions, self._n_dropped = list(actions) if self.replayable else [], 0
        replays: list[tuple[int, Array] | None] = []
        for i, (count, age) in enumerate(zip(snapshot["seed_counts"], snapshot["ages"], strict=True)):
            self._seed_counts[i] = int(count)
            self._seeded_at[i] = n_kept - int(age)
            can_replay = self.replayable and age <= n_kept and count >= 0
            replays.append((self._seed_of(i), actions[n_kept - age :, i]) if can_replay else None)
        return replays

    def _seed_of(self, i: int) -> int:
        return env_seed(self._seed, int(self._env_ids[i]), self._seed_counts[i])


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
