"""The observation: routes to the objective and, for each unit, what it sees around it and what the squad knows.

It shows only cells that a unit has seen, except for the position of the objective. Routes assume that unknown cells are floor.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flatout.workloads.mission.game import BREACHER, CARRIER, Game
from flatout.workloads.mission.grid import (
    DIRECTIONS,
    FAR,
    Cell,
    Field,
    distances,
    first_wall,
    neighbours,
    prices,
)

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


class Navigator:
    """Routes to the objective on the known map, recomputed only when what is known changes."""

    def __init__(self, game: Game) -> None:
        self._game = game
        self._plan()
        self._careful_for: tuple[bytes, tuple[bytes, bool], Cell | None] | None = None
        self._avoid()
        self._whole = max(1.0, self._left())

    def update(self) -> None:
        """Recompute what the last step has changed."""
        if self._read_facts() != self._facts:
            self._plan()
        elif self._game.units[CARRIER] != self._carrier:
            self._find_wall()
        self._avoid()

    def progress(self) -> float:
        """0 at the start, 1 when the carrier is on the objective, at least -1."""
        return max(1.0 - self._left() / self._whole, -1.0)

    def arrows(self, unit: int) -> list[float]:
        """For each direction 1 if the next cell is on a shortest path to the unit's goal; then the same for the path
        that avoids danger."""
        routes = (self._route(unit), self._careful[unit == BREACHER and self.wall is not None])
        here = self._game.units[unit]
        return [
            float(field[here] < FAR and field[at] + price[at] <= field[here])
            for field, price in routes
            for at in neighbours(here)
        ]

    def left(self, unit: int) -> int:
        """Cost of the rest of a unit's path."""
        return int(self._route(unit)[0][self._game.units[unit]])

    def _route(self, unit: int) -> tuple[Field, Field]:
        """Distances and prices to a unit's goal: the objective or, for the breacher, the wall to break."""
        if unit == BREACHER and self.wall is not None:
            return self._to_wall, self._floor
        return self._field, self._price

    def _left(self) -> float:
        return self.left(CARRIER) + (0.5 * self.left(BREACHER) if self.wall is not None else 0.0)

    def _avoid(self) -> None:
        """Recompute the paths to the objective and to the wall that avoid danger."""
        facts = (self._game.danger.tobytes(), self._facts, self.wall)
        if facts == self._careful_for:
            return
        self._careful_for = facts
        routes = [self._route(CARRIER), self._route(BREACHER)]
        self._careful = routes
        if self._game.danger.any():
            detour = (DANGER_PRICE * self._game.danger).astype(np.int32)
            goals = (self._game.scenario.objective, self.wall)
            avoiding = [
                (price + detour, goal) for (_, price), goal in zip(routes, goals, strict=True) if goal
            ]
            self._careful = [(distances(price, goal), price) for price, goal in avoiding]

    def _read_facts(self) -> tuple[bytes, bool]:
        game = self._game
        return (game.walls & game.known).tobytes(), game.free[BREACHER] and game.charges > 0

    def _plan(self) -> None:
        game = self._game
        self._facts = self._read_facts()
        self._walls = game.walls & game.known
        self._price = prices(self._walls, BREACH_PRICE if self._facts[1] else FAR)
        self._field = distances(self._price, game.scenario.objective)
        self.wall: Cell | None = None
        """The first wall on the carrier's path, for the breacher to break."""
        self._find_wall()

    def _find_wall(self) -> None:
        self._carrier = self._game.units[CARRIER]
        goal, wall = self._game.scenario.objective, None
        if self._field[self._carrier] < FAR:
            wall = first_wall(self._walls, self._field, self._price, self._carrier, goal)
        if wall is not None and wall != self.wall:
            self._floor = prices(self._walls, FAR)
            self._floor[wall] = 1
            self._to_wall = distances(self._floor, wall)
        self.wall = wall


class Observer:
    """Builds the observations of one episode."""

    def __init__(self, game: Game, navigator: Navigator) -> None:
        self._game, self._navigator = game, navigator
        rows, columns = game.walls.shape
        self._blocked = np.ones((rows + 2 * REACH, columns + 2 * REACH), np.float32)
        self._danger = np.zeros_like(self._blocked)
        self._inside = (slice(REACH, -REACH), slice(REACH, -REACH))

    def observation(self) -> NDArray[np.float32]:
        """For scout, breacher and carrier: windows, routes, own state and patrols; then values of the whole squad."""
        game, navigator = self._game, self._navigator
        self._blocked[self._inside] = np.where(game.known, game.walls, UNKNOWN)
        self._danger[self._inside] = game.danger
        out = np.zeros(SIZE, np.float32)
        for unit in range(3):
            if game.free[unit]:
                self._write_unit(unit, out[unit * N_UNIT : (unit + 1) * N_UNIT])
        out[-5:] = (
            1.0 - game.time / game.scenario.time_limit,
            game.held / game.scenario.hold,
            min(game.charges / 4, 1.0),
            game.tired,
            navigator.wall is not None,
        )
        return out

    def _write_unit(self, unit: int, out: NDArray[np.float32]) -> None:
        """Write a unit's windows, route arrows, position and nearest patrols."""
        game, navigator = self._game, self._navigator
        row, column = game.units[unit]
        window = (slice(row, row + WINDOW), slice(column, column + WINDOW))
        left, (goal_row, goal_column) = navigator.left(unit), game.scenario.objective
        rest = [
            *navigator.arrows(unit),
            1.0,
            _near(goal_row - row),
            _near(goal_column - column),
            min(left / 40, 1.0),
        ]
        for sighting in self._nearest(row, column):
            rest += sighting
        n = WINDOW**2
        out[:n], out[n : 2 * n] = self._blocked[window].ravel(), self._danger[window].ravel()
        out[2 * n : 2 * n + len(rest)] = rest

    def _nearest(self, row: int, column: int) -> list[tuple[float, ...]]:
        recent = [sighting for sighting in self._game.sightings.values() if sighting.age < FORGET]
        recent.sort(key=lambda s: abs(s.at[0] - row) + abs(s.at[1] - column))
        return [
            (
                1.0 - s.age / FORGET,
                _near(s.at[0] - row),
                _near(s.at[1] - column),
                *map(float, DIRECTIONS[s.facing]),
                s.alarm,
            )
            for s in recent[:N_PATROLS]
        ]


def _near(offset: int) -> float:
    """An offset in cells squashed to ±1, with most resolution near 0."""
    return offset / (4 + abs(offset))
