"""The figures of a run's page, few enough that the page stays small however long the run was.

In: a run's records. Out: plain lists for the page's script: curves, and the lanes as bins plus some spans in detail.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from flatout.runlog.lanes import is_idle, timeline
from flatout.runlog.samples import cores_in_use
from flatout.runlog.spans import Floats, Lane, Spans
from flatout.views.records import RunRecords

MOST_POINTS = 1000
MOST_LANES = 12
MOST_SPANS = 5000
N_WINDOWS = 5
"""Stretches shown span by span when there are too many spans for all of them."""
_N_BINS = 400
_N_TIMES = 150
_SMOOTH = 0.04
"""Each point of a curve over time is a mean over this part of the run before and after it."""


def page_data(records: RunRecords) -> dict[str, Any]:
    """Everything that the page draws."""
    return {"curve": curve(records), "time": over_time(records), "gantt": gantt(records.spans)}


def curve(records: RunRecords) -> dict[str, Any]:
    """The learning curve: env steps, seconds, mean return of the last 100 episodes, evaluations."""
    columns = [
        records.metrics.get(name, np.zeros(0))
        for name in ("time/total_timesteps", "time/time_elapsed", "rollout/ep_rew_mean", "eval/mean_reward")
    ]
    if len({len(column) for column in columns}) != 1:
        return {"steps": [], "seconds": [], "return": [], "eval": []}
    steps, seconds, returns, evaluated = columns
    kept = _spread(np.flatnonzero(np.isfinite(steps) & np.isfinite(seconds)), MOST_POINTS)
    # Evaluations are rare and each counts: none is left out with its row.
    tested = _spread(np.flatnonzero(np.isfinite(evaluated) & np.isfinite(steps)), MOST_POINTS)
    return {
        "steps": plain(steps[kept]),
        "seconds": plain(seconds[kept], 3),
        "return": plain(returns[kept], 4),
        "eval": [plain(column[tested], 4) for column in (steps, seconds, evaluated)],
    }


def over_time(records: RunRecords) -> dict[str, Any]:
    """Steps/s, learner busy and the machine's use over the wall time, each point a mean around its time."""
    seconds, samples = records.metrics.get("time/time_elapsed", np.zeros(0)), records.samples
    end = max(records.spans.end, _last(seconds), _last(samples.t))
    if end <= 0:
        return {"t": [], "rate": [], "busy": [], "gpu": [], "cores": []}
    t = np.linspace(0, end, _N_TIMES)
    return {
        "t": plain(t, 3),
        "rate": plain(_rate(seconds, records.metrics.get("time/total_timesteps", np.zeros(0)), t), 1),
        "busy": plain(_busy(records.spans.lanes.get("learner"), t), 4),
        "gpu": plain(_means(samples.t, samples.gpu.utilization, t), 4) if samples.gpu else [],
        "cores": plain(_means(samples.t, cores_in_use(samples), t), 4),
    }


