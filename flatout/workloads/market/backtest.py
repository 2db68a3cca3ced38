"""What a way of trading earns on every window of a split, side by side and without overlap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from flatout.envs.spaces import Array
from flatout.workloads.market.accounts import MarketAccounts

Trader = Callable[[Array], Array]
"""Observations of N accounts in, their actions out."""


def backtest(trader: Trader, **settings: Any) -> Array:
    """Final equity of each window, in multiples of its first cash; held-out windows unless `split` says otherwise."""
    settings = {"split": "test"} | settings
    first, last = (ledger := MarketAccounts(1, **settings).ledger).first, ledger.last
    starts = np.arange(first, last + 1, ledger.config.window)
    accounts = MarketAccounts(len(starts), **settings)
    obs, _ = accounts.reset(options={"start": starts})
    out, going = np.ones(len(starts)), np.ones(len(starts), np.bool_)
    for _ in range(ledger.config.window):
        obs, _, terminated, _, infos = accounts.step(trader(obs))
        out[going] = infos["equity"][going]
        going &= ~terminated
    return out


def buy_and_hold(obs: Array, n_assets: int) -> Array:
    """A trader: all cash into equal parts at the first bar, then left alone."""
    shares = obs[:, -2 - n_assets : -2]
    return np.where(obs[:, -2:-1] > 0.99, 1 / n_assets, shares)
