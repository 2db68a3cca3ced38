"""A rollout on its way, each env at a cursor of its own: what came back is stored where that env stands."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from flatout.buffers.rollout import Rollout
from flatout.envs.spaces import Array
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
        at = self.cursor[rows]
        rollout.reward[at, rows] = now.reward[rows]
        rollout.terminated[at, rows] = now.terminated[rows]
        rollout.truncated[at, rows] = now.truncated[rows]
        for leaf, obs in zip(rollout.obs, now.obs, strict=True):
            leaf[at + 1, rows] = obs[rows]
        cut = now.truncated[rows]
        for leaf, final in zip(rollout.final_obs, now.final_obs, strict=True):
            leaf[at[cut], rows[cut]] = final[rows[cut]]
        self.cursor[rows] += 1

    def _cut_before(self, t: int, n: int, now: Step) -> None:
        """End env n's episode with its last whole step, and begin at `t` with the new episode."""
        rollout = self.rollout
        if t > 0 and not rollout.terminated[t - 1, n] and not rollout.truncated[t - 1, n]:
            rollout.truncated[t - 1, n] = True
            for leaf, obs in zip(rollout.final_obs, rollout.obs, strict=True):
                leaf[t - 1, n] = obs[t, n]
        for leaf, obs in zip(rollout.obs, now.obs, strict=True):
            leaf[t, n] = obs[n]
