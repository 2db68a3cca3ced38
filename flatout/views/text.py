"""A run in plain text: its summary line by line, the verdict in two sentences, and the report for the terminal."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flatout.perf.case import Finding
from flatout.perf.findings import UNFILLED_CARD, findings_of_run
from flatout.runlog.files import number as known_number
from flatout.runlog.files import plural
from flatout.runlog.records import RunRecords, read_run
from flatout.timing import LEARN_PHASES
from flatout.views.figures import count, joined, mean_and_std, number, percent, rate, seconds_text, told

Summary = Mapping[str, Any]
"""The fields of summary.json, any of which may be null or missing."""

_LABEL_CELLS = 14
_MOST_LINES = 15
_IN_REPORT = ("run", "evaluation", "target", "pipeline", "executor", "recovered")
"""Lines of the summary that the report shows below the verdict."""
_RECOVERED = {
    "restarts": "worker restarts",
    "oom_backoffs": "out-of-memory back-offs",
    "nan_skips": "NaN updates skipped",
}
_STATUS = {
    "finished": "Finished",
    "stopped": "Stopped early",
    "failed": "Failed",
    "running": "Still running",
    "killed": "Killed",
}
_NEXT = {"finished": ("play",), "stopped": ("resume", "play"), "killed": ("resume", "play")}
_LIMIT = (
    "; if the env never ends one, give it a limit (gymnasium's TimeLimit, for an id --env-kwargs "
    "'{\"max_episode_steps\": 500}')"
)
_BUSY_ENOUGH = 0.85


def summary_text(summary: Summary) -> str:
    """The summary of a run that has just ended, without what is not known."""
    return "\n".join(f"{label:<{_LABEL_CELLS}}{text}" for label, text in summary_lines(summary))


def summary_lines(summary: Summary) -> list[tuple[str, str]]:
    """The summary as pairs of a label and its text, without what is not known."""
    startup, mean, largest = numbers(summary, "startup_seconds", "policy_lag_mean", "policy_lag_max")
    started = told(", after {} to start", startup, seconds_text)
    recovered = zip(numbers(summary, *_RECOVERED), _RECOVERED.values(), strict=True)
    lines = (
        (str(summary.get("status") or "ended"), _steps_and_time(summary) + started),
        ("run", _identity(summary)),
        ("return", _return(summary)),
        ("evaluation", _evaluation(summary)),
        ("target", _target(summary)),
        ("learner busy", _busy(summary)),
        ("time went to", _phases(summary)),
        ("pipeline", _pipeline(summary)),
        ("executor", _executor(summary)),
        ("policy lag", f"{number(mean)} on average, {count(largest)} at most" if largest else ""),
        ("recovered", ", ".join(f"{count(n)} {label}" for n, label in recovered if n)),
        ("folder", str(summary.get("folder") or "")),
    )
    return [(label, text) for label, text in lines if text]


def numbers(fields: Summary, *keys: str) -> tuple[float | None, ...]:
    """The values of these keys; None for what is not a finite number."""
    return tuple(known_number(fields.get(key)) for key in keys)


def _steps_and_time(summary: Summary) -> str:
    steps, wall, speed = numbers(summary, "env_steps", "wall_seconds", "steps_per_second")
    return f"{count(steps or 0)} env steps{told(' in {}', wall, seconds_text)}{told(', {} steps/s', speed, rate)}"


def _identity(summary: Summary) -> str:
    known = [str(summary[key]) for key in ("env", "algo", "preset", "device") if summary.get(key)]
    seed = summary.get("seed")
    return ", ".join([*known, f"seed {seed}"] if seed is not None else known)


def _return(summary: Summary) -> str:
    mean, std, episodes, steps = numbers(summary, "return_mean", "return_std", "episodes", "env_steps")
    if mean is None:
        return f"not known: no episode ended{_LIMIT if steps else ''}"
    if episodes is None:
        return mean_and_std(mean, std)
    last = f"over the last {count(min(100, episodes))} of {count(episodes)} episodes"
    return f"{mean_and_std(mean, std)} {last}"


def _evaluation(summary: Summary) -> str:
    """The last evaluation, and whether its deterministic policy differs from the sampled one of training."""
    mean, std, n = numbers(summary, "eval_return_mean", "eval_return_std", "eval_episodes")
    if mean is None:
        return ""
    text = f"{mean_and_std(mean, std)} over {plural(int(n or 0), 'episode')} of the deterministic policy"
    sampled = numbers(summary, "return_mean", "return_std", "episodes")
    return f"{text}; {DIFFER}" if differ_much((mean, std, n), sampled) else text


DIFFER = (
    "it differs much from the sampled policy of training: train longer, or use the sampled one (--stochastic)"
)
LEAST_EPISODES = 5
"""Of each policy, to say that they differ."""


def differ_much(a: Sequence[float | None], b: Sequence[float | None]) -> bool:
    """Whether two means (mean, standard deviation, episodes; at most the last 100 count) are far apart.

    Far: by more than half of the larger standard deviation, and by more than four standard errors.
    """
    known_a, known_b = ([value for value in it if value is not None] for it in (a, b))
    if len(known_a) < 3 or len(known_b) < 3:
        return False
    (mean_a, std_a, n_a), (mean_b, std_b, n_b) = known_a, known_b
    if min(n_a, n_b) < LEAST_EPISODES:
        return False
    error: float = (std_a**2 / min(n_a, 100) + std_b**2 / min(n_b, 100)) ** 0.5
    return abs(mean_a - mean_b) > max(0.5 * max(std_a, std_b), 4 * error, 1e-6 * abs(mean_a))


def _target(summary: Summary) -> str:
    goal, seconds, steps = numbers(summary, "target_return", "target_reached_seconds", "target_reached_steps")
    after = joined(" and ", told("{}", seconds, seconds_text), told("{} env steps", steps, count))
    return told("{} " + (f"reached after {after}" if after else "not reached"), goal)


def _busy(summary: Summary) -> str:
    busy, device, joules = numbers(summary, "learner_busy", "device_utilization", "device_energy_joules")
    return joined(
        ", ",
        told("{} of the time", busy, percent),
        told("device utilisation {} (share of time in which any kernel ran)", device, percent),
        told("{} kJ", joules and joules / 1000),
    )


def _phases(summary: Summary) -> str:
    phases = summary.get("phases")
    if not isinstance(phases, Mapping):
        return ""
    seconds = {str(name): s for name, value in phases.items() if (s := known_number(value)) is not None}
    return _shares(seconds, known_number(summary.get("wall_seconds")) or sum(seconds.values()))


def _shares(seconds: Mapping[str, float], total: float) -> str:
    """`update 51 %, env 29 %`, largest first, without what rounds to nothing."""
    if total <= 0:
        return ""
    largest_first = sorted(seconds.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {percent(s / total)}" for name, s in largest_first if s / total >= 0.005)


def _pipeline(summary: Summary) -> str:
    collect, learn, efficiency = numbers(summary, "collect_rate", "learn_rate", "pipeline_efficiency")
    if collect is None or learn is None:
        return ""
    slower = "collecting" if collect < learn else "learning"
    reached = told(", {} of it reached", efficiency, percent)
    speeds = f"collects {rate(collect)} and learns {rate(learn)} steps/s when neither waits"
    return f"{speeds}: {slower} is the limit{reached}"


def _executor(summary: Summary) -> str:
    executor = summary.get("executor")
    if not isinstance(executor, Mapping) or not executor.get("kind"):
        return ""
    reason = executor.get("reason")
    counts = zip(numbers(executor, "collectors", "workers"), ("collector", "worker"), strict=True)
    sizes = [plural(int(n), noun) for n, noun in counts if n]
    return ", ".join([str(executor["kind"]), *sizes]) + (f" ({reason})" if reason else "")


def run_findings(records: RunRecords) -> list[Finding]:
    """What slowed the run down and what to change."""
    known = {name: column[np.isfinite(column)] for name, column in records.metrics.items()}
    medians = {name: float(np.median(column)) for name, column in known.items() if column.size}
    return findings_of_run(
        {**records.summary, "metrics": medians}, records.config, records.system, records.samples
    )


def verdict(records: RunRecords) -> str:
    """Status, return, speed, learner busy, and what limits the run."""
    unfilled = [
        f"{f.what[0].upper()}{f.what[1:]}: {f.change}."
        for f in run_findings(records)
        if f.kind == UNFILLED_CARD
    ]
    return joined(" ", _outcome(records.summary), _limit(records), *unfilled)


def _outcome(summary: Summary) -> str:
    steps, mean, std, n = numbers(summary, "env_steps", "return_mean", "return_std", "episodes")
    status = _STATUS.get(str(summary.get("status")), "Not ended, running or killed")
    if not steps:
        return f"{status}: no env step is recorded."
    few = f" over {plural(int(n), 'episode')}" if n is not None and n < 100 else ""
    result = f"return {mean_and_std(mean, std)}{few}" if mean is not None else f"no episode ended{_LIMIT}"
    return f"{status}: {_steps_and_time(summary)}, {result}."


def _limit(records: RunRecords) -> str:
    busy = known_number(records.summary.get("learner_busy"))
    if busy is None:
        return ""
    text = f"The learner was busy {percent(busy)} of the time"
    if busy >= _BUSY_ENOUGH:
        return f"{text}: learning itself is the limit."
    idle, total = records.idle, learner_wall(records)
    if not idle or total <= 0:
        return f"{text}."
    cause, seconds = next(iter(idle.items()))
    return f"{text}. Largest cause of idle time: {cause} ({percent(seconds / total)})."


def learner_wall(records: RunRecords) -> float:
    """The wall time of the learner's lane, which its busy and idle seconds are a part of."""
    learner = records.spans.lanes.get("learner")
    return learner.wall if learner is not None else sum(records.phases.values())


