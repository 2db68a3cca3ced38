"""The rules of the game: what units and patrols may do, what happens in a step, and how an episode ends.

Order of a step: the squad acts, the patrols move, units within reach are captured, the patrols look, the objective counts as
held or not, the squad looks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from flatout.workloads.mission.grid import DIRECTIONS, Cell, Sight, Walls, breaches, step_towards
from flatout.workloads.validate import check_fields, within

WALKS_EVERY = 2
"""A patrol on its route moves every this many steps; in a chase it moves every step."""


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
    units: tuple[Cell, ...]
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


class Patrol:
    """Position, direction and mode of one patrol: on its route, chasing, or returning to the route."""

    def __init__(self, route: Route, radius: int, patience: int) -> None:
        self._round = (*route.cells, *route.cells[-2:0:-1])
        """The route there and back."""
        self._index, self._post, self._radius = 0, route.facing, radius
        self._patience, self._looks = patience, 0
        self.unaware = True
        """Whether it has not chased anyone yet."""
        self.at = self._target = route.cells[0]
        self.facing = self._post if len(route.cells) == 1 else _direction(*route.cells[:2])
        self.mode: Literal["route", "chase", "return"] = "route"

    def move(self, walls: Walls, time: int) -> None:
        """Move one cell, if it moves in this step."""
        if self.mode != "chase" and time % WALKS_EVERY:
            return
        if self.mode == "route":
            self._index = (self._index + 1) % len(self._round)
            self._go(self._round[self._index])
            return
        if self.at == self._target:  # the unit it chased is gone
            self.mode, self._target = "return", self._round[self._index]
        self._go(step_towards(walls, self.at, self._target))
        if self.mode == "return" and self.at == self._target:
            self.mode = "route"
            if len(self._round) == 1:
                self.facing = self._post

    def cone(self, sight: Sight) -> Walls:
        """A map of the cells that it sees."""
        return sight.view(self.at, self._radius, self.facing)

    def next_cone(self, sight: Sight) -> Walls:
        """The same after its next step straight ahead."""
        ahead = _beyond(self.at, self.facing)
        return sight.view(self.at if sight.walls[ahead] else ahead, self._radius, self.facing)

    def notice(self, seen: Sequence[Cell]) -> bool:
        """Take in the units it sees; after `patience` consecutive sightings, chase the nearest.

        Returns True when its first chase starts.
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
        """From 0, sees no one, to 1, chases."""
        return 1.0 if self.mode == "chase" else self._looks / self._patience

    def reaches(self, cell: Cell) -> bool:
        """Whether it captures a unit in this cell: its own cell and, in a chase, the four next to it."""
        return abs(cell[0] - self.at[0]) + abs(cell[1] - self.at[1]) <= (self.mode == "chase")

    def _go(self, cell: Cell) -> None:
        if cell != self.at:
            self.facing = _direction(self.at, cell)
            self.at = cell


def _direction(a: Cell, b: Cell) -> int:
    return DIRECTIONS.index((b[0] - a[0], b[1] - a[1]))


SCOUT, BREACHER, CARRIER = 0, 1, 2
SIGHT = (6, 4, 4)
"""How far scout, breacher and carrier see, in all directions."""
N_ACTIONS = (9, 9, 5)
"""Stay; move one cell N, E, S, W; then the scout's moves by two cells, or the walls that the breacher breaks."""

SOON, WATCHED = 0.25, 0.5

Outcome: TypeAlias = Literal["success", "captured", "unreachable"]


@dataclass(slots=True)
class Sighting:
    """The last sighting of a patrol."""

    at: Cell
    facing: int
    alarm: float
    age: int = 0


@dataclass(frozen=True, slots=True)
class Events:
    """What happened in a step."""

    captured: tuple[int, ...]
    noticed: tuple[int, ...]
    """Patrols whose first chase started."""
    breached: Cell | None


