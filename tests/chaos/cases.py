"""One case: a training run with seeded faults from inside (its envs) and outside (signals, disk), resumed to its end."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from flatout.errors import FlatoutError
from flatout.training.checkpoint import CheckpointFolder

ENVS = Path(__file__).with_name("envs.py")
EXECUTORS = {
    "serial": ("ChaosEnv", ["--executor", "serial"]),
    "process": ("ChaosEnv", ["--executor", "process", "--n-workers", "2"]),
    "thread": ("ChaosEnv", ["--executor", "thread"]),
    "async": ("AsyncChaosEnv", ["--executor", "async"]),
    "collectors": ("ChaosEnv", ["--n-collectors", "2"]),
    "batched": ("ChaosVec", ["--executor", "batched"]),
}
ISOLATED = ("process", "collectors")
"""Executors whose envs are not in the run's own process."""
SURVIVED = ("crash", "slow", "clock")
"""Faults of envs that a run survives with every executor but batched."""
HANGS = ("process", "collectors", "thread", "async")
"""Executors that replace an env that hangs."""
ENDING = ("nan", "shape")
"""Faults of envs that end a run with one line."""
OUTSIDE = ("term group", "int", "int twice", "hup", "kill run", "full disk", "read-only", "second terminal")
ON_WORKERS = ("kill worker", "stop worker", "kill fork server")
STEPS, RUN_SECONDS, STEP_TIMEOUT = 30_000, 120.0, 1.5


@dataclass
class Case:
    """What happens, all of it drawn from the seed."""

    seed: int
    executor: str = ""
    overlap: str = ""
    algo: str = ""
    inside: list[str] = field(default_factory=list)
    outside: list[tuple[float, str]] = field(default_factory=list)
    """Seconds after the run has begun to learn, and the fault."""
    corrupt_cache: bool = False

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        self.executor = list(EXECUTORS)[self.seed % len(EXECUTORS)]
        self.overlap = rng.choice(["on", "off"])
        self.algo = rng.choice(["ppo", "dqn", "pqn"])
        kinds = [] if self.executor == "batched" else list(SURVIVED)
        kinds += ["hang"] if self.executor in HANGS else []
        kinds += ["exit", "die", "segfault"] if self.executor in ISOLATED else []
        if kinds:
            self.inside = [
                f"{rng.choice(kinds)}@{rng.randrange(20, 1500)}-{i}" for i in range(rng.randrange(3, 7))
            ]
        if kinds and rng.random() < 0.15:
            self.inside.append(f"{rng.choice(ENDING)}@{rng.randrange(500, 1500)}-end")
        outside = [*OUTSIDE, *(ON_WORKERS * 2 if self.executor in ISOLATED else ())]
        times = sorted(rng.uniform(0.0, 4.0) for _ in range(rng.randrange(3, 7)))
        self.outside = [(at, rng.choice(outside)) for at in times]
        self.corrupt_cache = rng.random() < 0.2

    def __str__(self) -> str:
        faults = [name.partition("@")[0] for name in self.inside] + [kind for _, kind in self.outside]
        return f"case {self.seed}: {self.executor}, overlap {self.overlap}, {self.algo}: {', '.join(faults)}"


@dataclass
class Outcome:
    """How a case went."""

    case: Case
    faults: list[str] = field(default_factory=list)
    """The faults that took place."""
    violations: list[str] = field(default_factory=list)
    n_runs: int = 0
    seconds: float = 0.0


class Run:
    """One process of the run, its output, and what is done to it."""

    def __init__(self, words: list[str], folder: Path, mark: str, own_loops: bool = False) -> None:
        env = {
            **os.environ,
            "CHAOS": mark,
            "TMPDIR": str(folder / "tmp"),
            "FLATOUT_CACHE": str(folder / "cache"),
        }
        if own_loops:  # compiled for this case alone, so that their files can be damaged
            env["NUMBA_CACHE_DIR"] = str(folder / "cache")
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.run", *words],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            env=env,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with suppress(ValueError):
            self._lines.extend(iter(self.process.stderr.readline, ""))

    @property
    def errors(self) -> str:
        """Standard error so far."""
        return "".join(self._lines)

    def has_written(self, path: Path) -> bool:
        """Whether the file is there and has been written since this process was started."""
        try:
            return path.stat().st_mtime > time.time() - (time.monotonic() - self.began)
        except OSError:
            return False

    def wait(self, seconds: float) -> int | None:
        """Its exit code; None if it has not ended by then."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        self._reader.join(5)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code


def marked(mark: str) -> list[psutil.Process]:
    """All processes that were started for a case."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("CHAOS") == mark:
                found.append(process)
    return found


