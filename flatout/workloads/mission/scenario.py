"""A scenario: the map, the start cells and the patrols. Read from JSON here, generated in generate.py.

An error in a file names the file and the place in it, in one line.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from flatout.errors import FlatoutError
from flatout.workloads.mission.grid import NAMES, Cell, Walls, breaches, shortest_path
from flatout.workloads.validate import check_fields, check_keys, read_json, within

MARKS = {"S": "scout", "B": "breacher", "C": "carrier", "O": "objective"}
SIZES = (5, 64)
"""Smallest and largest number of rows and columns of a map."""
SETTINGS = ("known_map", "time_limit", "hold", "charges", "patrol_sight", "patience")
KEYS = ("name", "map", "patrols", *SETTINGS)


@dataclass(frozen=True, slots=True)
class Route:
    """The path that a patrol walks back and forth; a single cell is a sentry."""

    cells: tuple[Cell, ...]
    facing: int = 2
    """Direction in which a sentry looks: 0 north, 1 east, 2 south, 3 west."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Everything that is fixed at the start of an episode."""

    walls: Walls
    units: tuple[Cell, Cell, Cell]
    """Scout, breacher, carrier."""
    objective: Cell
    routes: tuple[Route, ...] = ()
    time_limit: int = within(100, 1, 10_000)
    """Steps until the episode is truncated."""
    hold: int = within(3, 1, 1_000)
    """Consecutive steps that the carrier must stand on the objective."""
    charges: int = within(1, 0, 99)
    """Number of walls that the breacher can break."""
    patrol_sight: int = within(4, 1, 8)
    """How far a patrol sees, in cells."""
    patience: int = within(1, 1, 99)
    """Consecutive steps that a patrol must see a unit before it chases it."""
    known_map: bool = True
    """Whether the squad knows all walls from the start. It never knows the patrols."""
    name: str = "mission"

    def __post_init__(self) -> None:
        check_fields(self)


def load_scenario(file: str | Path) -> Scenario:
    """Read a scenario from a JSON file."""
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
    name = data.get("name", "mission")
    _expect(isinstance(name, str), "name", name, "it must be a string")
    walls, places = _map(data["map"])
    scout, breacher, carrier, objective = (places[mark] for mark in MARKS)
    patrols = data.get("patrols", [])
    _expect(isinstance(patrols, list), "patrols", patrols, "it must be a list")
    scenario = Scenario(
        walls=walls,
        units=(scout, breacher, carrier),
        objective=objective,
        routes=tuple(_route(patrol, walls, f"patrols[{i}]") for i, patrol in enumerate(patrols)),
        name=name,
        **{key: data[key] for key in SETTINGS if key in data},
    )
    needed = breaches(walls, objective, carrier)
    if needed > scenario.charges:
        raise FlatoutError(
            f"map: between C in {_place(carrier)} and O in {_place(objective)} at least {needed} "
            f"walls must be broken; charges is {scenario.charges}"
        )
    return scenario


def _map(rows: Any) -> tuple[Walls, dict[str, Cell]]:
    """The walls, and the cells of the squad and the objective by their marks."""
    are_strings = isinstance(rows, list) and all(isinstance(row, str) for row in rows)
    _expect(are_strings, "map", rows, "it must be a list of strings, one per row")
    n_rows, width = len(rows), len(rows[0]) if rows else 0
    if not SIZES[0] <= min(n_rows, width) <= max(n_rows, width) <= SIZES[1]:
        raise FlatoutError(
            f"map has {n_rows} rows of {width} columns; it must have {SIZES[0]} to {SIZES[1]} of each"
        )
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
    expected = 'it must be {"route": [[row, column], …]}, with "facing" if you like'
    _expect(is_patrol, where, patrol, expected)
    points, facing = patrol["route"], patrol.get("facing", "S")
    _expect(facing in tuple(NAMES), f"{where}.facing", facing, "it must be N, E, S or W")
    is_list = isinstance(points, list) and len(points) > 0
    _expect(is_list, f"{where}.route", points, "it must be a list of [row, column]")
    cells = [_point(point, walls, f"{where}.route[{i}]") for i, point in enumerate(points)]
    path = cells[:1]
    for i, (a, b) in enumerate(pairwise(cells)):
        leg = shortest_path(walls, a, b)
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
