"""Lines of sight and shortest paths on a map whose outer ring is wall.

Cells are (row, column). Maps are boolean arrays, true where there is a wall.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from itertools import product
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Cell: TypeAlias = tuple[int, int]
Walls: TypeAlias = NDArray[np.bool_]
"""A boolean map, most often of walls."""
Field: TypeAlias = NDArray[np.int32]

DIRECTIONS: tuple[Cell, ...] = ((-1, 0), (0, 1), (1, 0), (0, -1))
"""North, east, south, west."""
FAR = 9_999
"""Infinite distance: no path."""
LAST_RESORT = 1_000
"""Price of a wall that is only broken where there is no other path."""


class Sight:
    """Views from cells, cached until a wall is removed."""

    def __init__(self, walls: Walls) -> None:
        self.walls = walls.copy()
        self.view = cache(partial(visible, self.walls))

    def open(self, cell: Cell) -> None:
        """Remove a wall."""
        self.walls[cell] = False
        self.view.cache_clear()


def visible(walls: Walls, eye: Cell, radius: int, facing: int | None = None) -> Walls:
    """A map of the cells seen from `eye`, walls included: in all directions, or in the quadrant ahead.

    A cell is seen if a straight line to it crosses no wall. Sight is symmetric: if a sees b, b sees a.
    """
    n_rows, n_columns = walls.shape
    down, right, between = _lines(radius, facing, n_columns)
    rows, columns = down + eye[0], right + eye[1]
    inside = (rows >= 0) & (rows < n_rows) & (columns >= 0) & (columns < n_columns)
    # Only lines to cells outside the map leave it, and those cells are dropped, so clipping is safe.
    hidden = walls.ravel().take(between + (eye[0] * n_columns + eye[1]), mode="clip").any(0).all(0)
    seen = inside & ~hidden
    view = np.zeros_like(walls)
    view[rows[seen], columns[seen]] = True
    return view


@cache
def _lines(radius: int, facing: int | None, n_columns: int) -> tuple[NDArray[np.intp], ...]:
    """Row and column offsets in range, and flat offsets of the cells between, (step, side, offset).

    Where a line passes exactly between two cells, `side` holds both; it is enough if one of them is free.
    """
    ends = np.array(list(product(range(-radius, radius + 1), repeat=2))).T
    in_range = (ends**2).sum(0) <= (radius + 0.5) ** 2
    if facing is not None:
        ahead = np.array(DIRECTIONS[facing])
        in_range &= abs(ahead[::-1]) @ abs(ends) <= ahead @ ends
    ends = ends[:, in_range]
    n, step = np.maximum(abs(ends).max(0), 1), np.arange(1, radius + 1)[:, None]
    # Lines end before their last cell; the rest is the eye's own cell, which is never a wall.
    points = np.where(step < n, step * ends[:, None] / n, 0.0)
    sides = np.ceil(points - 0.5), np.floor(points + 0.5)
    between = np.stack([row * n_columns + column for row, column in sides], 1)
    return *ends, between.astype(np.intp)


def distances(price: NDArray[np.integer], goal: Cell) -> Field:
    """The cost of the cheapest path from each cell to the goal; entering a cell costs its price, FAR: blocked.

    The outer ring must be FAR.
    """
    width = price.shape[1]
    prices: list[int] = price.ravel().tolist()
    found = [-1 if p >= FAR else FAR for p in prices]
    start = goal[0] * width + goal[1]
    found[start] = 0
    buckets: list[list[int]] = [[start]]
    for cost, bucket in enumerate(buckets):
        for cell in bucket:
            if found[cell] < cost:
                continue
            further = cost + prices[cell]
            for neighbour in (cell - width, cell + 1, cell + width, cell - 1):
                if further < found[neighbour]:
                    found[neighbour] = further
                    while len(buckets) <= further:
                        buckets.append([])
                    buckets[further].append(neighbour)
    field = np.array(found, np.int32).reshape(price.shape)
    field[field < 0] = FAR
    return field


def prices(walls: Walls, breach: int, floor: int = 1) -> Field:
    """Prices for `distances`: those of floor, of walls (`breach` more; FAR: blocked), and FAR on the outer ring."""
    price = np.where(walls, min(floor + breach, FAR), floor).astype(np.int32)
    price[[0, -1], :] = price[:, [0, -1]] = FAR
    return price


def breaches(walls: Walls, goal: Cell, start: Cell) -> int:
    """The smallest number of walls on a path between two cells."""
    return int(distances(prices(walls, 1, floor=0), goal)[start])


def neighbours(cell: Cell) -> list[Cell]:
    """The cells to the north, east, south and west."""
    return [(cell[0] + down, cell[1] + right) for down, right in DIRECTIONS]


def cheapest_path(field: Field, price: Field, start: Cell, goal: Cell) -> Iterator[Cell]:
    """The cells after the start on the cheapest path; `field` holds the distances to the goal at these prices."""
    while start != goal:
        start = min(neighbours(start), key=lambda cell: int(field[cell] + price[cell]))
        yield start


def shortest_path(walls: Walls, a: Cell, b: Cell) -> list[Cell]:
    """A shortest path from a to b, both included; empty if there is none."""
    price = prices(walls, FAR)
    field = distances(price, b)
    return [a, *cheapest_path(field, price, a, b)] if field[a] < FAR else []


def first_wall(walls: Walls, field: Field, price: Field, start: Cell, goal: Cell) -> Cell | None:
    """The first wall on the cheapest path."""
    return next((cell for cell in cheapest_path(field, price, start, goal) if walls[cell]), None)


def needed_wall(walls: Walls, start: Cell, goal: Cell) -> Cell | None:
    """The first wall on the cheapest path that goes around every wall it can."""
    price = prices(walls, LAST_RESORT)
    return first_wall(walls, distances(price, goal), price, start, goal)


def step_towards(walls: Walls, start: Cell, goal: Cell) -> Cell:
    """The next cell on a shortest path; the start itself if there is no path."""
    field = distances(prices(walls, FAR), goal)
    return min([start, *neighbours(start)], key=lambda cell: int(field[cell]))
