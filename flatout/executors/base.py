"""The executor protocol: a set of envs that take actions and give back steps.

`send`/`recv` are the primitive, `step` is derived from them once. Autoreset is SAME_STEP: where an
episode ended, `obs` is the next episode's first observation and `final_obs` the ended one's last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np

from flatout.envs.spaces import Array, ObsArrays, ObsLayout

Kind = Literal["serial", "process", "thread", "async", "batched"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How the envs of a run are stepped."""

    kind: Kind
    n_collectors: int = 1
    in_subprocesses: bool = False
    """Whether each collector is a process of its own."""
    n_workers: int = 0
    """Worker processes of a `process` executor, or threads."""
    steps_per_second: float = 0.0
    """Estimated speed of collecting with an idle learner; 0 where only one plan is possible."""
    reason: str = ""


@dataclass(slots=True)
class Step:
    """What `recv` returns: arrays with a row per env, of which those in `rows` are new.

    The arrays belong to the executor; a row is valid until its env is sent the next action.
    """

    rows: Array
    """Which envs have taken a step, as places in the arrays."""
    obs: ObsArrays
    reward: Array
    terminated: Array
    truncated: Array
    final_obs: ObsArrays
    """Written only where an episode ended."""
    ended: list[Episode]
    """The episodes that ended in this step."""
    restarted: list[int]
    """Places (also in `rows`) whose env was lost during its step and rebuilt: that step never happened, the
    episode is cut before it, and `obs` is a new episode's first observation."""


def alloc_step(layout: ObsLayout, n_envs: int) -> Step:
    """A Step for `n_envs` envs, in ordinary memory."""
    return Step(
        rows=np.arange(n_envs),
        obs=layout.alloc(n_envs),
        reward=np.zeros(n_envs),
        terminated=np.zeros(n_envs, np.bool_),
        truncated=np.zeros(n_envs, np.bool_),
        final_obs=layout.alloc(n_envs),
        ended=[],
        restarted=[],
    )


@dataclass(frozen=True, slots=True)
class Episode:
    """Statistics of one finished episode."""

    env_id: int
    """The env's number in the whole run, not its place in one executor."""
    total_reward: float
    length: int


class Executor(Protocol):
    """Steps a set of envs. Waiting executors may return fewer envs than they run."""

    n_envs: int
    env_ids: Array
    """The numbers of its envs in the whole run; seeds and random streams go by them."""

    def reset(self) -> Step:
        """Begin a new episode in every env; rewards are zero."""
        ...

    def send(self, actions: Array, rows: Array) -> None:
        """Hand actions, in the env's own units, to the envs in the places named."""
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


def step(executor: Executor, actions: Array) -> Step:
    """Send and receive: one step of all envs, however many `recv`s that takes."""
    executor.send(actions, np.arange(executor.n_envs))
    now = executor.recv()
    if len(now.rows) == executor.n_envs:
        return now
    n_seen, ended, restarted = len(now.rows), list(now.ended), list(now.restarted)
    while n_seen < executor.n_envs:
        now = executor.recv()
        n_seen += len(now.rows)
        ended += now.ended
        restarted += now.restarted
    ended.sort(key=lambda episode: episode.env_id)
    return replace(now, rows=np.arange(executor.n_envs), ended=ended, restarted=restarted)


def merge_snapshots(parts: list[dict[str, Array]]) -> dict[str, Array]:
    """Snapshots of consecutive envs as one, as if one executor had taken it."""
    n_actions = max(len(part["actions"]) for part in parts)
    merged: dict[str, list[Array]] = {name: [] for name in parts[0]}
    for part in parts:
        for name, array in part.items():
            if name == "actions":  # all end now; some begin later
                gap = np.zeros((n_actions - len(array), *array.shape[1:]), array.dtype)
                merged[name].append(np.concatenate([gap, array]))
            elif name == "ages":  # what was not kept must not seem to be
                merged[name].append(np.where(array > len(part["actions"]), n_actions + 1, array))
            else:
                merged[name].append(array)
    return {name: np.concatenate(arrays, axis=int(name == "actions")) for name, arrays in merged.items()}


def part_of_snapshot(snapshot: Mapping[str, Array], first: int, end: int) -> dict[str, Array]:
    """The part of a snapshot that is about the envs from `first` to before `end`."""
    return {
        name: array[:, first:end] if name == "actions" else array[first:end]
        for name, array in snapshot.items()
    }
