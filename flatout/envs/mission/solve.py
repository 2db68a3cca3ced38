"""Whether a mission can be done: a search over cells and time for ways that no patrol ever sees."""

from __future__ import annotations

import numpy as np

from flatout.envs.mission.game import BREACHER, CARRIER, SCOUT
from flatout.envs.mission.grid import DIRECTIONS, Cell, Walls, breaches, distances, prices
from flatout.envs.mission.patrol import Patrol
from flatout.envs.mission.scenario import Scenario

LAST_RESORT = 1_000
"""A breach's price when walls are only to be broken where there is no other way."""


def solvable(scenario: Scenario) -> bool:
    """Whether all three can stay unseen while the carrier reaches the objective and holds it, within the time.

    All cells that each unit could be in are followed step by step, the patrols being on their routes as long as they
    see no one. True is a proof; False may be wrong where walls could be broken elsewhere.
    """
    walls = scenario.walls.copy()
    patrols = [Patrol(route, scenario.patrol_sight) for route in scenario.routes]
    scout, breacher, fresh = (_only(walls, scenario.units[unit]) for unit in (SCOUT, BREACHER, CARRIER))
    tired = np.zeros_like(fresh)
    wall, charges, held = _next_wall(scenario, walls), scenario.charges, 0
    for time in range(1, scenario.time_limit + 1):
        scout = _spread(scout, walls)
        fresh, tired = fresh | tired, _spread(fresh, walls)
        beside = breacher & _spread(_only(walls, wall), walls) if wall and charges else None
        breacher = _spread(breacher, walls)
        if wall and beside is not None and beside.any():
            walls[wall], breacher, charges = False, beside, charges - 1
            wall = _next_wall(scenario, walls)
        safe = _unwatched(patrols, walls, time)
        scout, breacher, fresh, tired = scout & safe, breacher & safe, fresh & safe, tired & safe
        carrier = fresh | tired
        held = held + 1 if carrier[scenario.objective] else 0
        if not (scout.any() and breacher.any() and carrier.any()):
            return False
        if held >= scenario.hold:
            return True
    return False


def _unwatched(patrols: list[Patrol], walls: Walls, time: int) -> Walls:
    """Move the patrols on, and give the cells that they neither see nor reach."""
    safe = np.ones_like(walls)
    for patrol in patrols:
        patrol.move(walls, time)
        row, column = patrol.at
        safe[patrol.cone(walls)] = False
        safe[row - 1 : row + 2, column] = safe[row, column - 1 : column + 2] = False
    return safe


def _spread(cells: Walls, walls: Walls) -> Walls:
    """These cells and their neighbours, but for walls."""
    out = cells.copy()
    out[1:] |= cells[:-1]
    out[:-1] |= cells[1:]
    out[:, 1:] |= cells[:, :-1]
    out[:, :-1] |= cells[:, 1:]
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
