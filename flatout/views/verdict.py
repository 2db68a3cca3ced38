"""The verdict on a run in two or three sentences: how it went, and what limits it.

In: a run's records. Out: plain text, the same for the terminal and the page.
"""

from __future__ import annotations

from flatout.runlog.lanes import lane_use
from flatout.runlog.lines import number
from flatout.timing import LEARN_PHASES
from flatout.views.figures import count, duration, mean_and_std, percent, rate
from flatout.views.records import RunRecords

_STATUS = {
    "finished": "Finished",
    "stopped": "Stopped early",
    "failed": "Failed",
    "running": "Still running",
    "killed": "Killed",
}
_BUSY_ENOUGH = 0.85


def verdict(records: RunRecords) -> str:
    """Status, return, speed, learner busy, and what limits the run."""
    return " ".join(sentence for sentence in (outcome(records), limit(records)) if sentence)


def outcome(records: RunRecords) -> str:
    """How it went: status, steps, time, speed, return."""
    summary = records.summary
    steps, wall, speed, mean, std = (
        number(summary.get(key))
        for key in ("env_steps", "wall_seconds", "steps_per_second", "return_mean", "return_std")
    )
    status = _STATUS.get(str(summary.get("status")), "Not ended, still going or killed")
    if not steps:
        return f"{status}: no env step is recorded."
    text = f"{status}: {count(steps)} env steps"
    text += f" in {seconds_text(wall)}" if wall is not None else ""
    text += f", {rate(speed)} steps/s" if speed is not None else ""
    text += f", return {mean_and_std(mean, std)}" if mean is not None else ", no episode ended"
    return text + "."


def limit(records: RunRecords) -> str:
    """What keeps the run from being faster."""
    busy = number(records.summary.get("learner_busy"))
    if busy is None:
        return ""
    text = f"The learner was busy {percent(busy)} of the time"
    if busy >= _BUSY_ENOUGH:
        return f"{text}: learning itself is the limit."
    idle = records.idle
    total = idle_base(records)
    if not idle or total <= 0:
        return f"{text}."
    cause, seconds = next(iter(idle.items()))
    return f"{text}; the largest part of the rest went to {cause} ({percent(seconds / total)})."


def idle_base(records: RunRecords) -> float:
    """The wall time that the idle seconds are a part of."""
    learner = records.spans.lanes.get("learner")
    if learner is not None:
        return lane_use(learner).wall
    phases = records.summary.get("phases")
    return sum(number(s) or 0.0 for s in phases.values()) if isinstance(phases, dict) else 0.0


def busy_seconds(records: RunRecords) -> dict[str, float]:
    """Seconds of the learner's useful phases."""
    learner = records.spans.lanes.get("learner")
    phases = learner.total() if learner is not None else records.summary.get("phases")
    known = phases if isinstance(phases, dict) else {}
    return {phase: seconds for phase in LEARN_PHASES if (seconds := number(known.get(phase)))}


def seconds_text(value: float) -> str:
    """Short times to a tenth: `27.4 s`, `3 min 20 s`."""
    return f"{value:.1f} s" if value < 59.95 else duration(value)
