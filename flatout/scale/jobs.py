"""A queue of jobs in a folder: one JSON file for each job, replaced whole, and a lock that the queue's process holds.

So the queue outlives its process: what it says is true at any moment, and `flatout jobs` goes on where it was.
"""

from __future__ import annotations

import os
import re
import signal
import tomllib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import sleep, time
from typing import Any

from flatout.config.trust import MEMORY, require_trust, signed
from flatout.envs.loader import absolute, is_file
from flatout.envs.make import env_factory
from flatout.errors import FlatoutError, did_you_mean
from flatout.runlog.files import read_json, write_json
from flatout.runlog.folder import RunLock, holder, is_locked, try_lock
from flatout.scale.processes import Found, find, identity
from flatout.scale.runner import Job

QUEUE = ".jobs"
"""Folder of the queue among the runs."""
NAME = re.compile(r"[\w][\w.-]*")


class Queue:
    """The jobs of one runs-dir."""

    def __init__(self, runs_dir: Path, *, trust: bool = False) -> None:
        """`trust`: whether to run code that its files name though this user did not sign it."""
        self.path, self._runs_dir, self._trust = runs_dir / QUEUE, runs_dir, trust
        self.lock = RunLock(self.path)
        self._jobs: dict[str, Job] = {}
        self._ours: set[str] = set()
        """Jobs that this process runs."""
        self._verified: dict[str, dict[str, Any]] = {}
        self._seen = -1

    def jobs(self) -> list[Job]:
        """All jobs, in the order in which they were added."""
        read = {path.stem: read_json(path) for path in self.path.glob("*.json")}
        known = sorted((data.get("added") or 0.0, name) for name, data in read.items() if data)
        return [_from_json(name, read[name], self._runs_dir, self._trust) for _, name in known]

    def add(self, jobs: Collection[Job], source: str) -> tuple[int, int]:
        """Add jobs; a job that is there with the same settings is kept. Returns how many are new and how many are there."""
        there = {job.name: job for job in self.jobs()}
        new = []
        for job in jobs:
            old = there.get(job.name)
            if old is None and job.run.exists():
                raise FlatoutError(
                    f"{source}: run '{job.name}' exists in {self._runs_dir}/; give the job another name"
                )
            if old is not None and (old.settings, old.config) != (job.settings, job.config):
                if old.state != "waiting":
                    raise FlatoutError(
                        f"{source}: job '{job.name}' is {old.state} with other settings; give it another name"
                    )
                old = None
            if old is None:
                new.append(job)
        self.path.mkdir(parents=True, exist_ok=True)
        now = time()
        for nth, job in enumerate(new):
            write_json(self._file(job), _to_json(job) | {"added": now + nth * 1e-3})
        return len(new), len(jobs) - len(new)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the queue's lock; refused while another process works through the queue."""
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            self.lock.take()
        except FlatoutError:
            pid = holder(self.path).get("pid")
            raise FlatoutError(
                f"the jobs of {self._runs_dir}/ are run by process {pid}; 'flatout jobs add' adds to them"
            ) from None
        try:
            for job in self.jobs():
                if job.state in ("stopped", "failed"):
                    job.state, job.n_restarts, job.afresh = "waiting", 0, False
                    self.save(job)
            yield
        finally:
            self.lock.release()

    def waiting(self) -> list[Job]:
        """Jobs to be started, and those that run and were left by a process that was killed."""
        if (now := os.stat(self.path).st_mtime_ns) != self._seen:
            self._seen, self._jobs = now, {job.name: job for job in self.jobs()}
            for job in self._jobs.values():
                if job.name not in self._ours and job.state in ("waiting", "running"):
                    self._verify(job)
        jobs = self._jobs.values()
        return [
            it
            for it in jobs
            if it.state == "waiting" or (it.state == "running" and it.name not in self._ours)
        ]

    def _verify(self, job: Job) -> None:
        """Refuse settings that are wrong and code that this user did not sign: the queue may be a stranger's."""
        path = self._file(job)
        if self._verified.get(job.name) == job.settings:
            return
        try:
            require_trust(read_json(path).get("settings"), str(path), trust=self._trust)
            _check(job, str(path))
            self._verified[job.name] = job.settings
        except FlatoutError as error:
            job.state, job.error = "failed", str(error)
            self.save(job)

    def save(self, job: Job) -> None:
        """Keep what has changed of a job."""
        with self._changing():
            path = self._file(job)
            before = read_json(path)
            write_json(path, before | _to_json(job))
        if job.state == "running":
            self._ours.add(job.name)

    def looks_at(self, job: Job) -> None:
        """Nothing depends on how a job goes."""

    def stop(self, names: Collection[str]) -> list[str]:
        """Stop these jobs, or the whole queue; returns what was stopped."""
        jobs = {job.name: job for job in self.jobs()}
        for name in names:
            if name not in jobs:
                raise FlatoutError(f"there is no job '{name}'{did_you_mean(name, jobs)}")
        if (
            not names
            and is_locked(self.path)
            and (queue := find(identity(holder(self.path).get("pid", 0)))) is not None
        ):
            queue.send_signal(signal.SIGTERM)
            _wait_for(queue)
            return ["the queue"]
        stopped = []
        for name in names or jobs:
            job = jobs[name]
            process = find(job.process) if job.state == "running" else None
            if process is not None:
                process.send_signal(signal.SIGTERM)
                stopped.append(name)
            elif job.state == "waiting" and names:
                with self._changing():
                    write_json(self._file(job), read_json(self._file(job)) | {"state": "stopped"})
                stopped.append(name)
        return stopped

    def _file(self, job: Job) -> Path:
        return self.path / f"{job.name}.json"

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """One process at a time changes a job's file."""
        descriptor = os.open(self.path / ".changing", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            while try_lock(descriptor) is False:
                sleep(0.01)
            yield
        finally:
            os.close(descriptor)


def _wait_for(process: Found) -> None:
    while process.poll() is None:
        sleep(0.05)


def read_jobs(path: Path, runs_dir: Path, *, trust: bool) -> list[Job]:
    """The jobs of a TOML file; every one is checked, and the first mistake is told with its place."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FlatoutError(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FlatoutError(f"{path} is not TOML: {error}") from error
    tables = data.pop("job", None)
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        near = did_you_mean("job", data)
        raise FlatoutError(f"{path}: there are no [[job]] tables{near}")
    jobs: list[Job] = []
    for nth, table in enumerate(tables, 1):
        jobs += make_jobs({**data, **table}, f"{path}: job {nth}", runs_dir, trust=trust)
    names = [job.name for job in jobs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise FlatoutError(f"{path}: two jobs are called '{twice}'; give each a name of its own")
    return jobs


def make_jobs(
    table: Mapping[str, Any], source: str, runs_dir: Path, *, trust: bool, typed: bool = False
) -> list[Job]:
    """The job of one table, or one for each of its `seeds`. `typed`: whether the user typed it, code and all."""
    settings = {name.replace("-", "_"): value for name, value in table.items()}
    name, n_seeds, config = (settings.pop(key, None) for key in ("name", "seeds", "config"))
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise FlatoutError(f"{source}: name is {name!r}; it must be letters, digits, '-', '_' and '.'")
    source = f"{source} '{name}'"
    if n_seeds is not None and (not isinstance(n_seeds, int) or isinstance(n_seeds, bool) or n_seeds < 1):
        raise FlatoutError(f"{source}: seeds is {n_seeds!r}; it must be a whole number of at least 1")
    if config is not None and not Path(str(config)).is_file():
        raise FlatoutError(f"{source}: config {config!r}: there is no such file")
    settings = {key: absolute(v) if isinstance(v, str) and is_file(v) else v for key, v in settings.items()}
    if not typed:
        require_trust(_by_section(settings), source, trust=trust)
    path = str(Path(str(config)).resolve()) if config is not None else None
    job = Job(name, settings, runs_dir, path, trust)
    _check(job, source)
    if n_seeds is None:
        return [job]
    first = int(settings.get("seed", 0))
    return [
        Job(f"{name}-seed{seed}", settings | {"seed": seed}, runs_dir, path, trust)
        for seed in range(first, first + n_seeds)
    ]


def _check(job: Job, source: str) -> None:
    """Refuse a job whose settings are wrong, before anything runs."""
    try:
        env_factory(job.resolved().env)
    except FlatoutError as error:
        raise FlatoutError(f"{source}: {error}") from None


def _by_section(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings in the form in which their code is signed."""
    section, memory = MEMORY
    top = ("env", "algo", "executor", "env_kwargs")
    rest = {name: value for name, value in settings.items() if name not in (*top, memory)}
    nested: dict[str, Any] = {name: settings[name] for name in top if name in settings} | {"settings": rest}
    return nested | ({section: {memory: settings[memory]}} if memory in settings else {})


def _to_json(job: Job) -> dict[str, Any]:
    state = {"state": job.state, "error": job.error, "process": job.process, "n_restarts": job.n_restarts}
    about = {"name": job.name, "config": job.config, "afresh": job.afresh}
    return about | state | {"settings": signed(_by_section(job.settings))}


def _from_json(name: str, data: Mapping[str, Any], runs_dir: Path, trust: bool) -> Job:
    """A job as it was saved; whether it is trusted is not the file's to say."""
    nested = data.get("settings") or {}
    settings = {
        key: value for key, value in nested.items() if not isinstance(value, dict) and key != "signature"
    }
    settings |= nested.get("settings", {}) | nested.get(MEMORY[0], {})
    if "env_kwargs" in nested:
        settings["env_kwargs"] = nested["env_kwargs"]
    return Job(
        name=name,
        settings=settings,
        runs_dir=runs_dir,
        config=data.get("config"),
        trust=trust,
        state=str(data.get("state") or "waiting"),
        error=str(data.get("error") or ""),
        process=dict(data.get("process") or {}),
        n_restarts=int(data.get("n_restarts") or 0),
        afresh=bool(data.get("afresh")),
    )
