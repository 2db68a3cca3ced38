"""Snake in plain Python, the body as a list of cells: the reference for the fast forms."""

from __future__ import annotations

from typing import Any

import numpy as np

WAYS = [(-1, 0), (0, 1), (1, 0), (0, -1)]
ALL = 0xFFFFFFFFFFFFFFFF
WEYL = 0x9E3779B97F4A7C15
SIGHT = 3


def mix(x: int) -> int:
    x &= ALL
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & ALL
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & ALL
    return x ^ (x >> 31)


class PlainSnake:
    """One game, begun anew by its caller."""

    def __init__(
        self, height: int, width: int, wrap: bool, starve_after: int, death_reward: float, seed: int, n: int
    ):
        self.height, self.width, self.wrap = height, width, wrap
        self.starve_after, self.death_reward = starve_after, death_reward
        self.key = mix(mix(seed * WEYL + WEYL) + (n + 1) * WEYL)
        self.n_step = 0
        self.begin()

    def begin(self) -> None:
        y, x = self.height // 2, self.width // 2
        self.body = [(y, x - 1), (y, x)]
        self.facing = 1
        self.hunger = 0
        self.food: Any = self.place_food()

    def place_food(self) -> Any:
        cells = [(y, x) for y in range(self.height) for x in range(self.width)]
        free = [cell for cell in cells if cell not in self.body]
        if not free:
            return None
        bits = mix(self.key + self.n_step * WEYL) >> 33
        return free[bits * len(free) >> 31]

    def at(self, y: int, x: int) -> Any:
        if self.wrap:
            return y % self.height, x % self.width
        return (y, x) if 0 <= y < self.height and 0 <= x < self.width else None

    def ahead(self, way: int) -> Any:
        y, x = self.body[-1]
        return self.at(y + WAYS[way][0], x + WAYS[way][1])

    def step(self, action: int) -> tuple[float, bool]:
        """Reward, and whether the game ended."""
        self.n_step += 1
        if abs(action - self.facing) != 2:
            self.facing = action
        place = self.ahead(self.facing)
        if (
            place is None or place in self.body[1:]
        ):  # the tail's own place is free by the time the head is there
            return self.death_reward, True
        self.body.append(place)
        if place == self.food:
            self.hunger = 0
            self.food = self.place_food()
            return 1.0, self.food is None
        self.body.pop(0)
        self.hunger += 1
        starved = self.hunger >= self.starve_after
        return (self.death_reward if starved else 0.0), starved

    def mask(self) -> list[bool]:
        return [abs(way - self.facing) != 2 for way in range(4)]

    def planes(self) -> Any:
        view = np.zeros((3, self.height, self.width), np.uint8)
        view[0][self.body[-1]] = 255
        for i, place in enumerate(self.body):
            view[1][place] = 55 + min(i + 1, 200)
        if self.food is not None:
            view[2][self.food] = 255 - 200 * self.hunger // self.starve_after
        return view

    def vector(self) -> list[float]:
        n_cells = self.height * self.width
        y, x = self.body[-1]
        view = []
        for dy in range(-SIGHT, SIGHT + 1):
            for dx in range(-SIGHT, SIGHT + 1):
                if dy or dx:
                    place = self.at(y + dy, x + dx)
                    if place is None:
                        view.append(1.0)
                    elif place in self.body:
                        view.append(0.5 + (self.body.index(place) + 1) / n_cells / 2)
                    else:
                        view.append(0.0)
        down, right = (self.food[0] - y, self.food[1] - x) if self.food is not None else (0, 0)
        if self.wrap:
            down = (down + self.height // 2) % self.height - self.height // 2
            right = (right + self.width // 2) % self.width - self.width // 2
        view += [down / self.height, right / self.width, float(np.sign(down)), float(np.sign(right))]
        view += [float(self.facing == way) for way in range(4)]
        view += [y / self.height, x / self.width, len(self.body) / n_cells, self.hunger / self.starve_after]
        return view
