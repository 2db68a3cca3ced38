"""A run's metrics, config and summary in Weights & Biases and MLflow.

Each logger is a process of its own, which reads metrics.csv as it grows. Its imports, its threads and a server that does not
answer cannot slow, break or outlive the training. If it fails, it is started again and goes on after the last row that
it has sent; rows that were never sent are counted as lost.
"""

from __future__ import annotations

import csv
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import IO, Any, Protocol

from flatout.config.trust import SIGNATURE
from flatout.errors import FlatoutError, one_line
from flatout.runlog.files import Tail, json_object, read_json, write_json
from flatout.runlog.folder import RunFolder
from flatout.runlog.recorder import COLUMNS, cell_value

PROJECT = "flatout"
"""Project of W&B and experiment of MLflow, unless their own environment variables name another."""
POLL_SECONDS = 1.0
RETRY_SECONDS = 30.0
"""Time from the start of a logger that failed to its next one."""
END_SECONDS, FAILED_SECONDS = 60.0, 15.0
"""How long the end of a run waits for a logger; for one that has failed, for its last try."""
TELL_SECONDS = 2.0
"""How long it waits before it says so."""
ROWS_AT_ONCE = 30
"""MLflow takes 1,000 values at once."""
MAX_PARAMS, MAX_PARAM, MAX_TAG = 100, 6000, 5000
"""What MLflow takes: parameters at once, characters of a parameter and of a tag."""

MLFLOW_STATUS = {"finished": "FINISHED", "stopped": "KILLED", None: "KILLED"}

Row = dict[str, float]


def require_loggers(kinds: Collection[str]) -> None:
    """Refuse a logger whose package is missing, or which nobody is logged in to."""
    for kind in kinds:
        if kind in LOGGERS and find_spec(kind) is None:
            raise FlatoutError(f"--log {kind} needs {kind}: pip install 'flatout[{kind}]'")
    if "wandb" in kinds and os.environ.get("WANDB_MODE", "online") == "online":
        code = "import sys, wandb; sys.exit(0 if wandb.login(prompt=False) else 3)"
        asked = subprocess.run([sys.executable, "-c", code], capture_output=True, stdin=subprocess.DEVNULL)
        if asked.returncode == 3:
            raise FlatoutError(
                "--log wandb: not logged in; run `wandb login`, or set WANDB_MODE=offline to log to files only"
            )


