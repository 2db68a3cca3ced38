"""Runs jobs side by side: starts each when there is room for it, looks after them, and passes signals on.

A job is a `flatout train` in a process of its own, with its run's folder as usual. One that is interrupted, by a signal,
a crash or the end of the machine, goes on from its run's checkpoint when it is started again.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep, time
from typing import Any, Protocol

from flatout.config.run_config import RunConfig, resolve
from flatout.device.machine import usable_cores
from flatout.perf.demand import Demand
from flatout.runlog.files import number, read_json
from flatout.runlog.folder import holder, is_locked
from flatout.scale.processes import POLL_SECONDS, SIGNALS, Processes, as_flags, find, identity, last_line
from flatout.scale.schedule import Running, Schedule

LOOK_SECONDS = 1.0
"""Time between two looks at the runs: they write their progress once a second."""
CLOCK_SECONDS = 1.0
"""By how much the times of a file and of a process may differ."""
MAX_RESTARTS = 3
"""How often a job whose process was killed is started again."""
ALL_STEPS = "is finished: "
"""What `flatout resume` says of a checkpoint with all env steps; its run was killed just before it wrote its summary."""
MPS_PIPE = "CUDA_MPS_PIPE_DIRECTORY"
SIDE_BY_SIDE = "several runs on one card take turns there; CUDA MPS lets them compute at the same time: nvidia-cuda-mps-control -d"


@dataclass
class Job:
    """A run to be done."""

    name: str
    """Of the job and of its run's folder."""
    settings: dict[str, Any]
    """The env and the settings of `flatout train`."""
    runs_dir: Path
    config: str | None = None
    """A file for --config."""
    trust: bool = False
    state: str = "waiting"
    """waiting, running, finished, stopped or failed."""
    error: str = ""
    """Why it failed."""
    process: dict[str, Any] = field(default_factory=dict)
    """Identity of its process."""
    n_restarts: int = 0
    afresh: bool = False
    """Whether to begin again, because its checkpoint has nothing left to do."""

    @property
    def run(self) -> Path:
        """The folder of its run."""
        return self.runs_dir / self.name

    @property
    def is_begun(self) -> bool:
        """Whether its run has a checkpoint."""
        return any((self.run / "checkpoints").glob("*.flatout"))

    def resolved(self) -> RunConfig:
        """The complete config; raises where a setting is wrong."""
        rest = {name: value for name, value in self.settings.items() if name != "env"}
        file = Path(self.config) if self.config else None
        return resolve(
            self.settings.get("env"), rest, device="cpu", n_cores=usable_cores(), file=file, trust=self.trust
        )

    def command(self) -> list[str]:
        """What begins the run, or continues it from its newest checkpoint."""
        trust = ["--trust"] if self.trust else []
        if self.is_begun and not self.afresh:
            return ["resume", str(self.run), "--quiet", *trust]
        rest = {name: value for name, value in self.settings.items() if name != "env"}
        words = ["train", *([self.settings["env"]] if "env" in self.settings else []), *as_flags(rest)]
        words += ["--config", self.config] if self.config else []
        words += ["--overwrite"] if self.run.exists() else []
        return [*words, "--runs-dir", str(self.runs_dir), "--run-name", self.name, "--quiet", *trust]


class Work(Protocol):
    """Where jobs come from, and what is kept of them."""

    def waiting(self) -> list[Job]:
        """Jobs that may begin now; `running` are those that an earlier runner left."""

    def save(self, job: Job) -> None:
        """Keep what has changed of a job."""

    def looks_at(self, job: Job) -> None:
        """Called about once a second for every job that runs."""


