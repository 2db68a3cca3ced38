"""The market's settings, the history they name, and which of its bars an episode may use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from flatout.errors import FlatoutError, did_you_mean
from flatout.workloads.market.data import SUFFIXES, Bars, generate, read
from flatout.workloads.market.features import LONGEST, Tables, tables

GENERATED = ("regime", "walk")
N_ASSETS, N_BARS = 4, 40_000
DEAREST = 0.1
"""No order costs more than this share of its value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MarketConfig:
    """What is traded, on which bars, at what cost and within which limits."""

    data: str | Bars = "regime"
    """`regime` or `walk`, made up from `market_seed`; a .csv or .parquet file; or Bars."""
    assets: int | None = None
    """Assets of a made-up market; 4 unless given."""
    bars: int | None = None
    """Bars of a made-up market; 40,000 unless given."""
    market_seed: int = 0
    """Which made-up history; an episode's seed only picks where in it to begin."""
    split: Literal["train", "test"] = "train"
    """The older part of the history, or the part held out."""
    test_share: float = 0.25
    """How much of the history is held out."""
    window: int = 250
    """Bars of an episode."""
    cash: float = 1_000_000.0
    """Money at the start of an episode."""
    fee: float = 0.0005
    """Cost of an order as a share of its value."""
    slippage: float = 1.0
    """Further cost: this x recent volatility x √(order ÷ money that changes hands in a bar)."""
    short: bool = False
    """Whether assets may be sold that are not owned; actions then reach from -1 to 1."""
    max_position: float = 1.0
    """Largest position in one asset, as a share of equity: what an action of 1 asks for."""
    max_leverage: float = 1.0
    """Largest sum of all positions, as a share of equity; up to 1 no money is ever borrowed."""
    min_order: float = 0.01
    """Smaller changes of a position, as a share of equity, are not traded."""
    ruin: float = 0.2
    """An account that falls below this share of its first cash is closed."""
    reward_scale: float = 100.0
    """A reward is this x the logarithm of the bar's growth of equity: percents, about."""

    def __post_init__(self) -> None:
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is None and name in ("assets", "bars"):
                continue
            whole = name in _WHOLE
            kind = int if whole else int | float
            if not isinstance(value, kind) or isinstance(value, bool) or not low <= value <= high:
                wanted = "a whole number" if whole else "a number"
                raise FlatoutError(f"{name} is {value!r}; it must be {wanted} from {low:g} to {high:g}")
        for name, choices in (("split", ("train", "test")), ("short", (False, True))):
            if getattr(self, name) not in choices:
                given = getattr(self, name)
                raise FlatoutError(f"{name} is {given!r}; it must be {choices[0]} or {choices[1]}")
        if self.data not in GENERATED and not (self.assets is None and self.bars is None):
            raise FlatoutError("assets and bars are for made-up markets; a file or Bars has its own")

    @staticmethod
    def of(settings: Mapping[str, Any]) -> MarketConfig:
        """The config from an env's keywords; an unknown one is refused with the nearest."""
        known = [field.name for field in fields(MarketConfig)]
        for name in settings:
            if name not in known:
                raise FlatoutError(
                    f"Market takes no '{name}'{did_you_mean(name, known) or '; ' + ', '.join(known)}"
                )
        return MarketConfig(**settings)

    def tables(self) -> Tables:
        """The history, ready for trading; accounts of one process share it."""
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
            raise FlatoutError(f"{self.data}: there is no such file")
        changed = path.stat()
        return _read(str(path.resolve()), self.data, changed.st_mtime_ns, changed.st_size)

    def starts(self, n_bars: int) -> tuple[int, int]:
        """The first bar at which an episode of this split may begin, and the last.

        Training never sees a bar from the cut on; no held-out feature looks back to a bar before it.
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
_WHOLE = ("assets", "bars", "market_seed", "window")


@lru_cache(maxsize=4)
def _generated(kind: str, n_bars: int, n_assets: int, seed: int) -> Tables:
    return tables(generate(kind, n_bars, n_assets, seed))


@lru_cache(maxsize=4)
def _read(path: str, shown: str, changed: int, size: int) -> Tables:  # noqa: ARG001  # a changed file is read again
    return tables(read(Path(path), shown))
