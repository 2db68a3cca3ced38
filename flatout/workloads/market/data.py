"""Price bars of several assets, read from a CSV or Parquet file or generated from a seed, and their features.

Files have the columns time, open, high, low, close, volume, and asset if there are several assets. Every asset has the same
times, strictly increasing. Errors name the file and the row.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

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
        rows = np.stack([getattr(self, name).reshape(-1) for name in COLUMNS], 1)
        check_bars(rows, lambda row: f"bar {row // shape[1]} of '{self.names[row % shape[1]]}'")

    def __len__(self) -> int:
        return len(self.close)


def check_bars(rows: Array, where: Callable[[int], str]) -> None:
    """Refuse invalid rows (open, high, low, close, volume); `where` names the first one."""
    with np.errstate(invalid="ignore"):
        opened, high, low, close, volume = rows.T
        bad = ~np.isfinite(rows).all(axis=1) | (rows[:, :4] <= 0).any(axis=1) | (volume < 0)
        bad |= (high < np.maximum(opened, close)) | (low > np.minimum(opened, close))
    if not bad.any():
        return
    row = int(bad.argmax())
    values = dict(zip(COLUMNS, rows[row].tolist(), strict=True))
    for name, value in values.items():
        if not np.isfinite(value):
            raise FlatoutError(f"{where(row)}: {name} is {value}; it must be finite")
        if value < 0 or (value == 0 and name != "volume"):
            rule = "volumes must be 0 or more" if name == "volume" else "prices must be above 0"
            raise FlatoutError(f"{where(row)}: {name} is {value:g}; {rule}")
    wrong = "high" if values["high"] < max(values["open"], values["close"]) else "low"
    beside = f"with open {values['open']:g} and close {values['close']:g}"
    raise FlatoutError(f"{where(row)}: {wrong} is {values[wrong]:g}, {beside}")


SUFFIXES = (".csv", ".parquet")
NEEDED = ("time", *COLUMNS)
Columns: TypeAlias = dict[str, list[Any]]


def read(path: Path, shown: str) -> Bars:
    """The bars in a file; errors call it `shown`."""
    try:
        rows, columns = (_csv if path.suffix.lower() == ".csv" else _parquet)(path)
        if not rows:
            raise FlatoutError("has no rows of data")
        values = np.stack([_numbers(columns[name], name, rows) for name in COLUMNS], 1)
        check_bars(values, lambda k: f"row {rows[k]}")
        assets = [str(name) for name in columns.get("asset", ["price"] * len(rows))]
        return _panel(values, _times(columns["time"], rows), assets, rows)
    except FlatoutError as error:
        raise FlatoutError(f"{shown} {error}") from error
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise FlatoutError(f"{shown} cannot be read: {' '.join(str(error).split())}") from error


def _csv(path: Path) -> tuple[Sequence[int], Columns]:
    rows, table = [], []
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file)
        header = [name.strip().lower() for name in next(reader, [])]
        places = _places(header)
        for cells in filter(None, reader):
            if len(cells) != len(header):
                raise FlatoutError(
                    f"row {reader.line_num}: {len(cells)} cells, but the header has {len(header)}"
                )
            rows.append(reader.line_num)
            table.append(cells)
    return rows, {name: [cells[place].strip() for cells in table] for name, place in places.items()}


def _parquet(path: Path) -> tuple[Sequence[int], Columns]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise FlatoutError("needs pyarrow to be read: pip install flatout[parquet]") from error
    try:
        table = pyarrow.parquet.read_table(path)
    except pyarrow.ArrowException as error:
        raise FlatoutError(f"is not a Parquet file: {' '.join(str(error).split())}") from error
    places = _places([name.lower() for name in table.column_names])
    columns = {name: table.column(place).to_pylist() for name, place in places.items()}
    return range(1, table.num_rows + 1), columns


def _places(header: list[str]) -> dict[str, int]:
    for name in NEEDED:
        if name not in header:
            there = ", ".join(header) or "nothing"
            raise FlatoutError(f"has no column '{name}'; it has {there} and needs {', '.join(NEEDED)}")
    return {name: header.index(name) for name in (*NEEDED, "asset") if name in header}


def _numbers(cells: Sequence[Any], name: str, rows: Sequence[int]) -> Array:
    numbers = np.empty(len(cells))
    for k, cell in enumerate(cells):
        try:
            numbers[k] = cell
        except (TypeError, ValueError):
            raise FlatoutError(f"row {rows[k]}: {name} is {cell!r}, not a number") from None
    return numbers


def _times(cells: Sequence[Any], rows: Sequence[int]) -> list[float]:
    """The times as numbers; either all cells are numbers or all are dates."""
    times = [_time(cell) for cell in cells]
    for k, (time, is_number) in enumerate(times):
        if not np.isfinite(time) or is_number != times[0][1]:
            expected = "give dates such as 2024-05-31 or 2024-05-31T16:00, or numbers"
            raise FlatoutError(f"row {rows[k]}: time is {cells[k]!r}; {expected}")
    return [time for time, _ in times]


def _time(cell: Any) -> tuple[float, bool]:
    """The time as a number, and whether it was given as one; dates become seconds, anything else NaN."""
    with suppress(TypeError, ValueError):
        return float(cell), True
    with suppress(ValueError):
        time = datetime.fromisoformat(str(cell))
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp(), False
    return float("nan"), False


def _panel(values: Array, times: list[float], assets: list[str], rows: Sequence[int]) -> Bars:
    """The rows, assets in any order, as one (time, asset) panel without gaps."""
    places: dict[str, list[int]] = {}
    for place, name in enumerate(assets):
        before = places.setdefault(name, [])
        if before and times[place] <= times[before[-1]]:
            what = "repeats" if times[place] == times[before[-1]] else "is before"
            time = f"time of '{name}'" if len(set(assets)) > 1 else "time"
            last = rows[before[-1]]
            raise FlatoutError(f"row {rows[place]}: {time} {what} that of row {last}; sort rows by time")
        before.append(place)
    first = assets[0]
    expected = [times[place] for place in places[first]]
    for name, own in places.items():
        differing = [place for place, time in zip(own, expected, strict=False) if times[place] != time]
        if differing or len(own) != len(expected):
            row = rows[differing[0] if differing else own[-1]]
            raise FlatoutError(f"row {row}: '{name}' and '{first}' have different times from here on")
    panel = values[np.array(list(places.values())).T]
    return Bars(tuple(places), *(panel[..., k] for k in range(len(COLUMNS))))


SHARED = 0.3
"""Correlation of the noise between assets."""
GAP = 0.1
"""Share of a bar's drift and variance between the last close and the open."""
WALK_VOLATILITY = 0.01
TRADED = 1e9
"""Money traded per bar in a quiet regime."""
DRIFT, VOLATILITY, DURATION = np.array([(0.0015, 0.008, 80.0), (-0.0020, 0.014, 50.0), (0.0, 0.010, 40.0)]).T
"""Mean and standard deviation of a bar's log return, and the mean number of bars until the regime changes, in each
regime: rising quietly, falling with high volatility, going sideways. The next one is random."""


