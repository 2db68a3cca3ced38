"""Matrix products inside compiled loops: a tile of the result is summed up in the registers of one core.

`python -m benchmarks.products` compares them with the library that torch has. An element of the result is computed in one
order of operations, whatever the other rows are.
"""

from __future__ import annotations

from platform import machine
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba.extending import intrinsic

from flatout.device.jit import compiled

types: Any = numba.types
Flat = npt.NDArray[np.float32]
_FEATURES = binding.get_host_cpu_features()
_IS_X86 = machine().lower() in ("x86_64", "amd64")
_FUSES = not _IS_X86 or _FEATURES.get("fma", False)
"""Whether a multiply and an add are one instruction."""
WIDTH = 16 if _FEATURES.get("avx512f") else 8 if _FEATURES.get("avx2") else 4
"""Numbers in a register."""
TALL = 12 if _FEATURES.get("avx512f") or not _IS_X86 else 6
"""Rows of a tile: with two registers for each, two for the other matrix and one for this one, they all fit."""
LOW = 4
COLUMNS = 2 * WIDTH
DEPTH = 256
"""Rows of the other matrix at a time: those columns of it stay in the core's first cache."""


def _tile(n_rows: int) -> Any:
    """A compiled function for tiles of so many rows.

    It takes the first matrix and the bytes from row to row and from column to column; COLUMNS columns of the second one,
    packed; their depth; the result and the bytes from row to row; and whether to add to what is there.
    """
    real, whole = ir.FloatType(), ir.IntType(32)
    vector, zeros = ir.VectorType(real, WIDTH), ir.VectorType(whole, WIDTH)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        a, a_row, a_column, b, depth, out, out_row, adds = args
        pairs = [(i, half) for i in range(n_rows) for half in (0, 1)]

        def number(value: int) -> Any:
            return ir.Constant(depth.type, value)

        def pointer(base: Any, offset: Any, to: Any) -> Any:
            return builder.inttoptr(builder.add(base, offset), to.as_pointer())

        def multiply_add(x: Any, y: Any, z: Any) -> Any:
            if not _FUSES:
                return builder.fadd(builder.fmul(x, y), z)
            name, kind = f"llvm.fma.v{WIDTH}f32", ir.FunctionType(vector, [vector] * 3)
            fma = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
            return builder.call(fma, [x, y, z])

        places = [
            pointer(out, builder.add(builder.mul(out_row, number(i)), number(4 * WIDTH * half)), vector)
            for i, half in pairs
        ]
        again, anew, loop, end = (
            builder.append_basic_block(name) for name in ("again", "new", "loop", "end")
        )
        builder.cbranch(adds, again, anew)
        builder.position_at_end(again)
        earlier = [builder.load(place, align=4) for place in places]
        builder.branch(loop)
        builder.position_at_end(anew)
        builder.branch(loop)

        builder.position_at_end(loop)
        left, at_a, at_b = builder.phi(depth.type), builder.phi(a.type), builder.phi(b.type)
        sums = [builder.phi(vector) for _ in pairs]
        firsts = zip((left, at_a, at_b, *sums), (depth, a, b, *earlier), strict=True)
        for i, (phi, first) in enumerate(firsts):
            phi.add_incoming(first, again)
            phi.add_incoming(first if i < 3 else ir.Constant(vector, [0.0] * WIDTH), anew)
        sides = [builder.load(pointer(at_b, number(4 * WIDTH * half), vector), align=4) for half in (0, 1)]
        new = []
        for i, half in pairs:
            if half == 0:
                x = builder.load(pointer(at_a, builder.mul(a_row, number(i)), real), align=4)
                nothing = ir.Constant(vector, ir.Undefined)
                x = builder.insert_element(nothing, x, ir.Constant(whole, 0))
                x = builder.shuffle_vector(x, nothing, ir.Constant(zeros, [0] * WIDTH))
            new.append(multiply_add(x, sides[half], sums[2 * i + half]))
        steps = (
            builder.sub(left, number(1)),
            builder.add(at_a, a_column),
            builder.add(at_b, number(4 * COLUMNS)),
        )
        for phi, value in zip((left, at_a, at_b, *sums), (*steps, *new), strict=True):
            phi.add_incoming(value, loop)
        builder.cbranch(builder.icmp_signed(">", steps[0], number(0)), loop, end)

        builder.position_at_end(end)
        for value, place in zip(new, places, strict=True):
            builder.store(value, place, align=4)
        return context.get_dummy_value()

    word, size = types.uintp, types.intp
    kind = types.void(word, size, size, word, size, word, size, types.boolean)

    @intrinsic
    def tile(
        _: Any, a: Any, a_row: Any, a_column: Any, b: Any, depth: Any, out: Any, out_row: Any, adds: Any
    ) -> Any:
        return kind, codegen

    return tile


