"""Price bars of several assets, checked once: whatever trades on them need not look again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flatout.envs.spaces import Array
from flatout.errors import FlatoutError

COLUMNS = ("open", "high", "low", "close", "volume")


@dataclass(frozen=True, slots=True, eq=False)
class Bars:
    """T bars of A assets: arrays of shape (T, A), oldest first."""

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
    """The first row (open, high, low, close, volume) that no market has, and what is wrong with it."""
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
            return row, f"{name} is {value}, not a number to trade on"
        if value < 0 or (value == 0 and name != "volume"):
            return (
                row,
                f"{name} is {value:g}; {'volumes are 0 or more' if name == 'volume' else 'prices are above 0'}",
            )
    wrong = "high" if values["high"] < max(values["open"], values["close"]) else "low"
    return row, f"{wrong} is {values[wrong]:g}, with open {values['open']:g} and close {values['close']:g}"