def generate(kind: str, n_bars: int, n_assets: int, seed: int) -> Bars:
    """A history from a seed: `regime`, in which past prices carry information, or `walk`, in which they do not."""
    rng = np.random.default_rng([seed, n_assets])
    if kind == "regime":
        regimes = np.stack([_chain(rng, n_bars) for _ in range(n_assets)], 1)
        drift, volatility = DRIFT[regimes], VOLATILITY[regimes]
    else:
        volatility = np.full((n_bars, n_assets), WALK_VOLATILITY)
        drift = -0.5 * volatility**2  # so that the expected price, not its logarithm, is constant
    return _bars(rng, drift, volatility)


def _chain(rng: np.random.Generator, n_bars: int) -> Array:
    """The regime of each bar; each change goes to one of the other regimes."""
    out, at, now = np.zeros(n_bars, np.int64), 0, int(rng.integers(len(DURATION)))
    while at < n_bars:
        stay = int(rng.geometric(1 / DURATION[now]))
        out[at : at + stay] = now
        at, now = at + stay, (now + int(rng.integers(1, len(DURATION)))) % len(DURATION)
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
    return np.asarray(np.sqrt(SHARED) * common + np.sqrt(1 - SHARED) * own)


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
    long = np.maximum(np.sqrt(_mean(steps**2, LONGEST)), 1e-6)
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
    bar = np.arange(len(bars))
    high = np.maximum.accumulate(log_close, axis=0)
    if len(bars) > LONGEST:
        high[LONGEST:] = sliding_window_view(log_close, LONGEST + 1, axis=0).max(axis=-1)
    recent, normal = (np.maximum(_mean(bars.volume, n), 1e-12) for n in (5, LONGEST))
    return [
        *((log_close - log_close[np.maximum(bar - n, 0)]) / (long * np.sqrt(n)) for n in TRENDS),
        np.log(np.maximum(np.sqrt(_mean(steps**2, 20)), 1e-6) / long),
        np.log(long / 0.01),
        _mean(np.log(bars.high / bars.low), 10) / long - 1.0,
        np.log(recent / normal),
        (log_close - high) / (long * np.sqrt(LONGEST)),
    ]


def _mean(values: Array, n: int) -> Array:
    """Mean of a bar and up to n - 1 bars before it."""
    total = np.concatenate([np.zeros_like(values[:1]), np.cumsum(values, axis=0)])
    upto = np.arange(1, len(values) + 1)
    since = np.maximum(upto - n, 0)
    return np.asarray(np.maximum((total[upto] - total[since]) / (upto - since)[:, None], 0.0))
