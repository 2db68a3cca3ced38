"""Price bars of several assets: checked, read from a CSV or Parquet file, or generated from a seed.

Files have the columns time, open, high, low, close, volume, and asset if there are several assets. Every asset has the same
times, strictly increasing. Errors name the file and the row.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import numpy as np

from flatout.envs.spaces import Array
from flatout.errors import FlatoutError

COLUMNS = ("open", "high", "low", "close", "volume")


@dataclass(frozen=True, slots=True, eq=False)
class Bars:
    """T bars of A assets as arrays of shape (T, A), oldest first; checked on creation."""

    names: tuple[str, ...]
    open: Array
    high: Array
    low: Array
    close: Array
    volume: Array

    def __post_init__(self) -> None:
        shape = np.shape(self.close)
        if len(shape) != 2 or shape[1] != len(self.names) or not shape[1]:
            raise FlatoutError(f"bars of {len(self.names)} assets have close prices of shape {shape}")
        for name in COLUMNS:
            values = np.array(getattr(self, name), np.float64)
            if values.shape != shape:
                raise FlatoutError(f"bars have {name} of shape {values.shape} beside close of {shape}")
            values.flags.writeable = False
            object.__setattr__(self, name, values)
        fault = first_fault(np.stack([getattr(self, name).reshape(-1) for name in COLUMNS], 1))
        if fault is not None:
            bar, asset = divmod(fault[0], shape[1])
            raise FlatoutError(f"bar {bar} of '{self.names[asset]}': {fault[1]}")

    def __len__(self) -> int:
        return len(self.close)


def first_fault(rows: Array) -> tuple[int, str] | None:
    """The first invalid row (open, high, low, close, volume) and what is wrong with it; None if all are valid."""
    with np.errstate(invalid="ignore"):
        opened, high, low, close, volume = rows.T
        bad = ~np.isfinite(rows).all(axis=1) | (rows[:, :4] <= 0).any(axis=1) | (volume < 0)
        bad |= (high < np.maximum(opened, close)) | (low > np.minimum(opened, close))
    if not bad.any():
        return None
    row = int(bad.argmax())
    values = dict(zip(COLUMNS, rows[row].tolist(), strict=True))
    for name, value in values.items():
        if not np.isfinite(value):
            return row, f"{name} is {value}; it must be finite"
        if value < 0 or (value == 0 and name != "volume"):
            rule = "volumes must be 0 or more" if name == "volume" else "prices must be above 0"
            return row, f"{name} is {value:g}; {rule}"
    wrong = "high" if values["high"] < max(values["open"], values["close"]) else "low"
    return row, f"{wrong} is {values[wrong]:g}, with open {values['open']:g} and close {values['close']:g}"


SUFFIXES = (".csv", ".parquet")
NEEDED = ("time", *COLUMNS)


def read(path: Path, shown: str) -> Bars:
    """The bars in a file; errors call it `shown`."""
    try:
        columns, rows = _csv(path, shown) if path.suffix.lower() == ".csv" else _parquet(path, shown)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise FlatoutError(f"{shown} cannot be read: {' '.join(str(error).split())}") from error
    if not rows:
        raise FlatoutError(f"{shown} has no rows of data")
    values = np.stack([_numbers(columns[name], name, rows, shown) for name in COLUMNS], 1)
    fault = first_fault(values)
    if fault is not None:
        raise FlatoutError(f"{shown} row {rows[fault[0]]}: {fault[1]}")
    times = _times(columns["time"], rows, shown)
    assets = [str(name) for name in columns.get("asset", ["price"] * len(rows))]
    return _panel(values, times, assets, rows, shown)


def _csv(path: Path, shown: str) -> tuple[dict[str, list[Any]], list[int]]:
    """Columns by name, and the line number of each row."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file)
        header = [name.strip().lower() for name in next(reader, [])]
        places = _places(header, shown)
        columns: dict[str, list[Any]] = {name: [] for name in places}
        rows: list[int] = []
        for cells in reader:
            if not cells:
                continue
            if len(cells) != len(header):
                raise FlatoutError(
                    f"{shown} row {reader.line_num}: {len(cells)} cells, but the header has {len(header)}"
                )
            rows.append(reader.line_num)
            for name, place in places.items():
                columns[name].append(cells[place].strip())
    return columns, rows


