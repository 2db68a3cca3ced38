"""What the squad's leader is told: one vector of what each unit sees around it and all know together.

Nothing in it comes from cells that no unit has seen, but for where the objective is.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flatout.workloads.mission.game import Game
from flatout.workloads.mission.grid import DIRECTIONS
from flatout.workloads.mission.navigate import Navigator

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
