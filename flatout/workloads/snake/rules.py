"""The settings and spaces of a Snake game, and lookup tables for the board.

Cells are numbered row by row; the number after the last cell is the wall. Directions: 0 up, 1 right, 2 down, 3 left.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from flatout.envs.spaces import MASK_KEY
from flatout.workloads.validate import check_choice, check_fields, within

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

    height: int = within(10, 2, 64)
    width: int = within(10, 2, 64)
    wrap: bool = False
    """Leaving the board on one side enters it on the opposite side; otherwise there are walls."""
    starve_after: int | None = within(None, 1, 1_000_000)
    """Steps without food after which the snake dies; None: the number of cells."""
    death_reward: float = within(0.0, -1e30, 1e30)
    """Reward for dying: hitting something, or starving."""
    obs: str = "vector"
    """`vector`: the surroundings of the head; `planes`: the whole board as (3, height, width)."""

    def __post_init__(self) -> None:
        check_fields(self, "snake: ")
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


class Tables:
    """Lookup tables that depend on the rules alone."""

    def __init__(self, rules: Rules) -> None:
        height, width, n = rules.height, rules.width, rules.n_cells
        self.row, self.column = np.divmod(np.arange(n), width)

        def seen(offsets: Iterable[tuple[int, ...]]) -> Array:
            """(cells, offsets): the cells at these (rows, columns) from each cell."""
            down, right = np.array(list(offsets)).T
            rows, columns = self.row[:, None] + down, self.column[:, None] + right
            inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
            return np.where(rules.wrap | inside, rows % height * width + columns % width, n)

        self.ahead = seen(MOVES)
        """(cells, 4): the next cell in each direction."""
        self.around = seen(at for at in product(range(-SIGHT, SIGHT + 1), repeat=2) if at != (0, 0))
        """(cells, K): the cells seen from a head there, row by row, without its own."""
        self.down, self.right = (_signed_distances(side, rules.wrap) for side in (height, width))
        """Signed distance to the food ÷ side, indexed by the difference of rows (or columns) plus side - 1."""
        self.start_head = height // 2 * width + width // 2
        self.start = np.zeros(n + 1, np.int32)
        """The start board: the move at which the head entered each cell; the wall last."""
        self.start[[self.start_head - 1, self.start_head, n]] = 1, 2, FOREVER
        self.start_free = np.flatnonzero(self.start == 0)
        """The free cells of the start board."""


def _signed_distances(side: int, wrap: bool) -> Array:
    """The shortest signed distance for each coordinate difference, ÷ side; across the edge if the board wraps."""
    distance = np.arange(1 - side, side)
    if wrap:
        distance = (distance + side // 2) % side - side // 2
    return (distance / side).astype(np.float32)
