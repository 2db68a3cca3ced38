"""Hyper-parameter search on Optuna: every trial is a job, its run in the sweep's folder.

The study is a journal file, so several processes, on several machines with a shared folder, work on one study, and a
process that is killed loses nothing that was told. A trial that was interrupted goes on from its run's checkpoint.
"""

from __future__ import annotations

import json
import math
import os
import platform
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from time import monotonic
from typing import TYPE_CHECKING, Any

from flatout.algorithms.space import Space
from flatout.errors import FlatoutError, did_you_mean
from flatout.runlog.files import number, read_json, write_json
from flatout.runlog.folder import RunFolder, is_locked, try_lock
from flatout.runlog.recorder import cell_value, read_rows
from flatout.scale.processes import find, identity
from flatout.scale.runner import Job
from flatout.scale.spaces import defaults_in, settings_of, suggest

if TYPE_CHECKING:
    import optuna

SAMPLERS = ("tpe", "random", "gp", "qmc")
OBJECTIVES = ("return", "time-to-target")
RUNGS = 9
"""A trial's return is told to the pruner after every ninth of its env steps."""
TOO_LONG = 2.0
"""Searching for the shortest time to a target, a trial that has taken this many times as long as the best …"""
LUCKY = 2
"""… but so many, which may have been lucky, is pruned."""
UNREACHED = 1e6
"""Seconds, and more, of a trial that has not reached its target."""
MAX_FAILED = 5
"""So many failed trials, and no other, end a sweep."""
REFRESH_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """What to search, and how."""

    env: str
    given: Mapping[str, Any]
    """Settings that are the same in all trials."""
    space: Space
    folder: Path
    """Of the runs, the result, and the journal unless `storage` says otherwise."""
    storage: Path
    algo: str
    n_trials: int
    timesteps: int
    objective: str = "return"
    sampler: str = "tpe"
    seed: int = 0

    @property
    def maximizes(self) -> bool:
        """Whether a larger value is better."""
        return self.objective == "return"

    @property
    def target(self) -> float | None:
        """The return to reach."""
        return number(self.given.get("target_return"))

    def job(self, name: str, settings: Mapping[str, Any], seed: int) -> Job:
        """A run with these settings."""
        every = {"env": self.env, **self.given, **settings, "timesteps": self.timesteps, "seed": seed}
        return Job(name, every, self.folder)

    def facts(self) -> dict[str, Any]:
        """What makes two sweeps the same study."""
        given = {key: value for key, value in self.given.items() if key not in ("timesteps", "seed")}
        told = {"env": self.env, "algo": self.algo, "objective": self.objective, "timesteps": self.timesteps}
        return told | {
            "given": json.loads(json.dumps(given, default=str)),
            "space": repr(sorted(self.space.items())),
        }