class Runner:
    """Works through jobs."""

    def __init__(
        self,
        work: Work,
        logs: Path,
        *,
        at_once: int | None = None,
        processes: Processes | None = None,
        schedule: Schedule | None = None,
        tell: Callable[[str], None] = lambda _: None,
        show: Callable[[Runner], None] = lambda _: None,
    ) -> None:
        """`logs`: folder for what jobs print. `processes`, `schedule`: where jobs run and when, unless on this machine.

        `show` is called about once a second.
        """
        self._work, self._logs, self._tell, self._show = work, logs, tell, show
        self.processes, self.schedule = processes or Processes(), schedule or Schedule(at_once)
        self.jobs: dict[str, Job] = {}
        """Those that run."""
        self._runs: dict[str, Running] = {}
        self._demands: dict[str, tuple[Demand, str]] = {}
        self._told: set[str] = set()
        self._stopping: set[str] = set()

    def run(self) -> None:
        """Run until no job is left or a signal has stopped all."""
        looked = float("-inf")
        with self.processes.forwarding_signals():
            while self._begin_more() or self.jobs:
                sleep(POLL_SECONDS)
                for name, code in self.processes.ended().items():
                    self._end(self.jobs.pop(name), code)
                if monotonic() - looked >= LOOK_SECONDS:
                    looked = monotonic()
                    self.schedule.measure(self._runs)
                    for job in list(self.jobs.values()):
                        self._work.looks_at(job)
                    self._show(self)

    def stop(self, job: Job) -> None:
        """Ask a job to save and end, once: a second signal would not let it save."""
        if job.name not in self._stopping:
            self._stopping.add(job.name)
            self.processes.stop(job.name)

    def cores_of(self, name: str) -> tuple[int, ...]:
        """The cores of a running job; empty: all."""
        return self._runs[name].cores if name in self._runs else ()

    def adopt(self, job: Job) -> bool:
        """Look after a job's process that an earlier runner started, if it still runs."""
        found = find(job.process)
        if found is None and is_locked(job.run) and (it := holder(job.run)).get("host") == platform.node():
            found = find(identity(it.get("pid", 0)))
        if found is None:
            return False
        self.processes.running[job.name] = found
        self._begun(job, identity(found.pid), ())
        return True

    def _take_up(self, job: Job) -> bool:
        """Look after a job that an earlier runner left, or see that it has finished; false if it has to be started."""
        if self.adopt(job):
            return True
        if _status(job) != "finished":
            return False
        job.state = "finished"
        self._work.save(job)
        return True

    def _begin_more(self) -> bool:
        """Start jobs while there is room; whether any is left to start."""
        while self.processes.stopped_by is None and (waiting := self._work.waiting()):
            job = max(waiting, key=self._seconds)  # the longest first: short ones fill the end
            if job.state == "running" and self._take_up(job):
                continue
            demand, device = self._demand(job)
            if not self.schedule.admits(self._runs.values(), demand, device):
                return True
            cores = self.schedule.cores_for(self._runs.values(), demand, len(waiting))
            log = self._logs / f"{job.name}.log"
            process = self.processes.start(
                job.name, job.command(), cores=cores, log=log, env=_card_settings(device), demand=demand
            )
            self._begun(job, process, cores)
            self._note_mps(device)
        return False

    def _begun(self, job: Job, process: Mapping[str, Any], cores: tuple[int, ...]) -> None:
        job.state, job.process, job.error = "running", dict(process), ""
        self._work.save(job)
        demand, device = self._demand(job)
        self.jobs[job.name] = job
        began = number(job.process.get("created")) or time()
        self._runs[job.name] = Running(job.name, job.run, demand, cores, device, began)

    def _end(self, job: Job, code: int | None) -> None:
        del self._runs[job.name]
        self._stopping.discard(job.name)
        if is_locked(job.run) and self.adopt(job):
            return  # another process trains there: an earlier runner was killed before it could say so
        status = _status(job)
        stopping = self.processes.stopped_by is not None or -(code or 0) in SIGNALS
        if status in ("finished", "stopped"):
            job.state = status
        elif stopping:
            job.state = "stopped"
        elif (code is None or code < 0) and job.n_restarts < MAX_RESTARTS:
            job.state, job.n_restarts = "waiting", job.n_restarts + 1
            self._tell(f"{job.name}: its process was killed; it starts again")
        elif code == 2 and ALL_STEPS in self._last_line(job) and not job.afresh:
            job.state, job.afresh = "waiting", True
            self._tell(
                f"{job.name}: it was killed after its last step, before its results were written; it begins again"
            )
        else:
            why = read_json(job.run / "summary.json").get("error") if status == "failed" else ""
            job.state, job.error = "failed", str(why or self._last_line(job) or f"exit code {code}")
        self._work.save(job)

    def _last_line(self, job: Job) -> str:
        return last_line(self._logs / f"{job.name}.log")

    def _seconds(self, job: Job) -> float:
        """How long a job takes by the model; one that has begun comes first."""
        if job.state == "running":
            return float("inf")
        demand, _ = self._demand(job)
        try:
            return job.resolved().timesteps / demand.steps_per_second
        except ValueError:
            return 0.0

    def _demand(self, job: Job) -> tuple[Demand, str]:
        """What a job needs, and the device that it uses."""
        if job.name not in self._demands:
            try:
                self._demands[job.name] = self.processes.demand(job.resolved())
            except ValueError:  # the run itself will say what is wrong
                self._demands[job.name] = Demand(steps_per_second=1e9, cores=1.0), "cpu"
        return self._demands[job.name]

    def _note_mps(self, device: str) -> None:
        """Name CUDA MPS once if it would help."""
        several = sum(it.device == device for it in self._runs.values()) > 1
        if device.startswith("cuda") and several and not mps_runs() and SIDE_BY_SIDE not in self._told:
            self._told.add(SIDE_BY_SIDE)
            self._tell(f"note: {SIDE_BY_SIDE}")


def mps_runs() -> bool:
    """Whether the daemon of CUDA MPS runs for this user."""
    return _mps_folder().joinpath("control").exists()


def _mps_folder() -> Path:
    return Path(os.environ.get(MPS_PIPE) or "/tmp/nvidia-mps")


def _card_settings(device: str) -> dict[str, str]:
    """Environment of a job on a card: it uses CUDA MPS if its daemon runs."""
    return {MPS_PIPE: str(_mps_folder())} if device.startswith("cuda") and mps_runs() else {}


def _status(job: Job) -> str | None:
    """How the job's last process has ended its run; None if it has not."""
    path = job.run / "summary.json"
    try:
        written = path.stat().st_mtime
    except OSError:
        return None
    is_older = written < (number(job.process.get("created")) or 0.0) - CLOCK_SECONDS
    return None if is_older else read_json(path).get("status")