class LoggerProcess:
    """Runs the process of a logger for a run, and starts it again when it has failed."""

    def __init__(self, kind: str, folder: RunFolder, resume_at: int | None) -> None:
        """Nothing is started before there is a row."""
        self.name = kind
        self.n_lost = 0
        """Rows that were not sent; known after `close`."""
        self.problem: str | None = None
        """Why it sends nothing at the moment."""
        self._folder, self._after, self._n_sent = folder, resume_at or 0, 0
        self._notes: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._listener = threading.Thread()
        self._started_at = float("-inf")

    def keep_running(self) -> None:
        """Start the process, if there is none and the last one was started long enough ago."""
        is_running = self._process is not None and self._listener.is_alive()
        if not is_running and perf_counter() - self._started_at >= RETRY_SECONDS:
            self._start()

    def take_notes(self) -> list[str]:
        """What the user should know, once."""
        taken, self._notes = self._notes, []
        return taken

    def close(self, summary: Mapping[str, Any], n_rows: int) -> None:
        """Pass the summary on, wait a while for everything to be sent, and end the process."""
        if self._process is None:
            self.n_lost = n_rows
            return
        if not self._listener.is_alive():
            self._start()
        process, began = self._process, perf_counter()
        with suppress(OSError):
            assert process.stdin is not None
            process.stdin.write(json.dumps(summary, default=str).encode())
            process.stdin.close()
        told = not sys.stderr.isatty()
        while self._listener.is_alive():
            limit, waited = END_SECONDS if self.problem is None else FAILED_SECONDS, perf_counter() - began
            if waited >= limit:
                break
            if not told and waited > TELL_SECONDS:
                told = True
                print(
                    f"waiting for {self.name}, at most {limit - waited:.0f} s …", file=sys.stderr, flush=True
                )
            self._listener.join(0.1)
        is_done = not self._listener.is_alive() and process.wait() == 0
        self._end(process)
        self.n_lost = max(0, n_rows - self._n_sent)
        if self.n_lost:
            self._notes.append(
                f"{self.problem or f'{self.name} did not answer'}: {self.n_lost:,} of {n_rows:,} records are lost there; "
                "metrics.csv has them"
            )
        elif not is_done:
            self._notes.append(
                f"{self.problem or f'{self.name} has not sent everything'}; it has all records, but may miss the run's end"
            )

    def _start(self) -> None:
        command = [sys.executable, "-m", __name__, self.name, str(self._folder.path), str(self._after)]
        self._started_at = perf_counter()
        try:
            self._process = process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the run, which ends its loggers in time
            )
        except OSError as error:
            self.problem = f"cannot log to {self.name}: {error.strerror or error}"
            return
        self._listener = threading.Thread(target=self._listen, args=(process,), daemon=True)
        self._listener.start()

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        """Take what the process says, line by line, to its end."""
        assert process.stdin is not None
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                self._take(json_object(line) or {})
        with suppress(OSError):  # what was not read any more
            process.stdin.close()
        if process.wait() and self.problem is None:
            self.problem = f"cannot log to {self.name}: its process ended with {process.returncode}"

    def _take(self, said: Mapping[str, Any]) -> None:
        self._n_sent += said.get("sent", 0)
        self._after = said.get("step", self._after)
        if "note" in said:
            self._notes.append(f"{self.name}: {said['note']}")
        if "sent" in said:
            self.problem = None
        if "problem" in said:
            self.problem = f"cannot log to {self.name}: {said['problem']}"

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """End the process and those that it has started; nothing happens if they have ended."""
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL) if hasattr(os, "killpg") else process.kill()
        process.wait()
        self._listener.join(1.0)


class Logger(Protocol):
    """Where rows go; any method may raise."""

    def write(self, rows: Sequence[Row]) -> None:
        """Take rows of metrics.csv."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Take the summary, empty if the run was killed, and return when everything is sent."""


class Wandb:
    """A run of Weights & Biases, offline if WANDB_MODE says so; its files are in the run's folder."""

    def __init__(self, folder: RunFolder, config: Mapping[str, Any], say: Callable[..., None]) -> None:
        import wandb

        record = folder.path / "wandb.json"
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=os.environ.get("WANDB_NAME", folder.path.name),
            id=read_json(record).get("id"),
            resume="allow",
            config=dict(config),
            dir=os.environ.get("WANDB_DIR", str(folder.path)),
            settings=wandb.Settings(silent=True, console="off"),
        )
        # Steps of W&B must not go back, those of a resumed run do.
        self._run.define_metric("*", step_metric=COLUMNS[0])
        files, is_online = Path(self._run.dir).parent, not self._run.offline
        write_json(record, {"id": self._run.id, "url": self._run.url if is_online else None})
        say(note=self._run.url if is_online else f"offline; `wandb sync {files}` uploads it")

    def write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._run.log(row)

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._run.summary.update(dict(summary))
        self._run.finish(exit_code=0 if summary.get("status") in ("finished", "stopped") else 1)