class Trials:
    """The trials of a study as jobs for a runner."""

    def __init__(self, plan: SweepPlan) -> None:
        self.plan, self.study = plan, open_study(plan)
        self._trials: dict[str, Any] = {}
        """Trials that this process runs, by the name of their job."""
        self._pending: Job | None = None
        """A job that waits for room."""
        self._left = self._orphans()
        """Jobs that were begun and have to be begun again."""
        self._rung: dict[str, int] = {}
        self.to_prune: set[str] = set()
        """Jobs that the runner is to stop."""
        self.failed: list[str] = []
        """Errors of failed trials."""
        self._is_complete, self._looked = False, float("-inf")

    def waiting(self) -> list[Job]:
        """The next trial, those first that a process of this machine has left."""
        if self._pending is None and self._left:
            self._pending = self._left.pop(0)
        if self._pending is None and not self._has_enough():
            self._pending = self._ask()
        return [self._pending] if self._pending is not None else []

    def save(self, job: Job) -> None:
        """Tell the study how a trial ended."""
        from optuna.trial import TrialState

        trial = self._trials[job.name]
        if job is self._pending:
            self._pending = None
        if job.state == "waiting":
            self._left.insert(0, job)
        elif job.state == "running":
            trial.set_user_attr("process", {"host": platform.node(), **job.process})
        elif job.name in self.to_prune and job.state == "stopped":
            self._tell(job, state=TrialState.PRUNED)
        elif job.state == "finished":
            self._report(job)
            self._finish(job)
        elif job.state == "failed":
            self.failed.append(job.error)
            trial.set_user_attr("error", job.error)
            self._tell(job, state=TrialState.FAIL)

    def looks_at(self, job: Job) -> None:
        """Tell the pruner how far a trial is, and prune it if others were better by then."""
        if job.name in self.to_prune:
            return
        if self._report(job) and self._trials[job.name].should_prune():
            self.to_prune.add(job.name)
        if not self.plan.maximizes and self._takes_too_long(job):
            self.to_prune.add(job.name)

    def label(self, job: Job) -> str:
        """The values of a trial in a few words."""
        return ", ".join(f"{name} {_short(value)}" for name, value in self._trials[job.name].params.items())

    def _ask(self) -> Job:
        with _asking(self.plan):
            trial = self.study.ask()
            _own(trial)
        return self._job(trial, suggest(trial, self.plan.space))

    def _job(self, trial: Any, values: Mapping[str, Any]) -> Job:
        plan, name = self.plan, f"trial-{trial.number:04d}"
        self._trials[name] = trial
        return plan.job(name, settings_of(values, plan.env, plan.given), plan.seed)

    def _orphans(self) -> list[Job]:
        """Trials that a killed process of this machine has left, and those that nobody had come to own."""
        from optuna.trial import Trial, TrialState

        left = []
        with _asking(self.plan):
            for it in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
                owner = it.user_attrs.get("owner")
                if owner is None or (owner.get("host") == platform.node() and find(owner) is None):
                    trial = Trial(self.study, it._trial_id)
                    _own(trial)
                    left.append((trial, it.user_attrs.get("process") or {}))
        jobs = []
        for trial, process in left:
            try:
                values = suggest(trial, self.plan.space)  # those that it has, and what a kill kept it from
            except ValueError:
                continue  # of another space
            job = self._job(trial, values)
            job.state, job.process = "running", {key: process.get(key) for key in ("pid", "created")}
            jobs.append(job)
        return jobs

    def _has_enough(self) -> bool:
        """Whether the study has as many trials as are wanted, or only failed ones."""
        from optuna.trial import TrialState

        if len(self.failed) >= MAX_FAILED and not self.finished():
            raise FlatoutError(f"{len(self.failed)} trials failed and none was finished: {self.failed[-1]}")
        if monotonic() - self._looked >= REFRESH_SECONDS or not self._is_complete:
            self._looked = monotonic()
            trials = self.study.get_trials(deepcopy=False)
            not_counted = (
                TrialState.FAIL,
                TrialState.WAITING,
            )  # waiting: the first one, which nobody has asked for
            self._is_complete = sum(it.state not in not_counted for it in trials) >= self.plan.n_trials
        return self._is_complete

    def finished(self) -> list[optuna.trial.FrozenTrial]:
        """Trials that were run to their end, the best first."""
        from optuna.trial import TrialState

        done = self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        return sorted(done, key=lambda it: -it.values[0] if self.plan.maximizes else it.values[0])

    def _report(self, job: Job) -> bool:
        """Tell the returns after each ninth of the steps that are not told yet; whether there were any."""
        trial, told = self._trials[job.name], self._rung.get(job.name, 0)
        for rung, value in returns_at_rungs(RunFolder(job.run), self.plan, told):
            trial.report(value if self.plan.maximizes else -value, rung)
            self._rung[job.name] = rung
        return self._rung.get(job.name, 0) > told

    def _takes_too_long(self, job: Job) -> bool:
        reached = [it.values[0] for it in self.finished() if it.values[0] < UNREACHED]
        seconds = number(read_json(job.run / "progress.json").get("wall_seconds")) or 0.0
        return len(reached) > LUCKY and seconds > TOO_LONG * reached[LUCKY]

    def _finish(self, job: Job) -> None:
        from optuna.trial import TrialState

        summary = read_json(job.run / "summary.json")
        value = value_of(summary, self.plan)
        trial = self._trials[job.name]
        for key in ("steps_per_second", "wall_seconds", "return_mean"):
            trial.set_user_attr(key, number(summary.get(key)))
        if value is None:
            trial.set_user_attr("error", "no episode ended")
            self._tell(job, state=TrialState.FAIL)
        else:
            self._tell(job, values=value)

    def _tell(self, job: Job, **result: Any) -> None:
        self.study.tell(self._trials[job.name], skip_if_finished=True, **result)


def _own(trial: Any) -> None:
    trial.set_user_attr("owner", {"host": platform.node(), **identity(os.getpid())})


