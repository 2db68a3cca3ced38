"""Collects with two groups of envs in one process: while the accelerator acts for one group, the other steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise

from flatout.buffers.rollout import Rollout
from flatout.collect.collector import Collector, take_turns
from flatout.envs.spaces import Array
from flatout.executors.base import Episode
from flatout.executors.episodes import merge_snapshots, part_of_snapshot
from flatout.timing import ACT, Lane

MIN_ENVS = 16
"""Fewer envs are not worth two launches per time step."""


class GroupedCollector:
    """Looks like one collector over the envs of all groups. Groups share the model, the clock and the first one's stream."""

    def __init__(self, groups: Sequence[Collector]) -> None:
        """Only the first group has the learner's model as its source."""
        self._groups, self._first = groups, groups[0]
        ends = accumulate((group.executor.n_envs for group in groups), initial=0)
        self._shares = list(pairwise(ends))

    @property
    def n_steps(self) -> int:
        """Steps each env has taken for finished rollouts."""
        return self._first.n_steps

    @n_steps.setter
    def n_steps(self, n_steps: int) -> None:
        for group in self._groups:
            group.n_steps = n_steps

    @property
    def lanes(self) -> list[Lane]:
        return self._first.lanes

    def trace(self, spans: bool) -> None:
        self._first.trace(spans)

    def publish(self) -> None:
        self._first.publish()

    def offer_next(self, rollout: Rollout) -> None:
        """Nothing: all envs are done at the same time."""

    def reset(self) -> None:
        for group in self._groups:
            group.reset()

    def collect(self, rollout: Rollout, stop: Callable[[], bool] = lambda: False) -> list[Episode]:
        parts = [rollout.part(*share) for share in self._shares]
        self._first.clock.enter(ACT)
        with self._first.on_stream():
            steps = [group.steps(part, stop) for group, part in zip(self._groups, parts, strict=True)]
            episodes = [episode for some in take_turns(*steps) for episode in some]
        for group in self._groups:
            group.complete(rollout.n_steps)
        return episodes

    def snapshot(self) -> dict[str, Array]:
        return merge_snapshots([group.snapshot() for group in self._groups])

    def restore(self, snapshot: Mapping[str, Array]) -> list[int]:
        fresh: list[int] = []
        for group, share in zip(self._groups, self._shares, strict=True):
            fresh += [share[0] + n for n in group.restore(part_of_snapshot(snapshot, *share))]
        return fresh

    def take_notes(self) -> list[str]:
        return [note for group in self._groups for note in group.take_notes()]

    def close(self) -> None:
        for group in self._groups:
            group.close()
