"""N games of Snake as one object, flatout's `TensorEnvs`: stepped as tensors on any device, or by kernel.py on the CPU.

Both give the same games to the bit: they compute with integers, and with floats one operation away from integers.
The tensor form never waits for the device. Cells are numbered row by row; the number after the last cell is the wall.
Directions: 0 up, 1 right, 2 down, 3 left.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import product
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from flatout.device.accelerator import resolve_device
from flatout.envs.spaces import MASK_KEY, Array
from flatout.workloads.validate import check_choice, check_fields, check_number, from_settings, within

Stepped: TypeAlias = tuple[dict[str, Tensor], Tensor, Tensor, Tensor, dict[str, Any]]
"""Observation, reward, terminated, truncated and info of N games."""
SIGHT = 3
"""The vector observation shows this many cells on each side of the head."""
N_FEATURES = (2 * SIGHT + 1) ** 2 - 1 + 12
"""Length of the vector observation."""
MOVES = (-1, 0), (0, 1), (1, 0), (0, -1)
"""(rows, columns) of the four directions."""
N_START = 2
"""Length of the snake at the start."""
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
        return self.height * self.width

    @property
    def limit(self) -> int:
        """Steps without food at which the snake starves."""
        return self.starve_after or self.n_cells

    @property
    def observation_space(self) -> gym.Space[Any]:
        """The view, and a mask without the direction that would reverse the snake."""
        vector = spaces.Box(-1.0, 1.0, (N_FEATURES,), np.float32)
        planes = spaces.Box(0, 255, (3, self.height, self.width), np.uint8)
        view = planes if self.obs == "planes" else vector
        return spaces.Dict({"view": view, MASK_KEY: spaces.MultiBinary(4)})


def _signed_distances(side: int, wrap: bool) -> Array:
    """The shortest signed distance for each coordinate difference, ÷ side; across the edge if the board wraps."""
    distance = np.arange(1 - side, side)
    if wrap:
        distance = (distance + side // 2) % side - side // 2
    return (distance / side).astype(np.float32)


def _signed(x: int) -> int:
    """64 bits as the signed integer that torch wants."""
    return (x + 2**63) % 2**64 - 2**63


_WEYL, _MIX1, _MIX2 = map(_signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _shift(x: Tensor, n: int) -> Tensor:
    """Logical right shift."""
    return (x >> n) & ((1 << (64 - n)) - 1)


def mix(x: Tensor) -> Tensor:
    """The finisher of SplitMix64."""
    x = (x ^ _shift(x, 30)) * _MIX1
    x = (x ^ _shift(x, 27)) * _MIX2
    return x ^ _shift(x, 31)


def game_keys(seed: int, n_games: int, device: torch.device) -> Tensor:
    """The key of each game's random stream."""
    of_seed = mix(torch.tensor(_signed(seed * _WEYL + _WEYL), device=device))
    return mix(of_seed + torch.arange(1, n_games + 1, device=device) * _WEYL)


def draw(key: Tensor, n_step: Tensor, n_choices: Tensor | int) -> Tensor:
    """For each game, a random number below `n_choices`."""
    return (_shift(mix(key + n_step * _WEYL), 33) * n_choices) >> 31


@dataclass(slots=True)
class State:
    """N games."""

    key: Tensor
    n_step: Tensor
    """Steps since the games were seeded, the same for all."""
    board: Tensor
    """(N, cells + 1) int32: the move at which the head entered each cell; the wall last."""
    head: Tensor
    facing: Tensor
    length: Tensor
    moves: Tensor
    hunger: Tensor
    food: Tensor


