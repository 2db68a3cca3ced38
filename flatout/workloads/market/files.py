"""Bars from the user's CSV or Parquet: columns time, open, high, low, close, volume, and asset if there are several.

Every asset has the same times, each strictly after the one before. Whatever is wrong is said with file and row.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import numpy as np

from flatout.envs.spaces import Array
from flatout.errors import FlatoutError
from flatout.workloads.market.bars import COLUMNS, Bars, first_fault

SUFFIXES = (".csv", ".parquet")
NEEDED = ("time", *COLUMNS)


def read(path: Path, shown: str) -> Bars:
    """The bars in a file, which errors call `shown`."""
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
    """Columns by name, and the line in the file that each row stands on."""
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
                    f"{shown} row {reader.line_num}: {len(cells)} cells under a header of {len(header)}"
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
    """Seconds, or whatever the numbers count, and whether it was a number."""
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
    """Rows in any order of assets as one (time, asset) panel without holes."""
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
                f"{shown} row {rows[place]}: '{name}' and '{first}' do not have the same times from here on"
            )
    panel = values[np.array(list(places.values())).T]
    return Bars(tuple(places), *(panel[..., k] for k in range(len(COLUMNS))))
