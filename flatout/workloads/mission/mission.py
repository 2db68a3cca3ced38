"""Mission as a Gymnasium env: one joint action of the squad per step, its rewards and its observation.

The observation has routes to the objective and, for each unit, what it sees around it and what the squad knows. It shows only
cells that a unit has seen, except for the position of the objective. Routes assume that unknown cells are floor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from flatout.workloads.mission.game import BREACHER, CARRIER, N_ACTIONS, Events, Game, Scenario
from flatout.workloads.mission.grid import DIRECTIONS, FAR, Cell, distances, first_wall, neighbours, prices
from flatout.workloads.mission.map_image import image, text
from flatout.workloads.mission.scenario import LEVELS, generate, load_scenario
from flatout.workloads.validate import Info, check_choice

Observation: TypeAlias = dict[str, NDArray[Any]]

SUCCESS, PROGRESS, SLOWNESS, NOTICED, LOST, LOST_CARRIER = 10.0, 2.0, -1.0, -0.5, -0.5, -2.0
"""Rewards of: success, the carrier's whole path, the whole time limit, a chase by every patrol, a lost unit, the carrier."""
SOLVED = 5.0
"""A return above this is a success: returns of successes are above 9, all others below 3."""

BREACH_PRICE = 6
"""Breaking a wall costs as much as a detour of this many cells."""
DANGER_PRICE = 12
"""The same for danger 1: a cell next to a patrol in sight."""
REACH = 3
"""A unit's window shows this many cells on each side."""
WINDOW = 2 * REACH + 1
N_PATROLS = 2
"""Number of patrols in the observation, nearest first."""
FORGET = 12
"""Steps after which a sighting is forgotten."""
N_UNIT = 2 * WINDOW**2 + 12 + 6 * N_PATROLS
SIZE = 3 * N_UNIT + 5

UNKNOWN = 0.5
GOALS = (0, -1, 0)
"""Index of each unit's route: the last one, to the wall if there is one, is the breacher's."""


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
        self.level, self.render_mode = level, render_mode
        self._scenario = None if scenario is None else load_scenario(scenario)
        self.action_space = spaces.MultiDiscrete(list(N_ACTIONS))
        squad = spaces.Box(-1.0, 1.0, (SIZE,), np.float32)
        mask = spaces.MultiBinary(sum(N_ACTIONS))
        self.observation_space = spaces.Dict({"squad": squad, "action_mask": mask})

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Observation, Info]:
        del options
        super().reset(seed=seed)
        self.start(self._scenario or generate(self.level, self.np_random))
        return self._observation(), self._info()

    def start(self, scenario: Scenario) -> None:
        """Start this scenario."""
        self.game = Game(scenario)
        self._observer = Observer(self.game)
        self._progress = 0.0

    def step(self, action: NDArray[np.int64]) -> tuple[Observation, float, bool, bool, Info]:
        """The actions of scout, breacher and carrier; docs/mission.md lists them."""
        events = self.game.step([int(a) for a in action])
        self._observer.update()
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
        before, self._progress = self._progress, self._observer.progress()
        reward = PROGRESS * (self._progress - before) + SLOWNESS / game.scenario.time_limit
        reward += NOTICED * len(events.noticed) / max(len(game.patrols), 1)
        reward += sum(LOST_CARRIER if unit == CARRIER else LOST for unit in events.captured)
        return reward + SUCCESS * (game.outcome == "success")

    def _observation(self) -> Observation:
        return {"squad": self._observer.observation(), "action_mask": self.game.allowed}

    def _info(self) -> Info:
        outcome = self.game.outcome
        return {"success": outcome == "success", "outcome": outcome or "", "held": self.game.held}


