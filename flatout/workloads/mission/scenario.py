"""Scenarios, read from a JSON file or generated: the squad on one side of a random map, the objective on the other.

An error in a file names the file and the place in it, in one line. Every generated scenario can be solved: a search has found
paths that no patrol sees.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from flatout.errors import FlatoutError
from flatout.workloads.mission import grid
from flatout.workloads.mission.game import CARRIER, WALKS_EVERY, Patrol, Route, Scenario
from flatout.workloads.mission.grid import Cell, Sight, Walls
from flatout.workloads.validate import check_keys, read_json

MARKS = {"S": "scout", "B": "breacher", "C": "carrier", "O": "objective"}
NAMES = "NESW"
SIZES = (5, 64)
"""Smallest and largest number of rows and columns of a map."""
SETTINGS = ("known_map", "time_limit", "hold", "charges", "patrol_sight", "patience")
KEYS = ("name", "map", "patrols", *SETTINGS)


def load_scenario(file: str | Path) -> Scenario:
    data = read_json(file, "scenario")
    try:
        return parse(data)
    except FlatoutError as error:
        raise FlatoutError(f"scenario {file}: {error}") from None


def parse(data: Any) -> Scenario:
    """The scenario described by a JSON object."""
    if not isinstance(data, dict):
        raise FlatoutError(f"it must be an object with {', '.join(KEYS[:3])}, …, not {_short(data)}")
    check_keys("a scenario", data, KEYS)
    if "map" not in data:
        raise FlatoutError("key 'map' is missing; give the map's rows as a list of strings")
    name, patrols = data.get("name", "mission"), data.get("patrols", [])
    _expect(isinstance(name, str), "name", name, "it must be a string")
    walls, places = _map(data["map"])
    *units, objective = (places[mark] for mark in MARKS)
    _expect(isinstance(patrols, list), "patrols", patrols, "it must be a list")
    scenario = Scenario(
        walls=walls,
        units=tuple(units),
        objective=objective,
        routes=tuple(_route(patrol, walls, f"patrols[{i}]") for i, patrol in enumerate(patrols)),
        name=name,
        **{key: data[key] for key in SETTINGS if key in data},
    )
    needed = grid.breaches(walls, objective, places["C"])
    if needed > scenario.charges:
        between = f"C in {_place(places['C'])} and O in {_place(objective)}"
        must = f"at least {needed} walls must be broken; charges is {scenario.charges}"
        raise FlatoutError(f"map: between {between} {must}")
    return scenario


def _map(rows: Any) -> tuple[Walls, dict[str, Cell]]:
    """The walls, and the cells of the squad and the objective by their marks."""
    are_strings = isinstance(rows, list) and all(isinstance(row, str) for row in rows)
    _expect(are_strings, "map", rows, "it must be a list of strings, one per row")
    n_rows, width = len(rows), len(rows[0]) if rows else 0
    if not SIZES[0] <= min(n_rows, width) <= max(n_rows, width) <= SIZES[1]:
        expected = f"it must have {SIZES[0]} to {SIZES[1]} of each"
        raise FlatoutError(f"map has {n_rows} rows of {width} columns; {expected}")
    places: dict[str, Cell] = {}
    for r, row in enumerate(rows):
        if len(row) != width:
            raise FlatoutError(f"map row {r} has {len(row)} columns; row 0 has {width}")
        for c, mark in enumerate(row):
            here = f"map {_place((r, c))} is"
            if mark not in "#.SBCO":
                raise FlatoutError(f"{here} {mark!r}; use # wall, . floor, S, B, C the squad, O objective")
            if mark != "#" and (r in (0, n_rows - 1) or c in (0, width - 1)):
                raise FlatoutError(f"{here} {mark!r}; the outer ring must be walls, #")
            if mark in places:
                raise FlatoutError(f"{here} a second {mark!r}; the first is in {_place(places[mark])}")
            if mark in MARKS:
                places[mark] = (r, c)
    for mark, who in MARKS.items():
        if mark not in places:
            raise FlatoutError(f"map has no '{mark}', the {who}")
    return np.array([[mark == "#" for mark in row] for row in rows]), places


def _route(patrol: Any, walls: Walls, where: str) -> Route:
    is_patrol = isinstance(patrol, dict) and {"route"} <= set(patrol) <= {"route", "facing"}
    _expect(is_patrol, where, patrol, 'it must be {"route": [[row, column], …]}, with "facing" if you like')
    points, facing = patrol["route"], patrol.get("facing", "S")
    _expect(facing in tuple(NAMES), f"{where}.facing", facing, "it must be N, E, S or W")
    is_list = isinstance(points, list) and len(points) > 0
    _expect(is_list, f"{where}.route", points, "it must be a list of [row, column]")
    cells = [_point(point, walls, f"{where}.route[{i}]") for i, point in enumerate(points)]
    path = cells[:1]
    for i, (a, b) in enumerate(pairwise(cells)):
        leg = grid.shortest_path(walls, a, b)
        if not leg:
            raise FlatoutError(f"{where}.route[{i + 1}]: no path from {_place(a)} to {_place(b)}")
        path += leg[1:]
    return Route(tuple(path), NAMES.index(facing))


def _point(point: Any, walls: Walls, where: str) -> Cell:
    is_pair = isinstance(point, list) and [type(x) for x in point] == [int, int]
    _expect(is_pair, where, point, "it must be [row, column]")
    row, column = point
    n_rows, n_columns = walls.shape
    is_inside = 0 <= row < n_rows and 0 <= column < n_columns
    _expect(is_inside, where, point, f"the map has rows 0 to {n_rows - 1}, columns 0 to {n_columns - 1}")
    if walls[row, column]:
        raise FlatoutError(f"{where} is {point}, a wall; patrols walk on floor")
    return row, column


def _place(cell: Cell) -> str:
    return f"row {cell[0]} column {cell[1]}"


def _expect(is_valid: bool, name: str, value: Any, expected: str) -> None:
    if not is_valid:
        raise FlatoutError(f"{name} is {_short(value)}; {expected}")


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


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
    """Whether the objective is in a room without a door. The breacher then has three charges."""


LEVELS = {
    1: Level(11, 5, 1, {"patrol_sight": 2, "patience": 5, "time_limit": 80}, sealed=False),
    2: Level(13, 8, 2, {"patrol_sight": 3, "patience": 4, "time_limit": 120}),
    3: Level(17, 14, 3, {"patrol_sight": 4, "patience": 2, "time_limit": 180, "hold": 4, "known_map": False}),
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
    if grid.breaches(walls, objective, carrier) != int(level.sealed):
        return None
    routes = [_patrol_route(walls, grounds & ~walls, rng) for _ in range(level.n_patrols)]
    if not all(routes):
        return None
    return Scenario(
        walls=walls,
        units=((row, 2), (row + 1, 2), carrier),
        objective=objective,
        routes=tuple(Route(tuple(route)) for route in routes),
        name=name,
        charges=3 if level.sealed else 1,
        **level.settings,
    )


def _segment(walls: Walls, rng: np.random.Generator) -> None:
    length = int(rng.integers(2, 5))
    row, column = rng.integers(1, len(walls) - 1, size=2)
    if rng.random() < 0.5:
        walls[row : row + length, column] = True
    else:
        walls[row, column : column + length] = True


def _patrol_route(walls: Walls, grounds: Walls, rng: np.random.Generator) -> list[Cell]:
    """A route between two distant cells of the grounds; empty if none was found."""
    cells = np.argwhere(grounds)
    for _ in range(8):
        (a, b), (c, d) = rng.choice(cells, 2, replace=False).tolist()
        if abs(a - c) + abs(b - d) >= len(walls) // 3 and (
            route := grid.shortest_path(walls, (a, b), (c, d))
        ):
            return route
    return []


def _rotated(scenario: Scenario, turns: int) -> Scenario:
    """The same mission with the map rotated by `turns` quarters."""
    last = len(scenario.walls) - 1

    def turned(cell: Cell) -> Cell:
        for _ in range(turns):
            cell = (last - cell[1], cell[0])
        return cell

    return replace(
        scenario,
        walls=np.ascontiguousarray(np.rot90(scenario.walls, turns)),
        units=tuple(map(turned, scenario.units)),
        objective=turned(scenario.objective),
        routes=tuple(Route(tuple(map(turned, route.cells))) for route in scenario.routes),
    )


def solvable(scenario: Scenario) -> bool:
    """Whether the carrier can reach and hold the objective in time while no unit is ever seen.

    The search follows the set of cells that each unit could be in, step by step; patrols that see no one stay on their
    routes. True is a proof. False may be wrong where breaking other walls would help.
    """
    sight, carrier, objective = Sight(scenario.walls), scenario.units[CARRIER], scenario.objective
    walls = sight.walls
    patrols = [Patrol(route, scenario.patrol_sight, 1) for route in scenario.routes]
    cells = np.zeros((4, *walls.shape), bool)
    """Cells where the scout, the breacher, the carrier, and a carrier that must rest may be."""
    cells[range(3), *zip(*scenario.units, strict=True)] = True
    wall, charges, held = grid.needed_wall(walls, carrier, objective), scenario.charges, 0
    safe = _unwatched(patrols, sight)
    for time in range(1, scenario.time_limit + 1):
        before, cells = cells, _spread(cells, walls)
        cells[3], cells[2] = cells[2], before[2] | before[3]
        breached = False
        if wall and charges and (beside := [cell for cell in grid.neighbours(wall) if before[1][cell]]):
            sight.open(wall)
            cells[1], charges, breached = False, charges - 1, True
            cells[1][tuple(np.transpose(beside))] = True
            wall = grid.needed_wall(walls, carrier, objective)
        if breached or time % WALKS_EVERY == 0:  # otherwise the patrols have not moved
            for patrol in patrols:
                patrol.move(walls, time)
            safe = _unwatched(patrols, sight)
        cells &= safe
        held = held + 1 if cells[2:, *objective].any() else 0
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
