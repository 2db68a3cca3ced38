"""spans.jsonl: a thread takes what the lanes have kept and writes it, so that no lane ever waits for a disk.

The first line, and one more each time a run is resumed, says when its times begin.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter, time

from flatout.trace.phases import Lane, Span

EVERY_SECONDS = 0.5
VERSION = 1


class SpanFile:
    """Writes the lanes' spans until it is closed; a disk that fails ends the trace, never the run."""

    def __init__(self, path: Path, lanes: Callable[[], Sequence[Lane]], *, offset: float = 0.0) -> None:
        """`offset`: wall time that the run had before, if it is resumed."""
        self._lanes, self._zero, self.began = lanes, perf_counter(), time()
        self.problem: str | None = None
        self._ended = threading.Event()
        self._n_seen: dict[str, int] = {}
        mend_last_line(path)
        self._file = path.open("a", encoding="utf-8")
        self._write([json.dumps({"began": self.began, "offset": round(offset, 6), "version": VERSION})])
        self._thread = threading.Thread(target=self._work, name="flatout spans", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write what is left."""
        self._ended.set()
        self._thread.join()
        self._drain()
        with suppress(OSError):
            self._file.close()

    def _work(self) -> None:
        while not self._ended.wait(EVERY_SECONDS):
            self._drain()

    def _drain(self) -> None:
        for lane in self._lanes():
            n_spans = lane.n_spans
            spans = [lane.spans.popleft() for _ in range(len(lane.spans))]
            clock = "device" if lane.lane == "device" else "host"
            self._write(self._line(lane.lane, clock, span) for span in spans)
            lost = n_spans - self._n_seen.get(lane.lane, 0) - len(spans)
            self._n_seen[lane.lane] = n_spans if lost > 0 else self._n_seen.get(lane.lane, 0) + len(spans)
            if lost > 0:
                self._write([json.dumps({"dropped": lost, "lane": lane.lane})])

    def _line(self, lane: str, clock: str, span: Span) -> str:
        phases = ", ".join(f'"{name}": {seconds:.6f}' for name, seconds in span.phases.items())
        start, end = span.start - self._zero, span.end - self._zero
        return (
            f'{{"lane": "{lane}", "clock": "{clock}", "start": {start:.6f}, "end": {end:.6f}, '
            f'"phases": {{{phases}}}}}'
        )

    def _write(self, lines: Iterable[str]) -> None:
        if self.problem is not None:
            return
        try:
            self._file.write("".join(f"{line}\n" for line in lines))
            self._file.flush()
        except OSError as error:
            self.problem = f"the trace ends early: {error.strerror or error}"


def mend_last_line(path: Path) -> None:
    """End a line that a killed run has left unfinished, so that the next begins a line of its own."""
    with suppress(FileNotFoundError), path.open("rb+") as file:
        if file.seek(0, 2) and file.seek(-1, 2) >= 0 and file.read(1) != b"\n":
            file.write(b"\n")
