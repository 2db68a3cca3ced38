"""What a run has done so far: counters and the last episodes, as saved in checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flatout.executors.episodes import LastEpisodes

EPISODES = ("returns", "lengths", "eval_returns")


@dataclass(slots=True)
class TrainState:
    """Counts since training began; a resumed run continues them."""

    env_steps: int = 0
    schedule_start: int = 0
    """Env steps at which schedules began; above 0 after a learn() that begins them again."""
    iteration: int = 0
    n_episodes: int = 0
    n_updates: int = 0
    nan_skips: int = 0
    oom_backoffs: int = 0
    lag_sum: int = 0
    """Sum over iterations of how many versions the data's policy was behind."""
    lag_max: int = 0
    overlapped: bool | None = None
    """Whether the run overlaps collecting and learning; decided once, so that a resumed run continues the same way."""
    far_in_a_row: int = 0
    """Consecutive iterations, up to the last, in which the policy changed more than overlap allows."""
    fell_back: bool = False
    """Whether the policy changed too fast for overlap, so that the run continued in lockstep."""
    wall_seconds: float = 0.0
    lanes: dict[str, dict[str, float]] = field(default_factory=dict)
    """Seconds per phase of the learner and each collector."""
    best_return: float | None = None
    target_reached_seconds: float | None = None
    target_reached_steps: int | None = None
    returns: LastEpisodes = field(default_factory=LastEpisodes)
    lengths: LastEpisodes = field(default_factory=LastEpisodes)
    eval_returns: LastEpisodes = field(default_factory=LastEpisodes)
    """Of the last evaluation."""

    def to_json(self) -> dict[str, Any]:
        """Plain data for a checkpoint."""
        data = {name: getattr(self, name) for name in self.__slots__}
        return data | {name: list(getattr(self, name)) for name in EPISODES}

    def load(self, data: dict[str, Any]) -> None:
        """Take over what `to_json` returned."""
        for name, value in data.items():
            setattr(self, name, LastEpisodes(value) if name in EPISODES else value)
