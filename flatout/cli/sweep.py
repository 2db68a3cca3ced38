"""`flatout sweep ENV`: search for settings, run the best again with new seeds, and write the best of them as a config."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter, strftime
from typing import Any

from flatout.algorithms.space import Choice, Number
from flatout.cli import parser as cli
from flatout.cli.settings import parse_settings
from flatout.config.fields import all_fields, convert
from flatout.config.run_config import RunConfig
from flatout.errors import FlatoutError, did_you_mean
from flatout.runlog.files import plural, write_json, write_text
from flatout.runlog.folder import RunLock
from flatout.scale.runner import Job, Runner
from flatout.scale.spaces import space_for
from flatout.scale.sweep import (
    OBJECTIVES,
    SAMPLERS,
    UNREACHED,
    Candidate,
    Confirmation,
    SweepPlan,
    Trials,
    importances,
    quiet_optuna,
    write_config,
)
from flatout.views.figures import duration
from flatout.views.jobs import JobsDisplay, job_row
from flatout.views.sweep import SweepPage, TrialPoint, sweep_page, value_text

LOG_DIR = ".logs"


def sweep(argv: Sequence[str]) -> int:
    """Search; returns the exit code."""
    parser = cli.Parser(
        "sweep",
        "Search for the best settings with Optuna. Settings given as flags stay as they are in all trials. The same command "
        "again goes on where it was; run in several processes, or on machines with a shared folder, all work on one study.",
        usage="flatout sweep ENV [flags]",
    )
    parser.flag("env", "Gymnasium id, module:Id, or path/to/file.py:factory", nargs="?", metavar="ENV")
    parser.set_defaults(config=None, trust=False)
    parser.flag("--trials", "number of trials (40)", type=int, default=40, metavar="N")
    parser.flag(
        "--objective",
        "return at equal env steps, or wall time to --target-return",
        default="return",
        metavar="|".join(OBJECTIVES),
    )
    parser.flag(
        "--space", "what to search: a TOML file, or elegantrl (the algorithm's own)", metavar="FILE.toml|NAME"
    )
    parser.flag("--sampler", "how values are chosen (tpe)", default="tpe", metavar="|".join(SAMPLERS))
    parser.flag("--storage", "journal of the study (in the sweep's folder)", type=Path, metavar="FILE")
    parser.flag("--name", "name of the sweep's folder (sweep-ENV-ALGO)", metavar="NAME")
    cli.add_runs_dir(parser)
    parser.flag(
        "--candidates", "trials that are run again with new seeds (3)", type=int, default=3, metavar="N"
    )
    parser.flag("--new-seeds", "seeds of each of them (3)", type=int, default=3, metavar="N")
    parser.flag("--at-once", "trials side by side (as many as pay)", type=int, metavar="N")
    parser.flag(
        "--ray",
        "run trials on a Ray cluster: that of --ray-address, or one on this machine; --runs-dir must be a folder that all its "
        "machines share",
    )
    parser.flag("--quiet", "print only errors")
    parser.flag("--json", "print the result as JSON on the last line")
    args, config, given = parse_settings(parser, argv)
    if args.ray and config.executor == "ray":
        raise FlatoutError("--ray runs whole trials on the cluster; leave out --executor ray")
    if args.ray:  # other machines have other working folders
        args.runs_dir = args.runs_dir.resolve()
    plan = _plan(args, config, _typed(given))
    with quiet_optuna(), _place(args, plan) as place:
        return _run(plan, args, place)


@contextmanager
def _place(args: argparse.Namespace, plan: SweepPlan) -> Iterator[dict[str, Any]]:
    """Where trials run, for a Runner: on this machine or on a cluster."""
    if not args.ray:
        yield {"at_once": args.at_once}
        return
    from flatout.scale.cluster import RoomInCluster, on_cluster

    plan.folder.mkdir(parents=True, exist_ok=True)
    with on_cluster(getattr(args, "ray_address", None), plan.folder) as processes:
        yield {"processes": processes, "schedule": RoomInCluster(processes, args.at_once)}


def _typed(given: Mapping[str, Any]) -> dict[str, Any]:
    """The given settings in their own types, where every algorithm has the same; code and the rest stay as typed."""
    fields = {it.name: it for it in all_fields(RunConfig)}
    plain = (int, float, bool)
    return {k: convert(fields[k], v) if fields[k].type in plain else v for k, v in given.items()}


def _plan(args: argparse.Namespace, config: RunConfig, given: dict[str, Any]) -> SweepPlan:
    for name in ("trials", "candidates", "new_seeds", "at_once"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise FlatoutError(f"--{name.replace('_', '-')} is {value}; it must be at least 1")
    if args.objective not in OBJECTIVES:
        near = did_you_mean(args.objective, OBJECTIVES)
        raise FlatoutError(
            f"--objective is '{args.objective}'; it must be one of {', '.join(OBJECTIVES)}{near}"
        )
    if args.sampler not in SAMPLERS:
        near = did_you_mean(args.sampler, SAMPLERS)
        raise FlatoutError(f"--sampler is '{args.sampler}'; it must be one of {', '.join(SAMPLERS)}{near}")
    if args.objective == "time-to-target":
        if config.target_return is None:
            raise FlatoutError("--objective time-to-target needs --target-return, the return to reach")
        given["target_return"] = config.target_return
    algo = config.descriptor
    name = args.name or re.sub(r"[^\w.-]+", "-", f"sweep-{config.env.rpartition('/')[2]}-{algo.name}")
    folder = args.runs_dir / name
    given = {"algo": config.algo} | {k: v for k, v in given.items() if k not in ("timesteps", "seed")}
    if not (space := space_for(algo, args.space, given)):
        raise FlatoutError("every setting of the search space is given as a flag; there is nothing to search")
    return SweepPlan(
        env=config.env,
        given=given,
        space=space,
        folder=folder,
        storage=args.storage or folder / "journal.log",
        algo=algo.name,
        n_trials=args.trials,
        timesteps=config.timesteps,
        objective=args.objective,
        sampler=args.sampler,
        seed=config.seed,
    )


def _run(plan: SweepPlan, args: argparse.Namespace, place: Mapping[str, Any]) -> int:
    began = perf_counter()
    plan.folder.mkdir(parents=True, exist_ok=True)
    logs = plan.folder / LOG_DIR
    logs.mkdir(exist_ok=True)
    trials = Trials(plan)
    with JobsDisplay(sys.stderr, quiet=args.quiet) as display:
        searching = Runner(trials, logs, **place, tell=display.note, show=lambda it: search(it))
        told: set[int] = set()

        def search(runner: Runner) -> None:
            for name in trials.to_prune & runner.jobs.keys():
                runner.stop(runner.jobs[name])
            if _tell_trials(trials, told, display):
                _write(plan, trials, None, stopped=False)
            _show(display, runner, _title(trials, began))

        _write(plan, trials, None, stopped=False)
        searching.run()
        _tell_trials(trials, told, display)
        stopped_by = searching.processes.stopped_by
        confirmed: Confirmation | None = None
        lock = RunLock(plan.folder)
        if stopped_by is None and _is_ours(lock):
            confirmed = Confirmation(plan, trials.finished()[: args.candidates], args.new_seeds)
            display.note(
                f"the best {len(confirmed.candidates) - 1} and the defaults again, with {plural(args.new_seeds, 'new seed')} each"
            )
            runner = Runner(
                confirmed,
                logs,
                **place,
                tell=display.note,
                show=lambda it: _show(display, it, "confirming"),
            )
            runner.run()
            stopped_by = runner.processes.stopped_by
    result = _write(plan, trials, confirmed, stopped=stopped_by is not None)
    lock.release()
    if not args.quiet:
        print(result["verdict"])
        print(f"{'page':<8}{plan.folder / 'sweep.html'}\n{'time':<8}{duration(perf_counter() - began)}")
    if args.json:
        print(json.dumps(result))
    return 0 if stopped_by is None else 128 + stopped_by


def _is_ours(lock: RunLock) -> bool:
    """Whether no other process confirms the best trials."""
    try:
        lock.take()
    except FlatoutError:
        return False
    return True


def _tell_trials(trials: Trials, told: set[int], display: JobsDisplay) -> bool:
    """A line for each trial that has ended since the last call; whether there was one."""
    before = len(told)
    for point in points(trials):
        if point.number not in told and point.state != "running":
            told.add(point.number)
            result = "" if point.state == "failed" else f": {_value(point.value, trials.plan)}"
            display.note(f"trial {point.number} {point.state}{result}")
    return len(told) > before


def _title(trials: Trials, began: float) -> str:
    best, plan = trials.finished()[:1], trials.plan
    text = (
        f"best {_value(_shown(best[0].values[0], plan), plan)} (trial {best[0].number})"
        if best
        else "no result yet"
    )
    return f"{text}   {duration(perf_counter() - began)}"


def _show(display: JobsDisplay, runner: Runner, title: str) -> None:
    if display.is_live:
        display.show([_row(job, runner) for job in runner.jobs.values()], title)


def _row(job: Job, runner: Runner) -> Any:
    return job_row(job.name, job.state, str(job.settings["env"]), job.run, cores=runner.cores_of(job.name))


def _shown(value: float, plan: SweepPlan) -> float | None:
    """A value; None if the target was not reached."""
    return None if not plan.maximizes and value >= UNREACHED else value


def _value(value: float | None, plan: SweepPlan) -> str:
    return value_text(value, maximizes=plan.maximizes)


def points(trials: Trials) -> list[TrialPoint]:
    """The trials of the study, for lines and for the page."""
    from optuna.trial import TrialState

    words = {TrialState.COMPLETE: "done", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed"}
    plan, found = trials.plan, []
    for it in trials.study.get_trials(deepcopy=False):
        value = _shown(it.values[0], plan) if it.values else None
        if it.state == TrialState.PRUNED:  # Optuna keeps what was last reported, the return with a sign
            known = it.intermediate_values if plan.maximizes else {}
            value = known[max(known)] if known else None
        found.append(
            TrialPoint(number=it.number, state=words.get(it.state, "running"), value=value, params=it.params)
        )
    return found


def _write(
    plan: SweepPlan, trials: Trials, confirmed: Confirmation | None, *, stopped: bool
) -> dict[str, Any]:
    """Write the config, the page and summary.json; returns the summary."""
    known = points(trials)
    done = confirmed is not None and confirmed.is_done
    ranked = confirmed.ranked() if confirmed is not None and done else []
    best = next((it for it in ranked if it.values), None)
    config = plan.folder / "best.json"
    if best is not None:
        write_config(plan, best.settings, config)
    status = "finished" if done else "stopped" if stopped else "running"
    verdict = _verdict(plan, known, ranked, best, is_running=status == "running")
    what = "return" if plan.maximizes else f"seconds to a return of {plan.target:g}"
    command = f"flatout train --config {config}" if best is not None else ""
    page = SweepPage(
        name=plan.folder.name,
        # A process that is killed cannot write that it has ended.
        verdict=verdict + (f" As of {strftime('%Y-%m-%d %H:%M')}." if status == "running" else ""),
        what=what,
        maximizes=plan.maximizes,
        trials=known,
        importances=importances(trials.study),
        candidates=[(it.name, _result(it, plan), _words(it.settings)) for it in ranked],
        command=command,
        status=status,
        best=best.trial if best is not None else None,
        logs=frozenset(name for name, it in plan.space.items() if isinstance(it, Number) and it.log),
        choices=frozenset(name for name, it in plan.space.items() if isinstance(it, Choice)),
    )
    write_text(plan.folder / "sweep.html", sweep_page(page))
    summary = {
        "status": page.status,
        "env": plan.env,
        "algo": plan.algo,
        "objective": plan.objective,
        "target_return": plan.target,
        "timesteps": plan.timesteps,
        "trials": {
            state: sum(it.state == state for it in known) for state in ("done", "pruned", "failed", "running")
        },
        "candidates": [
            {
                "name": it.name,
                "trial": it.trial,
                "values": [_shown(v, plan) for v in it.values],
                "settings": it.settings,
            }
            for it in ranked
        ],
        "best": best.name if best is not None else None,
        "config": str(config) if best is not None else None,
        "verdict": verdict,
    }
    write_json(plan.folder / "sweep.json", summary)
    return summary


def _result(candidate: Candidate, plan: SweepPlan) -> str:
    if not candidate.values:
        return "no result"
    values = ", ".join(_value(_shown(v, plan), plan).removeprefix("return ") for v in candidate.values)
    score = candidate.score(plan) if plan.maximizes else _shown(-candidate.score(plan), plan)
    kind = "mean" if plan.maximizes else "median"
    return f"{_value(score, plan)} ({kind} of {values})"


def _words(settings: Mapping[str, Any]) -> str:
    return (
        ", ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in settings.items())
        .replace(" True", " on")
        .replace(" False", " off")
        or "as they are"
    )


def _verdict(
    plan: SweepPlan,
    known: Sequence[TrialPoint],
    ranked: Sequence[Candidate],
    best: Candidate | None,
    *,
    is_running: bool,
) -> str:
    """The result in two or three sentences."""
    n_done, n_pruned = (sum(it.state == state for it in known) for state in ("done", "pruned"))
    told = f"{plural(n_done, 'trial')} to the end, {n_pruned} pruned."
    if best is None:
        return f"{told} Nothing is confirmed yet{'' if is_running else ': the same command goes on'}."
    defaults = next(it for it in ranked if it.trial is None)
    if best is defaults:
        return f"{told} Nothing found is better than the defaults over new seeds: {_result(best, plan)}."
    text = f"{told} The best over new seeds is trial {best.trial}: {_result(best, plan)}; the defaults reach {_result(defaults, plan)}."
    if not plan.maximizes and defaults.values and -defaults.score(plan) < UNREACHED:
        text += f" That is {best.score(plan) and defaults.score(plan) / best.score(plan):.1f} × as fast."
    if len(best.values) < 5:
        text += f" With {plural(len(best.values), 'seed')} a small difference means little."
    return text
