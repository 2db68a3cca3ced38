"""Whether a mission can be done: a search over cells and time for ways that no patrol ever sees."""

from __future__ import annotations

import numpy as np

from flatout.workloads.mission.game import CARRIER
from flatout.workloads.mission.grid import DIRECTIONS, Cell, Sight, Walls, breaches, distances, prices
from flatout.workloads.mission.patrol import WALKS_EVERY, Patrol
from flatout.workloads.mission.scenario import Scenario

LAST_RESORT = 1_000
"""A breach's price when walls are only to be broken where there is no other way."""


def solvable(scenario: Scenario) -> bool:
    """Whether all three can stay unseen while the carrier reaches the objective and holds it, within the time.

    All cells that each unit could be in are followed step by step, the patrols being on their routes as long as they
    see no one. True is a proof; False may be wrong where walls could be broken elsewhere.
    """
    sight = Sight(scenario.walls)
    walls = sight.walls
    patrols = [Patrol(route, scenario.patrol_sight, 1) for route in scenario.routes]
    cells = np.stack([_only(walls, unit) for unit in scenario.units] + [np.zeros_like(walls)])
    """Where scout, breacher, carrier and a carrier that has to rest may be."""
    wall, charges, held = _next_wall(scenario, walls), scenario.charges, 0
    safe = _unwatched(patrols, sight)
    for time in range(1, scenario.time_limit + 1):
        before, cells = cells, _spread(cells, walls)
        cells[3], cells[2] = cells[2], before[2] | before[3]
        breached = False
        if wall and charges and (beside := before[1] & _spread(_only(walls, wall), walls)).any():
            sight.open(wall)
            cells[1], charges, breached = beside, charges - 1, True
            wall = _next_wall(scenario, walls)
        if breached or time % WALKS_EVERY == 0:  # else the patrols stand and see as before
            for patrol in patrols:
                patrol.move(walls, time)
            safe = _unwatched(patrols, sight)
        cells &= safe
        held = held + 1 if cells[2:, *scenario.objective].any() else 0
        if not (cells[0].any() and cells[1].any() and cells[2:].any()):
            return False
        if held >= scenario.hold:
            return True
    return False


def _unwatched(patrols: list[Patrol], sight: Sight) -> Walls:
    """The cells that no patrol sees or is next to."""
    safe = np.ones_like(sight.walls)
    for patrol in patrols:
        row, column = patrol.at
        safe &= ~patrol.cone(sight)
        safe[row - 1 : row + 2, column] = safe[row, column - 1 : column + 2] = False
    return safe


def _spread(cells: Walls, walls: Walls) -> Walls:
    """These cells and their neighbours, but for walls; any number of such maps at once."""
    out = cells.copy()
    out[..., 1:, :] |= cells[..., :-1, :]
    out[..., :-1, :] |= cells[..., 1:, :]
    out[..., 1:] |= cells[..., :-1]
    out[..., :-1] |= cells[..., 1:]
    return out & ~walls


def _only(walls: Walls, cell: Cell) -> Walls:
    out = np.zeros_like(walls)
    out[cell] = True
    return out


def _next_wall(scenario: Scenario, walls: Walls) -> Cell | None:
    """The first wall that the carrier cannot go round."""
    at, goal = scenario.units[CARRIER], scenario.objective
    if not breaches(walls, goal, at):
        return None
    price = prices(walls, LAST_RESORT)
    field = distances(price, goal)
    while not walls[at]:
        around = [(at[0] + down, at[1] + right) for down, right in DIRECTIONS]
        at = min(around, key=lambda cell: int(field[cell] + price[cell]))
    return at
