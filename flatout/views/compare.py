"""Runs beside each other: seeds of the same settings as one group, with statistics over seeds and a mean learning curve.

The interquartile mean and its bootstrap interval are those of Agarwal et al. (2021), "Deep Reinforcement Learning at the
Edge of the Statistical Precipice".
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flatout.errors import FlatoutError
from flatout.runlog.files import plural, read_json
from flatout.runlog.folder import RunFolder
from flatout.views import figures as fmt
from flatout.views.runs import RunIndex, RunRow, curve_of, row_of

Floats = npt.NDArray[np.float64]
N_RESAMPLES = 10_000
CONFIDENCE = 0.95
FEW_SEEDS = 5
"""With fewer an interval says little."""
N_POINTS = 200
_MOST_DIFFERENCES = 4


@dataclass(frozen=True)
class Run:
    """A run with its learning curve."""

    path: Path
    row: RunRow
    steps: Floats
    seconds: Floats
    returns: Floats
    """Mean return of the last 100 episodes."""

    def return_at(self, steps: float | None) -> float:
        """The return after so many env steps, or at the end; NaN if it is not known."""
        if steps is not None:
            is_inside = len(self.steps) > 0 and self.steps[0] <= steps <= self.steps[-1]
            return float(np.interp(steps, self.steps, self.returns)) if is_inside else np.nan
        if self.row.return_mean is not None:
            return self.row.return_mean
        return float(self.returns[-1]) if len(self.returns) else np.nan

    def seconds_to(self, target: float) -> float:
        """Wall seconds until the curve reached a return; infinite if it did not."""
        reached = np.flatnonzero(self.returns >= target)
        return float(self.seconds[reached[0]]) if len(reached) else np.inf


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seeds."""

    label: str
    runs: Sequence[Run]
    differs: str = ""
    """Settings in which it differs from the other groups of its env."""
    at_steps: float | None = None

    @property
    def env(self) -> str:
        """The env of its runs."""
        return self.runs[0].row.env

    @cached_property
    def returns(self) -> Floats:
        """The return of each run that has one."""
        values = [run.return_at(self.at_steps) for run in self.runs]
        return np.array([value for value in values if np.isfinite(value)])

    @cached_property
    def interval(self) -> tuple[float, float] | None:
        """The interval of the interquartile mean; None for a single run."""
        return bootstrap_interval(self.returns) if len(self.returns) > 1 else None

    def curve(self, by: str) -> tuple[Floats, Floats, Floats]:
        """Places on the axis `steps` or `seconds`, mean return and standard deviation over seeds.

        Over steps as far as all runs have come; over seconds a run counts with its first return before, and with its
        last one after its curve.
        """
        drawn = [run for run in self.runs if len(run.returns)]
        if not drawn:
            return np.zeros(0), np.zeros(0), np.zeros(0)
        axes: list[Floats] = [getattr(run, by) for run in drawn]
        if len(drawn) == 1:
            return axes[0], drawn[0].returns, np.zeros(len(axes[0]))
        begins, ends = [axis[0] for axis in axes], [axis[-1] for axis in axes]
        span = (max(begins), min(ends)) if by == "steps" else (min(begins), max(ends))
        x = np.linspace(*span, N_POINTS)
        if x[-1] <= x[0]:
            return np.zeros(0), np.zeros(0), np.zeros(0)
        values = np.array([np.interp(x, axis, run.returns) for axis, run in zip(axes, drawn, strict=True)])
        return x, values.mean(axis=0), values.std(axis=0, ddof=1)

    def mean(self, key: str) -> float | None:
        """The mean of a figure of its runs' rows."""
        known = [value for run in self.runs if (value := getattr(run.row, key)) is not None]
        return sum(known) / len(known) if known else None


