"""The settings of the market env, its history, and the bars that an episode may use."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from flatout.errors import FlatoutError, did_you_mean
from flatout.workloads.market.data import SUFFIXES, Bars, generate, read
from flatout.workloads.market.features import LONGEST, Tables, tables
from flatout.workloads.validate import check_choice, check_number

GENERATED = ("regime", "walk")
N_ASSETS, N_BARS = 4, 40_000
MAX_COST = 0.1
"""Upper bound of the cost of an order, as a share of its value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MarketConfig:
    """Data, split, costs and limits."""

    data: str | Bars = "regime"
    """`regime` or `walk`, generated from `market_seed`; a .csv or .parquet file; or Bars."""
    assets: int | None = None
    """Assets of a generated market; default 4."""
    bars: int | None = None
    """Bars of a generated market; default 40,000."""
    market_seed: int = 0
    """Seed of the generated history; the seed of an episode only picks its first bar."""
    split: Literal["train", "test"] = "train"
    """`test` is the held-out last part of the history."""
    test_share: float = 0.25
    """Share of the history that is held out."""
    window: int = 250
    """Bars per episode."""
    cash: float = 1_000_000.0
    """Initial cash of an episode."""
    fee: float = 0.0005
    """Cost of an order as a share of its value."""
    slippage: float = 1.0
    """Further cost: slippage x recent volatility x √(order ÷ money traded per bar)."""
    short: bool = False
    """Allow short positions; actions are then from -1 to 1."""
    max_position: float = 1.0
    """Largest position in one asset as a share of equity; an action of 1 asks for it."""
    max_leverage: float = 1.0
    """Largest sum of all positions as a share of equity; up to 1 nothing is borrowed."""
    min_order: float = 0.01
    """Smaller changes of a position, as a share of equity, are dropped."""
    ruin: float = 0.2
    """An episode terminates when equity falls below this share of the initial cash."""
    reward_scale: float = 100.0
    """The reward is reward_scale x log(equity ÷ equity one bar ago)."""

    def __post_init__(self) -> None:
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is None and name in ("assets", "bars"):
                continue
            check_number(name, value, low, high, whole=name in ("assets", "bars", "market_seed", "window"))
        check_choice("split", self.split, ("train", "test"))
        check_choice("short", self.short, (True, False))
        if self.data not in GENERATED and not (self.assets is None and self.bars is None):
            raise FlatoutError("assets and bars are for generated markets; a file or Bars has its own")

    def tables(self) -> Tables:
        """The history with its features; cached, so that all envs of a process share it."""
        if isinstance(self.data, Bars):
            return tables(self.data)
        if self.data in GENERATED:
            return _generated(self.data, self.bars or N_BARS, self.assets or N_ASSETS, self.market_seed)
        path = Path(self.data).expanduser()
        if path.suffix.lower() not in SUFFIXES:
            choices = ", ".join(GENERATED)
            hint = did_you_mean(self.data, GENERATED)
            raise FlatoutError(
                f"data is '{self.data}'; it must be {choices}, a .csv or a .parquet file{hint}"
            )
        if not path.is_file():
            raise FlatoutError(f"{self.data}: no such file")
        changed = path.stat()
        return _read(str(path.resolve()), self.data, changed.st_mtime_ns, changed.st_size)

    def starts(self, n_bars: int) -> tuple[int, int]:
        """The first and the last bar at which an episode of this split may start.

        Training never reaches a held-out bar, and no held-out feature looks back before the cut.
        """
        cut = round(n_bars * (1 - self.test_share))
        first = LONGEST if self.split == "train" else cut + LONGEST
        last = (cut if self.split == "train" else n_bars) - 1 - self.window
        if last < first:
            there = cut if self.split == "train" else n_bars - cut
            raise FlatoutError(
                f"{self.data if isinstance(self.data, str) else 'data'} has {n_bars} bars, {there} of them for "
                f"{self.split}; window {self.window} needs {LONGEST + self.window + 1} there: "
                "give more bars or a smaller window"
            )
        return first, last


_RANGES = (
    ("assets", 1, 1_000),
    ("bars", 1, 10_000_000),
    ("market_seed", 0, 2**63),
    ("test_share", 0.0, 1.0),
    ("window", 1, 10_000_000),
    ("cash", 1e-3, 1e15),
    ("fee", 0.0, 0.05),
    ("slippage", 0.0, 100.0),
    ("max_position", 1e-6, 5.0),
    ("max_leverage", 1e-6, 5.0),
    ("min_order", 0.0, 1.0),
    ("ruin", 0.001, 0.99),
    ("reward_scale", 1e-6, 1e6),
)


@lru_cache(maxsize=4)
def _generated(kind: str, n_bars: int, n_assets: int, seed: int) -> Tables:
    return tables(generate(kind, n_bars, n_assets, seed))


@lru_cache(maxsize=4)
def _read(path: str, shown: str, changed: int, size: int) -> Tables:  # noqa: ARG001  # a changed file is read again
    return tables(read(Path(path), shown))
