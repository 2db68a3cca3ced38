"""The figures of a run's iterations and the files that have a row for each: metrics.csv and TensorBoard's events.

Both are given as bytes to append. TensorBoard's format and checksums are its own, but not its writer: that one has a
thread, and a disk that is full for a moment ends it for good.
"""

from __future__ import annotations

import csv
import io
import math
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flatout.runlog.files import AppendedFile

COLUMNS = tuple(
    """
    time/total_timesteps time/iterations time/time_elapsed time/fps
    rollout/ep_rew_mean rollout/ep_len_mean rollout/episodes
    train/n_updates train/learning_rate train/loss
    train/policy_gradient_loss train/value_loss train/entropy_loss train/approx_kl train/clip_fraction
    train/kl_settled train/clip_range train/explained_variance train/grad_norm
    train/q_mean train/td_error rollout/exploration_rate train/buffer_fill train/updates_per_step
    eval/mean_reward eval/mean_ep_length learner_busy
    """.split()
)
"""Columns of metrics.csv, under Stable-Baselines3's names; an algorithm may add its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """The state of a run after an iteration; counts are since the start of the run."""

    env_steps: int
    total_steps: int
    """Env steps at which the run ends."""
    iteration: int
    """Rollouts learned from."""
    updates: int
    """Optimizer steps."""
    episodes: int
    seconds: float
    """Wall time."""
    steps_per_second: float
    """Env steps per second of wall time."""
    return_mean: float | None
    """Mean return of the last 100 episodes; None until one has ended."""
    return_std: float | None
    length_mean: float | None
    """Mean length of the last 100 episodes, in env steps."""
    metrics: Mapping[str, float]
    """Metrics of this iteration under Stable-Baselines3's names: `train/…`, and `eval/…` if it evaluated."""
    phases: Mapping[str, float]
    """Seconds per phase of the learner."""
    learner_busy: float
    """Share of wall time, 0 to 1, in which the learner's device ran updates."""


def scalars(progress: Progress) -> dict[str, float]:
    """The known figures of an iteration by name, for metrics.csv and TensorBoard."""
    known: dict[str, float | None] = {
        "time/total_timesteps": progress.env_steps,
        "time/iterations": progress.iteration,
        "time/time_elapsed": progress.seconds,
        "time/fps": progress.steps_per_second,
        "rollout/ep_rew_mean": progress.return_mean,
        "rollout/ep_len_mean": progress.length_mean,
        "rollout/episodes": progress.episodes,
        "train/n_updates": progress.updates,
        **progress.metrics,
        "learner_busy": progress.learner_busy,
    }
    return {name: value for name, value in known.items() if value is not None}


class MetricsLog(AppendedFile):
    """metrics.csv; with `resume_at`, continues after the last row up to that many env steps."""

    def __init__(self, path: Path, resume_at: int | None = None, more: Sequence[str] = ()) -> None:
        """`more`: columns besides COLUMNS."""
        super().__init__(path, self._begin)
        self._columns, self._resume_at = (*COLUMNS, *more), resume_at
        self.write()

    def _begin(self, path: Path) -> None:
        """Start the file with its header and the rows that a resumed run does not repeat."""
        part = path.with_name(f".{path.name}.part")
        try:
            with part.open("w", newline="", encoding="utf-8") as file:
                writer = csv.writer(file, lineterminator="\n")
                writer.writerow(self._columns)
                if self._resume_at is not None and path.exists():
                    for row in read_rows(path):
                        if cell_value(row.get(COLUMNS[0])) <= self._resume_at:
                            writer.writerow([row.get(name, "") for name in self._columns])
            os.replace(part, path)
        except OSError:
            part.unlink(missing_ok=True)
            raise

    def row(self, progress: Progress) -> bytes:
        """The row of an iteration."""
        values, line = scalars(progress), io.StringIO()
        csv.writer(line, lineterminator="\n").writerow([_cell(values.get(name)) for name in self._columns])
        return line.getvalue().encode()


def _cell(value: float | None) -> str:
    if value is None:
        return ""
    # Eight digits: one more than a float32 carries.
    return str(value) if isinstance(value, int) else f"{value:.8g}"


class TensorBoardLog(AppendedFile):
    """An event file of TensorBoard; with `resume_at`, it hides what earlier files of the run say beyond that step."""

    def __init__(self, folder: Path, resume_at: int | None = None) -> None:
        # TensorBoard reads the files of a folder in the order of their names.
        name = f"events.out.tfevents.{int(time.time()):010d}.{platform.node()}.{os.getpid()}.{time.time_ns()}"
        super().__init__(folder / name, prepare=lambda _: None)
        self._resume_at, self._begun = resume_at, False

    def row(self, progress: Progress) -> bytes:
        """An event with the finite scalars of an iteration; before the first one, what begins the file."""
        # Not at the top of the file: the import takes 0.25 s, and many commands write no events.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        now, events = time.time(), []
        if not self._begun:
            self._begun = True
            events.append(Event(wall_time=now, file_version="brain.Event:2"))
            if (at := self._resume_at) is not None:
                # TensorBoard drops the points from a session's start on, which would otherwise be drawn twice.
                start = SessionLog(status=SessionLog.START)
                events.append(Event(wall_time=now, step=at + 1, session_log=start))
        known = {tag: value for tag, value in scalars(progress).items() if math.isfinite(value)}
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in known.items()]
        events.append(Event(wall_time=now, step=progress.env_steps, summary=Summary(value=values)))
        writer = RecordWriter(row := io.BytesIO())
        for event in events:
            writer.write(event.SerializeToString())
        return row.getvalue()


def read_rows(path: Path) -> Iterator[dict[str, str]]:
    """The rows of metrics.csv, as text; the last one only if it is complete."""
    with path.open(encoding="utf-8", errors="replace") as file:
        whole_lines = (line.replace("\0", "") for line in file if line.endswith("\n"))
        yield from csv.DictReader(whole_lines, restval="")


def cell_value(text: str | None) -> float:
    """A cell of metrics.csv as a number; NaN for anything else."""
    try:
        return float(text or "nan")
    except ValueError:
        return float("nan")
