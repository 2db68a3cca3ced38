"""Numbers as short text: counts, shares, durations, returns; a dash for None, NaN and infinity."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

NOTHING = "–"


def count(value: float) -> str:
    """A whole number with thousands separators: `123,456`."""
    return f"{value:,.0f}" if math.isfinite(value) else NOTHING


def percent(share: float) -> str:
    """A share of one as whole percent: `61 %`."""
    return f"{100 * share:.0f} %" if math.isfinite(share) else NOTHING


def rate(per_second: float) -> str:
    """Steps per second, with a decimal below 100: `18,200`, `3.4`."""
    if not math.isfinite(per_second):
        return NOTHING
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.1f}"


def number(value: float | None) -> str:
    """Any figure in about three significant digits: `0.011`, `143.2`, `12,345`, `1.2e-05`."""
    if value is None:
        return NOTHING
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size >= 1e7 or 0 < size < 1e-3:
        return f"{value:.1e}"
    return f"{value:,.{_decimals(size)}f}"


def mean_and_std(mean: float | None, std: float | None) -> str:
    """A mean with its standard deviation, to the digits of the larger one: `143.2 ± 30.1`."""
    if mean is None or std is None or not (math.isfinite(mean) and math.isfinite(std)):
        return number(mean)
    size = max(abs(mean), std)
    if size >= 1e7 or 0 < size < 1e-3:
        return f"{mean:.1e} ± {std:.1e}"
    decimals = _decimals(size)
    return f"{mean:,.{decimals}f} ± {std:,.{decimals}f}"


def duration(seconds: float) -> str:
    """A length of time in its two largest units: `22 s`, `3 min 20 s`, `2 h 05 min`, `3 d 4 h`."""
    if not math.isfinite(seconds):
        return NOTHING
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


def seconds_text(seconds: float) -> str:
    """Like `duration`, with a tenth below a minute, where it matters: `0.4 s`, `27.4 s`, `3 min 20 s`."""
    return f"{seconds:.1f} s" if seconds < 59.95 else duration(seconds)


def age(seconds: float) -> str:
    """A length of time in one unit: `22 s`, `3 min`, `2 h`, `4 d`."""
    for unit, size, most in (("s", 1, 90), ("min", 60, 5400), ("h", 3600, 172_800)):
        if seconds < most:
            return f"{max(0.0, seconds) / size:.0f} {unit}"
    return f"{seconds / 86_400:,.0f} d"


def share_done(done: float, total: float) -> float:
    """`done` as a share of `total`, from 0 to 1."""
    return min(1.0, max(0.0, done / total)) if total > 0 else 0.0


def told(template: str, value: float | None, show: Callable[[float], str] = number) -> str:
    """The template with the value in place of {}; empty if the value is None."""
    return "" if value is None else template.format(show(value))


def plain(values: npt.NDArray[np.floating[Any]], digits: int = 0) -> list[float | int | None]:
    """Rounded numbers for JSON; None for NaN and infinity."""
    rounded = [round(v, digits) if math.isfinite(v) else None for v in values.tolist()]
    return [int(v) if v is not None and v == int(v) else v for v in rounded]


def printable(value: object) -> str:
    """Text without control characters."""
    text = "" if value is None else str(value)
    return "".join(character if character.isprintable() else " " for character in text)


def joined(separator: str, *texts: str) -> str:
    """The texts that are not empty, in one."""
    return separator.join(filter(None, texts))


def _decimals(size: float) -> int:
    if size >= 1000:
        return 0
    return 1 if size >= 10 else 2 if size >= 1 or size == 0 else 3
