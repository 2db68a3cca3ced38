"""Trading envs: N accounts at once, or one; and backtests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from flatout.envs.spaces import Array
from flatout.errors import FlatoutError
from flatout.workloads.market.chart import Journal, draw
from flatout.workloads.market.ledger import BOUND, Ledger, MarketConfig
from flatout.workloads.validate import Info, check_choice, from_settings


class MarketAccounts(VectorEnv[Array, Array, Array]):
    """`num_envs` accounts on one history, each in its own episode. Takes the keywords of MarketConfig.

    `reset(options={"start": bars})` starts at these bars instead of random ones. `infos["equity"]` is each account's equity
    and `infos["costs"]` the cost of its last orders, in multiples of the initial cash; where an episode just ended, its
    last values.
    """

    def __init__(self, num_envs: int = 1, **settings: Any) -> None:
        config = from_settings(MarketConfig, settings, "market")
        self.num_envs = num_envs
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.ledger = Ledger(config.tables(), config, num_envs)
        self.single_observation_space = spaces.Box(-BOUND, BOUND, (self.ledger.n_observed,))
        self.single_action_space = spaces.Box(-1.0 if config.short else 0.0, 1.0, (self.ledger.n_assets,))
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Array, Info]:
        super().reset(seed=seed)
        ledger, n = self.ledger, self.num_envs
        if options is None or "start" not in options:
            starts = ledger.draw(self.np_random, n)
        else:
            starts = np.broadcast_to(np.asarray(options["start"], np.int64), (n,))
            if starts.min() < ledger.first or starts.max() > ledger.last:
                allowed = f"{ledger.config.split} episodes start at bars {ledger.first} to {ledger.last}"
                raise FlatoutError(f"start is {options['start']}; {allowed}")
        ledger.reset(np.ones(n, np.bool_), starts)
        return ledger.observe(), {}

    def step(self, actions: Array) -> tuple[Array, Array, Array, Array, Info]:
        """Trade one bar in every account; ended episodes are reset in the same step."""
        ledger = self.ledger
        reward, terminated, truncated = ledger.trade(np.asarray(actions))
        obs = ledger.observe()
        cash = ledger.config.cash
        infos: Info = {"equity": ledger.equity / cash, "costs": ledger.costs / cash}
        ended = terminated | truncated
        n_ended = int(np.count_nonzero(ended))
        if n_ended:
            infos |= {"final_obs": obs, "_final_obs": ended}
            ledger.reset(ended, ledger.draw(self.np_random, n_ended))
            obs = obs.copy()
            obs[ended] = ledger.observe(ended)
        return obs, reward, terminated, truncated, infos


class Market(gym.Env[Array, Array]):
    """One account; gives the same results as MarketAccounts. Takes the keywords of MarketConfig."""

    batched_form = MarketAccounts
    metadata = {"render_modes": ["rgb_array", "ansi"], "render_fps": 20}  # noqa: RUF012  # as Gymnasium has it

    def __init__(self, render_mode: str | None = None, **settings: Any) -> None:
        check_choice("render_mode", render_mode, (None, *self.metadata["render_modes"]))
        self.render_mode = render_mode
        self._accounts = MarketAccounts(1, **settings)
        self.ledger = self._accounts.ledger
        self.observation_space = self._accounts.single_observation_space
        self.action_space = self._accounts.single_action_space
        self._journal: Journal | None = None

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Array, Info]:
        super().reset(seed=seed)
        self._accounts.np_random = self.np_random
        obs, _ = self._accounts.reset(options=options)
        self._journal = Journal(self.ledger) if self.render_mode else None
        return obs[0], self._info()

    def step(self, action: Array) -> tuple[Array, float, bool, bool, Info]:
        reward, terminated, truncated = self.ledger.trade(np.asarray(action)[None])
        if self._journal is not None:
            self._journal.record()
        obs = self.ledger.observe()[0]
        return obs, float(reward[0]), bool(terminated[0]), bool(truncated[0]), self._info()

    def render(self) -> Any:
        """The episode so far as a chart or a line of text."""
        if self._journal is None:
            return None
        return draw(self._journal) if self.render_mode == "rgb_array" else self._journal.line()

    def _info(self) -> Info:
        ledger, cash = self.ledger, self.ledger.config.cash
        equity, costs = float(ledger.equity[0] / cash), float(ledger.costs[0] / cash)
        return {"bar": int(ledger.bar[0]), "equity": equity, "costs": costs}


Trader = Callable[[Array], Array]
"""From the observations of N accounts to their actions."""


def backtest(trader: Trader, **settings: Any) -> Array:
    """Final equity in each window of a split (default: test), in multiples of the initial cash.

    The windows are adjacent and do not overlap.
    """
    settings = {"split": "test"} | settings
    ledger = MarketAccounts(1, **settings).ledger
    starts = np.arange(ledger.first, ledger.last + 1, ledger.config.window)
    accounts = MarketAccounts(len(starts), **settings)
    obs, _ = accounts.reset(options={"start": starts})
    out, going = np.ones(len(starts)), np.ones(len(starts), np.bool_)
    for _ in range(ledger.config.window):
        obs, _, terminated, _, infos = accounts.step(trader(obs))
        out[going] = infos["equity"][going]
        going &= ~terminated
    return out


def buy_and_hold(obs: Array, n_assets: int) -> Array:
    """A trader: equal parts of all assets at the first bar, then no more orders."""
    shares = obs[:, -2 - n_assets : -2]
    return np.where(obs[:, -2:-1] > 0.99, 1 / n_assets, shares)
