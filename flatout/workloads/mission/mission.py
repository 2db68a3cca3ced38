"""Mission as a Gymnasium env: one joint action of the squad per step."""

from __future__ import annotations

from pathlib import Path
from typing import Any, SupportsFloat, TypeAlias

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from flatout.workloads.mission.game import CARRIER, N_ACTIONS, Events, Game
from flatout.workloads.mission.generate import LEVELS, generate
from flatout.workloads.mission.map_image import image, text
from flatout.workloads.mission.observe import SIZE, Navigator, Observer
from flatout.workloads.mission.scenario import Scenario, load_scenario
from flatout.workloads.validate import check_choice

Observation: TypeAlias = dict[str, NDArray[Any]]

SUCCESS, PROGRESS, SLOWNESS, NOTICED, LOST, LOST_CARRIER = 10.0, 2.0, -1.0, -0.5, -0.5, -2.0
"""Rewards of: success, the carrier's whole path, the whole time limit, a chase by every patrol, a lost unit, the carrier."""
SOLVED = 5.0
"""A return above this is a success: returns of successes are above 9, all others below 3."""


class Mission(gym.Env[Any, NDArray[np.int64]]):
    """A squad with limited sight crosses a map with walls and patrols; its carrier must hold the objective.

    `level` 1 to 3 generates a new map for each episode from the seed; `scenario` is a JSON file to play instead.
    """

    metadata = {"render_modes": ["rgb_array", "ansi"], "render_fps": 6}  # noqa: RUF012  # declared so by Gymnasium

    def __init__(
        self, level: int = 1, scenario: str | Path | None = None, render_mode: str | None = None
    ) -> None:
        check_choice("level", level, tuple(LEVELS))
        check_choice("render_mode", render_mode, (None, *self.metadata["render_modes"]))
        self.level = level
        self.render_mode = render_mode
        self._scenario = None if scenario is None else load_scenario(scenario)
        self.action_space = spaces.MultiDiscrete(list(N_ACTIONS))
        self.observation_space = spaces.Dict(
            {
                "squad": spaces.Box(-1.0, 1.0, (SIZE,), np.float32),
                "action_mask": spaces.MultiBinary(sum(N_ACTIONS)),
            }
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        del options
        super().reset(seed=seed)
        self.start(self._scenario or generate(self.level, self.np_random))
        return self._observation(), self._info()

    def start(self, scenario: Scenario) -> None:
        """Start this scenario."""
        self.game = Game(scenario)
        self._navigator = Navigator(self.game)
        self._observer = Observer(self.game, self._navigator)
        self._progress = 0.0

    def step(
        self, action: NDArray[np.int64]
    ) -> tuple[Observation, SupportsFloat, bool, bool, dict[str, Any]]:
        """The actions of scout, breacher and carrier; docs/mission.md lists them."""
        events = self.game.step([int(a) for a in action])
        self._navigator.update()
        reward = self._reward(events)
        terminated = self.game.outcome is not None
        truncated = not terminated and self.game.time >= self.game.scenario.time_limit
        return self._observation(), reward, terminated, truncated, self._info()

    def render(self) -> NDArray[np.uint8] | str | None:
        """The map; what the squad does not see is dark."""
        if self.render_mode == "ansi":
            return text(self.game)
        return image(self.game) if self.render_mode == "rgb_array" else None

    def _reward(self, events: Events) -> float:
        game = self.game
        before, self._progress = self._progress, self._navigator.progress()
        reward = PROGRESS * (self._progress - before) + SLOWNESS / game.scenario.time_limit
        reward += NOTICED * len(events.noticed) / max(len(game.patrols), 1)
        reward += sum(LOST_CARRIER if unit == CARRIER else LOST for unit in events.captured)
        return reward + SUCCESS * (game.outcome == "success")

    def _observation(self) -> Observation:
        return {"squad": self._observer.observation(), "action_mask": self.game.allowed}

    def _info(self) -> dict[str, Any]:
        outcome = self.game.outcome
        return {"success": outcome == "success", "outcome": outcome or "", "held": self.game.held}
