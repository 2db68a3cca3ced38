"""N games of Snake as one object: flatout's `TensorEnvs` on any device."""

from __future__ import annotations

import secrets
from dataclasses import fields
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from flatout.envs.spaces import MASK_KEY
from flatout.errors import EnvError
from flatout.workloads.snake.rules import Rules, Tables
from flatout.workloads.snake.tensors import State, Steps, game_keys


class SnakeGames:
    """N games, stepped at once: on the CPU by a compiled kernel, elsewhere (or asked for with `compiled=False`) as
    tensors, with the same results.

    What `step` returns stays valid for one more step. `info["food"]` counts what each game's snake has eaten,
    in the game that ended where one did. Without `autoreset` a game that ended stays as it is until `reset`.
    """

    def __init__(
        self,
        num_envs: int = 256,
        device: str | torch.device = "auto",
        *,
        height: int = 10,
        width: int = 10,
        wrap: bool = False,
        starve_after: int | None = None,
        death_reward: float = 0.0,
        obs: str = "vector",
        compiled: bool = True,
        autoreset: bool = True,
    ) -> None:
        if num_envs < 1:
            raise EnvError(f"snake: num_envs is {num_envs}; there is at least 1 game")
        self.rules = Rules(
            height=height,
            width=width,
            wrap=wrap,
            starve_after=starve_after,
            death_reward=death_reward,
            obs=obs,
        )
        self.num_envs = num_envs
        self.device = torch.device(_auto() if device == "auto" else device)
        self.single_observation_space: gym.Space[Any] = self.rules.observation_space
        self.single_action_space: gym.Space[Any] = spaces.Discrete(4)
        tables = Tables.of(self.rules)
        self.state = State.alloc(num_envs, self.rules, self.device)
        self._steps = Steps(self.rules, tables, self.device)
        self._seeded = False
        self._autoreset = autoreset
        self._kernel: _Kernel | None = None
        if compiled and self.device.type == "cpu":
            self._kernel = _Kernel(self.state, self.rules, tables, autoreset)

    def reset(self, seed: int | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Begin all games anew: those of the seed, or the next ones."""
        if seed is not None or not self._seeded:
            seed = secrets.randbits(63) if seed is None else seed
            self.state.key.copy_(game_keys(seed, self.num_envs, self.device))
            self.state.n_step.zero_()
            self._seeded = True
        else:
            self.state.n_step.add_(1)
        self._steps.begin(self.state, torch.ones(self.num_envs, dtype=torch.bool, device=self.device))
        return self._steps.observe(self.state), {}

    def step(self, actions: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor, dict[str, Any]]:
        """Step every game; where one ended the next has begun. Turning back means going straight on."""
        if self._kernel is not None:
            return self._kernel.step(actions)
        state, steps = self.state, self._steps
        state.n_step.add_(1)
        reward, ended, food = steps.step(state, actions)
        obs = final = steps.observe(state)
        if self._autoreset:
            steps.begin(state, ended)
            obs = steps.observe(state)
        return obs, reward, ended, torch.zeros_like(ended), {"final_obs": final, "food": food}


class _Kernel:
    """The compiled step, with what it reads and writes bound once; two sets of results take turns."""

    def __init__(self, state: State, rules: Rules, tables: Tables, autoreset: bool) -> None:
        from flatout.workloads.snake import kernel  # here, because the compiler takes a moment to load

        self._run, self._n_step = kernel.step, state.n_step.numpy()
        self._settings = rules.limit, kernel.F(rules.death_reward), autoreset
        games = [getattr(state, f.name).numpy() for f in fields(State) if f.name != "n_step"]
        cells = [table.astype(np.uint16) for table in (tables.ahead, tables.around)]
        scratch = np.zeros(tables.around.shape[1], np.int32)
        where = [scratch, tables.row, tables.column, tables.down, tables.right]
        self._bound = (*games, *cells, *where, tables.start, tables.start_head, tables.start_free)
        self._sets = [_Results(state, rules) for _ in range(2)]

    def step(self, actions: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor, dict[str, Any]]:
        self._n_step += 1
        self._sets.reverse()
        results = self._sets[0]
        self._run(actions.numpy(), int(self._n_step), *self._settings, *self._bound, *results.arrays)
        return results.given


class _Results:
    """What a step gives, as tensors for its user and as the arrays behind them for the kernel."""

    def __init__(self, state: State, rules: Rules) -> None:
        n = len(state.head)
        planes = rules.obs == "planes"
        space = rules.observation_space["view"]  # type: ignore[index]
        kind = torch.uint8 if planes else torch.float32
        views = [torch.zeros(n, *space.shape, dtype=kind) for _ in range(2)]
        masks = [torch.zeros(n, 4, dtype=torch.bool) for _ in range(2)]
        reward, food = torch.zeros(n), torch.zeros(n, dtype=torch.int64)
        ended, never = (torch.zeros(n, dtype=torch.bool) for _ in range(2))
        obs, final = ({MASK_KEY: mask, "view": view} for mask, view in zip(masks, views, strict=True))
        self.given = obs, reward, ended, never, {"final_obs": final, "food": food}
        none = [torch.zeros(n, 3, 0, dtype=torch.uint8)] * 2 if not planes else [torch.zeros(n, 0)] * 2
        flat = [view.view(n, 3, -1) for view in views] if planes else views
        vectors_and_planes = [*none, *flat] if planes else [*flat, *none]
        self.arrays = tuple(t.numpy() for t in (*vectors_and_planes, *masks, reward, ended, food))


def _auto() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
