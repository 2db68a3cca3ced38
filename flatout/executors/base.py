"""The executor protocol: a set of envs that take actions and give back steps.

`send`/`recv` are the primitive, `step` is derived from them once. Autoreset is SAME_STEP: where an
episode ended, `obs` is the next episode's first observation and `final_obs` the ended one's last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from flatout.envs.spaces import Array, Leaves


@dataclass(slots=True)
class Step:
    """What `recv` returns, row i for env `env_ids[i]`; the arrays are valid until the next `recv`."""

    env_ids: Array
    obs: Leaves
    reward: Array
    terminated: Array
    truncated: Array
    final_obs: Leaves
    """Rows are written only where an episode ended."""
    ended: list[Episode]
    """The episodes that ended in this step."""


@dataclass(frozen=True, slots=True)
class Episode:
    """Statistics of one finished episode."""

    env_id: int
    total_reward: float
    length: int


class Executor(Protocol):
    """Steps a set of envs. Waiting executors may return fewer envs than they run."""

    n_envs: int

    def reset(self) -> Step:
        """Begin a new episode in every env; rewards are zero."""
        ...

    def send(self, actions: Array, env_ids: Array) -> None:
        """Hand action rows, in the env's own units, to the envs named."""
        ...

    def recv(self) -> Step:
        """Wait for envs to finish their step."""
        ...

    @property
    def current(self) -> Step:
        """The envs as they stand now: what the last `reset`, `recv` or `restore` left."""
        ...

    def mark(self) -> None:
        """Remember this moment as the one that `snapshot` describes."""
        ...

    def snapshot(self) -> dict[str, Array]:
        """What is needed to bring every env back to the last mark."""
        ...

    def restore(self, snapshot: Mapping[str, Array]) -> list[int]:
        """Bring the envs back to a snapshot's moment; returns those that had to begin a new episode."""
        ...

    def close(self) -> None:
        """Close every env; never raises for an env's own failure."""
        ...


def step(executor: Executor, actions: Array, env_ids: Array) -> Step:
    """Send and receive: one step of all the envs named."""
    executor.send(actions, env_ids)
    return executor.recv()
