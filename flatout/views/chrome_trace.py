"""A run's spans in the trace format of Chrome and Perfetto; host and device clocks are separate processes in it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from flatout.runlog.samples import Samples
from flatout.runlog.spans import CLOCKS, Lane, Spans

Event = dict[str, Any]
_PIDS = {clock: pid for pid, clock in enumerate(CLOCKS, start=1)}


def trace_json(name: str, spans: Spans, samples: Samples) -> str:
    """The text of a trace file, an event a line."""
    events = ",\n".join(json.dumps(event) for event in trace_events(name, spans, samples))
    return f'{{"displayTimeUnit": "ms", "traceEvents": [\n{events}\n]}}\n'


def trace_events(name: str, spans: Spans, samples: Samples) -> list[Event]:
    """Names first, then everything in the order of time."""
    names: list[Event] = [
        _name("process_name", _PIDS[clock], 0, f"{name} ({clock} clock)")
        for clock in CLOCKS
        if clock == "host" or any(lane.clock == clock for lane in spans.lanes.values())
    ]
    timed: list[Event] = []
    for tid, lane in enumerate(spans.lanes.values(), start=1):
        pid = _PIDS[lane.clock]
        names.append(_name("thread_name", pid, tid, lane.name))
        names.append({**_name("thread_sort_index", pid, tid, ""), "args": {"sort_index": tid}})
        timed += _spans(lane, pid, tid)
    timed += _counters(samples)
    return names + sorted(timed, key=lambda event: float(event["ts"]))


def _name(kind: str, pid: int, tid: int, name: str) -> Event:
    return {"name": kind, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": {"name": name}}


def _spans(lane: Lane, pid: int, tid: int) -> Iterator[Event]:
    # Both ends are rounded, not the length: what follows each other still does.
    starts, ends = (np.rint(1e6 * times).astype(int).tolist() for times in (lane.start, lane.end))
    for start, end, seconds in zip(starts, ends, lane.seconds.tolist(), strict=True):
        parts = {phase: value for phase, value in zip(lane.phases, seconds, strict=True) if value > 0}
        yield {
            "name": max(parts, key=lambda phase: parts[phase], default=lane.phases[0]),
            "cat": "folded" if len(parts) > 1 else "span",
            "ph": "X",
            "ts": start,
            "dur": end - start,
            "pid": pid,
            "tid": tid,
            "args": _seconds(parts) if len(parts) > 1 else {},
        }


def _seconds(parts: Mapping[str, float]) -> dict[str, float]:
    return {f"{phase} (s)": round(value, 6) for phase, value in parts.items()}


def _counters(samples: Samples) -> Iterator[Event]:
    counters = [
        ("cores in use (%)", 100 * samples.cores_in_use()),
        ("cores of this run", samples.run_cpu / 100),
    ]
    if samples.gpu:
        counters += [
            ("device utilisation (%)", 100 * samples.gpu["utilization"]),
            ("device power (W)", samples.gpu["power"]),
        ]
    for name, values in counters:
        for t, value in zip(samples.t.tolist(), values.tolist(), strict=True):
            if t >= 0 and np.isfinite(value):
                yield {
                    "name": name,
                    "ph": "C",
                    "ts": round(1e6 * t),
                    "pid": _PIDS["host"],
                    "tid": 0,
                    "args": {"value": round(value, 2)},
                }
