"""Everything a run writes while it goes, behind two verbs: write the progress, save a checkpoint.

Without a folder only the display is served.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from time import perf_counter, time

from flatout.integrations.tensorboard import TensorBoardWriter
from flatout.runlog.folder import RunFolder, write_json
from flatout.runlog.metrics import MetricsLog, scalars
from flatout.runlog.sampler import Figures, Sampler
from flatout.timing import Lane, SpanFile
from flatout.training.checkpoint import Checkpoint, CheckpointFolder
from flatout.training.progress import Progress
from flatout.views.display import Display

MIN_SECONDS = 0.1
"""Rows closer together than this are left out: a fast run has hundreds of iterations a second."""
TELL_SECONDS = 1.0
GPU_HERTZ, HOST_HERTZ = 5, 2
"""Samples a second; a GPU's load comes in bursts."""
TOLD = (
    "env_steps",
    "total_steps",
    "iteration",
    "updates",
    "episodes",
    "steps_per_second",
    "return_mean",
    "return_std",
    "length_mean",
    "learner_busy",
    "phases",
    "metrics",
)
"""Fields of Progress that progress.json has."""


class Recorder:
    """Serves the display and, if the run has a folder, metrics.csv, TensorBoard and the checkpoints."""

    def __init__(
        self,
        display: Display,
        folder: RunFolder | None,
        resume_at: int | None = None,
        about: Mapping[str, object] | None = None,
    ) -> None:
        """`about`: what progress.json says of the run beside its progress."""
        self.display = display
        self._about = dict(about or {})
        self._written_at = self._told_at = float("-inf")
        self._folder, self._resume_at = folder, resume_at
        self._metrics: MetricsLog | None = None
        self._tensorboard: TensorBoardWriter | None = None
        self._spans: SpanFile | None = None
        self._sampler: Sampler | None = None
        self._checkpoints = CheckpointFolder(folder.checkpoints) if folder else None

    @property
    def traces(self) -> bool:
        """Whether there is a place to keep spans."""
        return self._folder is not None

    def observe(self, lanes: Callable[[], Sequence[Lane]], *, offset: float, device: str) -> None:
        """Write what the lanes and the machine do from now on, if there is a place for it."""
        if self._folder is not None:
            self._spans = SpanFile(self._folder.spans, lanes, offset=offset)
            hertz = GPU_HERTZ if device.startswith("cuda") else HOST_HERTZ
            self._sampler = Sampler(
                self._folder.samples, began=self._spans.began, offset=offset, device=device, hertz=hertz
            )

    def figures(self) -> dict[str, object]:
        """What the samples say about the whole run, for summary.json."""
        return asdict(self._sampler.figures() if self._sampler is not None else Figures())

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
            self._tell(progress, self._folder)

    def _tell(self, progress: Progress, folder: RunFolder) -> None:
        """progress.json, for those who watch."""
        if self._written_at - self._told_at >= TELL_SECONDS:
            self._told_at = self._written_at
            now = {name: getattr(progress, name) for name in TOLD}
            clock = {"wall_seconds": progress.seconds, "updated": time(), "pid": os.getpid()}
            write_json(folder.progress, self._about | now | clock | {"status": "running"})

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
        if self._sampler is not None:
            self._sampler.close()
