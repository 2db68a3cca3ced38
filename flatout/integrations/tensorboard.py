"""TensorBoard event files, written with TensorBoard's own writer; a resumed run adds another file."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

from flatout.runlog.recorder import Progress, scalars


class TensorBoardWriter:
    """Writes the scalars of each iteration; with `resume_at`, hides what earlier files say beyond that step."""

    def __init__(self, folder: Path, resume_at: int | None = None) -> None:
        self._folder, self._resume_at = folder, resume_at
        self._file: Any = None

    def _open(self) -> None:
        # Not at the top of the file: the import takes 0.25 s, and many commands write no events.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        # 10 s, not the writer's 120: people watch the curve while the run goes, and a killed run keeps it.
        self._file = EventFileWriter(str(self._folder), max_queue_size=1000, flush_secs=10)
        if self._resume_at is not None:
            # TensorBoard drops the points from a session's start on, which would otherwise be drawn twice.
            log = SessionLog(status=SessionLog.START)
            self._file.add_event(Event(wall_time=time.time(), step=self._resume_at + 1, session_log=log))

    def write(self, progress: Progress) -> None:
        """Add an event with the finite scalars of an iteration; the first call creates the file."""
        if self._file is None:
            self._open()
        values = [
            self._summary.Value(tag=tag, simple_value=value)
            for tag, value in scalars(progress).items()
            if math.isfinite(value)
        ]
        self._file.add_event(
            self._event(wall_time=time.time(), step=progress.env_steps, summary=self._summary(value=values))
        )

    def note(self, text: str) -> None:
        """Notes are not for TensorBoard."""

    def close(self) -> None:
        """Write what is queued and close the file."""
        if self._file is not None:
            self._file.close()
