from __future__ import annotations

import math

import pytest

from flatout.views import figures


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0112, "0.011"),
        (143.21, "143.2"),
        (12_345.6, "12,346"),
        (-172.0, "-172.0"),
        (0.0, "0.00"),
        (3e-4, "3.0e-04"),
        (2.5e9, "2.5e+09"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        (None, "–"),
    ],
)
def test_numbers(value: float | None, text: str) -> None:
    assert figures.number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "0 s"),
        (59.6, "1 min 00 s"),
        (200, "3 min 20 s"),
        (7500, "2 h 05 min"),
        (3 * 86_400 + 4 * 3600, "3 d 4 h"),
        (-1, "0 s"),
        (math.inf, "–"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert figures.duration(seconds) == text


def test_a_mean_and_its_spread_share_their_digits() -> None:
    assert figures.mean_and_std(143.21, 3.06) == "143.2 ± 3.1"
    assert figures.mean_and_std(0.5, 12.0) == "0.5 ± 12.0"
    assert figures.mean_and_std(1e-5, 2e-5) == "1.0e-05 ± 2.0e-05"
    assert figures.mean_and_std(None, None) == "–"
    assert figures.mean_and_std(5.0, math.nan) == "5.00"


def test_shares_rates_and_time_left() -> None:
    assert figures.percent(0.614) == "61 %"
    assert figures.percent(math.nan) == "–"
    assert (figures.rate(18_200.4), figures.rate(3.42), figures.rate(math.inf)) == ("18,200", "3.4", "–")
    assert figures.share_done(5, 0) == 0
    assert figures.share_done(7, 5) == 1
