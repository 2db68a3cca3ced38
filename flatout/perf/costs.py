"""What a pipeline is made of, for reckoning: measured costs in seconds, and the settings that spend them."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from flatout.executors.base import Kind

Points = tuple[tuple[int, float], ...]
"""Seconds by number of rows, ascending."""


def at(points: Points, n_rows: float) -> float:
    """The seconds for so many rows: between two points a straight line, beyond them the outermost one."""
    if len(points) == 1:
        rows, seconds = points[0]
        return seconds * max(n_rows / rows, 1.0)
    place = min(max(bisect_left([rows for rows, _ in points], n_rows), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[place - 1 : place + 1]
    if n_rows <= points[0][0]:
        return points[0][1]
    return max(y0 + (y1 - y0) * (n_rows - x0) / (x1 - x0), points[0][1])


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateCost:
    """What one update takes."""

    python: float
    """Seconds in which the interpreter's lock is held: launching operations."""
    rows: Points
    """Seconds of the whole update by rows of the minibatch."""

    def seconds(self, batch_size: int) -> float:
        """Of one update."""
        return max(at(self.rows, batch_size), self.python)


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Measured for one env, one policy and one machine."""

    wait: tuple[float, ...]
    """Seconds of env steps in which nothing is computed; a sample."""
    compute: tuple[float, ...]
    """Seconds of the same steps on a core."""
    slowness: tuple[float, ...] = (1.0,)
    """How slow each env is beside the median one."""
    act: Points
    """Acting on so many observations."""
    update: UpdateCost
    compiled: UpdateCost | None = None
    """The same compiled; None: not known."""
    advantage: float = 0.0
    """Values and advantages, for each transition."""
    iteration: float = 1e-3
    """What every iteration costs beside: publishing, metrics, records."""
    store: float = 25e-6
    """A collector's own work in each of its time steps."""
    handover: float = 60e-6
    """A step's way to a worker process and back."""
    passing: float = 60e-6
    """A step's way through a thread or an event loop, for each env."""
    hold: float = 0.025
    """Share of a step for which envs that are ready wait for others."""

    @property
    def step_seconds(self) -> float:
        """Mean wall time of a step."""
        return (sum(self.wait) + sum(self.compute)) / len(self.wait)

    @property
    def compute_share(self) -> float:
        """Share of a step that is spent computing."""
        return sum(self.compute) / max(sum(self.wait) + sum(self.compute), 1e-12)

    @property
    def waits(self) -> bool:
        """Whether stepping is mostly waiting."""
        return self.compute_share < 0.5 and self.step_seconds > 200e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What a run can be told, as far as it decides its speed."""

    n_envs: int
    n_steps: int
    batch_size: int
    n_epochs: int
    executor: Kind
    n_collectors: int = 1
    in_subprocesses: bool = False
    """Whether collectors are processes of their own."""
    n_workers: int = 0
    overlap: bool = False
    compiled: bool = False
    n_cores: int = 1
    learn_threads: int = 1
    on_device: bool = False
    """Whether the learner computes on a GPU."""
    n_params: int = 0
    extra_seconds: float = 0.0
    """Of evaluation and checkpoints, for each iteration."""
    train_ratio: float | None = None
    """Updates per env step, where they do not follow from batch size and epochs."""

    @property
    def total_batch(self) -> int:
        """Transitions in one rollout."""
        return self.n_envs * self.n_steps

    @property
    def n_updates(self) -> float:
        """Updates in one iteration."""
        if self.train_ratio is not None:
            return self.train_ratio * self.total_batch
        return max(self.total_batch // self.batch_size, 1) * self.n_epochs