class Game:
    """The state of an episode."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self._sight = Sight(scenario.walls)
        self.walls: Walls = self._sight.walls
        self.known = np.full(self.walls.shape, scenario.known_map)
        self.units: list[Cell] = list(scenario.units)
        self.free = [True, True, True]
        """Whether each unit is still free."""
        self.tired = False
        """Whether the carrier moved in the last step and must rest in this one."""
        self.charges = scenario.charges
        self.held = 0
        self.time = 0
        self.outcome: Outcome | None = None
        self.patrols = [Patrol(route, scenario.patrol_sight, scenario.patience) for route in scenario.routes]
        self.cones = [patrol.cone(self._sight) for patrol in self.patrols]
        self.sightings: dict[int, Sighting] = {}
        self.in_sight = np.zeros(self.walls.shape, bool)
        self.danger = np.zeros(self.walls.shape, np.float32)
        """Danger from patrols in sight, on known cells: 1 next to them, less where they look now or next."""
        self._look()
        self.allowed = self._allowed()
        """The action mask of the three units, concatenated; staying is always allowed."""

    def step(self, actions: Sequence[int]) -> Events:
        """Play one step; an action that is not allowed is a stay."""
        self.time += 1
        offsets = (0, N_ACTIONS[0], N_ACTIONS[0] + N_ACTIONS[1])
        breached = None
        self.tired = False
        for unit, action in enumerate(actions):
            if action == 0 or not self.allowed[offsets[unit] + action]:
                continue
            if unit == BREACHER and action > 4:
                breached = _beyond(self.units[unit], action - 1)
                self._sight.open(breached)
                self.charges -= 1
            else:
                self.units[unit] = _beyond(self.units[unit], action - 1, 2 if action > 4 else 1)
                self.tired = unit == CARRIER
        captured, noticed = self._move_patrols()
        self._hold(changed=bool(captured) or breached is not None)
        self._look()
        self.allowed = self._allowed()
        return Events(captured, noticed, breached)

    def _allowed(self) -> NDArray[np.int8]:
        walls: list[list[bool]] = self.walls.tolist()
        mask = []
        for unit, n_actions in enumerate(N_ACTIONS):
            still = not self.free[unit] or (unit == CARRIER and self.tired)
            mask += [True] + [not still and self._may(walls, unit, action) for action in range(1, n_actions)]
        return np.array(mask, np.int8)

    def _may(self, walls: list[list[bool]], unit: int, action: int) -> bool:
        row, column = _beyond(self.units[unit], action - 1)
        if action <= 4:
            return not walls[row][column]
        if unit == BREACHER:
            inner = 0 < row < len(walls) - 1 and 0 < column < len(walls[0]) - 1
            return walls[row][column] and self.charges > 0 and inner
        further_row, further_column = _beyond((row, column), action - 1)
        return not walls[row][column] and not walls[further_row][further_column]

    def _move_patrols(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        for patrol in self.patrols:
            patrol.move(self.walls, self.time)
        in_reach = [any(patrol.reaches(cell) for patrol in self.patrols) for cell in self.units]
        captured = tuple(unit for unit in range(3) if self.free[unit] and in_reach[unit])
        for unit in captured:
            self.free[unit] = False
        self.cones = [patrol.cone(self._sight) for patrol in self.patrols]
        free = [cell for unit, cell in enumerate(self.units) if self.free[unit]]
        seen = [[cell for cell in free if cone[cell]] for cone in self.cones]
        noticed = tuple(i for i, patrol in enumerate(self.patrols) if patrol.notice(seen[i]))
        return captured, noticed

    def _hold(self, *, changed: bool) -> None:
        if not self.free[CARRIER]:
            self.held, self.outcome = 0, "captured"
            return
        self.held = self.held + 1 if self.units[CARRIER] == self.scenario.objective else 0
        if self.held >= self.scenario.hold:
            self.outcome = "success"
        elif changed:
            charges = self.charges if self.free[BREACHER] else 0
            if breaches(self.walls, self.scenario.objective, self.units[CARRIER]) > charges:
                self.outcome = "unreachable"

    def _look(self) -> None:
        self.in_sight[:] = False
        for unit, cell in enumerate(self.units):
            if self.free[unit]:
                self.in_sight |= self._sight.view(cell, SIGHT[unit])
        self.known |= self.in_sight
        for sighting in self.sightings.values():
            sighting.age += 1
        self.danger[:] = 0.0
        for i, patrol in enumerate(self.patrols):
            if self.in_sight[patrol.at]:
                self.sightings[i] = Sighting(patrol.at, patrol.facing, patrol.alarm)
                np.maximum(self.danger, SOON * patrol.next_cone(self._sight), out=self.danger)
                np.maximum(self.danger, WATCHED * self.cones[i], out=self.danger)
                row, column = patrol.at
                self.danger[row - 1 : row + 2, column] = self.danger[row, column - 1 : column + 2] = 1.0
        self.danger[~self.known] = 0.0


def _beyond(cell: Cell, direction: int, n: int = 1) -> Cell:
    down, right = DIRECTIONS[direction % 4]
    return cell[0] + n * down, cell[1] + n * right
