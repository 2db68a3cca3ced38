"""Market on the user's own bars: CSV and Parquet give the same bars, and errors name the row."""

from __future__ import annotations

import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from flatout.errors import FlatoutError
from flatout.workloads.market import Bars, Market
from flatout.workloads.market.data import COLUMNS, generate, read
from tests.command import flatout

BARS = generate("regime", 500, 2, 0)
DAYS = [datetime(2020, 1, 1) + timedelta(days=k) for k in range(len(BARS))]


def rows_by_time() -> list[list[Any]]:
    return [
        [DAYS[t], name, *(float(getattr(BARS, column)[t, a]) for column in COLUMNS)]
        for t in range(len(BARS))
        for a, name in enumerate(BARS.names)
    ]


HEADER = ["time", "asset", *COLUMNS]


def write(path: Path, header: list[str], rows: list[list[Any]]) -> Path:
    lines = [header, *rows]
    path.write_text("".join(",".join(map(str, line)) + "\n" for line in lines))
    return path


def assert_same(a: Bars, b: Bars) -> None:
    assert a.names == b.names
    for name in COLUMNS:
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


def test_csv_and_parquet_give_the_same_bars_whatever_the_order_of_assets(tmp_path: Path) -> None:
    rows = rows_by_time()
    assert_same(read(write(tmp_path / "a.csv", HEADER, rows), "a.csv"), BARS)
    grouped = sorted(rows, key=lambda row: str(row[1]))
    assert_same(read(write(tmp_path / "b.csv", HEADER, grouped), "b.csv"), BARS)
    titles = ["Volume", "Note", "ASSET", "close", "open", "high", "low", "Time"]
    shuffled = [[r[6], "x", r[1], r[5], r[2], r[3], r[4], k // 2] for k, r in enumerate(rows)]
    assert_same(read(write(tmp_path / "c.csv", titles, shuffled), "c.csv"), BARS)
    table = pyarrow.table({name: [row[k] for row in rows] for k, name in enumerate(HEADER)})
    pyarrow.parquet.write_table(table, tmp_path / "d.parquet")
    assert_same(read(tmp_path / "d.parquet", "d.parquet"), BARS)


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", HEADER, rows_by_time())
    env = Market(data=str(path), window=20)
    assert env.action_space.shape == (2,)
    env.reset(seed=0)
    made = Market(data=BARS, window=20)
    made.reset(seed=0)
    for _ in range(20):
        assert env.step(np.array([0.5, 0.2]))[1] == made.step(np.array([0.5, 0.2]))[1]
    one = [row for row in rows_by_time() if row[1] == "A1"]
    write(path, HEADER, one)
    assert Market(data=str(path), window=20).action_space.shape == (1,)
    without = [[row[0], *row[2:]] for row in one]
    write(path, ["time", *COLUMNS], without)
    assert Market(data=str(path), window=20).ledger.bars.names == ("price",)


def cell(row: int, column: str, value: Any) -> tuple[list[str], list[list[Any]]]:
    rows = rows_by_time()
    rows[row][HEADER.index(column)] = value
    return HEADER, rows


def without(column: str) -> tuple[list[str], list[list[Any]]]:
    k = HEADER.index(column)
    return [*HEADER[:k], *HEADER[k + 1 :]], [[*row[:k], *row[k + 1 :]] for row in rows_by_time()]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (without("close"), "bad.csv has no column 'close'; it has time, asset, open, high, low, volume"),
        (without("time"), "bad.csv has no column 'time'"),
        (cell(3, "close", "nan"), "bad.csv row 5: close is nan"),
        (cell(3, "volume", ""), "bad.csv row 5: volume is '', not a number"),
        (cell(4, "open", "1.2.3"), "bad.csv row 6: open is '1.2.3', not a number"),
        (cell(4, "low", -2.0), "bad.csv row 6: low is -2; prices must be above 0"),
        (cell(4, "high", 0.5), "bad.csv row 6: high is 0.5, with open"),
        (cell(4, "volume", -1), "bad.csv row 6: volume is -1; volumes must be 0 or more"),
        (cell(4, "time", DAYS[1]), "bad.csv row 6: time of 'A1' repeats that of row 4"),
        (cell(4, "time", DAYS[0]), "bad.csv row 6: time of 'A1' is before that of row 4"),
        (cell(4, "time", "yesterday"), "bad.csv row 6: time is 'yesterday'; give dates"),
        (cell(4, "time", "12"), "bad.csv row 6: time is '12'; give dates"),
        (cell(5, "asset", "A3"), "have different times"),
        ((HEADER, rows_by_time()[:-1]), "have different times"),
        ((HEADER, [*rows_by_time()[:2], ["2020-01-02"]]), "bad.csv row 4: 1 cells, but the header has 7"),
        ((HEADER, []), "bad.csv has no rows of data"),
        (([], []), "bad.csv has no column 'time'; it has nothing"),
        ((HEADER, rows_by_time()[:200]), "bad.csv has 100 bars, 75 of them for train; window 20 needs 81"),
    ],
)
def test_bad_files_are_refused_in_one_line_with_the_row(
    content: tuple[list[str], list[list[Any]]], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "bad.csv", *content)
    with pytest.raises(FlatoutError) as caught:
        Market(data="bad.csv", window=20)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_of_another_format_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.parquet").write_bytes(b"no such thing")
    with pytest.raises(FlatoutError, match=r"a\.parquet is not a Parquet file"):
        Market(data="a.parquet")
    (tmp_path / "b.csv").write_bytes(b"\xff\xfe\x00\x80" * 40)
    with pytest.raises(FlatoutError, match=r"b\.csv cannot be read"):
        Market(data="b.csv")
    table = pyarrow.table({name: [1.0, None] for name in HEADER})
    pyarrow.parquet.write_table(table, tmp_path / "c.parquet")
    with pytest.raises(FlatoutError, match=r"c\.parquet row 2: open is nan|c\.parquet row 2: open is None"):
        Market(data="c.parquet")


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"")
    code = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from flatout.workloads.market import Market\nfrom flatout.errors import FlatoutError\n"
        "try: Market(data='a.parquet')\nexcept FlatoutError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.strip() == "a.parquet needs pyarrow to be read: pip install flatout[parquet]", (
        done.stderr
    )


def test_the_command_line_refuses_a_bad_file(tmp_path: Path) -> None:
    write(tmp_path / "bad.csv", *cell(9, "close", "nan"))
    argv = ["train", "market", "--env-kwargs", '{"data": "bad.csv", "window": 20}']
    done = flatout(*argv, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.strip() == "flatout: bad.csv row 11: close is nan; it must be finite"
    assert not (tmp_path / "runs").exists()
