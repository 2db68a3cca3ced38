"""What a run writes while it trains: metrics.csv, progress.json, spans, samples and faults, and what its sinks get."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import platform
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

from flatout.errors import FlatoutError
from flatout.runlog.files import AppendedFile, write_json
from flatout.runlog.folder import RunFolder, this_process
from flatout.runlog.samples import Figures, Sampler
from flatout.timing import Lane, Span

MIN_SECONDS = 0.1
"""Rows of metrics.csv are at least this far apart: a fast run has hundreds of iterations a second."""
ROWS = 10_000
"""Rows are also 1/ROWS of the run's time apart, so that metrics.csv grows with the logarithm of that time."""
MAX_FAULTS, MAX_TRACEBACK = 100, 8_000
"""Faults of one kind, and kinds, that faults.log holds; characters of a note and of a traceback."""
PROGRESS_SECONDS = 1.0
"""Time between two writes of progress.json."""
SPANS_VERSION = 1
WRITE_SECONDS = 0.5
"""Time between two writes of spans."""
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
    seconds_left: float | None = None
    """None until an estimate means something."""


class TimeLeft:
    """Estimates the seconds that a run still takes, at the speed of the last half of its time.

    The first iterations measure, compile and fill caches: at the mean speed so far a run of a minute seems to take hours. So
    does one whose first update, after the env steps of `learning_starts`, is compiled: after such a stall the estimate begins anew.
    """

    least_seconds = 5.0
    """There is no estimate before so much time has passed since the first figures."""

    def __init__(self) -> None:
        self._began = self._last = math.inf
        self._n_calls = 0
        self._points: deque[tuple[float, float]] = deque()

    def estimate(self, env_steps: float, total_steps: float, seconds: float) -> float | None:
        """Seconds from now to the end."""
        if self._stalled(seconds):
            self._began, self._n_calls = seconds, 0
            self._points.clear()
        self._began, self._last = min(self._began, seconds), seconds
        self._n_calls += 1
        passed = seconds - self._began
        if not self._points or seconds - self._points[-1][0] >= passed / 100:
            self._points.append((seconds, env_steps))
        while len(self._points) > 2 and self._points[1][0] <= seconds - passed / 2:
            self._points.popleft()
        since, steps_then = self._points[0]
        if passed < self.least_seconds or env_steps <= steps_then:
            return None
        return max(0.0, total_steps - env_steps) * (seconds - since) / (env_steps - steps_then)

    def _stalled(self, seconds: float) -> bool:
        """Whether the last iteration took ten times as long as the others, and longer than all of them together."""
        if self._n_calls < 2:
            return False
        before, pause = self._last - self._began, seconds - self._last
        return pause > max(self.least_seconds, before, 10 * before / (self._n_calls - 1))


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
    """Receives a run's progress and notes, such as a display; never raises."""

    def write(self, progress: Progress) -> None:
        """Take the figures of an iteration."""

    def note(self, text: str) -> None:
        """Take a line for the user."""

    def close(self) -> None:
        """Flush and end; a second call does nothing."""


class Logger(Protocol):
    """Passes the rows of metrics.csv on to another program; never raises."""

    name: str
    problem: str | None
    """Why it sends nothing at the moment."""
    n_lost: int
    """Rows that were not sent; known after `close`."""

    def keep_running(self) -> None:
        """Called after each row."""

    def take_notes(self) -> list[str]:
        """Lines for the user."""

    def close(self, summary: Mapping[str, Any], n_rows: int) -> None:
        """Pass the run's summary on, after all rows, and end."""


