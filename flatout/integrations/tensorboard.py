"""TensorBoard event files, written with TensorBoard's own writer.

In: named scalars at a step. Out: one event file in the given folder; a resumed run adds another beside it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path


class TensorBoardWriter:
    """Writes scalars to an event file; with `resume_at`, hides what an earlier file says beyond that step."""

    def __init__(self, folder: Path, resume_at: int | None = None) -> None:
        # Here and not at the top: the import costs 0.25 s, and many commands write no events.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        # 10 s, not the writer's 120: people watch the curve while the run goes, and a killed run keeps it.
        self._file = EventFileWriter(str(folder), max_queue_size=1000, flush_secs=10)
        if resume_at is not None:
            # TensorBoard drops the points from a session's start on, which would otherwise be drawn twice.
            log = SessionLog(status=SessionLog.START)
            self._file.add_event(Event(wall_time=time.time(), step=resume_at + 1, session_log=log))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add the scalars at `step`, all in one event; those that are not finite are left out."""
        values = [
            self._summary.Value(tag=tag, simple_value=value)
            for tag, value in scalars.items()
            if math.isfinite(value)
        ]
        self._file.add_event(
            self._event(wall_time=time.time(), step=step, summary=self._summary(value=values))
        )

    def close(self) -> None:
        """Write what is queued and close the file; a second call does nothing."""
        self._file.close()
