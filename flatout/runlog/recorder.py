"""What a run writes while it trains: metrics.csv, progress.json, spans, samples and faults, and what its sinks get."""

from __future__ import annotations

import csv
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from time import perf_counter, time
from typing import Protocol

from flatout.runlog.folder import RunFolder, write_json
from flatout.runlog.samples import Figures, Sampler
from flatout.runlog.spans import SpanFile
from flatout.timing import Lane

MIN_SECONDS = 0.1
"""Rows of metrics.csv are at least this far apart: a fast run has hundreds of iterations a second."""
PROGRESS_SECONDS = 1.0
"""Time between two writes of progress.json."""
GPU_HERTZ, HOST_HERTZ = 5, 2
"""Samples a second; a GPU's load comes in bursts."""
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


class Sink(Protocol):
    """Receives a run's progress and notes: a display, TensorBoard, …"""

    def write(self, progress: Progress) -> None:
        """Take the figures of an iteration."""

    def note(self, text: str) -> None:
        """Take a line for the user."""

    def close(self) -> None:
        """Flush and end; a second call does nothing."""


class Recorder:
    """Feeds the sinks and, if the run has a folder, its files."""

    def __init__(
        self,
        folder: RunFolder | None = None,
        sinks: Sequence[Sink] = (),
        *,
        resume_at: int | None = None,
        about: Mapping[str, object] | None = None,
        metrics: Sequence[str] = (),
    ) -> None:
        """`resume_at`: env steps at which the run is resumed; `about`: what progress.json says beside the progress;
        `metrics`: the algorithm's own metrics, for more columns of metrics.csv."""
        self._own_metrics = metrics
        self._lock = threading.RLock()  # faults come from the thread that collects
        self._folder, self._sinks, self._resume_at = folder, sinks, resume_at
        self._about = dict(about or {})
        self._written_at = self._progress_at = float("-inf")
        self._metrics: MetricsLog | None = None
        self._spans: SpanFile | None = None
        self._sampler: Sampler | None = None

    @property
    def traces(self) -> bool:
        """Whether spans are written."""
        return self._folder is not None

    def observe(self, lanes: Callable[[], Sequence[Lane]], *, offset: float, device: str) -> None:
        """Write spans and samples from now on; `offset` is the wall time of the run so far."""
        if self._folder is not None:
            self._spans = SpanFile(self._folder.spans, lanes, offset=offset)
            hertz = GPU_HERTZ if device.startswith("cuda") else HOST_HERTZ
            self._sampler = Sampler(
                self._folder.samples, began=self._spans.began, offset=offset, device=device, hertz=hertz
            )

    def figures(self) -> dict[str, object]:
        """Figures of the samples for summary.json."""
        return asdict(self._sampler.figures() if self._sampler is not None else Figures())

    def is_due(self) -> bool:
        """Whether the last row is old enough for another."""
        return perf_counter() - self._written_at >= MIN_SECONDS

    def write(self, progress: Progress) -> None:
        """Add a row and feed the sinks."""
        self._written_at = perf_counter()
        with self._lock:
            for sink in self._sinks:
                sink.write(progress)
        if self._folder is not None:
            if self._metrics is None:
                self._metrics = MetricsLog(self._folder.metrics, self._resume_at, self._own_metrics)
            self._metrics.write(progress)
            self._write_progress(progress, self._folder)

    def _write_progress(self, progress: Progress, folder: RunFolder) -> None:
        if self._written_at - self._progress_at >= PROGRESS_SECONDS:
            self._progress_at = self._written_at
            now = asdict(progress)
            now |= {"wall_seconds": now.pop("seconds"), "updated": time(), "pid": os.getpid()}
            write_json(folder.progress, self._about | now | {"status": "running"})

    def note(self, note: str) -> None:
        """Pass a line on to the user."""
        with self._lock:
            for sink in self._sinks:
                sink.note(f"note: {note}")

    def fault(self, note: str, traceback_text: str, *, is_known: bool = False) -> None:
        """Report an env or process that failed, unless the user knows; its traceback goes to faults.log."""
        if not is_known:
            self.note(note)
        if self._folder is not None:
            with self._lock, self._folder.faults.open("a") as file:
                file.write(f"{datetime.now():%Y-%m-%d %H:%M:%S} {note}\n{traceback_text}")

    def close(self) -> None:
        """Flush and close every file, report what could not be written, and close the sinks."""
        for file in (self._metrics, self._spans, self._sampler):
            if file is not None:
                file.close()
        for writer in (self._spans, self._sampler):
            if writer is not None and writer.problem is not None:
                self.note(writer.problem)
        for sink in self._sinks:
            sink.close()


class MetricsLog:
    """Writes metrics.csv; with `resume_at`, continues after the last row up to that many env steps."""

    def __init__(self, path: Path, resume_at: int | None = None, more: Sequence[str] = ()) -> None:
        """`more`: columns besides COLUMNS."""
        self._columns = (*COLUMNS, *more)
        rows = read_rows(path) if resume_at is not None and path.exists() else []
        # A resumed run repeats the later rows.
        kept = [row for row in rows if cell_value(row.get(COLUMNS[0])) <= (resume_at or 0)]
        part = path.with_name(f".{path.name}.part")
        with part.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(self._columns)
            writer.writerows([row.get(name, "") for name in self._columns] for row in kept)
        os.replace(part, path)
        self._file = path.open("a", newline="", encoding="utf-8")
        self._writer = csv.writer(self._file, lineterminator="\n")

    def write(self, progress: Progress) -> None:
        """Add a row and flush it."""
        values = scalars(progress)
        self._writer.writerow([_cell(values.get(name)) for name in self._columns])
        self._file.flush()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()


def _cell(value: float | None) -> str:
    if value is None:
        return ""
    # Eight digits: one more than a float32 carries.
    return str(value) if isinstance(value, int) else f"{value:.8g}"


def read_rows(path: Path) -> list[dict[str, str]]:
    """The complete rows of metrics.csv, as text."""
    text = path.read_text(encoding="utf-8", errors="replace")
    # A row is complete once its newline is there.
    whole_lines = text[: text.rfind("\n") + 1].replace("\0", "").splitlines()
    return list(csv.DictReader(whole_lines, restval=""))


def cell_value(text: str | None) -> float:
    """A cell of metrics.csv as a number; NaN for anything else."""
    try:
        return float(text or "nan")
    except ValueError:
        return float("nan")
