"""A run's spans in the trace format of Chrome and Perfetto; host and device clocks are separate processes in it."""

from __future__ import annotations

import json
from collections.abc import Iterator
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
    clocks = {"host", *(lane.clock for lane in spans.lanes.values())}
    names = [
        _event("process_name", "M", _PIDS[clock], 0, 0, {"name": f"{name} ({clock} clock)"})
        for clock in CLOCKS
        if clock in clocks
    ]
    timed = list(_counters(samples))
    for tid, lane in enumerate(spans.lanes.values(), start=1):
        pid = _PIDS[lane.clock]
        names.append(_event("thread_name", "M", pid, tid, 0, {"name": lane.name}))
        names.append(_event("thread_sort_index", "M", pid, tid, 0, {"sort_index": tid}))
        timed += _spans(lane, pid, tid)
    return names + sorted(timed, key=lambda event: float(event["ts"]))


def _event(name: str, kind: str, pid: int, tid: int, ts: int, args: Event, **more: object) -> Event:
    return {"name": name, "ph": kind, "ts": ts, "pid": pid, "tid": tid, "args": args, **more}


def _spans(lane: Lane, pid: int, tid: int) -> Iterator[Event]:
    # Both ends are rounded, not the length: what follows each other still does.
    starts, ends = (np.rint(1e6 * times).astype(int).tolist() for times in (lane.start, lane.end))
    for start, end, seconds in zip(starts, ends, lane.seconds.tolist(), strict=True):
        parts = {phase: value for phase, value in zip(lane.phases, seconds, strict=True) if value > 0}
        largest = max(parts, key=lambda phase: parts[phase], default=lane.phases[0])
        is_folded = len(parts) > 1
        args = {f"{phase} (s)": round(value, 6) for phase, value in parts.items()} if is_folded else {}
        category = "folded" if is_folded else "span"
        yield _event(largest, "X", pid, tid, start, args, dur=end - start, cat=category)


def _counters(samples: Samples) -> Iterator[Event]:
    counters = {
        "cores in use (%)": 100 * samples.cores_in_use(),
        "cores of this run": samples.run_cpu / 100,
    }
    if samples.gpu:
        counters["device utilisation (%)"] = 100 * samples.gpu["utilization"]
        counters["device power (W)"] = samples.gpu["power"]
    for name, values in counters.items():
        for t, value in zip(samples.t.tolist(), values.tolist(), strict=True):
            if t >= 0 and np.isfinite(value):
                yield _event(name, "C", _PIDS["host"], 0, round(1e6 * t), {"value": round(value, 2)})
