"""What a run writes while it trains: metrics.csv, progress.json, spans, samples and faults, and what its sinks get."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from time import perf_counter, time
from typing import Protocol

from flatout.runlog.folder import RunFolder, write_json
from flatout.runlog.metrics import MetricsLog, Progress
from flatout.runlog.samples import Figures, Sampler
from flatout.runlog.spans import SpanFile
from flatout.timing import Lane

MIN_SECONDS = 0.1
"""Rows of metrics.csv are at least this far apart: a fast run has hundreds of iterations a second."""
PROGRESS_SECONDS = 1.0
"""Time between two writes of progress.json."""
GPU_HERTZ, HOST_HERTZ = 5, 2
"""Samples a second; a GPU's load comes in bursts."""


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
        for sink in self._sinks:
            sink.note(f"note: {note}")

    def fault(self, note: str, traceback_text: str) -> None:
        """Report an env or process that failed and was rebuilt; its traceback goes to faults.log."""
        self.note(f"{note}; rebuilt, training goes on")
        if self._folder is not None:
            with self._folder.faults.open("a") as file:
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