def _parquet(path: Path, shown: str) -> tuple[dict[str, list[Any]], list[int]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise FlatoutError(f"{shown} needs pyarrow to be read: pip install flatout[parquet]") from error
    try:
        table = pyarrow.parquet.read_table(path)
    except pyarrow.ArrowException as error:
        raise FlatoutError(f"{shown} is not a Parquet file: {' '.join(str(error).split())}") from error
    places = _places([name.lower() for name in table.column_names], shown)
    columns = {name: table.column(place).to_pylist() for name, place in places.items()}
    return columns, list(range(1, table.num_rows + 1))


def _places(header: list[str], shown: str) -> dict[str, int]:
    for name in NEEDED:
        if name not in header:
            there = ", ".join(header) or "nothing"
            raise FlatoutError(
                f"{shown} has no column '{name}'; it has {there} and needs {', '.join(NEEDED)}"
            )
    return {name: header.index(name) for name in (*NEEDED, "asset") if name in header}


def _numbers(cells: Sequence[Any], name: str, rows: list[int], shown: str) -> Array:
    try:
        return np.array(cells, np.float64)
    except (TypeError, ValueError):
        for cell, row in zip(cells, rows, strict=True):
            try:
                float(cell)
            except (TypeError, ValueError):
                raise FlatoutError(f"{shown} row {row}: {name} is {cell!r}, not a number") from None
        raise


def _times(cells: Sequence[Any], rows: list[int], shown: str) -> list[float]:
    out = []
    numeric = _time(cells[0])[1] if cells else False
    for cell, row in zip(cells, rows, strict=True):
        time, is_number = _time(cell)
        if time is None or not np.isfinite(time) or is_number != numeric:
            raise FlatoutError(
                f"{shown} row {row}: time is {cell!r}; give dates such as 2024-05-31 or 2024-05-31T16:00, or numbers"
            )
        out.append(time)
    return out


def _time(cell: Any) -> tuple[float | None, bool]:
    """The time as a number, and whether it was given as one; dates become seconds."""
    if isinstance(cell, date) and not isinstance(cell, datetime):
        cell = datetime(cell.year, cell.month, cell.day)
    if not isinstance(cell, datetime):
        try:
            return float(cell), True
        except (TypeError, ValueError):
            pass
        try:
            cell = datetime.fromisoformat(cell)
        except (TypeError, ValueError):
            return None, False
    return (cell if cell.tzinfo else cell.replace(tzinfo=UTC)).timestamp(), False


def _panel(values: Array, times: list[float], assets: list[str], rows: list[int], shown: str) -> Bars:
    """The rows, assets in any order, as one (time, asset) panel without gaps."""
    places: dict[str, list[int]] = {}
    for place, name in enumerate(assets):
        before = places.setdefault(name, [])
        if before and times[place] <= times[before[-1]]:
            what = "repeats" if times[place] == times[before[-1]] else "is before"
            of = f" of '{name}'" if len(set(assets)) > 1 else ""
            raise FlatoutError(
                f"{shown} row {rows[place]}: time{of} {what} that of row {rows[before[-1]]}; sort rows by time"
            )
        before.append(place)
    first, *others = places
    expected = [times[place] for place in places[first]]
    for name in others:
        own = [times[place] for place in places[name]]
        if own != expected:
            differs = next((k for k, (a, b) in enumerate(zip(own, expected, strict=False)) if a != b), None)
            place = places[name][-1 if differs is None else differs]
            raise FlatoutError(
                f"{shown} row {rows[place]}: '{name}' and '{first}' have different times from here on"
            )
    panel = values[np.array(list(places.values())).T]
    return Bars(tuple(places), *(panel[..., k] for k in range(len(COLUMNS))))


SHARED = 0.3
"""Correlation of the noise between assets."""
GAP = 0.1
"""Share of a bar's drift and variance between the last close and the open."""
WALK_VOLATILITY = 0.01
TRADED = 1e9
"""Money traded per bar in a quiet regime."""


@dataclass(frozen=True, slots=True)
class Regime:
    """Mean and standard deviation of a bar's log return, and the mean number of bars until the regime changes."""

    drift: float
    volatility: float
    n_bars: float


REGIMES = (
    Regime(0.0015, 0.008, 80.0),
    Regime(-0.0020, 0.014, 50.0),
    Regime(0.0, 0.010, 40.0),
)
"""Rising quietly, falling with high volatility, going sideways. The next one is random."""


def generate(kind: str, n_bars: int, n_assets: int, seed: int) -> Bars:
    """A history from a seed: `regime`, in which past prices carry information, or `walk`, in which they do not."""
    rng = np.random.default_rng([seed, n_assets])
    if kind == "regime":
        regimes = np.stack([_chain(rng, n_bars) for _ in range(n_assets)], 1)
        drift = np.array([r.drift for r in REGIMES])[regimes]
        volatility = np.array([r.volatility for r in REGIMES])[regimes]
    else:
        volatility = np.full((n_bars, n_assets), WALK_VOLATILITY)
        drift = -0.5 * volatility**2  # so that the expected price, not its logarithm, is constant
    return _bars(rng, drift, volatility)


def _chain(rng: np.random.Generator, n_bars: int) -> Array:
    """The regime of each bar; each change goes to one of the other regimes."""
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
