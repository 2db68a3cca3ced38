"""N accounts on one history: orders, costs, limits and what each sees, with no loop over accounts.

A assets, N accounts; money is (A, N) so that sums over assets are sums of whole rows. An order given after bar t
is filled at the open of bar t + 1; what it costs is known at t.


What one account went through in this episode, for whoever draws it."""

from __future__ import annotations

import numpy as np

from flatout.envs.spaces import Array
from flatout.workloads.market.features import Tables
from flatout.workloads.market.settings import DEAREST, MarketConfig

LEAST = 1e-3
"""Equity never counts as less than this share of the first cash, so that its logarithm exists."""

BOUND = 10.0
"""No observation is larger."""


class Ledger:
    """The accounts' state, one bar at a time."""

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
        """What the last orders cost, in money."""
        self._moves = np.empty((3, self.n_assets, n_accounts))

    def draw(self, rng: np.random.Generator, n: int) -> Array:
        """Bars for `n` episodes to begin at."""
        return rng.integers(self.first, self.last, size=n, endpoint=True)

    def begin(self, which: Array, starts: Array) -> None:
        """New episodes, in cash, for the accounts that `which` marks."""
        self.bar[which], self.end[which] = starts, starts + self.config.window
        self.holdings[:, which], self.costs[which] = 0.0, 0.0
        for money in (self.cash, self.equity, self.peak):
            money[which] = self.config.cash

    def trade(self, actions: Array) -> tuple[Array, Array, Array]:
        """One bar: fill the orders that lead to these targets; rewards, and whose episode ended how."""
        config = self.config
        self.bar += 1
        gap, within, dearness = self._tables.moves.take(self.bar, axis=2, out=self._moves, mode="clip")
        before = np.maximum(self.equity, LEAST * config.cash)
        self.holdings *= gap
        self._fill(np.array(actions.T, np.float64, order="C"), dearness)
        self.holdings *= within
        np.add(self.cash, self.holdings.sum(axis=0), out=self.equity)
        np.maximum(self.peak, self.equity, out=self.peak)
        reward = np.log(np.maximum(self.equity, LEAST * config.cash) / before)
        reward *= config.reward_scale
        terminated = self.equity < config.ruin * config.cash
        return reward, terminated, (self.bar >= self.end) & ~terminated

    def _fill(self, actions: Array, dearness: Array) -> None:
        """Trade to the targets, within the limits, at the prices of the open."""
        config = self.config
        equity = np.maximum(self.cash + self.holdings.sum(axis=0), LEAST * config.cash)
        have = self.holdings / equity
        want = self._targets(actions, have)
        gross = np.abs(want).sum(axis=0)
        over = np.maximum(gross / config.max_leverage, 1.0)
        want /= over
        gross /= over
        orders = np.abs(want - have)
        rate = dearness * np.sqrt(orders * equity)
        rate *= config.slippage
        rate += config.fee
        np.minimum(rate, DEAREST, out=rate)
        # What is left after costs is what may be invested: with this bound the limits hold to the last cent.
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
        """The shares of equity asked for; what is near enough already stays as it is."""
        config = self.config
        most = config.max_position
        least = -most if config.short else 0.0
        want = actions * most
        near = np.abs(want - have) < config.min_order
        return np.clip(np.where(near, have, want), least, most)

    def observe(self, which: Array | None = None) -> Array:
        """What the accounts see, all of them or those that `which` marks: a new array, float32."""
        pick: Array | slice = slice(None) if which is None else which
        out = self._tables.observed.take(self.bar[pick], axis=0, mode="clip")
        floored = np.maximum(self.equity[pick], LEAST * self.config.cash)
        own = np.concatenate([self.holdings[:, pick], self.cash[None, pick], self.equity[None, pick]])
        own[:-1] /= floored
        own[-1] /= self.peak[pick]
        own[-1] -= 1
        out[:, -len(own) :] = np.clip(own, -BOUND, BOUND, out=own).T
        return out


class Journal:
    """Equity, positions and prices of an episode, bar by bar; all are shares of the first cash or price."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.names = ledger.bars.names
        self.window = ledger.config.window
        self.start = 0
        self.equity: list[float] = []
        self.weights: list[Array] = []
        self.costs = 0.0

    def begin(self) -> None:
        """A new episode: forget the last."""
        self.start, self.costs = int(self._ledger.bar[0]), 0.0
        self.equity, self.weights = [], []
        self.note()

    def note(self) -> None:
        """Write down how the account stands at this bar."""
        ledger = self._ledger
        equity = max(float(ledger.equity[0]), 1e-9)
        self.equity.append(equity / ledger.config.cash)
        self.weights.append(ledger.holdings[:, 0] / equity)
        self.costs += float(ledger.costs[0]) / ledger.config.cash

    @property
    def prices(self) -> Array:
        """Close prices since the episode began, (bars, assets), the first being 1."""
        close = self._ledger.bars.close[self.start : self.start + len(self.equity)]
        return np.asarray(close / close[:1])

    def line(self) -> str:
        """The account as it stands, in one line of text."""
        weights = " ".join(
            f"{name} {weight:+.0%}" for name, weight in zip(self.names, self.weights[-1], strict=True)
        )
        held = float(self.prices[-1].mean())
        return (
            f"bar {self.start + len(self.equity) - 1} ({len(self.equity) - 1}/{self.window})  "
            f"equity {self.equity[-1]:.3f}  prices {held:.3f}  {weights}  "
            f"cash {1 - float(self.weights[-1].sum()):+.0%}  costs {self.costs:.2%}"
        )
