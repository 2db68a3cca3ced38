"""Progress of a run after an iteration, and metrics.csv: one row per iteration under Stable-Baselines3's names."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

COLUMNS = (
    "time/total_timesteps",
    "time/iterations",
    "time/time_elapsed",
    "time/fps",
    "rollout/ep_rew_mean",
    "rollout/ep_len_mean",
    "rollout/episodes",
    "train/n_updates",
    "train/learning_rate",
    "train/loss",
    "train/policy_gradient_loss",
    "train/value_loss",
    "train/entropy_loss",
    "train/approx_kl",
    "train/clip_fraction",
    "train/kl_settled",
    "train/clip_range",
    "train/explained_variance",
    "train/grad_norm",
    "train/q_mean",
    "train/td_error",
    "rollout/exploration_rate",
    "train/buffer_fill",
    "train/updates_per_step",
    "eval/mean_reward",
    "eval/mean_ep_length",
    "learner_busy",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """The state of a run after an iteration; counts are since the start of the run."""

    env_steps: int
    total_steps: int
    """Env steps at which the run ends."""
    iteration: int
    """Rollouts learned from."""
    updates: int
    """Optimizer steps."""
    episodes: int
    seconds: float
    """Wall time."""
    steps_per_second: float
    """Env steps per second of wall time."""
    return_mean: float | None
    """Mean return of the last 100 episodes; None until one has ended."""
    return_std: float | None
    length_mean: float | None
    """Mean length of the last 100 episodes, in env steps."""
    metrics: Mapping[str, float]
    """Metrics of this iteration under Stable-Baselines3's names: `train/…`, and `eval/…` if it evaluated."""
    phases: Mapping[str, float]
    """Seconds per phase of the learner."""
    learner_busy: float
    """Share of wall time, 0 to 1, in which the learner's device ran updates."""


def scalars(progress: Progress) -> dict[str, float]:
    """The known figures of an iteration by name, for metrics.csv and TensorBoard."""
    known: dict[str, float | None] = {
        "time/total_timesteps": progress.env_steps,
        "time/iterations": progress.iteration,
        "time/time_elapsed": progress.seconds,
        "time/fps": progress.steps_per_second,
        "rollout/ep_rew_mean": progress.return_mean,
        "rollout/ep_len_mean": progress.length_mean,
        "rollout/episodes": progress.episodes,
        "train/n_updates": progress.updates,
        **progress.metrics,
        "learner_busy": progress.learner_busy,
    }
    return {name: value for name, value in known.items() if value is not None}


class MetricsLog:
    """Writes metrics.csv; with `resume_at`, continues after the last row up to that many env steps."""

    def __init__(self, path: Path, resume_at: int | None = None, more: Sequence[str] = ()) -> None:
        """`more`: columns besides COLUMNS."""
        self._columns = (*COLUMNS, *more)
        kept = [] if resume_at is None else _rows_up_to(path, resume_at)
        part = path.with_name(f".{path.name}.part")
        with part.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(self._columns)
            writer.writerows([row.get(name, "") for name in self._columns] for row in kept)
        os.replace(part, path)
        self._file = path.open("a", newline="", encoding="utf-8")
        self._writer = csv.writer(self._file, lineterminator="\n")

    def write(self, progress: Progress) -> None:
        """Add a row and flush it."""
        values = scalars(progress)
        self._writer.writerow([_cell(values.get(name)) for name in self._columns])
        self._file.flush()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()


def _cell(value: float | None) -> str:
    if value is None:
        return ""
    # Eight digits: one more than a float32 carries.
    return str(value) if isinstance(value, int) else f"{value:.8g}"


def _rows_up_to(path: Path, env_steps: int) -> list[Mapping[str, str]]:
    """The complete rows up to `env_steps`; a resumed run repeats the later ones."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    whole_lines = text[: text.rfind("\n") + 1].splitlines()
    return [row for row in csv.DictReader(whole_lines, restval="") if _steps_of(row) <= env_steps]


def _steps_of(row: Mapping[str, str]) -> float:
    try:
        return float(row.get("time/total_timesteps", "inf"))
    except ValueError:
        return float("inf")
