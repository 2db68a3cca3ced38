"""The settings of the market env, and N accounts on one history: orders, costs, limits and observations.

There is no loop over accounts. A assets, N accounts; arrays are (A, N), so that a sum over assets adds whole rows. An order
given after bar t is filled at the open of bar t + 1; its cost is known at t.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from flatout.envs.spaces import Array
from flatout.errors import FlatoutError, did_you_mean
from flatout.workloads.market.data import LONGEST, SUFFIXES, Bars, Tables, generate, read, tables
from flatout.workloads.validate import check_choice, check_fields, within

GENERATED = ("regime", "walk")
N_ASSETS, N_BARS = 4, 40_000
MAX_COST = 0.1
"""Upper bound of the cost of an order, as a share of its value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MarketConfig:
    """Data, split, costs and limits."""

    data: str | Bars = "regime"
    """`regime` or `walk`, generated from `market_seed`; a .csv or .parquet file; or Bars."""
    assets: int | None = within(None, 1, 1_000)
    """Assets of a generated market; default 4."""
    bars: int | None = within(None, 1, 10_000_000)
    """Bars of a generated market; default 40,000."""
    market_seed: int = within(0, 0, 2**63)
    """Seed of the generated history; the seed of an episode only picks its first bar."""
    split: Literal["train", "test"] = "train"
    """`test` is the held-out last part of the history."""
    test_share: float = within(0.25, 0.0, 1.0)
    """Share of the history that is held out."""
    window: int = within(250, 1, 10_000_000)
    """Bars per episode."""
    cash: float = within(1_000_000.0, 1e-3, 1e15)
    """Initial cash of an episode."""
    fee: float = within(0.0005, 0.0, 0.05)
    """Cost of an order as a share of its value."""
    slippage: float = within(1.0, 0.0, 100.0)
    """Further cost: slippage x recent volatility x √(order ÷ money traded per bar)."""
    short: bool = False
    """Allow short positions; actions are then from -1 to 1."""
    max_position: float = within(1.0, 1e-6, 5.0)
    """Largest position in one asset as a share of equity; an action of 1 asks for it."""
    max_leverage: float = within(1.0, 1e-6, 5.0)
    """Largest sum of all positions as a share of equity; up to 1 nothing is borrowed."""
    min_order: float = within(0.01, 0.0, 1.0)
    """Smaller changes of a position, as a share of equity, are dropped."""
    ruin: float = within(0.2, 0.001, 0.99)
    """An episode terminates when equity falls below this share of the initial cash."""
    reward_scale: float = within(100.0, 1e-6, 1e6)
    """The reward is reward_scale x log(equity ÷ equity one bar ago)."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_choice("split", self.split, ("train", "test"))
        if self.data not in GENERATED and not (self.assets is None and self.bars is None):
            raise FlatoutError("assets and bars are for generated markets; a file or Bars has its own")

    def tables(self) -> Tables:
        """The history with its features; cached, so that all envs of a process share it."""
        if isinstance(self.data, Bars):
            return tables(self.data)
        if self.data in GENERATED:
            size = self.bars or N_BARS, self.assets or N_ASSETS
            return _cached(generate, self.data, *size, self.market_seed)
        path = Path(self.data).expanduser()
        if path.suffix.lower() not in SUFFIXES:
            expected = f"{', '.join(GENERATED)}, a .csv or a .parquet file"
            hint = did_you_mean(self.data, GENERATED)
            raise FlatoutError(f"data is '{self.data}'; it must be {expected}{hint}")
        if not path.is_file():
            raise FlatoutError(f"{self.data}: no such file")
        stat = path.stat()  # a changed file is read again
        return _cached(read, path.resolve(), self.data, version=(stat.st_mtime_ns, stat.st_size))

    def starts(self, n_bars: int) -> tuple[int, int]:
        """The first and the last bar at which an episode of this split may start.

        Training never reaches a held-out bar, and no held-out feature looks back before the cut.
        """
        cut = round(n_bars * (1 - self.test_share))
        start, end = (0, cut) if self.split == "train" else (cut, n_bars)
        n_needed = LONGEST + self.window + 1
        if end - start < n_needed:
            raise FlatoutError(
                f"{self.data if isinstance(self.data, str) else 'data'} has {n_bars} bars, {end - start} of them "
                f"for {self.split}; window {self.window} needs {n_needed} there: give more bars or a smaller window"
            )
        return start + LONGEST, end - 1 - self.window


@lru_cache(maxsize=8)
def _cached(make: Callable[..., Bars], *args: Any, version: Any = None) -> Tables:  # noqa: ARG001  # part of the key
    return tables(make(*args))


MIN_EQUITY = 1e-3
"""Lower bound of equity in the reward, as a share of the initial cash, so that its logarithm exists."""

BOUND = 10.0
"""Bound of every observation."""


class Ledger:
    """The state of N accounts, stepped bar by bar."""

    def __init__(self, tables: Tables, config: MarketConfig, n_accounts: int) -> None:
        self.config, self._tables = config, tables
        self.bars, self.n_assets = tables.bars, len(tables.bars.names)
        self.first, self.last = config.starts(len(tables.bars))
        self.n_observed = tables.observed.shape[1]
        self.bar = np.full(n_accounts, self.first)
        self.end = self.bar + config.window
        self.holdings = np.zeros((self.n_assets, n_accounts))
        self.cash = np.full(n_accounts, config.cash)
        self.equity, self.peak = self.cash.copy(), self.cash.copy()
        self.costs = np.zeros(n_accounts)
        """Cost of the last orders, in money."""
        self._moves = np.empty((3, self.n_assets, n_accounts))

    def draw(self, rng: np.random.Generator, n: int) -> Array:
        """Random first bars of `n` episodes."""
        return rng.integers(self.first, self.last, size=n, endpoint=True)

    def reset(self, which: Array, starts: Array) -> None:
        """Start episodes, all in cash, in the accounts where `which` is true."""
        self.bar[which], self.end[which] = starts, starts + self.config.window
        self.holdings[:, which], self.costs[which] = 0.0, 0.0
        for money in (self.cash, self.equity, self.peak):
            money[which] = self.config.cash

    def trade(self, actions: Array) -> tuple[Array, Array, Array]:
        """Trade to the target positions and step one bar; returns rewards, terminated, truncated."""
        config = self.config
        self.bar += 1
        gap, within, impact = self._tables.moves.take(self.bar, axis=2, out=self._moves, mode="clip")
        before = np.maximum(self.equity, MIN_EQUITY * config.cash)
        self.holdings *= gap
        self._fill(np.array(actions.T, np.float64, order="C"), impact)
        self.holdings *= within
        np.add(self.cash, self.holdings.sum(axis=0), out=self.equity)
        np.maximum(self.peak, self.equity, out=self.peak)
        reward = np.log(np.maximum(self.equity, MIN_EQUITY * config.cash) / before)
        reward *= config.reward_scale
        terminated = self.equity < config.ruin * config.cash
        return reward, terminated, (self.bar >= self.end) & ~terminated

    def _fill(self, actions: Array, impact: Array) -> None:
        """Trade to the targets at the open, within the limits; changes smaller than `min_order` are dropped."""
        config = self.config
        equity = np.maximum(self.cash + self.holdings.sum(axis=0), MIN_EQUITY * config.cash)
        have = self.holdings / equity
        most = config.max_position
        want = actions * most
        want = np.where(np.abs(want - have) < config.min_order, have, want)
        np.clip(want, -most if config.short else 0.0, most, out=want)
        gross = np.abs(want).sum(axis=0)
        over = np.maximum(gross / config.max_leverage, 1.0)
        want /= over
        gross /= over
        orders = np.abs(want - have)
        rate = impact * np.sqrt(orders * equity)
        rate *= config.slippage
        rate += config.fee
        np.minimum(rate, MAX_COST, out=rate)
        # Positions are shares of the equity after costs. This upper bound of the costs makes the limits hold exactly.
        cost = (rate * orders).sum(axis=0)
        want *= equity * (1 - cost / (1 - rate.max(axis=0) * gross))
        np.subtract(want, self.holdings, out=orders)
        np.abs(orders, out=orders)
        orders *= rate
        self.costs = orders.sum(axis=0)
        self.cash += self.holdings.sum(axis=0)
        self.cash -= want.sum(axis=0)
        self.cash -= self.costs
        self.holdings = want

    def observe(self, which: Array | None = None) -> Array:
        """Observations of all accounts, or of those where `which` is true: a new float32 array."""
        pick: Array | slice = slice(None) if which is None else which
        out = self._tables.observed.take(self.bar[pick], axis=0, mode="clip")
        floored = np.maximum(self.equity[pick], MIN_EQUITY * self.config.cash)
        own = np.concatenate([self.holdings[:, pick], self.cash[None, pick], self.equity[None, pick]])
        own[:-1] /= floored
        own[-1] /= self.peak[pick]
        own[-1] -= 1
        out[:, -len(own) :] = np.clip(own, -BOUND, BOUND, out=own).T
        return out