def interquartile_mean(values: Floats) -> Floats:
    """Mean along the last axis without the lowest and the highest quarter; of fewer than 4 values, of all."""
    n = values.shape[-1]
    inside: Floats = np.sort(values, axis=-1)[..., n // 4 : n - n // 4]
    return np.asarray(inside.mean(axis=-1), np.float64)


def bootstrap_interval(values: Floats) -> tuple[float, float]:
    """The interval that contains the interquartile mean of 95 % of the resamples; the same for the same values."""
    chosen = np.random.default_rng(0).integers(len(values), size=(N_RESAMPLES, len(values)))
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(interquartile_mean(np.sort(values)[chosen]), [tail, 100 - tail])
    return float(low), float(high)


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """The runs that are named, and all runs of the folders that are named."""
    found: dict[Path, Path] = {}
    for path in paths:
        if path.is_dir() and not (path / "config.json").is_file():
            inside = [path / name for name in RunIndex(path).read()]
            if not inside:
                raise FlatoutError(f"there are no runs in {os.path.join(path, '')}")
        else:
            inside = [RunFolder.open(path).path]
        found |= {run.resolve(): run for run in inside if run.resolve() not in found}
    return list(found.values())


def read_groups(paths: Sequence[Path], at_steps: float | None = None) -> dict[str, list[Group]]:
    """The groups of these runs by env, in the order of the runs."""
    members: dict[tuple[str, str], list[Run]] = {}
    for path in paths:
        run = _read(path)
        members.setdefault((run.row.env, run.row.group), []).append(run)
    by_env: dict[str, list[list[Run]]] = {}
    for (env, _), runs in members.items():
        by_env.setdefault(env, []).append(runs)
    return {env: _groups(groups, at_steps) for env, groups in by_env.items()}


def _read(path: Path) -> Run:
    row, curve = row_of(path), curve_of(path)
    if row is None:
        raise FlatoutError(f"{path} is not a run: its records cannot be read")
    steps, seconds, returns = (np.array(curve[key], float) for key in ("steps", "seconds", "return"))
    return Run(path, row, steps, seconds, returns)


def _groups(groups: Sequence[Sequence[Run]], at_steps: float | None) -> list[Group]:
    settings = [_flat(read_json(runs[0].path / "config.json")) for runs in groups]
    labels = _labels(groups)
    return [
        Group(label, runs, _differences(own, settings), at_steps)
        for label, runs, own in zip(labels, groups, settings, strict=True)
    ]


def _labels(groups: Sequence[Sequence[Run]]) -> list[str]:
    """What the names of a group's runs have in common; with their folders where that is not enough."""
    labels = [_label(runs) for runs in groups]
    if len(set(labels)) < len(labels):
        labels = [str(runs[0].path) for runs in groups]
    return [fmt.printable(label) for label in labels]


def _label(runs: Sequence[Run]) -> str:
    first = runs[0].path.resolve()
    if all(re.fullmatch(r"seed-\d+", run.path.name) for run in runs):
        return first.parent.name if len(runs) > 1 else f"{first.parent.name}/{first.name}"
    if len(runs) == 1:
        return first.name
    names = [run.path.name for run in runs]
    n_common = next((n for n, letters in enumerate(zip(*names, strict=False)) if len(set(letters)) > 1), 0)
    return re.sub(r"([-_.]?s(eed)?)?[-_.]?\d*$", "", names[0][:n_common]) or runs[0].row.algo or first.name


def _differences(own: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> str:
    """The settings of one group that are not those of all; of another algorithm, its name."""
    names = [name for name in own if any(other.get(name) != own[name] for other in others)]
    if "algo" in names:
        names = [name for name in names if "." not in name]
    texts = [f"{name.rpartition('.')[2]} {_value(own[name])}" for name in names]
    more = [f"{len(texts) - _MOST_DIFFERENCES} more"] if len(texts) > _MOST_DIFFERENCES else []
    return fmt.printable(", ".join([*texts[:_MOST_DIFFERENCES], *more]))


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        elif key not in ("seed", "signature", "overlap"):
            flat[prefix + key] = value
    return flat


def _value(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


HEADINGS = ("runs", "seeds", "IQM return", "95 % interval", "mean", "env steps", "steps/s", "time")


def table(groups: Sequence[Group], target: float | None = None) -> list[dict[str, str]]:
    """A row for each group, under HEADINGS and two more where they say something."""
    rows = []
    for group in groups:
        returns, known = group.returns, len(group.returns) > 0
        std = float(returns.std(ddof=1)) if len(returns) > 1 else None
        low_high = [fmt.number(value) for value in group.interval or ()]
        row = {
            "runs": group.label,
            "seeds": str(len(group.runs)),
            "IQM return": fmt.number(float(interquartile_mean(returns))) if known else fmt.NOTHING,
            "95 % interval": " to ".join(low_high) or fmt.NOTHING,
            "mean": fmt.mean_and_std(float(returns.mean()), std) if known else fmt.NOTHING,
            "env steps": fmt.told("{}", group.mean("env_steps"), fmt.count),
            "steps/s": fmt.told("{}", group.mean("steps_per_second"), fmt.rate),
            "time": fmt.told("{}", group.mean("wall_seconds"), fmt.seconds_text),
        }
        if target is not None:
            row[f"time to {fmt.number(target)}"] = _time_to(group, target)
        rows.append(row | {"differs in": group.differs})
    if not any(row["differs in"] for row in rows):
        for row in rows:
            del row["differs in"]
    return rows


def _time_to(group: Group, target: float) -> str:
    """The median over seeds, and how many of them reached it."""
    seconds = np.array([run.seconds_to(target) for run in group.runs])
    n_reached = int(np.isfinite(seconds).sum())
    if not n_reached:
        return "not reached"
    middle = float(np.sort(seconds)[len(seconds) // 2])
    median = fmt.seconds_text(middle) if np.isfinite(middle) else "most never"
    return median if n_reached == len(seconds) else f"{median} ({n_reached} of {len(seconds)} reached it)"


def notes(groups: Sequence[Group]) -> list[str]:
    """What to know before believing the table."""
    texts = []
    if len(groups) > 1 and any(group.interval is None for group in groups):
        texts.append("a single run has no interval: train --seeds 5 or more to compare settings")
    elif (
        max(len(group.returns) for group in groups) > 1
        and min(len(group.returns) for group in groups) < FEW_SEEDS
    ):
        texts.append(f"with fewer than {FEW_SEEDS} seeds an interval says little")
    runs = [run for group in groups for run in group.runs]
    known = [run.row.env_steps or 0.0 for run in runs]
    if groups[0].at_steps is None and min(known) < 0.9 * max(known):
        shortest = f"{fmt.count(min(known))} to {fmt.count(max(known))}"
        texts.append(
            f"the runs have {shortest} env steps; --steps {min(known):.0f} compares them at the same number"
        )
    if unfinished := [run for run in runs if run.row.status not in ("finished", "stopped")]:
        first = f"{unfinished[0].path.name} is {unfinished[0].row.status}"
        texts.append(f"{plural(len(unfinished), 'run')} not finished: {fmt.printable(first)}")
    if silent := [run for run in runs if not len(run.returns)]:
        texts.append(f"{plural(len(silent), 'run')} without a learning curve: no episode has ended yet")
    return texts


def verdict(groups: Sequence[Group]) -> str:
    """Which group is ahead, if the intervals are apart."""
    ranked = sorted(
        (group for group in groups if len(group.returns)),
        key=lambda group: -float(interquartile_mean(group.returns)),
    )
    if len(ranked) < 2:
        return ""
    first, second = ranked[:2]
    a, b = (fmt.number(float(interquartile_mean(group.returns))) for group in (first, second))
    if first.interval is None or second.interval is None:
        return f"{first.label} has the highest return, {a}, before {second.label} with {b}; one seed does not decide it."
    if first.interval[0] > second.interval[1]:
        return f"{first.label} is ahead: return {a} against {b} of {second.label}, with intervals apart."
    return f"{first.label} ({a}) and {second.label} ({b}) cannot be told apart: their intervals overlap."