class Observer:
    """Builds the observations of one episode; routes are recomputed only when what is known changes."""

    def __init__(self, game: Game) -> None:
        self._game = game
        rows, columns = game.walls.shape
        self._blocked = np.ones((rows + 2 * REACH, columns + 2 * REACH), np.float32)
        self._danger = np.zeros_like(self._blocked)
        self._facts: Any = None
        self._careful_for: Any = None
        self.update()
        self._whole = max(1.0, self._left())

    def update(self) -> None:
        """Recompute what the last step has changed."""
        game = self._game
        walls, breaks = game.walls & game.known, game.free[BREACHER] and game.charges > 0
        facts = walls.tobytes(), breaks
        is_new = facts != self._facts
        if is_new:
            self._facts, self._walls = facts, walls
            price = prices(walls, BREACH_PRICE if breaks else FAR)
            self._routes = [(distances(price, game.scenario.objective), price)]
            """Distances and prices to the objective and, if there is one, to the wall that the breacher breaks."""
            self._wall: Cell | None = None
            """The first wall on the carrier's path, for the breacher to break."""
        if is_new or game.units[CARRIER] != self._carrier:
            self._find_wall()
        self._avoid()

    def observation(self) -> NDArray[np.float32]:
        """For scout, breacher and carrier: windows, routes, own state and patrols; then values of the whole squad."""
        game, inside = self._game, (slice(REACH, -REACH), slice(REACH, -REACH))
        self._blocked[inside] = np.where(game.known, game.walls, UNKNOWN)
        self._danger[inside] = game.danger
        out = np.zeros(SIZE, np.float32)
        for unit in range(3):
            if game.free[unit]:
                self._write_unit(unit, out[unit * N_UNIT : (unit + 1) * N_UNIT])
        out[-5:] = (
            1.0 - game.time / game.scenario.time_limit,
            game.held / game.scenario.hold,
            min(game.charges / 4, 1.0),
            game.tired,
            self._wall is not None,
        )
        return out

    def _write_unit(self, unit: int, out: NDArray[np.float32]) -> None:
        """Write a unit's windows, route arrows, position and nearest patrols."""
        game = self._game
        row, column = game.units[unit]
        goal_row, goal_column = game.scenario.objective
        n, window = WINDOW**2, (slice(row, row + WINDOW), slice(column, column + WINDOW))
        out[:n], out[n : 2 * n] = self._blocked[window].ravel(), self._danger[window].ravel()
        rest = [*self._arrows(unit), 1.0, _near(goal_row - row), _near(goal_column - column)]
        rest.append(min(self._left_of(unit) / 40, 1.0))
        recent = [sighting for sighting in game.sightings.values() if sighting.age < FORGET]
        recent.sort(key=lambda s: abs(s.at[0] - row) + abs(s.at[1] - column))
        for s in recent[:N_PATROLS]:
            rest += 1.0 - s.age / FORGET, _near(s.at[0] - row), _near(s.at[1] - column)
            rest += *DIRECTIONS[s.facing], s.alarm
        out[2 * n : 2 * n + len(rest)] = rest

    def progress(self) -> float:
        """0 at the start, 1 when the carrier is on the objective, at least -1."""
        return max(1.0 - self._left() / self._whole, -1.0)

    def _arrows(self, unit: int) -> list[float]:
        """For each direction 1 if the next cell is on a shortest path to the unit's goal; then the same for the path
        that avoids danger."""
        here, goal = self._game.units[unit], GOALS[unit]
        return [
            float(field[here] < FAR and field[at] + price[at] <= field[here])
            for field, price in (self._routes[goal], self._careful[goal])
            for at in neighbours(here)
        ]

    def _left_of(self, unit: int) -> int:
        """Cost of the rest of a unit's path."""
        return int(self._routes[GOALS[unit]][0][self._game.units[unit]])

    def _left(self) -> float:
        return self._left_of(CARRIER) + (0.5 * self._left_of(BREACHER) if self._wall is not None else 0.0)

    def _avoid(self) -> None:
        """Recompute the paths to the objective and to the wall that avoid danger."""
        facts = (self._game.danger.tobytes(), self._facts, self._wall)
        if facts == self._careful_for:
            return
        self._careful_for, self._careful = facts, self._routes
        if self._game.danger.any():
            detour = (DANGER_PRICE * self._game.danger).astype(np.int32)
            goals = [goal for goal in (self._game.scenario.objective, self._wall) if goal]
            costs = [price + detour for _, price in self._routes]
            self._careful = [(distances(cost, goal), cost) for cost, goal in zip(costs, goals, strict=True)]

    def _find_wall(self) -> None:
        self._carrier = self._game.units[CARRIER]
        (field, price), wall = self._routes[0], None
        if field[self._carrier] < FAR:
            wall = first_wall(self._walls, field, price, self._carrier, self._game.scenario.objective)
        if wall != self._wall:
            self._wall, self._routes = wall, self._routes[:1]
            if wall is not None:
                floor = prices(self._walls, FAR)
                floor[wall] = 1
                self._routes.append((distances(floor, wall), floor))


def _near(offset: int) -> float:
    """An offset in cells squashed to ±1, with most resolution near 0."""
    return offset / (4 + abs(offset))
