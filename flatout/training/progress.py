"""Where a run stands after an iteration: what the pipeline tells its callback, the records and the display.

Data only; nothing here computes or imports.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """One iteration's figures, counted from the start of the run unless a field says otherwise."""

    env_steps: int
    """Env steps taken so far."""

    total_steps: int
    """Env steps asked for."""

    iteration: int
    """Rollouts collected and learned from so far."""

    updates: int
    """Optimizer steps so far."""

    episodes: int
    """Episodes finished so far."""

    seconds: float
    """Wall time since learn() began."""

    steps_per_second: float
    """Env steps per second of wall time since learn() began."""

    return_mean: float | None
    """Mean return of the last 100 episodes; None until one has finished."""

    return_std: float | None
    """Standard deviation of the return over the last 100 episodes."""

    length_mean: float | None
    """Mean length of the last 100 episodes, in env steps."""

    metrics: Mapping[str, float]
    """This iteration's figures under Stable-Baselines3's names: `train/…`, and `eval/…` if it evaluated."""

    phases: Mapping[str, float]
    """Seconds per phase of the learner since learn() began."""

    learner_busy: float
    """Share of wall time, 0 to 1, in which the learner's device ran update work."""
