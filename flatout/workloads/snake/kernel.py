"""The step of N games on the CPU as one compiled function; games.py does the same with tensors.

For each cell the board holds the move at which the head entered it. Cells entered after move `moves - length` are the body,
so a step writes one cell whatever the length, and the tail's cell is free when the head arrives.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flatout.device.jit import compiled
from flatout.envs.spaces import Array

F, S, U = np.float32, np.int32, np.uint64

_WEYL, _MIX1, _MIX2 = U(0x9E3779B97F4A7C15), U(0xBF58476D1CE4E5B9), U(0x94D049BB133111EB)
_HALF = F(0.5)


@compiled
def draw(key: Any, n_step: Any, n_choices: int) -> Any:
    """A random number below `n_choices`: SplitMix64 of the game's key and the step number."""
    x = U(key) + U(n_step) * _WEYL
    x = (x ^ (x >> U(30))) * _MIX1
    x = (x ^ (x >> U(27))) * _MIX2
    x = x ^ (x >> U(31))
    return np.int64(((x >> U(33)) * U(n_choices)) >> U(31))


@compiled
def _free_cell(board: Array, i: Any, free_since: Any, k: Any) -> Any:
    """The free cell of game i with k free cells before it."""
    for cell in range(board.shape[1] - 1):
        k -= board[i, U(cell)] <= free_since
        if k < 0:
            return cell
    return board.shape[1] - 1


@compiled
def _write_planes(
    i: Any, board: Array, free_since: Any, head: Any, food: Any, hunger: int, limit: int, view: Array
) -> None:
    for cell in range(U(view.shape[2])):
        left = S(board[i, cell] - free_since)
        view[i, 0, cell] = 0
        view[i, 1, cell] = S(min(left, S(200)) + S(55)) if left > 0 else S(0)
        view[i, 2, cell] = 0
    view[i, 0, head] = 255
    if food != head:
        view[i, 2, food] = 255 - 200 * hunger // limit


@compiled
def _write_vector(
    i: Any, board: Array, free_since: Any, head: Any, facing: int, food: Any, length: int, hunger: int, limit: int,
    tables: Any, view: Array,
) -> None:  # fmt: skip
    around, scratch, row, column, down, right = tables
    n_cells, n_seen = S(board.shape[1] - 1), U(around.shape[1])
    unit = _HALF / F(n_cells)
    # Two loops, because only the second vectorises. S() keeps sums at 32 bits; numba would widen them to 64.
    for j in range(n_seen):
        scratch[j] = board[i, around[head, j]]
    for j in range(n_seen):
        left = S(min(max(S(scratch[j] - free_since), S(0)), n_cells))
        view[i, j] = F(S(left + (n_cells if left > 0 else S(0)))) * unit
    y, x = row[head], column[head]
    height, width = (len(down) + 1) // 2, (len(right) + 1) // 2
    to_y, to_x = down[U(row[food] - y + height - 1)], right[U(column[food] - x + width - 1)]
    view[i, n_seen] = to_y
    view[i, n_seen + U(1)] = to_x
    view[i, n_seen + U(2)] = F(to_y > 0) - F(to_y < 0)
    view[i, n_seen + U(3)] = F(to_x > 0) - F(to_x < 0)
    for d in range(4):
        view[i, n_seen + U(4 + d)] = F(facing == d)
    view[i, n_seen + U(8)] = F(y) / F(height)
    view[i, n_seen + U(9)] = F(x) / F(width)
    view[i, n_seen + U(10)] = F(length) / F(n_cells)
    view[i, n_seen + U(11)] = F(hunger) / F(limit)


@compiled
def step(
    actions: Array, n_step: int, limit: int, death_reward: Any, autoreset: bool,
    keys: Array, board: Array, heads: Array, facings: Array, lengths: Array, moves: Array, hungers: Array, foods: Array,
    ahead: Array, tables: Any, start: Array, start_head: int, start_free: Array,
    view: Array, final_view: Array, mask: Array, final_mask: Array, reward: Array, terminated: Array, eaten: Array,
) -> None:  # fmt: skip
    """Step every game, reset it where it ended, and observe it: planes if `view` has three dimensions, else a vector."""
    # Indices are unsigned, because numba checks signed ones for being negative at each access.
    n_cells, n_start = len(ahead), np.int64(start[start_head])
    for i in range(U(len(heads))):
        head, food, facing = heads[i], foods[i], facings[i]
        length, now, hunger = lengths[i], moves[i], hungers[i]
        direction = actions[i] & 3
        if direction != facing ^ 2:
            facing = direction
        cell = ahead[U(head), U(facing)]
        ate = cell == food
        crashed = board[i, cell] > now + 1 - length
        hungry = 0 if ate else hunger + 1
        if not crashed:
            now += 1
            length += ate
            head, hunger = np.int64(cell), hungry
            board[i, cell] = now
        full = length == n_cells
        died = crashed or (hungry >= limit and not full)
        ended = died or full
        reward[i] = death_reward if died else F(ate)
        terminated[i] = ended
        eaten[i] = length - n_start
        if ate:
            food = head
            if not full:
                food = _free_cell(board, i, S(now - length), draw(keys[i], n_step, n_cells - length))
        if ended and autoreset:
            free_since = S(now - length)
            if view.ndim == 3:
                _write_planes(i, board, free_since, U(head), U(food), hunger, limit, final_view)
            else:
                _write_vector(
                    i, board, free_since, U(head), facing, U(food), length, hunger, limit, tables, final_view
                )
            for d in range(4):
                final_mask[i, U(d)] = d != facing ^ 2
            for j in range(U(len(start))):
                board[i, j] = start[j]
            head, facing, length, now, hunger = start_head, 1, n_start, n_start, 0
            food = start_free[U(draw(keys[i], n_step, len(start_free)))]
        heads[i], foods[i], facings[i] = head, food, facing
        lengths[i], moves[i], hungers[i] = length, now, hunger
        # Written out twice: as one function for both, a step took twice the time.
        free_since = S(now - length)
        if view.ndim == 3:
            _write_planes(i, board, free_since, U(head), U(food), hunger, limit, view)
        else:
            _write_vector(i, board, free_since, U(head), facing, U(food), length, hunger, limit, tables, view)
        for d in range(4):
            mask[i, U(d)] = d != facing ^ 2
