"""Everything a run writes while it goes, behind two verbs: write the progress, save a checkpoint.

Without a folder only the display is served.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from time import perf_counter

from flatout.integrations.tensorboard import TensorBoardWriter
from flatout.learn.checkpoint import Checkpoint, CheckpointFolder
from flatout.pipeline.progress import Progress
from flatout.records.display import Display
from flatout.records.folder import RunFolder
from flatout.records.metrics import MetricsLog, scalars
from flatout.trace.phases import Lane
from flatout.trace.sink import SpanFile

MIN_SECONDS = 0.1
"""Rows closer together than this are left out: a fast run has hundreds of iterations a second."""


class Recorder:
    """Serves the display and, if the run has a folder, metrics.csv, TensorBoard and the checkpoints."""

    def __init__(self, display: Display, folder: RunFolder | None, resume_at: int | None = None) -> None:
        self.display = display
        self._written_at = float("-inf")
        self._folder, self._resume_at = folder, resume_at
        self._metrics: MetricsLog | None = None
        self._tensorboard: TensorBoardWriter | None = None
        self._spans: SpanFile | None = None
        self._checkpoints = CheckpointFolder(folder.checkpoints) if folder else None

    @property
    def traces(self) -> bool:
        """Whether there is a place to keep spans."""
        return self._folder is not None

    def trace(self, lanes: Callable[[], Sequence[Lane]], offset: float) -> None:
        """Write the lanes' spans from now on, if there is a place for them."""
        if self._folder is not None:
            self._spans = SpanFile(self._folder.spans, lanes, offset=offset)

    def is_due(self) -> bool:
        """Whether the last row is old enough for another."""
        return perf_counter() - self._written_at >= MIN_SECONDS

    def write(self, progress: Progress) -> None:
        """Show the progress and add a row."""
        self._written_at = perf_counter()
        self.display.update(progress)
        if self._folder is not None:
            if self._metrics is None or self._tensorboard is None:
                self._metrics = MetricsLog(self._folder.metrics, self._resume_at)
                self._tensorboard = TensorBoardWriter(self._folder.tensorboard, self._resume_at)
            self._metrics.write(progress)
            self._tensorboard.write(progress.env_steps, scalars(progress))

    def note(self, note: str) -> None:
        """Show something that a user should know."""
        self.display.note(f"note: {note}")

    def fault(self, note: str, traceback_text: str) -> None:
        """Show that part of the run was lost and rebuilt; its traceback goes to the folder's faults.log."""
        self.display.note(f"note: {note}; rebuilt, training goes on")
        if self._folder is not None:
            with self._folder.faults.open("a") as file:
                file.write(f"{datetime.now():%Y-%m-%d %H:%M:%S} {note}\n{traceback_text}")

    def save(self, make: Callable[[], Checkpoint], env_steps: int) -> None:
        """Save a checkpoint, made only if there is a place for it."""
        if self._checkpoints is not None:
            self._checkpoints.save(make(), env_steps)

    def save_best(self, make: Callable[[], Checkpoint]) -> None:
        """Save the best checkpoint so far."""
        if self._checkpoints is not None:
            self._checkpoints.save_best(make())

    def close(self) -> None:
        """Flush and close every file."""
        if self._metrics is not None:
            self._metrics.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._spans is not None:
            self._spans.close()
