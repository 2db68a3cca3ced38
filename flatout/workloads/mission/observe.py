"""The squad's way to the objective on the map as it knows it; unknown cells are taken for floor.

What the squad's leader is told: one vector of what each unit sees around it and all know together.

Nothing in it comes from cells that no unit has seen, but for where the objective is.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flatout.workloads.mission.game import BREACHER, CARRIER, Game
from flatout.workloads.mission.grid import DIRECTIONS, FAR, Cell, Field, distances, prices

BREACH_PRICE = 6
"""How many cells of a detour a breach is worth."""
DANGER_PRICE = 12
"""The same for a cell next to a patrol in sight; half of it where it looks, a quarter where it will look next."""


class Navigator:
    """Routes, worked out again only when what is known has changed."""

    def __init__(self, game: Game) -> None:
        self._game = game
        self._plan()
        self._feared: tuple[bytes, tuple[bytes, bool], Cell | None] | None = None
        self._avoid()
        self._whole = max(1.0, self._left())

    def update(self) -> None:
        """Take in what the last step showed."""
        if self._facts_now() != self._facts:
            self._plan()
        elif self._game.units[CARRIER] != self._carrier:
            self._task()
        self._avoid()

    def progress(self) -> float:
        """1 when the carrier is there, 0 at the start, less than that further away, never below -1."""
        return max(1.0 - self._left() / self._whole, -1.0)

    def arrows(self, unit: int) -> list[float]:
        """For each direction 1 if the next cell is on a shortest way to the unit's goal; then the same for the
        way that is best if danger is worth a detour."""
        ways = (self._way(unit), self._careful[unit == BREACHER and self.wall is not None])
        row, column = self._game.units[unit]
        around = [(row + down, column + right) for down, right in DIRECTIONS]
        return [
            float(field[row, column] < FAR and field[at] + price[at] <= field[row, column])
            for field, price in ways
            for at in around
        ]

    def left(self, unit: int) -> int:
        """What the rest of a unit's way costs."""
        return int(self._way(unit)[0][self._game.units[unit]])

    def _way(self, unit: int) -> tuple[Field, Field]:
        """Distances and prices on the way to a unit's goal: the wall to break for a breacher that has one."""
        if unit == BREACHER and self.wall is not None:
            return self._to_wall, self._floor
        return self._field, self._price

    def _left(self) -> float:
        return self.left(CARRIER) + (0.5 * self.left(BREACHER) if self.wall is not None else 0.0)

    def _avoid(self) -> None:
        """The ways to the objective and to the wall with the danger in sight taken into account."""
        facts = (self._game.danger.tobytes(), self._facts, self.wall)
        if facts == self._feared:
            return
        self._feared = facts
        ways = [self._way(CARRIER), self._way(BREACHER)]
        self._careful = ways
        if self._game.danger.any():
            detour = (DANGER_PRICE * self._game.danger).astype(np.int32)
            goals = (self._game.scenario.objective, self.wall)
            dearer = [(price + detour, goal) for (_, price), goal in zip(ways, goals, strict=True) if goal]
            self._careful = [(distances(price, goal), price) for price, goal in dearer]

    def _facts_now(self) -> tuple[bytes, bool]:
        game = self._game
        return (game.walls & game.known).tobytes(), game.free[BREACHER] and game.charges > 0

    def _plan(self) -> None:
        game = self._game
        self._facts = self._facts_now()
        self._walls = game.walls & game.known
        self._price = prices(self._walls, BREACH_PRICE if self._facts[1] else FAR)
        self._field = distances(self._price, game.scenario.objective)
        self.wall: Cell | None = None
        """The first wall on the carrier's way, which the breacher is to break."""
        self._task()

    def _task(self) -> None:
        self._carrier = self._game.units[CARRIER]
        wall = self._first_wall()
        if wall is not None and wall != self.wall:
            self._floor = prices(self._walls, FAR)
            self._floor[wall] = 1
            self._to_wall = distances(self._floor, wall)
        self.wall = wall

    def _first_wall(self) -> Cell | None:
        at = self._carrier
        if self._field[at] >= FAR:
            return None
        while at != self._game.scenario.objective:
            around = [(at[0] + down, at[1] + right) for down, right in DIRECTIONS]
            at = min(around, key=lambda cell: int(self._field[cell] + self._price[cell]))
            if self._walls[at]:
                return at
        return None


REACH = 3
"""A unit's window shows so many cells to each side."""
WINDOW = 2 * REACH + 1
N_PATROLS = 2
"""How many patrols are told of, the nearest first."""
FORGET = 12
"""Steps after which a patrol that was seen is forgotten."""
N_UNIT = 2 * WINDOW**2 + 12 + 6 * N_PATROLS
SIZE = 3 * N_UNIT + 5

UNKNOWN = 0.5


class Observer:
    """Builds the observations of one episode."""

    def __init__(self, game: Game, navigator: Navigator) -> None:
        self._game, self._navigator = game, navigator
        rows, columns = game.walls.shape
        self._blocked = np.ones((rows + 2 * REACH, columns + 2 * REACH), np.float32)
        self._danger = np.zeros_like(self._blocked)
        self._inside = (slice(REACH, -REACH), slice(REACH, -REACH))

    def observation(self) -> NDArray[np.float32]:
        """The vector: for scout, breacher and carrier windows, own state and patrols; then what concerns all."""
        game, navigator = self._game, self._navigator
        self._blocked[self._inside] = np.where(game.known, game.walls, UNKNOWN)
        self._danger[self._inside] = game.danger
        out = np.zeros(SIZE, np.float32)
        for unit in range(3):
            if game.free[unit]:
                self._tell(unit, out[unit * N_UNIT : (unit + 1) * N_UNIT])
        out[-5:] = (
            1.0 - game.time / game.scenario.time_limit,
            game.held / game.scenario.hold,
            min(game.charges / 4, 1.0),
            game.tired,
            navigator.wall is not None,
        )
        return out

    def _tell(self, unit: int, out: NDArray[np.float32]) -> None:
        """A unit's windows, arrows to its goal, own state and patrols."""
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
    """An offset in cells, within ±1, finest close by."""
    return offset / (4 + abs(offset))
