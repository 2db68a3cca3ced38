"""What a run has done so far: counters and the last episodes, as a checkpoint keeps them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flatout.executors.base import Episode

WINDOW = 100
"""Episodes that the reported mean return is taken over."""


@dataclass(slots=True)
class TrainState:
    """Counts since the agent was new; all of it survives a resume."""

    env_steps: int = 0
    iteration: int = 0
    n_episodes: int = 0
    n_updates: int = 0
    nan_skips: int = 0
    oom_backoffs: int = 0
    lag_sum: int = 0
    """Over iterations: how many versions the data's policy was behind."""
    lag_max: int = 0
    overlapped: bool | None = None
    """Whether the run collects beside learning; decided once, so that a resumed run goes on the same way."""
    far_in_a_row: int = 0
    """Iterations, up to the last, in which the policy had moved further than overlap allows."""
    fell_back: bool = False
    """Whether the policy moved too fast for overlap, so that the run went on in lockstep."""
    wall_seconds: float = 0.0
    lanes: dict[str, dict[str, float]] = field(default_factory=dict)
    """Seconds per phase of the learner and each collector."""
    best_return: float | None = None
    target_reached_seconds: float | None = None
    target_reached_steps: int | None = None
    returns: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    lengths: deque[int] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def add(self, n_transitions: int, episodes: Iterable[Episode]) -> None:
        """Count one iteration."""
        self.env_steps += n_transitions
        self.iteration += 1
        for episode in episodes:
            self.n_episodes += 1
            self.returns.append(episode.total_reward)
            self.lengths.append(episode.length)

    @property
    def return_mean(self) -> float | None:
        """Mean return of the last episodes."""
        return float(np.mean(self.returns)) if self.returns else None

    @property
    def return_std(self) -> float | None:
        """Deviation of the last episodes' returns."""
        return float(np.std(self.returns)) if self.returns else None

    @property
    def length_mean(self) -> float | None:
        """Mean length of the last episodes."""
        return float(np.mean(self.lengths)) if self.lengths else None

    def reached(self, target: float | None) -> bool:
        """Whether a full window of episodes has reached the target return."""
        mean = self.return_mean
        return target is not None and mean is not None and len(self.returns) == WINDOW and mean >= target

    def to_json(self) -> dict[str, Any]:
        """Plain data for a checkpoint."""
        data = {name: getattr(self, name) for name in self.__slots__}
        return data | {"returns": list(self.returns), "lengths": list(self.lengths)}

    @staticmethod
    def from_json(data: dict[str, Any]) -> TrainState:
        """What `to_json` described."""
        state = TrainState(**{k: v for k, v in data.items() if k not in ("returns", "lengths")})
        state.returns.extend(data["returns"])
        state.lengths.extend(data["lengths"])
        return state