class Chaos:
    """Runs one case in a folder of its own."""

    def __init__(self, case: Case, folder: Path) -> None:
        self._case, self._folder = case, folder
        self._runs, self._run = folder / "runs", folder / "runs" / "r"
        self._faults = folder / "faults"
        self._mark = f"{os.getpid()}-{case.seed}-{time.monotonic_ns()}"
        self.outcome = Outcome(case)
        self._killed = False
        """Whether the run was killed, so that it could not tidy up."""
        self._disk_failed = False
        """Whether the disk failed while this process ran, which may then have ended without saving anything."""

    def play(self) -> Outcome:
        """Start the run, inject its faults, resume it until it has finished, check."""
        began = time.monotonic()
        for name in ("tmp", "cache", "faults", "runs"):
            (self._folder / name).mkdir()
        for name in self._case.inside:
            (self._faults / name).touch()
        outside = list(self._case.outside)
        with self._small_disk():
            done = False
            while not done and not self.outcome.violations and self.outcome.n_runs < 12:
                done = self._one_run(outside)
            if not done and not self.outcome.violations:
                self._violated("the run did not finish in 12 attempts")
            self._check_leftovers()
        claimed = [path.name.split()[1].partition("@")[0] for path in self._faults.glob("done *")]
        self.outcome.faults += claimed
        self.outcome.seconds = time.monotonic() - began
        return self.outcome

    def _words(self) -> list[str]:
        if any((self._run / "checkpoints").glob("step-*.flatout")):
            return ["resume", "r", "--runs-dir", str(self._runs)]
        cls, flags = EXECUTORS[self._case.executor]
        kwargs = {"faults": str(self._faults), "step_seconds": 0.0002}
        sizes = ["--n-envs", "8", "--n-steps", "32", "--timesteps", str(STEPS), "--network-arch", "16"]
        words = ["train", f"{ENVS}:{cls}", "--algo", self._case.algo, *flags, *sizes]
        words += ["--overlap", self._case.overlap, "--env-kwargs", json.dumps(kwargs)]
        words += ["--seed", str(self._case.seed), "--checkpoint-every", "2000", "--eval-every", "10000"]
        words += ["--eval-episodes", "2", "--step-timeout", str(STEP_TIMEOUT)]
        return [*words, "--run-name", "r", "--runs-dir", str(self._runs), "--overwrite"]

    def _one_run(self, outside: list[tuple[float, str]]) -> bool:
        """Start or resume the run and inject faults until it ends; true when it has finished."""
        if self._case.corrupt_cache and self.outcome.n_runs == 1:
            self._corrupt_cache()
        self.outcome.n_runs += 1
        self._disk_failed = False
        (self._faults / "armed").unlink(missing_ok=True)
        run = Run(self._words(), self._folder, self._mark, own_loops=self._case.corrupt_cache)
        learned_at, n_stops = None, 0
        deadline = time.monotonic() + RUN_SECONDS
        while run.wait(0.02) is None:
            now = time.monotonic()
            if now > deadline:
                self._violated(f"still running after {RUN_SECONDS:g} s: {run.errors[-500:]}")
                for process in marked(self._mark):
                    with suppress(psutil.Error):
                        process.kill()
                run.wait(10)
                return False
            if learned_at is None and run.has_written(self._run / "progress.json"):
                learned_at = now
                (self._faults / "armed").touch()
            if learned_at is not None and outside and now - learned_at >= outside[0][0]:
                _, kind = outside.pop(0)
                if kind == "second terminal" and n_stops:  # it may be the only one by now
                    continue
                n_stops += self._inject(kind, run)
                outside[:] = [(max(at - (now - learned_at), 0.0), what) for at, what in outside]
                learned_at = now
        return self._check_end(run, n_stops)

    def _inject(self, kind: str, run: Run) -> int:
        """Do it; returns how many signals ask the run to stop."""
        group = run.process.pid
        if kind in ("kill worker", "stop worker", "kill fork server"):
            if not self._hit_worker(kind, run):
                return 0
        elif kind in ("full disk", "read-only"):
            self._hurt_disk(kind, run)
        elif kind == "second terminal":
            self._second_terminal(run)
        else:
            with suppress(ProcessLookupError):
                if kind == "term group":
                    os.killpg(group, signal.SIGTERM)
                elif kind == "kill run":
                    self._killed = True
                    os.kill(group, signal.SIGKILL)
                elif kind == "hup":
                    os.kill(group, signal.SIGHUP)
                else:
                    os.kill(group, signal.SIGINT)
                    if kind == "int twice":
                        time.sleep(0.3)
                        os.kill(group, signal.SIGINT)
        self.outcome.faults.append(kind)
        return {"term group": 1, "hup": 1, "int": 1, "int twice": 2, "kill run": 1}.get(kind, 0)

    def _hit_worker(self, kind: str, run: Run) -> bool:
        server, workers = list[psutil.Process](), list[psutil.Process]()
        for process in marked(self._mark):
            with suppress(psutil.Error):  # it may end at any moment
                if "forkserver" in " ".join(process.cmdline()):
                    (server if process.ppid() == run.process.pid else workers).append(process)
        victims = server if kind == "kill fork server" else workers
        if not victims:
            return False
        number = signal.SIGSTOP if kind == "stop worker" else signal.SIGKILL
        with suppress(psutil.Error):
            random.Random(self._case.seed).choice(victims).send_signal(number)
        return True

    def _hurt_disk(self, kind: str, run: Run) -> None:
        """For a second nothing can be written: on a small file system of its own, or by a limit of the process."""
        self._disk_failed = True
        if not self._has_disk:
            before = resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE, (0, before[1]))
            time.sleep(1.0)
            with suppress(ProcessLookupError):
                resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE, before)
        elif kind == "read-only":
            # MS_RDONLY is refused while files are open for writing, so the run's own files stay writable.
            subprocess.run(["mount", "-o", "remount,ro", str(self._runs)], check=False, capture_output=True)
            time.sleep(1.0)
            subprocess.run(["mount", "-o", "remount,rw", str(self._runs)], check=False, capture_output=True)
        else:
            filler = self._runs / "filler"
            with suppress(OSError), filler.open("wb", buffering=0) as file:
                while file.write(bytes(1 << 16)):
                    pass
            time.sleep(1.0)
            filler.unlink(missing_ok=True)

    def _second_terminal(self, run: Run) -> None:
        """Resuming a run that is training is refused, and harms nothing."""
        other = Run(["resume", "r", "--runs-dir", str(self._runs)], self._folder, self._mark)
        code = other.wait(60)
        has_ended = run.process.poll() is not None  # then the second one is the only one
        if not has_ended and (code != 2 or other.errors.count("\n") != 1):
            self._violated(f"a second terminal got exit code {code}: {other.errors}")

    def _corrupt_cache(self) -> None:
        rng = random.Random(self._case.seed)
        found = (self._folder / "cache").rglob("*")
        files = sorted(path for path in found if path.is_file() and path.name != "signing.key")
        for path in rng.sample(files, min(len(files), 3)):
            os.truncate(path, path.stat().st_size // 2)
        if files:
            self.outcome.faults.append("corrupt cache")

    def _check_end(self, run: Run, n_stops: int) -> bool:
        """What must hold after a process has ended; true when the run has finished."""
        code, errors = run.process.returncode, run.errors
        if "Traceback" in errors or "CHAOS" in errors:
            self._violated(f"exit code {code}: {errors[-3000:]}")
            return False
        summary: dict[str, Any] = {}
        if run.has_written(self._run / "summary.json"):
            summary = json.loads((self._run / "summary.json").read_text())
        # A second signal may come when everything is saved and the handlers are those of Python again.
        stopped = n_stops > 0 and code in (-9, 129, 130, 143, *((-1, -2, -15) if n_stops > 1 else ()))
        if code == 0:
            self._check_saved(summary)
            if summary.get("status") != "finished":
                self._violated(f"exit code 0, but the summary says {summary.get('status')}")
            return True
        if code == 1 and self._disk_failed and "\nflatout: cannot write" in f"\n{errors}":
            self._newest()  # it says that its end is not saved
            return False
        if code in (1, 2):
            return self._check_refusal(errors)
        if not stopped:
            self._violated(f"ended with exit code {code} for no reason: {errors[-1000:]}")
        elif code != -9 and summary.get("status") in ("stopped", "finished"):
            self._check_saved(summary)
        else:
            self._newest()
            if not (code == -9 or self._disk_failed or n_stops > 2):
                self._violated(f"stopped with exit code {code}, but not saved: {errors[-1000:]}")
        return False

    def _check_refusal(self, errors: str) -> bool:
        """A run that ends by itself says why in one line; an env that breaks its contract is a reason."""
        lines = [line for line in errors.splitlines() if line.startswith("flatout: ")]
        lines = [line for line in lines if not line.startswith("flatout: cannot write")]
        ends = [name for name in self._case.inside if name.partition("@")[0] in ENDING]
        expected = ends and any((self._faults / f"done {name}").exists() for name in ends)
        if len(lines) != 1 or not (expected or "gave up" in lines[0] or "is finished: " in lines[0]):
            self._violated(f"ended by itself: {errors[-2000:]}")
        self._newest()
        return True

    def _check_saved(self, summary: dict[str, Any]) -> None:
        """The newest checkpoint is the one that the summary reports."""
        newest = self._newest()
        if newest is not None and summary.get("env_steps") != newest:
            self._violated(
                f"the summary says {summary.get('env_steps')} steps, the newest checkpoint {newest}"
            )

    def _newest(self) -> int | None:
        """Env steps of the newest checkpoint, which loads; None if none was written yet."""
        folder = self._run / "checkpoints"
        if not any(folder.glob("*.flatout")):
            return None
        try:
            _, checkpoint, skipped = CheckpointFolder(folder).newest()
        except FlatoutError as error:
            self._violated(f"no checkpoint can be read: {error}")
            return None
        if skipped:
            self._violated(f"damaged checkpoints: {skipped}")
        return int(checkpoint.state["progress"]["env_steps"])

    def _check_leftovers(self) -> None:
        deadline = time.monotonic() + 8
        while (left := marked(self._mark)) and time.monotonic() < deadline:
            time.sleep(0.1)
        for process in left:
            with suppress(psutil.Error):
                self._violated(f"left behind: {process.pid} {' '.join(process.cmdline())[:200]}")
                process.kill()
        parts = [] if self._killed else [p.name for p in self._run.rglob(".*.part*")]
        temporary = [] if self._killed else [p.name for p in (self._folder / "tmp").iterdir()]
        if parts or temporary:
            self._violated(f"temporary files left: {parts + temporary}")

    def _violated(self, text: str) -> None:
        self.outcome.violations.append(text)

    @contextmanager
    def _small_disk(self) -> Iterator[None]:
        """The runs folder as a file system of its own, where this user may mount one."""
        command = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(self._runs)]
        self._has_disk = subprocess.run(command, check=False, capture_output=True).returncode == 0
        try:
            yield
        finally:
            if self._has_disk:
                subprocess.run(["umount", "-l", str(self._runs)], check=False, capture_output=True)


def play(seed: int) -> Outcome:
    """Play the case of a seed in a temporary folder."""
    folder = Path(tempfile.mkdtemp(prefix=f"chaos-{seed}-"))
    shm = set(os.listdir("/dev/shm"))
    try:
        outcome = Chaos(Case(seed), folder).play()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if left := {name for name in set(os.listdir("/dev/shm")) - shm if "flatout" in name}:
        outcome.violations.append(f"shared memory left: {left}")
    return outcome