class Recorder:
    """Feeds the sinks and, if the run has a folder, its files. A file that cannot be written does not end the run."""

    def __init__(
        self,
        folder: RunFolder | None = None,
        sinks: Sequence[Sink] = (),
        *,
        about: Mapping[str, object] | None = None,
        resume_at: int | None = None,
        columns: Sequence[str] = (),
        loggers: Sequence[Logger] = (),
    ) -> None:
        """`about`: what progress.json says beside the progress. `columns`: of metrics.csv, besides COLUMNS."""
        self._folder, self._sinks = folder, sinks
        self._lock = threading.RLock()  # faults come from the thread that collects
        self._about = {**(about or {}), **this_process()}
        self._written_at = self._progress_at = self._row_at = float("-inf")
        self._unwritten: Progress | None = None
        """The newest figures, if they are not a row yet."""
        self._n_faults = Counter[str]()
        self._spans: SpanFile | None = None
        self._sampler: Sampler | None = None
        self._progress_problem: str | None = None
        self._troubles: set[str] = set()
        self._logs: list[MetricsLog | TensorBoardLog] = []
        self._loggers, self._n_rows = loggers, 0
        self._faults: AppendedFile | None = None
        self._files: list[AppendedFile] = []
        if folder is not None:
            metrics = MetricsLog(folder.metrics, resume_at, columns)
            self._logs = [metrics, TensorBoardLog(folder.tensorboard, resume_at)]
            self._faults = AppendedFile(folder.faults)
            self._files = [*self._logs, self._faults]

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
            self._files += [self._spans.file, self._sampler.file]

    def figures(self) -> dict[str, object]:
        """Figures of the samples and of the records, for summary.json."""
        figures = self._sampler.figures() if self._sampler is not None else Figures()
        n_lost = sum(file.n_lost for file in self._files) + sum(logger.n_lost for logger in self._loggers)
        return {**asdict(figures), "records_lost": n_lost}

    def is_due(self) -> bool:
        """Whether the last write is long enough ago for another."""
        return perf_counter() - self._written_at >= MIN_SECONDS

    def write(self, progress: Progress) -> None:
        """Feed the sinks, and add a row if one is due."""
        self._written_at, self._unwritten = perf_counter(), progress
        with self._lock:
            for sink in self._sinks:
                sink.write(progress)
        waited, evaluated = progress.seconds - self._row_at, "eval/mean_reward" in progress.metrics
        if evaluated or waited >= progress.seconds / ROWS:
            self._write_row()
        if self._folder is not None:
            problems = [self._write_progress(progress, self._folder), *(file.problem for file in self._files)]
            self._tell("records", next(filter(None, problems), None))
        for logger in self._loggers:
            self._tell(logger.name, logger.problem)
            for note in logger.take_notes():
                self.note(note)

    def _write_row(self) -> None:
        if self._unwritten is not None:
            self._row_at = self._unwritten.seconds
            for log in self._logs:
                log.write(log.row(self._unwritten))
            self._unwritten = None
            self._n_rows += 1
            for logger in self._loggers:
                logger.keep_running()

    def _write_progress(self, progress: Progress, folder: RunFolder) -> str | None:
        """Write progress.json if it is due; returns why it could not be written the last time."""
        if self._written_at - self._progress_at >= PROGRESS_SECONDS:
            self._progress_at = self._written_at
            now = asdict(progress)
            now |= {"wall_seconds": now.pop("seconds"), "updated": time.time()}
            now["gpu"] = self._sampler.gpu if self._sampler is not None else None
            try:
                write_json(folder.progress, self._about | now | {"status": "running"})
                self._progress_problem = None
            except FlatoutError as error:
                self._progress_problem = str(error)
        return self._progress_problem

    def attempt(self, what: str, write: Callable[[], object]) -> bool:
        """Write something whose failure must not end the run; whether that succeeded."""
        try:
            write()
        except FlatoutError as error:
            self._tell(what, str(error))
            return False
        self._tell(what, None)
        return True

    def _tell(self, what: str, problem: str | None) -> None:
        """Say once that something cannot be written, and once that it can be again."""
        if problem is not None and what not in self._troubles:
            self.note(f"{problem}; training goes on and tries again")
        elif problem is None and what in self._troubles:
            self.note(f"{what} can be written again")
        (self._troubles.discard if problem is None else self._troubles.add)(what)

    def note(self, note: str) -> None:
        """Pass a line on to the user."""
        with self._lock:
            for sink in self._sinks:
                sink.note(f"note: {note}")

    def fault(self, note: str, traceback_text: str, *, is_known: bool = False) -> None:
        """Report an env or process that failed, unless the user knows; its traceback goes to faults.log.

        Of faults that differ only in numbers, those after the first MAX_FAULTS are written when their count has doubled.
        """
        with self._lock:
            if not is_known:
                self.note(note)
            if self._faults is None:
                return
            kind = re.sub(r"\d+", "", note)[:200]
            kind = kind if kind in self._n_faults or len(self._n_faults) < MAX_FAULTS else "others"
            self._n_faults[kind] += 1
            n = self._n_faults[kind]
            if n <= MAX_FAULTS or n.bit_count() == 1:
                more = f" ({n:,} such faults by now)" if n > MAX_FAULTS else ""
                text = f"{datetime.now():%Y-%m-%d %H:%M:%S} {note[:MAX_TRACEBACK]}{more}\n{traceback_text[-MAX_TRACEBACK:]}"
                self._faults.write(text.encode())

    def close(self) -> None:
        """Write the last row, close every file, report what is lost, and close the sinks."""
        self._write_row()
        for writer in (self._spans, self._sampler):
            if writer is not None:
                writer.close()
        for file in self._files:
            file.close()
        if self._sampler is not None and self._sampler.problem is not None:
            self.note(self._sampler.problem)
        for sink in self._sinks:
            sink.close()

    def end_loggers(self, summary: Mapping[str, Any]) -> list[str]:
        """After `close`: pass the summary on to the loggers and end them; returns what the user should know."""
        for logger in self._loggers:
            logger.close(summary, self._n_rows)
        return [note for logger in self._loggers for note in logger.take_notes()]


class SpanFile:
    """Writes the lanes' spans to spans.jsonl from a thread, so that no lane waits for the disk.

    The first line, and one more each time the run is resumed, says when its times begin.
    """

    def __init__(self, path: Path, lanes: Callable[[], Sequence[Lane]], *, offset: float = 0.0) -> None:
        """`offset`: wall seconds of the run before it was resumed."""
        self._lanes, self._zero, self.began = lanes, perf_counter(), time.time()
        self._ended = threading.Event()
        self._n_seen: dict[str, int] = {}
        self.file = AppendedFile(path)
        self._write([json.dumps({"began": self.began, "offset": round(offset, 6), "version": SPANS_VERSION})])
        self._thread = threading.Thread(target=self._work, name="flatout spans", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write the remaining spans."""
        self._ended.set()
        self._thread.join()
        self._drain()
        self.file.close()

    def _work(self) -> None:
        while not self._ended.wait(WRITE_SECONDS):
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
        self.file.write(*(f"{line}\n".encode() for line in lines))


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
    """An event file of TensorBoard; with `resume_at`, it hides what earlier files of the run say beyond that step.

    TensorBoard's own writer is not used: it has a thread, and a disk that is full for a moment ends it for good.
    """

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