_tall, _low, _single = (_tile(n_rows) for n_rows in (TALL, LOW, 1))


@compiled
def _pack(
    b: Flat, flip: bool, shape: tuple[int, int], begins: tuple[int, int], n: tuple[int, int], to: Flat
) -> None:
    """Copy `n` rows and columns of a matrix of this shape, COLUMNS to a row, the rest zeros."""
    (depth, width), (row, column), (n_rows, n_columns) = shape, begins, n
    if n_columns < COLUMNS:
        to[: n_rows * COLUMNS] = 0
    if flip:
        for j in range(n_columns):
            side = b[(column + j) * depth + row :]
            for k in range(n_rows):
                to[k * COLUMNS + j] = side[k]
    elif n_columns == COLUMNS:
        for k in range(n_rows):
            side, part = b[(row + k) * width + column :], to[k * COLUMNS :]
            for j in range(COLUMNS):
                part[j] = side[j]
    else:
        for k in range(n_rows):
            for j in range(n_columns):
                to[k * COLUMNS + j] = b[(row + k) * width + column + j]


@compiled
def product(
    n_rows: int, n_columns: int, depth: int, a: Flat, flip_a: bool, b: Flat, flip_b: bool, out: Flat
) -> None:
    """out = A B, of float32, each in a flat array with its rows one after another; a flipped one is stored transposed."""
    panel, edge = np.empty(DEPTH * COLUMNS, np.float32), np.empty(TALL * COLUMNS, np.float32)
    a_row, a_column = (4, 4 * n_rows) if flip_a else (4 * depth, 4)
    for begin in range(0, depth, DEPTH):
        n_deep, adds = min(DEPTH, depth - begin), begin > 0
        for column in range(0, n_columns, COLUMNS):
            n_wide = min(COLUMNS, n_columns - column)
            _pack(b, flip_b, (depth, n_columns), (begin, column), (n_deep, n_wide), panel)
            is_whole, row = n_wide == COLUMNS, 0
            while row < n_rows:
                n = TALL if row + TALL <= n_rows else LOW if row + LOW <= n_rows else 1
                first = row * n_columns + column
                if not is_whole and adds:
                    for i in range(n):
                        for j in range(n_wide):
                            edge[i * COLUMNS + j] = out[first + i * n_columns + j]
                at_a = a.ctypes.data + row * a_row + begin * a_column
                to, to_row = edge.ctypes.data, 4 * COLUMNS
                if is_whole:
                    to, to_row = out.ctypes.data + 4 * first, 4 * n_columns
                if n == TALL:
                    _tall(at_a, a_row, a_column, panel.ctypes.data, n_deep, to, to_row, adds)
                elif n == LOW:
                    _low(at_a, a_row, a_column, panel.ctypes.data, n_deep, to, to_row, adds)
                else:
                    _single(at_a, a_row, a_column, panel.ctypes.data, n_deep, to, to_row, adds)
                if not is_whole:
                    for i in range(n):
                        for j in range(n_wide):
                            out[first + i * n_columns + j] = edge[i * COLUMNS + j]
                row += n
