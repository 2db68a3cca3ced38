"""Examples of `Progress` for the tests of everything that shows or stores it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flatout.runlog.recorder import Progress

MIDWAY = Progress(
    env_steps=125_000,
    total_steps=500_000,
    iteration=30,
    updates=900,
    episodes=1204,
    seconds=6.9,
    steps_per_second=18_200.4,
    return_mean=143.21,
    return_std=30.06,
    length_mean=143.2,
    metrics={
        "train/approx_kl": 0.0112,
        "train/clip_fraction": 0.12,
        "train/entropy_loss": -0.58,
        "train/explained_variance": 0.81,
        "train/value_loss": 12.5,
        "train/loss": 12.3,
    },
    phases={"collect": 2.6, "learn": 4.1, "evaluate": 0.2},
    learner_busy=0.61,
    seconds_left=20.6,
)


def progress(**changes: Any) -> Progress:
    """`MIDWAY` with some fields changed."""
    return replace(MIDWAY, **changes)
