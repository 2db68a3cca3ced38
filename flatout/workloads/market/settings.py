"""The settings of the market env, its history, and the bars that an episode may use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

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
            return _cached(
                generate, self.data, self.bars or N_BARS, self.assets or N_ASSETS, self.market_seed
            )
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
