"""Small hand-written missions for the tests."""

from __future__ import annotations

from typing import Any

from flatout.workloads.mission.game import Events, Game
from flatout.workloads.mission.scenario import parse

STAY, NORTH, EAST, SOUTH, WEST = range(5)
TWO = 4
"""Added to a direction: the scout's two cells, the breacher's breach."""


def game(*rows: str, **more: Any) -> Game:
    """The mission on this map."""
    return Game(parse({"map": list(rows), **more}))


def play(mission: Game, *, scout: str = "", breacher: str = "", carrier: str = "") -> list[Events]:
    """Steps by letters, one per step and unit: NESW a move, `.` a stay, nesw two cells or a breach."""
    n = max(len(scout), len(breacher), len(carrier))
    turns = zip(*(line.ljust(n, ".") for line in (scout, breacher, carrier)), strict=True)
    return [mission.step([".NESWnesw".index(letter) for letter in turn]) for turn in turns]
