"""Matrix products inside compiled loops equal NumPy's, whatever the shape, and a row does not depend on the others."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
import torch

from flatout.device import blas, tiles

Matrix = npt.NDArray[np.float32]
SHAPES = [
    (1, 1, 1),
    (3, 2, 5),
    (tiles.TALL, tiles.COLUMNS, tiles.DEPTH),
    (2 * tiles.TALL + 1, tiles.COLUMNS + 1, tiles.DEPTH + 1),
    (37, 3 * tiles.COLUMNS - 1, 2 * tiles.DEPTH + 7),
    (256, 4, 17),
]
"""Rows, columns, depth: whole tiles, parts of tiles, and products that take several passes."""


@pytest.fixture(params=[1, 2])
def n_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def product(a: Matrix, b: Matrix, flip_a: bool = False, flip_b: bool = False) -> Matrix:
    out = np.full((len(a), b.shape[1]), np.nan, np.float32)
    left, right = np.ascontiguousarray(a.T if flip_a else a), np.ascontiguousarray(b.T if flip_b else b)
    sizes = (*out.shape, len(b))
    blas.product(*sizes, left.reshape(-1), flip_a, right.reshape(-1), flip_b, out.reshape(-1))
    return out


def matrices(n_rows: int, n_columns: int, depth: int) -> tuple[Matrix, Matrix]:
    rng = np.random.default_rng(n_rows + depth)
    return (
        rng.normal(size=(n_rows, depth)).astype(np.float32),
        rng.normal(size=(depth, n_columns)).astype(np.float32),
    )


@pytest.mark.parametrize("flip_b", [False, True])
@pytest.mark.parametrize("flip_a", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.usefixtures("n_threads")
def test_it_is_the_product(shape: tuple[int, int, int], flip_a: bool, flip_b: bool) -> None:
    a, b = matrices(*shape)
    want = a.astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_allclose(product(a, b, flip_a, flip_b), want, rtol=1e-5, atol=1e-5 * shape[2] ** 0.5)


@pytest.mark.parametrize("n_rows", [1, 5, tiles.TALL, 40])
def test_on_one_core_a_row_is_the_same_to_the_bit_in_any_batch(n_rows: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    a, b = matrices(64, 300, 300)
    np.testing.assert_array_equal(product(a[7 : 7 + n_rows], b), product(a, b)[7 : 7 + n_rows])
    torch.set_num_threads(before)


def test_what_is_not_a_number_stays_so() -> None:
    a, b = matrices(30, 40, 50)
    a[4, 3] = np.nan
    found = product(a, b)
    assert np.isnan(found[4]).all()
    assert np.isfinite(np.delete(found, 4, 0)).all()
