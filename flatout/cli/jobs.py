"""`flatout jobs FILE.toml`, `flatout jobs add`, `flatout jobs status` and `flatout jobs stop`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

from flatout.cli import parser as cli
from flatout.errors import FlatoutError
from flatout.runlog.files import plural
from flatout.scale.jobs import Queue, make_jobs, read_jobs
from flatout.scale.runner import Job, Runner
from flatout.views.figures import duration
from flatout.views.jobs import JobRow, JobsDisplay, console_for, job_row, job_table
from flatout.views.stream import SafeStream

USAGE = """flatout jobs [FILE.toml] [flags]
       flatout jobs add FILE.toml [--runs-dir DIR]
       flatout jobs add ENV --name NAME [flags of train]
       flatout jobs status [--json]
       flatout jobs stop [NAME ...]"""


def jobs(argv: Sequence[str]) -> int:
    """Run a queue of jobs, or add to it, show it or stop it; returns the exit code."""
    verbs = {"add": _add, "status": _status, "stop": _stop}
    if argv and argv[0] in verbs:
        return verbs[argv[0]](argv[1:])
    parser = cli.Parser(
        "jobs",
        "Run a queue of trainings, as many side by side as pay. A job that was interrupted goes on; one that failed or was "
        "stopped is tried again; finished ones are left alone.",
        usage=USAGE,
    )
    parser.flag(
        "file",
        "[[job]] tables to add first: name, env, and any setting of train",
        nargs="?",
        metavar="FILE.toml",
    )
    cli.add_runs_dir(parser)
    parser.flag("--at-once", "how many run side by side (as many as pay)", type=int, metavar="N")
    parser.flag("--quiet", "print only errors")
    parser.flag("--json", "print all jobs as JSON on the last line")
    cli.add_trust(parser)
    args = parser.parse(argv)
    if args.at_once is not None and args.at_once < 1:
        raise FlatoutError(f"--at-once is {args.at_once}; it must be at least 1")
    queue = Queue(args.runs_dir, trust=args.trust)
    if args.file is not None:
        queue.add(read_jobs(Path(args.file), args.runs_dir, trust=args.trust), args.file)
    if not queue.path.is_dir():
        raise FlatoutError(
            f"there are no jobs in {args.runs_dir}/; give a file with [[job]] tables, or 'jobs add' some"
        )
    return _work(queue, args)


def _work(queue: Queue, args: argparse.Namespace) -> int:
    """Work through the queue; returns the exit code."""
    began = perf_counter()
    with queue.held(), JobsDisplay(sys.stderr, quiet=args.quiet) as display:
        runner = Runner(queue, queue.path, at_once=args.at_once, tell=display.note, show=lambda it: show(it))

        def show(runner: Runner) -> None:
            why = f": {runner.schedule.reason}" if runner.schedule.reason else ""
            title = f"{len(runner.jobs)} side by side{why}   {duration(perf_counter() - began)}"
            display.show(rows(queue.jobs(), runner), title)

        runner.run()
        show(runner)
    all_jobs = queue.jobs()
    if args.json:
        print(json.dumps([asdict(row) for row in rows(all_jobs)]))
    n_failed = sum(job.state == "failed" for job in all_jobs)
    if not args.quiet:
        done = plural(sum(job.state == "finished" for job in all_jobs), "job")
        print(
            f"{done} of {len(all_jobs)} finished, {n_failed} failed, in {duration(perf_counter() - began)}",
            file=sys.stderr,
        )
    if runner.processes.stopped_by is not None:
        return 128 + runner.processes.stopped_by
    return int(n_failed > 0)


def rows(jobs: Sequence[Job], runner: Runner | None = None) -> list[JobRow]:
    """The rows of these jobs."""
    return [
        job_row(
            job.name,
            job.state,
            str(job.settings.get("env", "")),
            job.run,
            error=job.error,
            cores=runner.cores_of(job.name) if runner is not None else (),
        )
        for job in jobs
    ]


def _add(argv: Sequence[str]) -> int:
    """Add the jobs of a file, or one job; a queue that runs takes them up."""
    if argv and argv[0].endswith(".toml"):
        parser = cli.Parser("jobs add", "Add the [[job]] tables of a file to the queue.")
        parser.flag("file", "a file with [[job]] tables", metavar="FILE.toml")
        cli.add_runs_dir(parser)
        cli.add_trust(parser)
        args = parser.parse(argv)
        new = read_jobs(Path(args.file), args.runs_dir, trust=args.trust)
        source = args.file
    else:
        parser = cli.env_parser("jobs add", "Add a training to the queue.")
        parser.flag("--name", "name of the job and of its run", metavar="NAME")
        cli.add_runs_dir(parser)
        from flatout.cli.settings import parse_settings

        args, _, given = parse_settings(parser, argv)
        table: dict[str, Any] = {**given, **({"env": args.env} if args.env else {}), "name": args.name}
        table |= {"config": str(args.config)} if args.config else {}
        source = "jobs add"
        new = make_jobs(table, source, args.runs_dir, trust=args.trust, typed=True)
    n_new, n_there = Queue(args.runs_dir, trust=args.trust).add(new, source)
    there = f", {n_there} there already" if n_there else ""
    print(f"{plural(n_new, 'job')} added{there}; 'flatout jobs' runs them")
    return 0


def _status(argv: Sequence[str]) -> int:
    parser = cli.Parser("jobs status", "Show the jobs of a queue and how far each is.")
    cli.add_runs_dir(parser)
    parser.flag("--json", "print the jobs as JSON")
    args = parser.parse(argv)
    known = rows(Queue(args.runs_dir).jobs())
    if args.json:
        print(json.dumps([asdict(row) for row in known]))
    elif not known:
        print(f"no jobs in {args.runs_dir}/")
    else:
        console_for(SafeStream(sys.stdout)).print(job_table(known))
    return 0


def _stop(argv: Sequence[str]) -> int:
    parser = cli.Parser(
        "jobs stop", "Stop the queue with all its jobs, or some of them; they can go on later."
    )
    parser.flag("names", "jobs to stop (all, and the queue)", nargs="*", metavar="NAME")
    cli.add_runs_dir(parser)
    args = parser.parse(argv)
    stopped = Queue(args.runs_dir).stop(args.names)
    print(f"stopped: {', '.join(stopped)}" if stopped else "nothing was running")
    return 0
