"""The features of each bar, from that bar and earlier ones only, computed once per history.

T bars, A assets, F features. A step only looks them up by bar.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from flatout.envs.spaces import Array
from flatout.workloads.market.data import Bars

TRENDS = (1, 2, 5, 10, 20, 60)
"""Horizons of the return features, in bars."""
LONGEST = 60
"""Features look back at most this many bars."""
CLIP = 5.0
FEATURES = (*(f"return_{n}" for n in TRENDS), "turbulence", "volatility", "range", "activity", "below_high")


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """A history with everything that a step looks up."""

    bars: Bars
    observed: Array
    """(T, A x F + A + 2) float32: the features of every asset, then space for the account's own values."""
    moves: Array
    """(3, A, T): open ÷ last close, close ÷ open, and volatility ÷ √money traded as of the bar before (for slippage)."""


def tables(bars: Bars) -> Tables:
    """The tables of a history; features are complete from bar LONGEST on."""
    log_close = np.log(bars.close)
    steps = np.diff(log_close, axis=0, prepend=log_close[:1])
    long = np.maximum(_volatility(steps, LONGEST), 1e-6)
    traded = _mean(bars.close * bars.volume, 20)
    with np.errstate(divide="ignore"):
        impact = np.where(traded > 0, long / np.sqrt(traded), 1.0)
    moves = np.ones((3, bars.close.shape[1], len(bars)))
    moves[0, :, 1:] = (bars.open[1:] / bars.close[:-1]).T
    moves[1] = (bars.close / bars.open).T
    moves[2, :, 1:] = impact[:-1].T
    features = np.clip(np.stack(_features(bars, log_close, steps, long), 2), -CLIP, CLIP)
    n_assets, n = features.shape[1], features[0].size
    observed = np.zeros((len(bars), n + n_assets + 2), np.float32)
    observed[:, :n] = features.reshape(len(bars), n)
    return Tables(bars, observed, moves)


def _features(bars: Bars, log_close: Array, steps: Array, long: Array) -> list[Array]:
    """In the order of FEATURES, each (T, A); returns are divided by their recent standard deviation."""
    usual = long * np.sqrt(LONGEST)
    high = np.maximum.accumulate(log_close, axis=0)
    if len(bars) > LONGEST:
        high[LONGEST:] = sliding_window_view(log_close, LONGEST + 1, axis=0).max(axis=-1)
    recent, normal = (np.maximum(_mean(bars.volume, n), 1e-12) for n in (5, LONGEST))
    return [
        *((log_close - _back(log_close, n)) / (long * np.sqrt(n)) for n in TRENDS),
        np.log(np.maximum(_volatility(steps, 20), 1e-6) / long),
        np.log(long / 0.01),
        _mean(np.log(bars.high / bars.low), 10) / long - 1.0,
        np.log(recent / normal),
        (log_close - high) / usual,
    ]


def _back(values: Array, n: int) -> Array:
    """The value n bars earlier, or the first one."""
    return np.concatenate([np.repeat(values[:1], min(n, len(values)), axis=0), values[:-n]])


def _mean(values: Array, n: int) -> Array:
    """Mean of a bar and up to n - 1 bars before it."""
    total = np.concatenate([np.zeros_like(values[:1]), np.cumsum(values, axis=0)])
    upto = np.arange(1, len(values) + 1)
    since = np.maximum(upto - n, 0)
    out: Array = np.maximum((total[upto] - total[since]) / (upto - since)[:, None], 0.0)
    return out


def _volatility(steps: Array, n: int) -> Array:
    return np.sqrt(_mean(steps**2, n))
