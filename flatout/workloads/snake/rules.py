"""The settings and spaces of a Snake game, and lookup tables for the board.

Cells are numbered row by row; the number after the last cell is the wall. Directions: 0 up, 1 right, 2 down, 3 left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from flatout.envs.spaces import MASK_KEY
from flatout.workloads.validate import check_choice, check_number

Array = npt.NDArray[Any]

SIGHT = 3
"""The vector observation shows this many cells on each side of the head."""
N_FEATURES = (2 * SIGHT + 1) ** 2 - 1 + 12
"""Length of the vector observation."""
MOVES = (-1, 0), (0, 1), (1, 0), (0, -1)
"""(rows, columns) of the four directions."""
FOREVER = np.iinfo(np.int32).max
"""The move number on the board that keeps the wall blocked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """The settings of a game."""

    height: int = 10
    width: int = 10
    wrap: bool = False
    """Leaving the board on one side enters it on the opposite side; otherwise there are walls."""
    starve_after: int | None = None
    """Steps without food after which the snake dies; None: the number of cells."""
    death_reward: float = 0.0
    """Reward for dying: hitting something, or starving."""
    obs: str = "vector"
    """`vector`: the surroundings of the head; `planes`: the whole board as (3, height, width)."""

    def __post_init__(self) -> None:
        check_number("snake: height", self.height, 2, 64, whole=True)
        check_number("snake: width", self.width, 2, 64, whole=True)
        check_choice("snake: wrap", self.wrap, (True, False))
        if self.starve_after is not None:
            check_number("snake: starve_after", self.starve_after, 1, 1_000_000, whole=True)
        check_number("snake: death_reward", self.death_reward, -1e30, 1e30)
        check_choice("snake: obs", self.obs, ("vector", "planes"))

    @property
    def n_cells(self) -> int:
        """Cells of the board."""
        return self.height * self.width

    @property
    def limit(self) -> int:
        """Steps without food at which the snake starves."""
        return self.starve_after or self.n_cells

    @property
    def observation_space(self) -> gym.Space[Any]:
        """The view, and a mask without the direction that would reverse the snake."""
        view: gym.Space[Any]
        if self.obs == "planes":
            view = spaces.Box(0, 255, (3, self.height, self.width), np.uint8)
        else:
            view = spaces.Box(-1.0, 1.0, (N_FEATURES,), np.float32)
        return spaces.Dict({"view": view, MASK_KEY: spaces.MultiBinary(4)})


@dataclass(frozen=True, slots=True)
class Tables:
    """Lookup tables that depend on the rules alone."""

    ahead: Array
    """(cells, 4): the next cell in each direction."""
    around: Array
    """(cells, K): the cells seen from a head there, row by row, without its own."""
    row: Array
    column: Array
    down: Array
    """Indexed by the row difference plus height - 1: distance down to the food ÷ height, negative if up."""
    right: Array
    """The same for columns."""
    start: Array
    """The start board: the move at which the head entered each cell; the wall last."""
    start_head: int
    start_free: Array
    """The free cells of the start board."""

    @staticmethod
    def of(rules: Rules) -> Tables:
        """Build the tables."""
        height, width, n = rules.height, rules.width, rules.n_cells
        cells = np.arange(n)
        row, column = cells // width, cells % width

        def at(rows: Array, columns: Array) -> Array:
            inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
            cell: Array = np.where(rules.wrap | inside, rows % height * width + columns % width, n)
            return cell

        reach = range(-SIGHT, SIGHT + 1)
        seen = [(r, c) for r in reach for c in reach if (r, c) != (0, 0)]
        start = np.zeros(n + 1, np.int32)
        head = height // 2 * width + width // 2
        start[[head - 1, head, n]] = 1, 2, FOREVER
        return Tables(
            ahead=np.stack([at(row + r, column + c) for r, c in MOVES], 1),
            around=np.stack([at(row + r, column + c) for r, c in seen], 1),
            row=row,
            column=column,
            down=_signed_distances(height, rules.wrap),
            right=_signed_distances(width, rules.wrap),
            start=start,
            start_head=head,
            start_free=np.flatnonzero(start[:n] == 0),
        )


def _signed_distances(side: int, wrap: bool) -> Array:
    """The shortest signed distance for each coordinate difference, ÷ side; across the edge if the board wraps."""
    distance = np.arange(1 - side, side)
    if wrap:
        distance = (distance + side // 2) % side - side // 2
    return (distance / side).astype(np.float32)
