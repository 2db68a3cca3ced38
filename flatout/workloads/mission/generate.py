"""Generated missions: a random map with the squad on one side, the objective on the other, and patrols between.

Every generated mission can be solved: a search has found paths that no patrol sees.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flatout.workloads.mission.game import CARRIER, WALKS_EVERY, Patrol
from flatout.workloads.mission.grid import (
    Cell,
    Sight,
    Walls,
    breaches,
    distances,
    first_wall,
    prices,
    shortest_path,
)
from flatout.workloads.mission.scenario import Route, Scenario


@dataclass(frozen=True, slots=True)
class Level:
    """The difficulty of generated missions."""

    size: int
    """Rows and columns, including the outer ring."""
    n_segments: int
    """Pieces of wall on the map."""
    n_patrols: int
    settings: dict[str, Any]
    """Further fields of the scenario."""
    sealed: bool = True
    """Whether the objective is in a room without a door."""


LEVELS = {
    1: Level(11, 5, 1, {"patrol_sight": 2, "patience": 5, "time_limit": 80}, sealed=False),
    2: Level(13, 8, 2, {"patrol_sight": 3, "patience": 4, "time_limit": 120, "charges": 3}),
    3: Level(
        17,
        14,
        3,
        {"patrol_sight": 4, "patience": 2, "time_limit": 180, "charges": 3, "hold": 4, "known_map": False},
    ),
}
ATTEMPTS = 1_000


def generate(level: int, rng: np.random.Generator) -> Scenario:
    """A random solvable mission of a level."""
    for _ in range(ATTEMPTS):
        scenario = _draft(LEVELS[level], f"level {level}", rng)
        if scenario is not None and solvable(scenario):
            return _rotated(scenario, int(rng.integers(4)))
    raise AssertionError(f"no mission of level {level} in {ATTEMPTS} attempts")


def _draft(level: Level, name: str, rng: np.random.Generator) -> Scenario | None:
    """A random scenario with the squad in the west and the objective in the east; None if the walls do not fit."""
    size = level.size
    walls = np.ones((size, size), bool)
    walls[1:-1, 1:-1] = False
    for _ in range(level.n_segments):
        _segment(walls, rng)
    objective = (int(rng.integers(3, size - 3)), size - 4 if level.sealed else size - 2)
    grounds = np.ones((size, size), bool)
    grounds[:, : size // 3] = False
    if level.sealed:
        room = (slice(objective[0] - 1, objective[0] + 2), slice(objective[1] - 1, objective[1] + 2))
        walls[objective[0] - 2 : objective[0] + 3, objective[1] - 2 : objective[1] + 3] = True
        walls[room] = grounds[room] = False
    row = int(rng.integers(1, size - 2))
    walls[row : row + 2, 1:3] = walls[objective] = False
    carrier = (row, 1)
    if breaches(walls, objective, carrier) != int(level.sealed):
        return None
    routes = [_route(walls, grounds & ~walls, rng) for _ in range(level.n_patrols)]
    if not all(routes):
        return None
    return Scenario(
        walls=walls,
        units=((row, 2), (row + 1, 2), carrier),
        objective=objective,
        routes=tuple(Route(tuple(route)) for route in routes),
        name=name,
        **level.settings,
    )


def _segment(walls: Walls, rng: np.random.Generator) -> None:
    length = int(rng.integers(2, 5))
    row, column = rng.integers(1, len(walls) - 1, size=2)
    if rng.random() < 0.5:
        walls[row : row + length, column] = True
    else:
        walls[row, column : column + length] = True


def _route(walls: Walls, grounds: Walls, rng: np.random.Generator) -> list[Cell]:
    """A route between two distant cells of the grounds; empty if none was found."""
    cells = np.argwhere(grounds)
    for _ in range(8):
        (a, b), (c, d) = rng.choice(cells, 2, replace=False).tolist()
        if abs(a - c) + abs(b - d) >= len(walls) // 3:
            route = shortest_path(walls, (a, b), (c, d))
            if route:
                return route
    return []


def _rotated(scenario: Scenario, turns: int) -> Scenario:
    """The same mission with the map rotated by `turns` quarters."""
    last = len(scenario.walls) - 1

    def turned(cell: Cell) -> Cell:
        for _ in range(turns):
            cell = (last - cell[1], cell[0])
        return cell

    scout, breacher, carrier = map(turned, scenario.units)
    return replace(
        scenario,
        walls=np.ascontiguousarray(np.rot90(scenario.walls, turns)),
        units=(scout, breacher, carrier),
        objective=turned(scenario.objective),
        routes=tuple(Route(tuple(map(turned, route.cells))) for route in scenario.routes),
    )


LAST_RESORT = 1_000
"""Price of a wall that is only broken where there is no other path."""


def solvable(scenario: Scenario) -> bool:
    """Whether the carrier can reach and hold the objective in time while no unit is ever seen.

    The search follows the set of cells that each unit could be in, step by step; patrols that see no one stay on their
    routes. True is a proof. False may be wrong where breaking other walls would help.
    """
    sight = Sight(scenario.walls)
    walls = sight.walls
    patrols = [Patrol(route, scenario.patrol_sight, 1) for route in scenario.routes]
    cells = np.stack([_only(walls, unit) for unit in scenario.units] + [np.zeros_like(walls)])
    """Cells where the scout, the breacher, the carrier, and a carrier that must rest may be."""
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
        if breached or time % WALKS_EVERY == 0:  # otherwise the patrols have not moved
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
    """Cells that no patrol sees or is next to."""
    safe = np.ones_like(sight.walls)
    for patrol in patrols:
        row, column = patrol.at
        safe &= ~patrol.cone(sight)
        safe[row - 1 : row + 2, column] = safe[row, column - 1 : column + 2] = False
    return safe


def _spread(cells: Walls, walls: Walls) -> Walls:
    """The cells and their neighbours, without walls; works on a stack of maps."""
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
    """The first wall on the carrier's path that it cannot go around."""
    carrier, goal = scenario.units[CARRIER], scenario.objective
    if not breaches(walls, goal, carrier):
        return None
    price = prices(walls, LAST_RESORT)
    return first_wall(walls, distances(price, goal), price, carrier, goal)
