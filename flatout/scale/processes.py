"""`flatout` commands side by side: each in a process and a session of its own, on cores of its own; signals are passed on.

A process outlives the one that started it. Who starts again finds it by its id and the time of its creation.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import psutil

from flatout.config.run_config import RunConfig
from flatout.device.accelerator import resolve_device
from flatout.perf.demand import Demand, predict

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
POLL_SECONDS = 0.1
FLATOUT = [sys.executable, "-m", "flatout"]
"""The command that starts flatout."""
LIFELINE = "FLATOUT_LIFELINE"
"""Environment variable with the read end of a pipe: a command ends when the write end is closed."""


class Command(Protocol):
    """A command that was started here, by another process, or on another machine."""

    @property
    def returncode(self) -> int | None:
        """The exit code; None while it runs, and if it is not known."""

    def poll(self) -> int | None:
        """None while it runs."""

    def send_signal(self, number: int) -> None:
        """Send a signal, if it still runs."""


class Found:
    """A process that another one started; its exit code is not known."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process
        self.pid: int = process.pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """None while it runs."""
        with suppress(psutil.Error):
            if self._process.is_running() and self._process.status() != psutil.STATUS_ZOMBIE:
                return None
        return 0

    def send_signal(self, number: int) -> None:
        """Send a signal, if it still runs."""
        with suppress(psutil.Error):
            self._process.send_signal(number)


def identity(pid: int) -> dict[str, Any]:
    """What tells a process from a later one with the same id."""
    try:
        return {"pid": pid, "created": psutil.Process(pid).create_time()}
    except psutil.Error:
        return {"pid": pid, "created": None}


def find(known: Mapping[str, Any]) -> Found | None:
    """The process with this identity, if it still runs."""
    pid, created = known.get("pid"), known.get("created")
    if not isinstance(pid, int) or created is None:
        return None
    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - float(created)) < 1.0
    except (psutil.Error, ValueError):
        return None
    found = Found(process)
    return found if same and found.poll() is None else None


@dataclass
class Processes:
    """Commands of flatout that run at the same time, by name."""

    running: dict[str, Command] = field(default_factory=dict)
    stopped_by: signal.Signals | None = None
    """The first signal that came."""

    def start(
        self,
        name: str,
        words: Collection[str],
        *,
        cores: Collection[int] = (),
        log: Path | None = None,
        env: Mapping[str, str] | None = None,
        demand: Demand | None = None,  # noqa: ARG002
        pass_fds: Collection[int] = (),
    ) -> dict[str, Any]:
        """Run `flatout` with these words, on these cores if any are given; returns the process's identity.

        `log`: a file for what it prints; without one it prints here. `demand`: for a place that has to be found.
        """
        output = None if log is None else os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            with _on(cores):
                # A session of its own: Ctrl-C reaches it once, through this process.
                process = subprocess.Popen(
                    [*FLATOUT, *words],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env={**os.environ, **(env or {})},
                    start_new_session=True,
                    pass_fds=tuple(pass_fds),
                )
        finally:
            if output is not None:
                os.close(output)
        self.running[name] = process
        if self.stopped_by is not None:  # the signal came while it was being started
            process.send_signal(self.stopped_by)
        return identity(process.pid)

    def demand(self, config: RunConfig) -> tuple[Demand, str]:
        """What a run needs of this machine, and the device that it uses."""
        device = resolve_device(config.device)
        return predict(config, n_cores=1, on_device=device != "cpu"), device

    def ended(self) -> dict[str, int | None]:
        """Processes that have ended since the last call, with their exit codes; None if that is not known."""
        done = [name for name, process in self.running.items() if process.poll() is not None]
        return {name: self.running.pop(name).returncode for name in done}

    def stop(self, name: str, number: int = signal.SIGTERM) -> None:
        """Ask a process to save and end."""
        if (process := self.running.get(name)) is not None:
            process.send_signal(number)

    @contextmanager
    def forwarding_signals(self) -> Iterator[None]:
        """Send every signal on to the processes, which stop and save."""

        def forward(signum: int, _: FrameType | None) -> None:
            self.stopped_by = self.stopped_by or signal.Signals(signum)
            for name in list(self.running):
                self.stop(name, signum)

        before = {n: signal.signal(n, forward) for n in SIGNALS if signal.getsignal(n) != signal.SIG_IGN}
        try:
            yield
        finally:
            for n, handler in before.items():
                signal.signal(n, handler)


@contextmanager
def _on(cores: Collection[int]) -> Iterator[None]:
    """Use only these cores meanwhile: a new process inherits that."""
    if not cores or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def as_flags(settings: Mapping[str, Any]) -> list[str]:
    """Settings as flags of `flatout train`."""
    words = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list | tuple):
            words.append(f"--{flag}={','.join(map(str, value)) or 'none'}")
        else:
            words.append(f"--{flag}={json.dumps(value) if isinstance(value, Mapping) else value}")
    return words


def last_line(log: Path) -> str:
    """The last line that a command printed, without its name; empty if it printed nothing."""
    with suppress(OSError):
        lines = log.read_text(errors="replace").split("\n")
        return next((line.removeprefix("flatout: ") for line in reversed(lines) if line.strip()), "")
    return ""