@contextmanager
def _asking(plan: SweepPlan) -> Iterator[None]:
    """While no other process asks: a running trial without an owner is then of one that was killed."""
    lock = _lock(Path(f"{plan.storage}.asking"))
    lock.acquire()
    try:
        yield
    finally:
        lock.release()


def value_of(summary: Mapping[str, Any], plan: SweepPlan) -> float | None:
    """What a run is worth to the sweep; None if no episode ended."""
    last = number(summary.get("eval_return_mean"))
    if last is None:
        last = number(summary.get("return_mean"))
    if last is None or plan.maximizes:
        return last
    seconds, target = number(summary.get("target_reached_seconds")), plan.target or 0.0
    if seconds is not None:
        return seconds
    # Ranked by what is missing, after all that have reached it.
    return UNREACHED * (1 + min(max(target - last, 0.0) / max(abs(target), 1.0), 100.0))


def returns_at_rungs(folder: RunFolder, plan: SweepPlan, after: int) -> Iterator[tuple[int, float]]:
    """The return when each ninth of the steps was done, after the first so many."""
    column = "eval/mean_reward" if plan.given.get("eval_every") else "rollout/ep_rew_mean"
    value = math.nan
    try:
        rows = list(read_rows(folder.metrics))
    except OSError:
        return
    for row in rows:
        seen = cell_value(row.get(column))
        value = seen if math.isfinite(seen) else value
        rung = min(int(RUNGS * cell_value(row.get("time/total_timesteps")) / plan.timesteps), RUNGS)
        if rung > after and math.isfinite(value):
            yield rung, value
            after = rung


class _FileLock:
    """Optuna's kind of lock as an flock, which ends with its process however that ends."""

    def __init__(self, path: str) -> None:
        self._path, self._descriptor = path, -1

    def acquire(self) -> bool:
        """Wait for the lock."""
        import fcntl

        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        return True

    def release(self) -> None:
        """Give it back."""
        os.close(self._descriptor)


