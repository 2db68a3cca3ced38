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
from flatout.workloads.validate import check_choice, check_keys, check_number, read_json

SQUAD = {"S": "scout", "B": "breacher", "C": "carrier"}
SIZES = (5, 64)
"""Smallest and largest number of rows and columns of a map."""
NUMBERS = {
    "time_limit": (1, 10_000),
    "hold": (1, 1_000),
    "charges": (0, 99),
    "patrol_sight": (1, 8),
    "patience": (1, 99),
}
KEYS = ("name", "map", "patrols", "known_map", *NUMBERS)


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
    time_limit: int = 100
    """Steps until the episode is truncated."""
    hold: int = 3
    """Consecutive steps that the carrier must stand on the objective."""
    charges: int = 1
    """Number of walls that the breacher can break."""
    patrol_sight: int = 4
    """How far a patrol sees, in cells."""
    patience: int = 1
    """Consecutive steps that a patrol must see a unit before it chases it."""
    known_map: bool = True
    """Whether the squad knows all walls from the start. It never knows the patrols."""
    name: str = "mission"


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
    walls, places = _map(data["map"])
    numbers = {key: data[key] for key in NUMBERS if key in data}
    for key, value in numbers.items():
        check_number(key, value, *NUMBERS[key], whole=True)
    known_map, name = data.get("known_map", True), data.get("name", "mission")
    check_choice("known_map", known_map, (True, False))
    if not isinstance(name, str):
        raise FlatoutError(f"name is {_short(name)}; it must be a string")
    scout, breacher, carrier = (places[mark] for mark in SQUAD)
    scenario = Scenario(
        walls=walls,
        units=(scout, breacher, carrier),
        objective=places["O"],
        routes=_routes(data.get("patrols", []), walls),
        known_map=known_map,
        name=name,
        **numbers,
    )
    needed = breaches(walls, scenario.objective, carrier)
    if needed > scenario.charges:
        raise FlatoutError(
            f"map: between C in {_place(carrier)} and O in {_place(scenario.objective)} at least {needed} "
            f"walls must be broken; charges is {scenario.charges}"
        )
    return scenario


def _map(rows: Any) -> tuple[Walls, dict[str, Cell]]:
    if not isinstance(rows, list) or not all(isinstance(row, str) for row in rows):
        raise FlatoutError(f"map is {_short(rows)}; it must be a list of strings, one per row")
    least, most = SIZES
    width = len(rows[0]) if rows else 0
    if not (least <= len(rows) <= most and least <= width <= most):
        raise FlatoutError(
            f"map has {len(rows)} rows of {width} columns; it must have {least} to {most} of each"
        )
    places: dict[str, Cell] = {}
    for r, row in enumerate(rows):
        if len(row) != width:
            raise FlatoutError(f"map row {r} has {len(row)} columns; row 0 has {width}")
        for c, mark in enumerate(row):
            _mark(mark, (r, c), (len(rows), width), places)
    for mark, who in {**SQUAD, "O": "objective"}.items():
        if mark not in places:
            raise FlatoutError(f"map has no '{mark}', the {who}")
    return np.array([[mark == "#" for mark in row] for row in rows]), places


def _mark(mark: str, cell: Cell, size: Cell, places: dict[str, Cell]) -> None:
    if mark not in "#.SBCO":
        raise FlatoutError(
            f"map {_place(cell)} is {mark!r}; use # wall, . floor, S, B, C the squad, O objective"
        )
    on_edge = cell[0] in (0, size[0] - 1) or cell[1] in (0, size[1] - 1)
    if on_edge and mark != "#":
        raise FlatoutError(f"map {_place(cell)} is {mark!r}; the outer ring must be walls, #")
    if mark in "SBCO":
        if mark in places:
            raise FlatoutError(
                f"map {_place(cell)} is a second {mark!r}; the first is in {_place(places[mark])}"
            )
        places[mark] = cell


def _routes(patrols: Any, walls: Walls) -> tuple[Route, ...]:
    if not isinstance(patrols, list):
        raise FlatoutError(f"patrols is {_short(patrols)}; it must be a list")
    return tuple(_route(patrol, walls, f"patrols[{i}]") for i, patrol in enumerate(patrols))


def _route(patrol: Any, walls: Walls, where: str) -> Route:
    if not isinstance(patrol, dict) or "route" not in patrol or set(patrol) - {"route", "facing"}:
        raise FlatoutError(
            f'{where} is {_short(patrol)}; it must be {{"route": [[row, column], …]}}, with "facing" if you like'
        )
    points, facing = patrol["route"], patrol.get("facing", "S")
    if not isinstance(facing, str) or len(facing) != 1 or facing not in NAMES:
        raise FlatoutError(f"{where}.facing is {_short(facing)}; it must be N, E, S or W")
    if not isinstance(points, list) or not points:
        raise FlatoutError(f"{where}.route is {_short(points)}; it must be a list of [row, column]")
    cells = [_point(point, walls, f"{where}.route[{i}]") for i, point in enumerate(points)]
    path = cells[:1]
    for i, (a, b) in enumerate(pairwise(cells)):
        leg = shortest_path(walls, a, b)
        if not leg:
            raise FlatoutError(f"{where}.route[{i + 1}]: no path from {_place(a)} to {_place(b)}")
        path += leg[1:]
    return Route(tuple(path), NAMES.index(facing))


def _point(point: Any, walls: Walls, where: str) -> Cell:
    whole = isinstance(point, list) and all(type(x) is int for x in point)
    if not whole or len(point) != 2:
        raise FlatoutError(f"{where} is {_short(point)}; it must be [row, column]")
    row, column = point
    if not (0 <= row < walls.shape[0] and 0 <= column < walls.shape[1]):
        raise FlatoutError(
            f"{where} is {point}; the map has rows 0 to {len(walls) - 1}, columns 0 to {walls.shape[1] - 1}"
        )
    if walls[row, column]:
        raise FlatoutError(f"{where} is {point}, a wall; patrols walk on floor")
    return row, column


def _place(cell: Cell) -> str:
    return f"row {cell[0]} column {cell[1]}"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
