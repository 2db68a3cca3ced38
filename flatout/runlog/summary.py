"""The end of a run in a dozen plain lines, from the fields of summary.json.

In: the summary, of which any field may be null or missing. Out: text that says only what is known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from flatout.views.figures import count, duration, mean_and_std, number, percent, rate

_LABEL_CELLS = 14
_REPAIRS = (
    ("restarts", "worker restarts"),
    ("oom_backoffs", "out-of-memory back-offs"),
    ("nan_skips", "NaN updates skipped"),
)


def summary_text(summary: Mapping[str, Any]) -> str:
    """What a person wants to know when a run ends; a line for each thing that is known, the folder last."""
    return "\n".join(f"{label:<{_LABEL_CELLS}}{text}" for label, text in summary_lines(summary))


def summary_lines(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The same as pairs of a label and its text."""
    lines = (
        (str(summary.get("status") or "ended"), _outcome(summary)),
        ("run", _identity(summary)),
        ("return", _returns(summary)),
        ("target", _target(summary)),
        ("learner busy", _busy(summary)),
        ("time went to", _phases(summary)),
        ("pipeline", _pipeline(summary)),
        ("executor", _executor(summary)),
        ("policy lag", _lag(summary)),
        ("recovered", _repairs(summary)),
        ("folder", str(summary.get("folder") or "")),
    )
    return [(label, text) for label, text in lines if text]


def _outcome(summary: Mapping[str, Any]) -> str:
    steps, wall = _number(summary, "env_steps"), _number(summary, "wall_seconds")
    speed, startup = _number(summary, "steps_per_second"), _number(summary, "startup_seconds")
    text = f"{count(steps or 0)} env steps"
    if wall is not None:
        text += f" in {_seconds(wall)}"
    if speed is not None:
        text += f", {rate(speed)} steps/s"
    if startup is not None:
        text += f", after {_seconds(startup)} to start"
    return text


def _identity(summary: Mapping[str, Any]) -> str:
    seed = summary.get("seed")
    parts = [summary.get("env"), summary.get("algo"), summary.get("preset"), summary.get("device")]
    return ", ".join(
        [*(str(part) for part in parts if part), *([f"seed {seed}"] if seed is not None else [])]
    )


def _returns(summary: Mapping[str, Any]) -> str:
    mean, std, episodes = (_number(summary, key) for key in ("return_mean", "return_std", "episodes"))
    if mean is None:
        return "not known: no episode ended"
    text = mean_and_std(mean, std)
    if episodes is None:
        return text
    return f"{text} over the last {count(min(100, episodes))} of {count(episodes)} episodes"


def _target(summary: Mapping[str, Any]) -> str:
    target = _number(summary, "target_return")
    if target is None:
        return ""
    seconds, steps = _number(summary, "target_reached_seconds"), _number(summary, "target_reached_steps")
    if seconds is None and steps is None:
        return f"{number(target)} not reached"
    after = [_seconds(seconds)] if seconds is not None else []
    after += [f"{count(steps)} env steps"] if steps is not None else []
    return f"{number(target)} reached after {' and '.join(after)}"


def _busy(summary: Mapping[str, Any]) -> str:
    busy, device = _number(summary, "learner_busy"), _number(summary, "device_utilization")
    parts = [f"{percent(busy)} of the time"] if busy is not None else []
    if device is not None:
        parts.append(
            f"device utilisation {percent(device)} (time in which any kernel ran, not how full it was)"
        )
    if (joules := _number(summary, "device_energy_joules")) is not None:
        parts.append(f"{number(joules / 1000)} kJ")
    return ", ".join(parts)


def _phases(summary: Mapping[str, Any]) -> str:
    phases = summary.get("phases")
    if not isinstance(phases, Mapping):
        return ""
    seconds = {str(name): value for name in phases if (value := _number(phases, name)) is not None}
    wall = _number(summary, "wall_seconds") or sum(seconds.values())
    if wall <= 0:
        return ""
    largest_first = sorted(seconds.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {percent(s / wall)}" for name, s in largest_first if s / wall >= 0.005)


def _pipeline(summary: Mapping[str, Any]) -> str:
    efficiency = _number(summary, "pipeline_efficiency")
    collect, learn = _number(summary, "collect_rate"), _number(summary, "learn_rate")
    if collect is None or learn is None:
        return ""
    slower = "collecting" if collect < learn else "learning"
    text = (
        f"collects {rate(collect)} and learns {rate(learn)} steps/s when neither waits: {slower} is the limit"
    )
    return text if efficiency is None else f"{text}, {percent(efficiency)} of it reached"


def _executor(summary: Mapping[str, Any]) -> str:
    executor = summary.get("executor")
    if not isinstance(executor, Mapping) or not executor.get("kind"):
        return ""
    reason = executor.get("reason")
    counts = [(noun, executor.get(f"{noun}s")) for noun in ("collector", "worker")]
    sizes = [f"{n} {noun}" if n == 1 else f"{n} {noun}s" for noun, n in counts if n]
    return ", ".join([str(executor["kind"]), *sizes]) + (f" ({reason})" if reason else "")


def _lag(summary: Mapping[str, Any]) -> str:
    mean, largest = _number(summary, "policy_lag_mean"), _number(summary, "policy_lag_max")
    return f"{number(mean)} on average, {count(largest)} at most" if largest else ""


def _repairs(summary: Mapping[str, Any]) -> str:
    counts = [(label, _number(summary, key)) for key, label in _REPAIRS]
    return ", ".join(f"{count(n)} {label}" for label, n in counts if n)


def _seconds(value: float) -> str:
    """Short times to a tenth: whether it was 0.4 s or 1.2 s matters at the end of a run."""
    return f"{value:.1f} s" if value < 59.95 else duration(value)


def _number(fields: Mapping[str, Any], key: str) -> float | None:
    value = fields.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value
