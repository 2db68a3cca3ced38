"""A rollout on its way, each env at a cursor of its own: what came back is stored where that env stands."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from types import ModuleType

import numpy as np

from flatout.buffers.batch import as_bytes
from flatout.buffers.rollout import Rollout
from flatout.envs.spaces import Array, ObsArrays
from flatout.executors.base import Episode, Step
from flatout.models.actor import Actor


@dataclass(slots=True)
class Filling:
    """A rollout, how far each env is with it, and the policy that it is collected with."""

    rollout: Rollout
    actor: Actor
    noise: Array
    """(T, N, size): what is drawn does not depend on who is ready when."""
    cursor: Array
    """Steps that each env has stored."""
    episodes: list[Episode] = field(default_factory=list)
    _leaves: list[tuple[Array, Array]] = field(init=False)
    """Observations and final ones as rows of bytes."""

    def __post_init__(self) -> None:
        self._leaves = list(zip(_bytes(self.rollout.obs, 2), _bytes(self.rollout.final_obs, 2), strict=True))

    @property
    def open(self) -> Array:
        """Which envs still have steps to take."""
        out: Array = self.cursor < self.rollout.n_steps
        return out

    def begin(self, now: Step, rows: Array) -> None:
        """Let envs begin with what they see now."""
        for leaf, obs in zip(self.rollout.obs, now.obs, strict=True):
            leaf[0, rows] = obs[rows]

    def store(self, now: Step, rows: Array, restarted: list[int]) -> None:
        """Store what these envs gave; a step that was lost with its env is never stored."""
        rollout = self.rollout
        for n in restarted:
            self._cut_before(int(self.cursor[n]), n, now)
        if restarted:
            rows = rows[~np.isin(rows, restarted)]
        cursor, flags = self.cursor, (now.terminated, now.truncated)
        loops().put_steps(
            now.reward, *flags, cursor, rows, rollout.reward, rollout.terminated, rollout.truncated
        )
        given = zip(_bytes(now.obs, 1), _bytes(now.final_obs, 1), self._leaves, strict=True)
        for obs, final, (obs_out, final_out) in given:
            loops().put_leaf(obs, final, now.truncated, cursor, rows, obs_out, final_out)
        cursor[rows] += 1

    def take(self, rows: Array, obs: ObsArrays, noise: Array) -> tuple[ObsArrays, Array]:
        """What these envs see, and their noise, in the memory given."""
        n, take_rows = len(rows), loops().take_rows
        for (source, _), leaf in zip(self._leaves, _bytes(obs, 1), strict=True):
            take_rows(source, self.cursor, rows, leaf)
        take_rows(self.noise, self.cursor, rows, noise)
        return tuple([leaf[:n] for leaf in obs]), noise[:n]

    def put(self, rows: Array, action: Array, log_prob: Array) -> None:
        """What these envs do."""
        put_rows, rollout = loops().put_rows, self.rollout
        put_rows(action, self.cursor, rows, rollout.action)
        put_rows(log_prob[:, None], self.cursor, rows, rollout.log_prob[:, :, None])

    def _cut_before(self, t: int, n: int, now: Step) -> None:
        """End env n's episode with its last whole step, and begin at `t` with the new episode."""
        rollout = self.rollout
        if t > 0 and not rollout.terminated[t - 1, n] and not rollout.truncated[t - 1, n]:
            rollout.truncated[t - 1, n] = True
            for leaf, obs in zip(rollout.final_obs, rollout.obs, strict=True):
                leaf[t - 1, n] = obs[t, n]
        for leaf, obs in zip(rollout.obs, now.obs, strict=True):
            leaf[t, n] = obs[n]


@cache
def loops() -> ModuleType:
    """The compiled loops over rows; here, because the compiler takes a moment to load."""
    from flatout.executors import rows

    return rows


def _bytes(leaves: ObsArrays, n_lead: int) -> list[Array]:
    return [as_bytes(leaf, n_lead) for leaf in leaves]
