"""One account in plain Python, with floats and loops: the reference for the batched accounts.

Also the way accounts are written as a rule, one env each, to compare the speed with.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from flatout.envs.spaces import Array
from flatout.workloads.market.data import LONGEST, TRENDS, Tables
from flatout.workloads.market.ledger import MarketConfig


@lru_cache(maxsize=4)
def as_lists(tables: Tables) -> tuple[list[list[float]], ...]:
    """Open and close prices and the dearness of orders, by bar and asset; accounts share them."""
    return tables.bars.open.tolist(), tables.bars.close.tolist(), tables.moves[2].T.tolist()


class PlainAccount(gym.Env[Array, Array]):
    """The rules of docs/market.md, one asset after the other."""

    def __init__(self, **settings: Any) -> None:
        self.config = MarketConfig(**settings)
        self.tables = self.config.tables()
        bars = self.tables.bars
        self.opens, self.closes, self.dearness = as_lists(self.tables)
        self.n_assets = len(bars.names)
        self.first, self.last = self.config.starts(len(bars))
        self.observation_space = spaces.Box(-10, 10, (self.tables.observed.shape[1],))
        self.action_space = spaces.Box(-1.0 if self.config.short else 0.0, 1.0, (self.n_assets,))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed)
        start = (options or {}).get("start")
        self.bar = int(self.np_random.integers(self.first, self.last + 1)) if start is None else int(start)
        self.end = self.bar + self.config.window
        self.cash = self.equity = self.peak = self.config.cash
        self.holdings = [0.0] * self.n_assets
        return self.observe(), {}

    def step(self, action: Array) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        config, assets, before = self.config, range(self.n_assets), self.equity
        self.bar += 1
        opened, closed, last = self.opens[self.bar], self.closes[self.bar], self.closes[self.bar - 1]
        money = [self.holdings[a] * opened[a] / last[a] for a in assets]
        equity = max(self.cash + sum(money), config.cash / 1000)

        have = [m / equity for m in money]
        want = []
        for a in assets:
            target = float(action[a]) * config.max_position
            if abs(target - have[a]) < config.min_order:
                target = have[a]
            lowest = -config.max_position if config.short else 0.0
            want.append(min(max(target, lowest), config.max_position))
        gross = sum(map(abs, want))
        if gross > config.max_leverage:
            want = [w * config.max_leverage / gross for w in want]
            gross = config.max_leverage

        rates = []
        for a in assets:
            impact = self.dearness[self.bar][a] * math.sqrt(abs(want[a] - have[a]) * equity)
            rates.append(min(config.fee + config.slippage * impact, 0.1))
        cost = sum(rates[a] * abs(want[a] - have[a]) for a in assets)
        investable = equity * (1 - cost / (1 - max(rates) * gross))
        bought = [w * investable for w in want]
        paid = sum(rates[a] * abs(bought[a] - money[a]) for a in assets)
        self.cash = self.cash + sum(money) - sum(bought) - paid

        self.holdings = [bought[a] * closed[a] / opened[a] for a in assets]
        self.equity = self.cash + sum(self.holdings)
        self.peak = max(self.peak, self.equity)
        floor = config.cash / 1000
        reward = config.reward_scale * math.log(max(self.equity, floor) / max(before, floor))
        terminated = self.equity < config.ruin * config.cash
        info = {"equity": self.equity / config.cash, "costs": paid / config.cash}
        return self.observe(), reward, terminated, self.bar >= self.end and not terminated, info

    def observe(self) -> Array:
        out: Array = self.tables.observed[self.bar].copy()
        floored = max(self.equity, self.config.cash / 1000)
        own = [h / floored for h in self.holdings] + [self.cash / floored, self.equity / self.peak - 1]
        out[-len(own) :] = np.clip(own, -10, 10)
        return out


def plain_features(bars: Any, t: int, a: int) -> list[float]:
    """What is known of asset `a` at bar `t`, from the bars up to t alone."""
    close, high, low, volume = (
        getattr(bars, name)[: t + 1, a].tolist() for name in ("close", "high", "low", "volume")
    )
    steps = [math.log(close[-k] / close[-k - 1]) for k in range(1, LONGEST + 1)]
    usual = math.sqrt(sum(s * s for s in steps) / LONGEST)
    recent = math.sqrt(sum(s * s for s in steps[:20]) / 20)
    ranges = [math.log(h / x) for h, x in zip(high[-10:], low[-10:], strict=True)]
    out = [math.log(close[-1] / close[-n - 1]) / (usual * math.sqrt(n)) for n in TRENDS]
    out += [math.log(recent / usual), math.log(usual / 0.01), sum(ranges) / 10 / usual - 1]
    out.append(math.log(sum(volume[-5:]) / 5 / (sum(volume[-LONGEST:]) / LONGEST)))
    out.append(math.log(close[-1] / max(close[-LONGEST - 1 :])) / (usual * math.sqrt(LONGEST)))
    return [min(max(value, -5.0), 5.0) for value in out]
