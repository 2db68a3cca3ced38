"""spans.jsonl of a run that goes on: each read takes in only what is new.

In: the growing file. Out: the spans of the last seconds, or of the whole run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flatout.runlog.lines import number
from flatout.runlog.spans import Row, Spans, before, lane_order, make_lane, span_row
from flatout.runlog.tail import Tail, json_object


class SpanFollower:
    """Follows the spans of one run."""

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path)
        self._forget()

    def read(self) -> bool:
        """Take in what is new; whether anything was."""
        restarted, lines = self._tail.read()
        if restarted:
            self._forget()
        for line in lines:
            self._take(json_object(line))
        return restarted or bool(lines)

    def last(self, seconds: float | None = None) -> Spans:
        """The spans of the last seconds; of the whole run unless given."""
        end = max((rows[-1][1] for rows in self._rows.values() if rows), default=0.0)
        since = 0.0 if seconds is None else max(0.0, end - seconds)
        lanes = [
            make_lane(name, clock, _since(self._rows[name, clock], since))[0]
            for name, clock in sorted(self._rows, key=lane_order)
        ]
        return Spans({lane.name: lane for lane in lanes if len(lane.start)})

    def _forget(self) -> None:
        self._rows: dict[tuple[str, str], list[Row]] = {}
        self._offset = 0.0

    def _take(self, record: dict[str, Any]) -> None:
        if "began" in record:
            self._offset = max(0.0, number(record.get("offset")) or 0.0)
            # A resumed run walks again what came after its checkpoint.
            self._rows = {key: before(rows, self._offset) for key, rows in self._rows.items()}
        elif (row := span_row(record, self._offset)) is not None:
            self._rows.setdefault((record["lane"], record.get("clock", "host")), []).append(row)


def _since(rows: list[Row], limit: float) -> list[Row]:
    """The spans from `limit` on; one across it is cut, with its part of the seconds."""
    kept: list[Row] = []
    for start, end, seconds in reversed(rows):
        if end <= limit:
            break
        if start < limit:
            share = (end - limit) / (end - start)
            start, seconds = limit, {phase: value * share for phase, value in seconds.items()}
        kept.append((start, end, seconds))
    return kept[::-1]
