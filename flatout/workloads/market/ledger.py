"""N accounts on one history: orders, costs, limits and observations, without a loop over accounts.

A assets, N accounts; arrays are (A, N), so that a sum over assets adds whole rows. An order given after bar t is filled at the
open of bar t + 1; its cost is known at t.
"""

from __future__ import annotations

import numpy as np

from flatout.envs.spaces import Array
from flatout.workloads.market.data import Tables
from flatout.workloads.market.settings import MAX_COST, MarketConfig

MIN_EQUITY = 1e-3
"""Lower bound of equity in the reward, as a share of the initial cash, so that its logarithm exists."""

BOUND = 10.0
"""Bound of every observation."""


class Ledger:
    """The state of N accounts, stepped bar by bar."""

    def __init__(self, tables: Tables, config: MarketConfig, n_accounts: int) -> None:
        self.config, self._tables, self._n = config, tables, n_accounts
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
        """Trade to the targets at the open, within the limits."""
        config = self.config
        equity = np.maximum(self.cash + self.holdings.sum(axis=0), MIN_EQUITY * config.cash)
        have = self.holdings / equity
        want = self._targets(actions, have)
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

    def _targets(self, actions: Array, have: Array) -> Array:
        """Target positions as shares of equity; changes smaller than `min_order` are dropped."""
        config = self.config
        most = config.max_position
        least = -most if config.short else 0.0
        want = actions * most
        near = np.abs(want - have) < config.min_order
        return np.clip(np.where(near, have, want), least, most)

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
