"""A scenario: the map, who starts where, and the patrols. Read from JSON, or made by generate.py.

Whatever is wrong with a file is refused in one line that names the file and the place in it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from flatout.errors import FlatoutError, did_you_mean
from flatout.workloads.mission.grid import NAMES, Cell, Walls, breaches, walk

SQUAD = {"S": "scout", "B": "breacher", "C": "carrier"}
SIZES = (5, 64)
"""Fewest and most rows and columns of a map."""
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
    """A patrol's way, walked to and fro; one cell: a sentry that looks one way."""

    cells: tuple[Cell, ...]
    facing: int = 2
    """Where a sentry looks: 0 north, 1 east, 2 south, 3 west."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Everything that is fixed when an episode begins."""

    walls: Walls
    units: tuple[Cell, Cell, Cell]
    """Scout, breacher, carrier."""
    objective: Cell
    routes: tuple[Route, ...] = ()
    time_limit: int = 100
    """Steps until the episode is truncated."""
    hold: int = 3
    """Steps in a row that the carrier has to stand on the objective."""
    charges: int = 1
    """Walls that the breacher can break."""
    patrol_sight: int = 4
    """How many cells ahead a patrol sees."""
    patience: int = 1
    """How many steps in a row a patrol has to see someone before it runs after them."""
    known_map: bool = True
    """Whether the squad knows the walls from the start; patrols it never does."""
    name: str = "mission"


def load_scenario(file: str | Path) -> Scenario:
    """The scenario in a JSON file."""
    try:
        data = json.loads(Path(file).expanduser().read_text())
    except OSError as error:
        raise FlatoutError(f"scenario {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise FlatoutError(f"scenario {file}: not text, byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise FlatoutError(
            f"scenario {file}: not JSON, line {error.lineno} column {error.colno}: {error.msg}"
        ) from error
    try:
        return parse(data)
    except FlatoutError as error:
        raise FlatoutError(f"scenario {file}: {error}") from None


def parse(data: Any) -> Scenario:
    """The scenario that a JSON object describes."""
    if not isinstance(data, dict):
        raise FlatoutError(f"an object with {', '.join(KEYS[:3])}, … is expected, not {_short(data)}")
    for key in data:
        if key not in KEYS:
            hint = did_you_mean(key, KEYS) or f"; known are {', '.join(KEYS)}"
            raise FlatoutError(f"unknown key '{key}'{hint}")
    if "map" not in data:
        raise FlatoutError("key 'map' is missing; give the map's rows as a list of strings")
    walls, places = _map(data["map"])
    numbers = {key: _number(data, key, *bounds) for key, bounds in NUMBERS.items() if key in data}
    known_map, name = data.get("known_map", True), data.get("name", "mission")
    if not isinstance(known_map, bool):
        raise FlatoutError(f"known_map is {_short(known_map)}; true or false is expected")
    if not isinstance(name, str):
        raise FlatoutError(f"name is {_short(name)}; a string is expected")
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
            f"walls have to be broken; charges is {scenario.charges}"
        )
    return scenario


def _map(rows: Any) -> tuple[Walls, dict[str, Cell]]:
    if not isinstance(rows, list) or not all(isinstance(row, str) for row in rows):
        raise FlatoutError(f"map is {_short(rows)}; a list of strings is expected, one per row")
    least, most = SIZES
    width = len(rows[0]) if rows else 0
    if not (least <= len(rows) <= most and least <= width <= most):
        raise FlatoutError(
            f"map has {len(rows)} rows of {width} columns; {least} to {most} of each are allowed"
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
        raise FlatoutError(f"map {_place(cell)} is {mark!r}; the outer ring has to be walls, #")
    if mark in "SBCO":
        if mark in places:
            raise FlatoutError(
                f"map {_place(cell)} is a second {mark!r}; the first is in {_place(places[mark])}"
            )
        places[mark] = cell


def _routes(patrols: Any, walls: Walls) -> tuple[Route, ...]:
    if not isinstance(patrols, list):
        raise FlatoutError(f"patrols is {_short(patrols)}; a list is expected")
    return tuple(_route(patrol, walls, f"patrols[{i}]") for i, patrol in enumerate(patrols))


def _route(patrol: Any, walls: Walls, where: str) -> Route:
    if not isinstance(patrol, dict) or "route" not in patrol or set(patrol) - {"route", "facing"}:
        raise FlatoutError(
            f'{where} is {_short(patrol)}; {{"route": [[row, column], …]}} is expected, "facing" may be added'
        )
    points, facing = patrol["route"], patrol.get("facing", "S")
    if not isinstance(facing, str) or len(facing) != 1 or facing not in NAMES:
        raise FlatoutError(f"{where}.facing is {_short(facing)}; one of N, E, S, W is expected")
    if not isinstance(points, list) or not points:
        raise FlatoutError(f"{where}.route is {_short(points)}; a list of [row, column] is expected")
    cells = [_point(point, walls, f"{where}.route[{i}]") for i, point in enumerate(points)]
    way = cells[:1]
    for i, (a, b) in enumerate(pairwise(cells)):
        leg = walk(walls, a, b)
        if not leg:
            raise FlatoutError(f"{where}.route[{i + 1}]: no way from {_place(a)} to {_place(b)}")
        way += leg[1:]
    return Route(tuple(way), NAMES.index(facing))


def _point(point: Any, walls: Walls, where: str) -> Cell:
    whole = isinstance(point, list) and all(type(x) is int for x in point)
    if not whole or len(point) != 2:
        raise FlatoutError(f"{where} is {_short(point)}; [row, column] is expected")
    row, column = point
    if not (0 <= row < walls.shape[0] and 0 <= column < walls.shape[1]):
        raise FlatoutError(
            f"{where} is {point}; the map has rows 0 to {len(walls) - 1}, columns 0 to {walls.shape[1] - 1}"
        )
    if walls[row, column]:
        raise FlatoutError(f"{where} is {point}, a wall; patrols walk on floor")
    return row, column


def _number(data: Mapping[str, Any], key: str, least: int, most: int) -> int:
    value = data[key]
    if type(value) is not int or not least <= value <= most:
        raise FlatoutError(f"{key} is {_short(value)}; a whole number from {least} to {most} is expected")
    return value


def _place(cell: Cell) -> str:
    return f"row {cell[0]} column {cell[1]}"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