def gantt(spans: Spans) -> dict[str, Any]:
    """The lanes in bins over the whole run, and in detail where there is room for it."""
    lanes = [_idle_last(lane) for lane in list(spans.lanes.values())[:MOST_LANES]]
    phases = list(dict.fromkeys(phase for lane in lanes for phase in lane.phases))
    windows = _windows(lanes)
    n_bins = min(_N_BINS, 20_000 // max(1, sum(len(lane.phases) for lane in lanes)))
    edges = np.linspace(0, spans.end or 1.0, n_bins + 1)
    return {
        "end": spans.end,
        "phases": phases,
        "left_out": len(spans.lanes) - len(lanes),
        "windows": windows,
        "lanes": [
            {
                "name": lane.name,
                "clock": lane.clock,
                "phases": [phases.index(phase) for phase in lane.phases],
                "bins": [plain(100 * column, 0) for column in timeline(lane, edges).T],
                "detail": [_detail(lane, phases, *window) for window in windows],
            }
            for lane in lanes
        ],
    }


def _idle_last(lane: Lane) -> Lane:
    """The lane with its useful phases first: they are drawn from the ground up, the idle ones above."""
    order = sorted(range(len(lane.phases)), key=lambda column: is_idle(lane.name, lane.phases[column]))
    phases = tuple(lane.phases[column] for column in order)
    return replace(lane, phases=phases, seconds=lane.seconds[:, order])


def _windows(lanes: list[Lane]) -> list[tuple[float, float]]:
    """The stretches that are shown span by span: all, or a few spread over the run."""
    if not lanes or sum(len(lane.start) for lane in lanes) <= MOST_SPANS:
        return [(0.0, max((float(lane.end[-1]) for lane in lanes), default=0.0))]
    starts = np.sort(np.concatenate([lane.start for lane in lanes]))
    size = MOST_SPANS // N_WINDOWS
    # By count, not by time: where spans are many is where they are fine.
    first = np.linspace(0, len(starts) - size - 1, N_WINDOWS).astype(int)
    windows = [(float(starts[i]), float(starts[i + size])) for i in first]
    return [(begin, end) for begin, end in windows if end > begin]


def _detail(lane: Lane, phases: list[str], begin: float, end: float) -> dict[str, Any]:
    """The spans that lie in the window: start and length in µs, and the phase, or the shares of several."""
    inside = np.flatnonzero((lane.start >= begin) & (lane.end <= end + 1e-9))
    start = np.rint(1e6 * (lane.start[inside] - begin)).astype(int)
    stop = np.rint(1e6 * (lane.end[inside] - begin)).astype(int)
    columns = np.array([phases.index(phase) for phase in lane.phases], int)
    seconds = lane.seconds[inside]
    several = (seconds > 0).sum(axis=1) > 1
    main = columns[seconds.argmax(axis=1)] if len(inside) else np.zeros(0, int)
    mixed = {str(i): plain(1e3 * seconds[i], 3) for i in np.flatnonzero(several)}
    return {
        "start": start.tolist(),
        "length": (stop - start).tolist(),
        "phase": main.tolist(),
        "mixed": mixed,
    }


def _slope(times: Floats, sums: Floats, t: Floats) -> Floats:
    """What the growing sums gain per second around each time; NaN outside of what they cover."""
    half = _SMOOTH * (t[-1] - t[0])
    low, high = np.maximum(t - half, times[0]), np.minimum(t + half, times[-1])
    covered = (high > low) & (t >= times[0]) & (t <= times[-1])
    gained = np.interp(high, times, sums) - np.interp(low, times, sums)
    slope: Floats = np.divide(gained, high - low, out=np.full(len(t), np.nan), where=covered)
    return slope


def _rate(seconds: Floats, steps: Floats, t: Floats) -> Floats:
    known = np.isfinite(seconds) & np.isfinite(steps)
    if not known.any():
        return np.zeros(0)
    times, sums = np.append(0.0, seconds[known]), np.append(0.0, steps[known])
    order = np.argsort(times, kind="stable")
    return _slope(times[order], sums[order], t)


def _busy(lane: Lane | None, t: Floats) -> Floats:
    if lane is None:
        return np.zeros(0)
    times = np.column_stack((lane.start, lane.end)).ravel()
    columns = [i for i, phase in enumerate(lane.phases) if not is_idle(lane.name, phase)]
    return np.minimum(1.0, _slope(times, lane.until(times)[:, columns].sum(axis=1), t))


def _means(times: Floats, values: Floats, t: Floats) -> Floats:
    """The mean of the values around each time; nothing at all if none is known."""
    known = np.isfinite(values) & np.isfinite(times)
    if not known.any():
        return np.zeros(0)
    times, sums = times[known], np.append(0.0, np.cumsum(values[known]))
    half = _SMOOTH * (t[-1] - t[0])
    low, high = np.searchsorted(times, t - half), np.searchsorted(times, t + half, side="right")
    means: Floats = np.divide(
        sums[high] - sums[low], high - low, out=np.full(len(t), np.nan), where=high > low
    )
    return means


def _last(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return float(known.max()) if known.size else 0.0


def _spread(indices: npt.NDArray[np.intp], most: int) -> npt.NDArray[np.intp]:
    """At most `most` of the indices, evenly spread, the last one included."""
    chosen = np.linspace(0, len(indices) - 1, min(len(indices), most)).astype(int)
    return np.asarray(indices[chosen], np.intp)


def plain(values: Floats, digits: int = 0) -> list[float | int | None]:
    """Numbers as JSON has them, short; None for what is not finite."""
    rounded = [round(v, digits) if np.isfinite(v) else None for v in values.tolist()]
    return [int(v) if v is not None and v == int(v) else v for v in rounded]