class TensorSteps:
    """Starts, steps and observes N games with tensor operations and lookup tables that depend on the rules alone."""

    def __init__(self, rules: Rules, device: torch.device) -> None:
        height, width, n = rules.height, rules.width, rules.n_cells
        row, column = np.divmod(np.arange(n), width)
        start = np.zeros(n + 1, np.int32)
        self._rules = rules
        self._unit = (torch.tensor(0.5) / n).to(device)

        def put(values: Array) -> Tensor:
            return torch.as_tensor(values, device=device)

        def seen(offsets: Iterable[tuple[int, ...]]) -> Tensor:
            """(cells, offsets): the cells at these (rows, columns) from each cell."""
            down, right = np.array(list(offsets)).T
            rows, columns = row[:, None] + down, column[:, None] + right
            inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
            return put(np.where(rules.wrap | inside, rows % height * width + columns % width, n))

        self.row, self.column, self.directions = put(row), put(column), put(np.arange(4))
        self.ahead = seen(MOVES)
        """(cells, 4): the next cell in each direction."""
        self.around = seen(at for at in product(range(-SIGHT, SIGHT + 1), repeat=2) if at != (0, 0))
        """(cells, K): the cells seen from a head there, row by row, without its own."""
        self.down, self.right = (put(_signed_distances(side, rules.wrap)) for side in (height, width))
        """Signed distance to the food ÷ side, indexed by the difference of rows (or columns) plus side - 1."""
        self.start_head = height // 2 * width + width // 2
        start[[self.start_head - 1, self.start_head, n]] = 1, N_START, FOREVER
        self.start, self.start_free = put(start), put(np.flatnonzero(start == 0))
        """The start board (the move at which the head entered each cell; the wall last) and its free cells."""

    def reset(self, s: State, where: Tensor) -> State:
        """The games, with new ones where the mask is true."""
        names, first = (
            ("head", "facing", "length", "moves", "hunger"),
            (self.start_head, 1, N_START, N_START, 0),
        )
        pairs = zip(names, first, strict=True)
        new = {name: getattr(s, name).masked_fill(where, value) for name, value in pairs}
        food = self.start_free[draw(s.key, s.n_step, len(self.start_free))]
        board = torch.where(where[:, None], self.start, s.board)
        return replace(s, board=board, food=torch.where(where, food, s.food), **new)

    def step(self, s: State, actions: Tensor) -> tuple[State, Tensor, Tensor, Tensor]:
        """Every game a step later, rewards, which games ended, and food eaten. Does not reset."""
        rules, n_cells = self._rules, self._rules.n_cells
        actions = actions & 3
        facing = torch.where(actions == s.facing ^ 2, s.facing, actions)
        cell, now = self.ahead[s.head, facing], s.moves + 1
        ate = cell == s.food
        there = s.board.gather(1, cell[:, None]).squeeze(1)
        crashed = there > now - s.length
        hungry = torch.where(ate, 0, s.hunger + 1)
        length = s.length + (ate & ~crashed)
        board = s.board.scatter(1, cell[:, None], torch.where(crashed, there, now).int()[:, None])
        pairs = ((s.head, cell), (s.moves, now), (s.hunger, hungry))
        head, moves, hunger = (torch.where(crashed, before, after) for before, after in pairs)
        full = length == n_cells
        died = crashed | ((hungry >= rules.limit) & ~full)
        # The cell with k free cells before it is the first whose running count of free cells exceeds k.
        n_free = (board[:, :-1] <= (moves - length)[:, None]).cumsum(1)
        k = draw(s.key, s.n_step, n_cells - length)
        food = (n_free <= k[:, None]).sum(1)
        food = torch.where(full, cell, torch.where(ate, food, s.food))
        reward = torch.where(died, rules.death_reward, ate.float())
        new = {"board": board, "head": head, "facing": facing, "length": length, "moves": moves}
        return replace(s, hunger=hunger, food=food, **new), reward, died | full, length - N_START

    def observe(self, s: State) -> dict[str, Any]:
        mask = self.directions != (s.facing ^ 2)[:, None]
        view = self._planes(s) if self._rules.obs == "planes" else self._vector(s)
        return {MASK_KEY: mask, "view": view}

    def _vector(self, s: State) -> Tensor:
        rules, n_cells = self._rules, self._rules.n_cells
        free_since = (s.moves - s.length)[:, None]
        left = (s.board.gather(1, self.around[s.head]) - free_since).clamp(0, n_cells)
        around = (left + n_cells * (left > 0)).float() * self._unit
        y, x = self.row[s.head], self.column[s.head]
        to_y = self.down[self.row[s.food] - y + rules.height - 1]
        to_x = self.right[self.column[s.food] - x + rules.width - 1]
        facing = (self.directions == s.facing[:, None]).float()
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


