"""What a game of Snake is: its settings, its spaces, and tables that say which cell lies where.

Cells are numbered row by row; the number after the last is the wall. Directions: 0 up, 1 right, 2 down, 3 left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from flatout.envs.spaces import MASK_KEY
from flatout.errors import EnvError, did_you_mean

Array = npt.NDArray[Any]

SIDES = 2, 64
"""The least and the most cells a board may be wide or high."""
SIGHT = 3
"""How many cells around its head a snake sees in the vector observation."""
KINDS = "vector", "planes"
MOVES = (-1, 0), (0, 1), (1, 0), (0, -1)
"""Rows and columns of the four directions."""
START_LENGTH = 2
FOREVER = np.iinfo(np.int32).max
"""When a wall gives way."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """The settings of a game, checked."""

    height: int = 10
    width: int = 10
    wrap: bool = False
    """Leaving the board on one side enters it on the other; else there are walls."""
    starve_after: int | None = None
    """Steps without food that a snake survives; none: as many as the board has cells."""
    death_reward: float = 0.0
    """What hitting something or starving gives."""
    obs: str = "vector"
    """`vector`: what lies around the head; `planes`: the whole board as (3, height, width)."""

    def __post_init__(self) -> None:
        for name, side in (("height", self.height), ("width", self.width)):
            if not isinstance(side, int) or not SIDES[0] <= side <= SIDES[1]:
                raise EnvError(
                    f"snake: {name} is {side!r}; a board has {SIDES[0]} to {SIDES[1]} cells a side"
                )
        if not isinstance(self.wrap, bool):
            raise EnvError(f"snake: wrap is {self.wrap!r}; give true or false")
        if self.starve_after is not None and not _is_count(self.starve_after):
            raise EnvError(
                f"snake: starve_after is {self.starve_after!r}; give 1 to 1,000,000 steps, or none"
            )
        if not isinstance(self.death_reward, int | float) or not np.isfinite(self.death_reward):
            raise EnvError(f"snake: death_reward is {self.death_reward!r}; give a number")
        if self.obs not in KINDS:
            hint = did_you_mean(str(self.obs), KINDS)
            raise EnvError(f"snake: obs is {self.obs!r}; there is {' and '.join(KINDS)}{hint}")

    @property
    def n_cells(self) -> int:
        """Cells of the board."""
        return self.height * self.width

    @property
    def limit(self) -> int:
        """Steps without food at which a snake starves."""
        return self.starve_after or self.n_cells

    @property
    def observation_space(self) -> gym.Space[Any]:
        """The snake's view, and which of the four directions do not turn it back."""
        view: gym.Space[Any]
        if self.obs == "planes":
            view = spaces.Box(0, 255, (3, self.height, self.width), np.uint8)
        else:
            view = spaces.Box(-1.0, 1.0, (n_features(),), np.float32)
        return spaces.Dict({"view": view, MASK_KEY: spaces.MultiBinary(4)})


def _is_count(n: object) -> bool:
    return isinstance(n, int) and 1 <= n <= 1_000_000


def n_features() -> int:
    """Length of the vector observation."""
    return (2 * SIGHT + 1) ** 2 - 1 + 12


@dataclass(frozen=True, slots=True)
class Tables:
    """What follows from the rules alone."""

    ahead: Array
    """(cells, 4): the next cell in each direction."""
    around: Array
    """(cells, K): the cells that a head there sees, row by row, without its own."""
    row: Array
    column: Array
    down: Array
    """By a difference of rows plus height - 1: the way down to the food, as a share of the board; negative: up."""
    right: Array
    """The same for columns."""
    start: Array
    """The start board: when the head came to each cell; the wall's number last."""
    start_head: int
    start_free: Array
    """The start board's free cells."""

    @staticmethod
    def of(rules: Rules) -> Tables:
        """The tables of these rules."""
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
            down=_ways(height, rules.wrap),
            right=_ways(width, rules.wrap),
            start=start,
            start_head=head,
            start_free=np.flatnonzero(start[:n] == 0),
        )


def _ways(side: int, wrap: bool) -> Array:
    """The shortest way for each difference of places, over the edge where that is allowed, as a share of the side."""
    way = np.arange(1 - side, side)
    if wrap:
        way = (way + side // 2) % side - side // 2
    return (way / side).astype(np.float32)
