"""Where the time of each lane went: busy and idle shares, a timeline, and the causes of idle time in plain words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from flatout.runlog.spans import Floats, Lane, Spans
from flatout.timing import LEARN_PHASES, Phase

WAITS: dict[str, str] = {
    Phase.ENV: "waiting for envs",
    Phase.TAIL: "waiting for the slowest env",
    Phase.ACT: "waiting for inference",
    Phase.STORE: "Python overhead of collecting",
}
"""What the learner waits for while a collector is in a phase."""

CAUSES: dict[str, str] = WAITS | {
    Phase.WAIT: "waiting for data",
    Phase.STAGE: "staging data",
    Phase.RECORD: "writing records",
    Phase.COMPILE: "compiling",
    Phase.EVALUATE: "evaluating",
    Phase.CHECKPOINT: "saving checkpoints",
    Phase.PUBLISH: "handing parameters to the collectors",
    Phase.START: "starting",
    Phase.SLOT: "waiting for the learner",
}


@dataclass(frozen=True)
class LaneUse:
    """How a lane spent its wall time."""

    wall: float
    seconds: Mapping[str, float]
    """Per phase."""
    busy: float
    """Share of the wall time."""
    idle: float


def is_idle(lane: str, phase: str) -> bool:
    """Whether a phase counts as idle time of a lane."""
    return phase == Phase.SLOT if lane.startswith("collector") else phase not in LEARN_PHASES


def lane_use(lane: Lane) -> LaneUse:
    """Busy and idle shares of one lane."""
    seconds, wall = lane.total(), lane.wall
    idle = sum(value for phase, value in seconds.items() if is_idle(lane.name, phase))
    busy = sum(seconds.values()) - idle
    shares = [value / wall if wall > 0 else 0.0 for value in (busy, idle)]
    return LaneUse(wall, seconds, *shares)


def timeline(lane: Lane, edges: Floats) -> Floats:
    """The share of each phase (column) in each bin of time (row)."""
    return np.diff(lane.until(edges), axis=0) / np.diff(edges)[:, None]


def idle_causes(spans: Spans, name: str = "learner") -> dict[str, float]:
    """A lane's idle seconds by cause in plain words, largest first; they add up to its idle time."""
    lane = spans.lanes.get(name)
    if lane is None:
        return {}
    causes: defaultdict[str, float] = defaultdict(float)
    for phase, seconds in lane.total().items():
        if phase == Phase.WAIT:
            for cause, part in _causes_of_waiting(lane, spans).items():
                causes[cause] += part
        elif is_idle(name, phase):
            causes[cause_of(phase)] += seconds
    largest_first = sorted(causes.items(), key=lambda item: -item[1])
    return {cause: seconds for cause, seconds in largest_first if seconds > 0}


def cause_of(phase: str) -> str:
    """The cause of idle time in a phase."""
    return CAUSES.get(phase, f"in phase {phase!r}")


def _without_slots_in_folds(collector: Lane) -> Lane:
    """The lane without `slot` in folded spans: the collector waits for the learner while the learner does not wait."""
    if Phase.SLOT not in collector.phases:
        return collector
    slot = collector.phases.index(Phase.SLOT)
    total = collector.seconds.sum(axis=1)
    work = total - collector.seconds[:, slot]
    seconds = collector.seconds * np.divide(total, work, out=np.ones_like(total), where=work > 0)[:, None]
    seconds[:, slot] = np.where(work > 0, 0.0, total)
    return replace(collector, seconds=seconds)


def _causes_of_waiting(lane: Lane, spans: Spans) -> dict[str, float]:
    """The seconds of `wait`, split by what the collectors did meanwhile."""
    wait = lane.seconds[:, lane.phases.index(Phase.WAIT)]
    work = np.zeros((len(wait), len(WAITS)))
    for collector in spans.collectors:
        if collector.clock == lane.clock:
            working = _without_slots_in_folds(collector)
            done = working.until(lane.end) - working.until(lane.start)
            for column, phase in enumerate(WAITS):
                if phase in collector.phases:
                    work[:, column] += done[:, collector.phases.index(phase)]
    # Where collectors worked less than the learner waited, the rest has no known cause.
    whole = np.maximum(work.sum(axis=1), wait)
    split = work * np.divide(wait, whole, out=np.zeros_like(wait), where=whole > 0)[:, None]
    causes = dict(zip(WAITS.values(), split.sum(axis=0).tolist(), strict=True))
    return causes | {CAUSES[Phase.WAIT]: max(0.0, float(wait.sum()) - sum(causes.values()))}
