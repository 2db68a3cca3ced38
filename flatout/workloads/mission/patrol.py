"""A patrol: walks its route to and fro, runs after whom it sees, and goes back when it has lost them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from flatout.workloads.mission.grid import DIRECTIONS, FAR, Cell, Sight, Walls, distances, downhill, prices
from flatout.workloads.mission.scenario import Route

WALKS_EVERY = 2
"""A patrol takes a step on its route every so many steps; running, it takes one in each."""


class Patrol:
    """Where one patrol is, where it looks and what it is after."""

    def __init__(self, route: Route, radius: int, patience: int) -> None:
        self._route, self._post = route.cells, route.facing
        self._index, self._way = 0, 1
        self._radius = radius
        self._patience, self._looks = patience, 0
        self.unaware = True
        """Whether it has run after no one yet."""
        self._target = route.cells[0]
        self.at = route.cells[0]
        self.facing = self._post if len(route.cells) == 1 else _direction(*route.cells[:2])
        self.mode: Literal["route", "chase", "return"] = "route"

    def move(self, walls: Walls, time: int) -> None:
        """One step, if it is time for one."""
        if self.mode != "chase" and time % WALKS_EVERY:
            return
        if self.mode == "route":
            self._go(self._next_on_route())
            return
        if self.at == self._target:  # whoever was here is gone
            self.mode, self._target = "return", self._route[self._index]
        self._go(downhill(distances(prices(walls, FAR), self._target), self.at))
        if self.mode == "return" and self.at == self._target:
            self.mode = "route"
            if len(self._route) == 1:
                self.facing = self._post

    def cone(self, sight: Sight) -> Walls:
        """A map of the cells it sees."""
        return sight.view(self.at, self._radius, self.facing)

    def next_cone(self, sight: Sight) -> Walls:
        """The same, one step ahead."""
        down, right = DIRECTIONS[self.facing]
        ahead = (self.at[0] + down, self.at[1] + right)
        return sight.view(self.at if sight.walls[ahead] else ahead, self._radius, self.facing)

    def notice(self, seen: Sequence[Cell]) -> bool:
        """Look at those it sees; when it has seen someone often enough in a row, run after the nearest.

        True the first time that it begins to run.
        """
        self._looks = self._looks + 1 if seen else 0
        if not seen or (self.mode != "chase" and self._looks < self._patience):
            return False
        self._target = min(seen, key=lambda cell: abs(cell[0] - self.at[0]) + abs(cell[1] - self.at[1]))
        self.mode = "chase"
        first, self.unaware = self.unaware, False
        return first

    @property
    def alarm(self) -> float:
        """0 while it has seen no one, 1 when it runs after someone."""
        return 1.0 if self.mode == "chase" else self._looks / self._patience

    def reaches(self, cell: Cell) -> bool:
        """Whether it captures someone there: whom it walks into, and when it runs, whom it is next to."""
        return abs(cell[0] - self.at[0]) + abs(cell[1] - self.at[1]) <= (self.mode == "chase")

    def _next_on_route(self) -> Cell:
        if len(self._route) == 1:
            return self.at
        if not 0 <= self._index + self._way < len(self._route):
            self._way = -self._way
        self._index += self._way
        return self._route[self._index]

    def _go(self, cell: Cell) -> None:
        if cell != self.at:
            self.facing = _direction(self.at, cell)
            self.at = cell


def _direction(a: Cell, b: Cell) -> int:
    return DIRECTIONS.index((b[0] - a[0], b[1] - a[1]))
