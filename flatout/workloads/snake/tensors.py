"""All of a step as operations on tensors over all games at once, on any device, without waiting for it.

The same games to the bit as `kernel`: integers, and floats that are one operation away from integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flatout.workloads.snake.rules import Rules, Tables

_WEYL, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _signed(x: int) -> int:
    """Sixty-four bits as torch writes them."""
    x &= 0xFFFFFFFFFFFFFFFF
    return x - (1 << 64) if x >> 63 else x


def _shift(x: Tensor, n: int) -> Tensor:
    """Right, with zeros coming in."""
    return (x >> n) & ((1 << (64 - n)) - 1)


def mix(x: Tensor) -> Tensor:
    """SplitMix64's finisher."""
    x = (x ^ _shift(x, 30)) * _signed(_MIX1)
    x = (x ^ _shift(x, 27)) * _signed(_MIX2)
    return x ^ _shift(x, 31)


def game_keys(seed: int, n_games: int, device: torch.device) -> Tensor:
    """A random stream's key for each game."""
    of_seed = mix(torch.tensor(_signed(seed * _WEYL + _WEYL), device=device))
    return mix(of_seed + torch.arange(1, n_games + 1, device=device) * _signed(_WEYL))


def draw(key: Tensor, n_step: Tensor, n_choices: Tensor | int) -> Tensor:
    """For each game a number below `n_choices`."""
    return (_shift(mix(key + n_step * _signed(_WEYL)), 33) * n_choices) >> 31


@dataclass(slots=True)
class State:
    """N games; changed in place."""

    key: Tensor
    n_step: Tensor
    """Steps since the games were seeded, the same for all."""
    board: Tensor
    """(N, cells + 1) int32: at which move the head came to each cell; the wall last."""
    head: Tensor
    facing: Tensor
    length: Tensor
    moves: Tensor
    hunger: Tensor
    food: Tensor

    @staticmethod
    def alloc(n_games: int, rules: Rules, device: torch.device) -> State:
        """Room for N games."""

        def zeros() -> Tensor:
            return torch.zeros(n_games, dtype=torch.int64, device=device)

        board = torch.zeros(n_games, rules.n_cells + 1, dtype=torch.int32, device=device)
        n_step = torch.zeros((), dtype=torch.int64, device=device)
        return State(zeros(), n_step, board, zeros(), zeros(), zeros(), zeros(), zeros(), zeros())


class Steps:
    """The rules on a device."""

    def __init__(self, rules: Rules, tables: Tables, device: torch.device) -> None:
        self._rules = rules
        self._around, self._ahead, self._row, self._column, self._down, self._right, self._start = (
            torch.as_tensor(table, device=device)
            for table in (
                tables.around,
                tables.ahead,
                tables.row,
                tables.column,
                tables.down,
                tables.right,
                tables.start,
            )
        )
        self._start_free = torch.as_tensor(tables.start_free, device=device)
        self._start_head, self._n_start = tables.start_head, int(tables.start[tables.start_head])
        self._directions = torch.arange(4, device=device)

    def begin(self, s: State, where: Tensor) -> None:
        """A new game in the places named."""
        s.board.copy_(torch.where(where[:, None], self._start, s.board))
        first = (self._start_head, 1, self._n_start, self._n_start, 0)
        for values, value in zip((s.head, s.facing, s.length, s.moves, s.hunger), first, strict=True):
            values.masked_fill_(where, value)
        food = self._start_free[draw(s.key, s.n_step, len(self._start_free))]
        s.food.copy_(torch.where(where, food, s.food))

    def step(self, s: State, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Step every game; rewards, which ended, and food eaten. The games that ended are left as they are."""
        rules, n_cells = self._rules, self._rules.n_cells
        actions = actions & 3
        s.facing.copy_(torch.where(actions == s.facing ^ 2, s.facing, actions))
        cell, now = self._ahead[s.head, s.facing], s.moves + 1
        ate = cell == s.food
        there = s.board.gather(1, cell[:, None]).squeeze(1)
        crashed = there > now - s.length
        hungry = torch.where(ate, 0, s.hunger + 1)
        s.length.add_(ate & ~crashed)
        s.board.scatter_(1, cell[:, None], torch.where(crashed, there, now).int()[:, None])
        for values, value in ((s.head, cell), (s.moves, now), (s.hunger, hungry)):
            values.copy_(torch.where(crashed, values, value))
        full = s.length == n_cells
        died = crashed | ((hungry >= rules.limit) & ~full)
        # The free cell that k free ones come before has k + 1 free ones up to itself.
        n_free = (s.board[:, :-1] <= (s.moves - s.length)[:, None]).cumsum(1)
        k = draw(s.key, s.n_step, n_cells - s.length)
        food = (n_free <= k[:, None]).sum(1)
        s.food.copy_(torch.where(full, cell, torch.where(ate, food, s.food)))
        reward = torch.where(died, rules.death_reward, ate.float())
        return reward, died | full, s.length - self._n_start

    def observe(self, s: State) -> dict[str, Any]:
        """The observation of every game."""
        mask = self._directions != (s.facing ^ 2)[:, None]
        return {
            "action_mask": mask,
            "view": self._planes(s) if self._rules.obs == "planes" else self._vector(s),
        }

    def _vector(self, s: State) -> Tensor:
        rules, n_cells = self._rules, self._rules.n_cells
        gone = (s.moves - s.length)[:, None]
        left = (s.board.gather(1, self._around[s.head]) - gone).clamp(0, n_cells)
        unit = torch.tensor(0.5) / n_cells
        around = (left + n_cells * (left > 0)).float() * unit.to(left.device)
        y, x = self._row[s.head], self._column[s.head]
        to_y = self._down[self._row[s.food] - y + rules.height - 1]
        to_x = self._right[self._column[s.food] - x + rules.width - 1]
        facing = (self._directions == s.facing[:, None]).float()
        place = [y.float() / rules.height, x.float() / rules.width]
        body = [s.length.float() / n_cells, s.hunger.float() / rules.limit]
        columns = [to_y, to_x, to_y.sign(), to_x.sign()]
        return torch.cat([around, torch.stack(columns, 1), facing, torch.stack(place + body, 1)], 1)

    def _planes(self, s: State) -> Tensor:
        rules = self._rules
        cells = torch.arange(rules.n_cells, device=s.board.device)
        left = s.board[:, :-1] - (s.moves - s.length)[:, None]
        head = cells == s.head[:, None]
        body = torch.where(left > 0, 55 + left.clamp(max=200), 0)
        food = (cells == s.food[:, None]) & (s.food != s.head)[:, None]
        fresh = 255 - 200 * s.hunger // rules.limit
        planes = torch.stack([head * 255, body, food * fresh[:, None]], 1)
        return planes.to(torch.uint8).view(-1, 3, rules.height, rules.width)