@contextmanager
def quiet_optuna() -> Iterator[None]:
    """Optuna without its log and its notes on what is experimental."""
    try:
        import optuna
    except ImportError:
        raise FlatoutError("flatout sweep needs Optuna: pip install 'flatout[sweep]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        yield


def open_study(plan: SweepPlan) -> optuna.Study:
    """The study in the plan's journal, new or begun by this or another process; another sweep's is refused."""
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    path = plan.storage
    path.parent.mkdir(parents=True, exist_ok=True)
    _mend(path)
    storage = JournalStorage(JournalFileBackend(str(path), lock_obj=_lock(path)))
    # Returns at equal env steps say little about time: there the trials themselves are stopped, by `_takes_too_long`.
    by_returns = optuna.pruners.HyperbandPruner(min_resource=1, max_resource=RUNGS, reduction_factor=3)
    study = optuna.create_study(
        storage=storage,
        study_name="flatout",
        direction="maximize" if plan.maximizes else "minimize",
        sampler=_sampler(plan),
        pruner=by_returns if plan.maximizes else optuna.pruners.NopPruner(),
        load_if_exists=True,
    )
    facts = study.user_attrs.get("facts")
    if facts is None:
        study.set_user_attr("facts", plan.facts())
        study.enqueue_trial(defaults_in(plan.space, plan.env, plan.given), skip_if_exists=True)
    elif facts != (now := plan.facts()):
        differs = next(key for key in now if now[key] != facts.get(key))
        raise FlatoutError(
            f"{path} holds a sweep with another {differs}; use another --storage or --name, or remove it"
        )
    return study


def _sampler(plan: SweepPlan) -> Any:
    from optuna import samplers

    # Not the same numbers again in another process or after a kill.
    seed = (plan.seed * 1_000_003 + os.getpid() * 7919 + _n_lines(plan.storage)) % 2**32
    if plan.sampler == "tpe":
        # Hyperband has three brackets, each with a model of its own.
        return samplers.TPESampler(
            seed=seed, n_startup_trials=max(min(plan.n_trials // 10, 10), 2), multivariate=True
        )
    known = {"random": "RandomSampler", "gp": "GPSampler", "qmc": "QMCSampler"}
    if plan.sampler not in known:
        near = did_you_mean(plan.sampler, SAMPLERS)
        raise FlatoutError(f"--sampler is '{plan.sampler}'; it must be one of {', '.join(SAMPLERS)}{near}")
    try:
        return getattr(samplers, known[plan.sampler])(seed=seed)
    except ImportError as error:
        raise FlatoutError(
            f"--sampler {plan.sampler} needs a package that is not installed: {error}"
        ) from None


def _n_lines(path: Path) -> int:
    with suppress(OSError):
        return path.read_bytes().count(b"\n")
    return 0


def _mend(path: Path) -> None:
    """Drop a line that a crash of the machine or a full disk left incomplete."""
    with suppress(OSError), path.open("rb+") as file:
        content = file.read()
        if content and not content.endswith(b"\n"):
            file.truncate(content.rfind(b"\n") + 1)


def _lock(path: Path) -> Any:
    """A lock between processes, also of several machines with a shared folder."""
    from optuna.storages.journal import JournalFileSymlinkLock

    return _FileLock(f"{path}.flock") if _can_lock(path) else JournalFileSymlinkLock(str(path))


def _can_lock(path: Path) -> bool:
    descriptor = os.open(f"{path}.flock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        return try_lock(descriptor, shared=True) is not None
    finally:
        os.close(descriptor)


@dataclass
class Candidate:
    """Settings that are run again with new seeds."""

    name: str
    settings: dict[str, Any]
    values: list[float] = field(default_factory=list)
    """What its runs were worth."""
    trial: int | None = None
    """Its trial; None for the defaults."""

    def score(self, plan: SweepPlan) -> float:
        """Mean return, or median time, over its seeds; larger is better."""
        if not self.values:
            return -math.inf
        return fmean(self.values) if plan.maximizes else -median(self.values)


class Confirmation:
    """The best trials and the defaults again, with new seeds, as jobs for a runner."""

    def __init__(self, plan: SweepPlan, best: Sequence[optuna.trial.FrozenTrial], n_seeds: int) -> None:
        self.plan = plan
        self.candidates = [Candidate("defaults", {})]
        for it in best:
            settings = settings_of(it.params, plan.env, plan.given)
            self.candidates.append(Candidate(f"best-{it.number:04d}", settings, trial=it.number))
        seeds = range(plan.seed + 1, plan.seed + 1 + n_seeds)
        self._jobs = {
            f"{it.name}-seed{seed}": (it, plan.job(f"{it.name}-seed{seed}", it.settings, seed))
            for it in self.candidates
            for seed in seeds
        }
        self.errors: list[str] = []
        for candidate, job in self._jobs.values():
            summary = read_json(job.run / "summary.json")
            if summary.get("status") == "finished" and not is_locked(job.run):
                job.state = "finished"
                self._take(candidate, job)
            elif is_locked(job.run):
                job.state = "running"
        self._ours: set[str] = set()

    def waiting(self) -> list[Job]:
        """Runs that are not done."""
        left = [job for _, job in self._jobs.values() if job.name not in self._ours]
        return [job for job in left if job.state in ("waiting", "running")]

    def save(self, job: Job) -> None:
        """Keep the value of a run that has ended."""
        candidate, _ = self._jobs[job.name]
        if job.state == "running":
            self._ours.add(job.name)
        elif job.state == "waiting":
            self._ours.discard(job.name)
        elif job.state == "finished":
            self._take(candidate, job)
        elif job.state == "failed":
            self.errors.append(job.error)

    def looks_at(self, job: Job) -> None:
        """Every run goes to its end."""

    def _take(self, candidate: Candidate, job: Job) -> None:
        if (value := value_of(read_json(job.run / "summary.json"), self.plan)) is not None:
            candidate.values.append(value)

    @property
    def is_done(self) -> bool:
        """Whether every run has ended."""
        return all(job.state in ("finished", "failed") for _, job in self._jobs.values())

    def ranked(self) -> list[Candidate]:
        """The candidates, the best first."""
        return sorted(self.candidates, key=lambda it: it.score(self.plan), reverse=True)


def write_config(plan: SweepPlan, settings: Mapping[str, Any], path: Path) -> None:
    """The complete config with these settings, for `flatout train --config`."""
    write_json(path, plan.job("best", settings, plan.seed).resolved().to_json())


def importances(study: optuna.Study) -> dict[str, float]:
    """How much each setting decides whether a trial is among the best; empty with too few trials."""
    from optuna.importance import get_param_importances

    with suppress(Exception), warnings.catch_warnings(action="ignore"):
        return get_param_importances(study)
    return {}


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
