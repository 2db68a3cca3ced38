"""TensorBoard's event files; a resumed run adds another file.

TensorBoard's own format and checksums, but not its writer: that one has a thread, and a disk that is full for a moment
ends it for good.
"""

from __future__ import annotations

import math
import os
import platform
import time
from pathlib import Path
from typing import Any

from flatout.runlog.appended import AppendedFile
from flatout.runlog.recorder import Progress, scalars


class TensorBoardWriter:
    """Writes the scalars of each iteration; with `resume_at`, hides what earlier files say beyond that step."""

    def __init__(self, folder: Path, resume_at: int | None = None) -> None:
        # TensorBoard reads the files of a folder in the order of their names.
        name = f"events.out.tfevents.{int(time.time()):010d}.{platform.node()}.{os.getpid()}.{time.time_ns()}"
        self.file = AppendedFile(folder / name, prepare=lambda _: None)
        self._resume_at = resume_at
        self._records: Any = None

    def _begin(self) -> None:
        # Not at the top of the file: the import takes 0.25 s, and many commands write no events.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        self._records = RecordWriter(self.file)
        self._add(file_version="brain.Event:2")
        if self._resume_at is not None:
            # TensorBoard drops the points from a session's start on, which would otherwise be drawn twice.
            self._add(step=self._resume_at + 1, session_log=SessionLog(status=SessionLog.START))

    def write(self, progress: Progress) -> None:
        """Add an event with the finite scalars of an iteration; the first call creates the file."""
        if self._records is None:
            self._begin()
        values = [
            self._summary.Value(tag=tag, simple_value=value)
            for tag, value in scalars(progress).items()
            if math.isfinite(value)
        ]
        self._add(step=progress.env_steps, summary=self._summary(value=values))

    def _add(self, **content: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **content).SerializeToString())