def busy_seconds(records: RunRecords) -> float:
    """Seconds that the learner spent in update work."""
    return sum(records.phases.get(phase, 0.0) for phase in LEARN_PHASES)


def report_text(run: Path | RunRecords, findings: Sequence[Finding] | None = None, width: int = 100) -> str:
    """At most 15 lines: the verdict, where the time went, the first two findings, what is missing, the folder, what is next."""
    records = read_run(run) if isinstance(run, Path) else run
    findings = run_findings(records) if findings is None else findings
    summary = dict(summary_lines(records.summary))
    lines = [
        ("time went to", _shares({"updates": busy_seconds(records)} | records.idle, learner_wall(records))),
        *((f"{i}. to change", _finding(finding)) for i, finding in enumerate(findings[:2], start=1)),
        *((label, summary.get(label, "")) for label in _IN_REPORT),
    ]
    head = _wrap(verdict(records), width, _MOST_LINES // 3)
    missing = _row("missing", "; ".join(records.problems), width, 2)
    verbs = _NEXT.get(str(records.summary.get("status")), ())
    tail = [*missing, f"{'folder':<{_LABEL_CELLS}}{records.path}"]
    for label, verb in zip(("next", ""), verbs, strict=False):
        tail.append(f"{label:<{_LABEL_CELLS}}flatout {verb} {shlex.quote(str(records.path))}")
    body: list[str] = []
    for label, text in lines:
        rows = _row(label, text, width, 2)
        if len(head) + len(body) + len(rows) + len(tail) <= _MOST_LINES:
            body += rows
    return "\n".join([*head, *body, *tail])


def _finding(finding: Finding) -> str:
    text = f"{finding.what}: {finding.change}"
    text += f" ({' '.join(finding.flags)})" if finding.flags else ""
    speed = told(", {} steps/s", finding.steps_per_second, rate)
    return text if finding.gain is None else f"{text}: about {finding.gain:.1f} × the speed{speed}"


def _row(label: str, text: str, width: int, most: int) -> list[str]:
    wrapped = _wrap(text, max(20, width - _LABEL_CELLS), most)
    return [f"{label if i == 0 else '':<{_LABEL_CELLS}}{line}" for i, line in enumerate(wrapped)]


def _wrap(text: str, width: int, most: int) -> list[str]:
    """At most `most` lines, with a figure and its unit kept together."""
    glued = text.replace(" %", "\N{NO-BREAK SPACE}%").replace(" steps/s", "\N{NO-BREAK SPACE}steps/s")
    lines = textwrap.wrap(glued, width, max_lines=most, placeholder=" …")
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]