class Mlflow:
    """A run of MLflow, at MLFLOW_TRACKING_URI; without it, in mlflow.db of the current folder."""

    def __init__(self, folder: RunFolder, config: Mapping[str, Any], say: Callable[..., None]) -> None:
        # The run's own retries are enough; MLflow's take four minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        import mlflow
        from mlflow import entities

        self._entities, self._client = entities, mlflow.MlflowClient()
        record, uri = folder.path / "mlflow.json", mlflow.get_tracking_uri()
        known = read_json(record)
        if known.get("tracking_uri") == uri:
            self._id = str(known["run_id"])
            self._client.update_run(self._id, status="RUNNING")
            return
        experiment = os.environ.get("MLFLOW_EXPERIMENT_ID")
        if experiment is None:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
            experiment = mlflow.set_experiment(name).experiment_id
        self._id = self._client.create_run(experiment, run_name=folder.path.name).info.run_id
        write_json(record, {"run_id": self._id, "experiment_id": experiment, "tracking_uri": uri})
        params = [entities.Param(name, str(value)[:MAX_PARAM]) for name, value in flat(config)]
        for first in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(self._id, params=params[first : first + MAX_PARAMS])
        say(note=f"run {self._id} at {uri}")

    def write(self, rows: Sequence[Row]) -> None:
        now = int(time.time() * 1000)
        self._client.log_batch(
            self._id,
            metrics=[
                self._entities.Metric(name, value, now, int(row[COLUMNS[0]]))
                for row in rows
                for name, value in row.items()
            ],
        )

    def finish(self, summary: Mapping[str, Any]) -> None:
        figures: Row = {}
        for name, value in flat(summary, "summary/"):
            if isinstance(value, int | float) and not isinstance(value, bool):
                figures[name] = value
            elif value is not None:
                self._client.set_tag(self._id, name, str(value)[:MAX_TAG])
        step = {COLUMNS[0]: float(summary.get("env_steps", 0))}
        self.write([step | {name: value for name, value in figures.items() if math.isfinite(value)}])
        self._client.set_terminated(self._id, MLFLOW_STATUS.get(summary.get("status"), "FAILED"))


LOGGERS: dict[str, type[Wandb] | type[Mlflow]] = {"wandb": Wandb, "mlflow": Mlflow}
"""By the name of the package, which is that of flatout's extra."""


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The entries of nested mappings, with names such as `ppo/gamma`."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}/")
        else:
            yield prefix + "".join(c if c.isalnum() or c in "_-./ " else "_" for c in str(name)), value


def new_rows(tail: Tail, header: list[str]) -> Iterator[Row]:
    """The rows that metrics.csv has gained, with the known figures of each; `header` is kept between calls."""
    replaced, lines = tail.read()
    if replaced:
        header.clear()
    for cells in csv.reader(line.decode(errors="replace") for line in lines):
        if not header:
            header.extend(cells)
            continue
        row = {name: cell_value(cell) for name, cell in zip(header, cells, strict=False)}
        yield {name: value for name, value in row.items() if math.isfinite(value)}


def follow(kind: str, path: Path, after: int, stdin: IO[bytes], say: Callable[..., None]) -> None:
    """Pass on the rows of a run after `after` env steps, until `stdin` ends, and then the summary read from it."""
    said: list[bytes] = []
    reader = threading.Thread(target=lambda: said.append(stdin.read()), daemon=True)
    reader.start()
    folder = RunFolder.open(path)
    config = {name: value for name, value in read_json(folder.config).items() if name != SIGNATURE}
    logger = LOGGERS[kind](folder, config, say)
    tail, header, is_last = Tail(folder.metrics), list[str](), False
    while not is_last:
        reader.join(POLL_SECONDS)
        is_last = not reader.is_alive()  # before the rows are read: those that come now are the last
        rows = [row for row in new_rows(tail, header) if row.get(COLUMNS[0], 0) > after]
        for first in range(0, len(rows), ROWS_AT_ONCE):
            some = rows[first : first + ROWS_AT_ONCE]
            logger.write(some)
            after = int(some[-1][COLUMNS[0]])
            say(sent=len(some), step=after)
    logger.finish(json_object(b"".join(said)) or {})


def main(kind: str, path: str, after: str) -> int:
    """The logger's process; returns its exit code."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the packages print is not for the run

    def say(**what: Any) -> None:
        out.write(json.dumps(what) + "\n")
        out.flush()

    try:
        follow(kind, Path(path), int(after), sys.stdin.buffer, say)
    except Exception as error:
        with suppress(OSError):  # the run was killed
            say(problem=one_line(error))
        os._exit(1)  # at exit W&B would wait for a server that does not answer
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
