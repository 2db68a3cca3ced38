"""How each env came to where it stands: its seed and the actions since, for envs that step at their own pace.

In: seeds used, actions taken. Out: snapshots of the same form as the serial executor's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from flatout.envs.spaces import Array, ObsArrays
from flatout.executors.serial import MAX_LOG, RESEED_STEPS, env_seed


@dataclass(slots=True)
class _Moment:
    """One env as a mark describes it."""

    values: dict[str, Any]
    log: tuple[list[Any], int]


class History:
    """Seeds and, where envs can be replayed, actions of each env since its last seeded reset."""

    def __init__(self, env_ids: Array, seed: int, *, replayable: bool) -> None:
        n_envs = len(env_ids)
        self.replayable = replayable
        self._env_ids, self._seed = env_ids, seed
        self._counts = [-1] * n_envs
        self._ages = [0] * n_envs
        self._logs: list[list[Any]] = [[] for _ in range(n_envs)]
        self._coming: dict[int, int] = {}
        self._mark: dict[str, Array] = {}
        self._marked: list[tuple[list[Any], int]] = []
        self._remembered: dict[int, _Moment] = {}

    def next_seed(self, i: int) -> int:
        """The seed of a new seeded episode of env i, which begins now."""
        self._counts[i] += 1
        self._ages[i], self._logs[i] = 0, []
        self._coming.pop(i, None)
        return self._seed_of(i, self._counts[i])

    def seed_at_end(self, i: int) -> int | None:
        """The seed that env i should be reset with if its coming step ends the episode; None for most steps."""
        if not self.replayable or self._ages[i] + 1 < RESEED_STEPS:
            return None
        if i not in self._coming:
            self._coming[i] = self._seed_of(i, self._counts[i] + 1)
        return self._coming[i]

    def add(self, i: int, action: Any, *, ended: bool) -> None:
        """Env i has taken this action."""
        if ended and self.seed_at_end(i) is not None:
            self.next_seed(i)
            return
        self._ages[i] += 1
        if self._ages[i] <= MAX_LOG:
            self._logs[i].append(action)
        else:  # too long to be replayed; it starts anew after a resume
            self._logs[i] = []

    def mark(self, obs: ObsArrays, returns: Array, lengths: Array) -> None:
        """Remember this moment; logs only grow, so that their lengths are enough."""
        self._mark = {f"obs.{k}": leaf.copy() for k, leaf in enumerate(obs)}
        self._mark |= {"returns": returns.copy(), "lengths": lengths.copy()}
        # Without actions no env may seem to be zero steps away from its seed.
        ages = np.array(self._ages) if self.replayable else np.ones(len(self._ages), np.int64)
        self._mark |= {"seed_counts": np.array(self._counts), "ages": ages}
        self._marked = [(log, len(log)) for log in self._logs]
        for i, then in self._remembered.items():
            for name, value in then.values.items():
                self._mark[name][i] = value
            self._marked[i] = then.log
        self._remembered = {}

    def remember(self, rows: Array, obs: ObsArrays, returns: list[float], lengths: list[int]) -> None:
        """Let the next mark describe these envs as they are now; the first word counts."""
        for i in rows.tolist():
            if i not in self._remembered:
                values: dict[str, Any] = {f"obs.{k}": leaf[i].copy() for k, leaf in enumerate(obs)}
                values |= {"returns": returns[i], "lengths": lengths[i], "seed_counts": self._counts[i]}
                values |= {"ages": self._ages[i]} if self.replayable else {}
                self._remembered[i] = _Moment(values, (self._logs[i], len(self._logs[i])))

    def snapshot(self) -> dict[str, Array]:
        """The last mark, each env's actions aligned at their end."""
        assert self._mark, "reset comes first"
        n_envs, longest = len(self._marked), max(n for _, n in self._marked)
        some = next((log[0] for log, n in self._marked if n), np.zeros(()))
        actions = np.zeros((longest, n_envs, *np.shape(some)), np.asarray(some).dtype)
        for i, (log, n) in enumerate(self._marked):
            if n:
                actions[longest - n :, i] = log[:n]
        return {**self._mark, "actions": actions}

    def restore(self, snapshot: Mapping[str, Array]) -> list[tuple[int, Array] | None]:
        """Take the snapshot's place; returns each env's seed and actions, None where a new episode must begin."""
        actions, n_kept = snapshot["actions"], len(snapshot["actions"])
        walks: list[tuple[int, Array] | None] = []
        for i, (count, age) in enumerate(zip(snapshot["seed_counts"], snapshot["ages"], strict=True)):
            self._counts[i] = int(count)
            if not self.replayable or age > n_kept or count < 0:
                walks.append(None)
                continue
            walk = actions[n_kept - age :, i]
            self._ages[i], self._logs[i] = int(age), list(walk)
            self._coming.pop(i, None)
            walks.append((self._seed_of(i, int(count)), walk))
        return walks

    def _seed_of(self, i: int, count: int) -> int:
        return env_seed(self._seed, int(self._env_ids[i]), count)
