"""Matrix products inside compiled loops on one core, beside the routine that torch has.

`python -m benchmarks.products` → docs/benchmarks.md. Both compute the same product in turn, in one process.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from time import perf_counter

import numpy as np
import torch

from benchmarks.page import conditions, table, write_section
from flatout.device import tiles

SHAPES = [(64, 64, 64), (256, 64, 64), (256, 256, 17), (256, 256, 256), (512, 256, 256), (4096, 512, 1024)]
"""Rows, columns, depth: those of the networks that flatout trains."""
N_ROUNDS, SECONDS = 15, 0.02


def rate(call: Callable[[], object], flops: float) -> float:
    """GFLOP/s of a call that is repeated for some time."""
    call()
    n, began = 0, perf_counter()
    while (took := perf_counter() - began) < SECONDS:
        call()
        n += 1
    return n * flops / took / 1e9


def main() -> None:
    """Measure all shapes and write the table."""
    torch.set_num_threads(1)
    rng, rows = np.random.default_rng(0), []
    for n_rows, n_columns, depth in SHAPES:
        a, b = (rng.normal(size=shape).astype(np.float32) for shape in ((n_rows, depth), (depth, n_columns)))
        out = np.empty((n_rows, n_columns), np.float32)
        flat = [x.reshape(-1) for x in (a, b, out)]
        tensors = [torch.from_numpy(x) for x in (a, b, np.empty_like(out))]

        own = partial(tiles.product, n_rows, n_columns, depth, flat[0], False, flat[1], False, flat[2])
        theirs = partial(torch.mm, *tensors[:2], out=tensors[2])
        flops = 2.0 * n_rows * n_columns * depth
        pairs = [(rate(own, flops), rate(theirs, flops)) for _ in range(N_ROUNDS)]
        ours, peer = (statistics.median(side) for side in zip(*pairs, strict=True))
        ratio = statistics.median(x / y for x, y in pairs)
        rows.append([f"{n_rows} × {depth} × {n_columns}", f"{ours:.0f}", f"{peer:.0f}", f"{ratio:.2f} ×"])
    header = ["rows × depth × columns", "flatout, GFLOP/s", "torch, GFLOP/s", "ratio"]
    width = f"{tiles.WIDTH} numbers in a register, tiles of {tiles.TALL} × {tiles.COLUMNS}"
    write_section(
        "products",
        "## Matrix products on one core\n`python -m benchmarks.products`: medians of "
        f"{N_ROUNDS} rounds in turn, and of the ratios within a round; {width}. {conditions()}\n\n{table(header, rows)}",
    )


if __name__ == "__main__":
    main()
