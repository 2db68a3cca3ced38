"""Markets made up from a seed: `regime`, which past prices tell something about, and `walk`, which they do not.

Every bar's return is an overnight gap and a move within the bar; assets share part of their noise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flatout.envs.spaces import Array
from flatout.workloads.market.bars import Bars

SHARED = 0.3
"""Correlation of the assets' noise."""
GAP = 0.1
"""Share of a bar's drift and variance that falls between the last close and the open."""
WALK_VOLATILITY = 0.01
TRADED = 1e9
"""Money that changes hands in a quiet bar."""


@dataclass(frozen=True, slots=True)
class Regime:
    """How prices move for a while: mean and deviation of a bar's log return, and how long that lasts."""

    drift: float
    volatility: float
    n_bars: float


REGIMES = (
    Regime(0.0015, 0.008, 80.0),
    Regime(-0.0020, 0.014, 50.0),
    Regime(0.0, 0.010, 40.0),
)
"""Rising quietly, falling in turmoil, going nowhere. Which one comes next is up to chance."""


def generate(kind: str, n_bars: int, n_assets: int, seed: int) -> Bars:
    """One history: `regime` or `walk`; the same seed gives the same one."""
    rng = np.random.default_rng([seed, n_assets])
    if kind == "regime":
        regimes = np.stack([_chain(rng, n_bars) for _ in range(n_assets)], 1)
        drift = np.array([r.drift for r in REGIMES])[regimes]
        volatility = np.array([r.volatility for r in REGIMES])[regimes]
    else:
        volatility = np.full((n_bars, n_assets), WALK_VOLATILITY)
        drift = -0.5 * volatility**2  # so that the price itself, not its logarithm, is expected to stay
    return _bars(rng, drift, volatility)


def _chain(rng: np.random.Generator, n_bars: int) -> Array:
    """Which regime rules each bar; from one the chain goes to either of the others."""
    out, at, now = np.zeros(n_bars, np.int64), 0, int(rng.integers(len(REGIMES)))
    while at < n_bars:
        stay = int(rng.geometric(1 / REGIMES[now].n_bars))
        out[at : at + stay] = now
        at, now = at + stay, (now + int(rng.integers(1, len(REGIMES)))) % len(REGIMES)
    return out


def _bars(rng: np.random.Generator, drift: Array, volatility: Array) -> Bars:
    gap = GAP * drift + np.sqrt(GAP) * volatility * _noise(rng, drift.shape)
    within = (1 - GAP) * drift + np.sqrt(1 - GAP) * volatility * _noise(rng, drift.shape)
    close = np.log(100.0) + np.cumsum(gap + within, axis=0)
    opened = close - within
    reach = 0.5 * volatility * np.abs(rng.standard_normal((2, *drift.shape)))
    high, low = np.maximum(opened, close) + reach[0], np.minimum(opened, close) - reach[1]
    traded = TRADED * np.exp(0.3 * rng.standard_normal(drift.shape) + 50 * (volatility - WALK_VOLATILITY))
    names = tuple(f"A{i + 1}" for i in range(drift.shape[1]))
    return Bars(names, np.exp(opened), np.exp(high), np.exp(low), np.exp(close), traded / np.exp(close))


def _noise(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    own, common = rng.standard_normal(shape), rng.standard_normal((shape[0], 1))
    out: Array = np.sqrt(SHARED) * common + np.sqrt(1 - SHARED) * own
    return out