class SnakeGames:
    """N games stepped at once: by a compiled kernel on the CPU, as tensors elsewhere or with `compiled=False`.

    Takes the keywords of `Rules`. What `step` returns stays valid for one more step. `info["food"]` counts the food eaten
    in each game; for a game that just ended, in that game. Without `autoreset`, an ended game stays until `reset`.
    """

    capturable = True

    def __init__(
        self,
        num_envs: int = 256,
        device: str | torch.device = "auto",
        *,
        compiled: bool = True,
        autoreset: bool = True,
        **settings: Any,
    ) -> None:
        check_number("snake: num_envs", num_envs, 1, 2**31, whole=True)
        self.rules = from_settings(Rules, settings, "snake")
        self.num_envs = num_envs
        if device == "auto":
            device = resolve_device("auto")
        self.device = torch.device(device)
        self.single_observation_space: gym.Space[Any] = self.rules.observation_space
        self.single_action_space: gym.Space[Any] = spaces.Discrete(4)
        zeros = partial(torch.zeros, dtype=torch.int64, device=self.device)
        board = zeros((num_envs, self.rules.n_cells + 1), dtype=torch.int32)
        keys = game_keys(secrets.randbits(63), num_envs, self.device)
        self.state = State(keys, zeros(()), board, *(zeros(num_envs) for _ in range(6)))
        self._steps, self._autoreset = TensorSteps(self.rules, self.device), autoreset
        on_cpu = compiled and self.device.type == "cpu"
        self._kernel = _Kernel(self.state, self.rules, self._steps, autoreset) if on_cpu else None

    def reset(self, seed: int | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Start new games in all envs; a seed restarts the random streams."""
        now = replace(self.state, n_step=self.state.n_step + 1)
        if seed is not None:
            now.key, now.n_step = game_keys(seed, self.num_envs, self.device), torch.zeros_like(now.n_step)
        now = self._steps.reset(now, torch.ones(self.num_envs, dtype=torch.bool, device=self.device))
        obs = self._steps.observe(now)
        self._keep(now)
        return obs, {}

    def _keep(self, now: State) -> None:
        """Make these the games, in the same memory; in place, so that nothing here can run out of memory."""
        for name in (f.name for f in fields(State)):
            getattr(self.state, name).copy_(getattr(now, name))

    def step(self, actions: Tensor) -> Stepped:
        """Step every game and reset those that ended. An action that would reverse the snake goes straight on."""
        if self._kernel is not None:
            return self._kernel.step(actions)
        steps, now = self._steps, replace(self.state, n_step=self.state.n_step + 1)
        now, reward, ended, food = steps.step(now, actions)
        obs = final = steps.observe(now)
        if self._autoreset:
            now = steps.reset(now, ended)
            obs = steps.observe(now)
        never = torch.zeros_like(ended)
        self._keep(now)
        return obs, reward, ended, never, {"final_obs": final, "food": food}


class _Kernel:
    """The compiled step with its arrays bound once; two sets of results alternate."""

    def __init__(self, state: State, rules: Rules, steps: TensorSteps, autoreset: bool) -> None:
        from flatout.workloads.snake import kernel  # here, because numba takes a while to load

        self._run, self._n_step = kernel.step, state.n_step.numpy()
        self._settings = rules.limit, kernel.F(rules.death_reward), autoreset
        games = [getattr(state, f.name).numpy() for f in fields(State) if f.name != "n_step"]
        ahead, around = (cells.numpy().astype(np.uint16) for cells in (steps.ahead, steps.around))
        places = (table.numpy() for table in (steps.row, steps.column, steps.down, steps.right))
        tables = (around, np.zeros(around.shape[1], np.int32), *places)
        start = steps.start.numpy(), steps.start_head, steps.start_free.numpy()
        self._bound = (*games, ahead, tables, *start)
        self._sets = [_results(steps.observe(state), steps.observe(state)) for _ in range(2)]

    def step(self, actions: Tensor) -> Stepped:
        self._n_step += 1
        self._sets.reverse()
        given, arrays = self._sets[0]
        self._run(actions.numpy(), int(self._n_step), *self._settings, *self._bound, *arrays)
        return given


def _results(obs: dict[str, Tensor], final: dict[str, Tensor]) -> tuple[Stepped, tuple[Array, ...]]:
    """Memory for the results of a step: as tensors for the caller, and as the arrays that the kernel writes."""
    n = len(obs["view"])
    reward, food = torch.zeros(n), torch.zeros(n, dtype=torch.int64)
    ended, never = (torch.zeros(n, dtype=torch.bool) for _ in range(2))
    given = obs, reward, ended, never, {"final_obs": final, "food": food}
    views = [o["view"].flatten(2) if o["view"].ndim > 2 else o["view"] for o in (obs, final)]
    written = (*views, obs[MASK_KEY], final[MASK_KEY], reward, ended, food)
    return given, tuple(t.numpy() for t in written)
