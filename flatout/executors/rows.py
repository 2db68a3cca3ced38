"""Some rows of arrays at a time, as compiled loops: where envs are ready one by one, most batches have a few rows only,
and NumPy's indexing costs more than everything else that is done with them.

T: time steps, N: envs; a leaf's rows are bytes, whatever it holds. None of these lets go of Python's lock: to get it
back among many threads takes longer than they do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy.typing as npt
from numba import njit

Array = npt.NDArray[Any]
Function = TypeVar("Function", bound=Callable[..., Any])


def _compiled(function: Function) -> Function:
    """Compiled at its first call, then kept on disk."""
    return cast(Function, njit(cache=True, error_model="numpy")(function))


@_compiled
def take_rows(source: Array, cursor: Array, rows: Array, out: Array) -> None:
    """out[i] = source[cursor[n], n] for the i-th row n."""
    for i in range(len(rows)):
        n = rows[i]
        t = cursor[n]
        for k in range(out.shape[1]):
            out[i, k] = source[t, n, k]


@_compiled
def put_rows(values: Array, cursor: Array, rows: Array, out: Array) -> None:
    """out[cursor[n], n] = values[i] for the i-th row n."""
    for i in range(len(rows)):
        n = rows[i]
        t = cursor[n]
        for k in range(values.shape[1]):
            out[t, n, k] = values[i, k]


@_compiled
def put_steps(
    reward: Array, terminated: Array, truncated: Array, cursor: Array, rows: Array,
    reward_out: Array, terminated_out: Array, truncated_out: Array,
) -> None:  # fmt: skip
    """What the envs of these rows gave, at their cursors."""
    for i in range(len(rows)):
        n = rows[i]
        t = cursor[n]
        reward_out[t, n] = reward[n]
        terminated_out[t, n] = terminated[n]
        truncated_out[t, n] = truncated[n]


@_compiled
def put_leaf(
    obs: Array,
    final_obs: Array,
    truncated: Array,
    cursor: Array,
    rows: Array,
    obs_out: Array,
    final_out: Array,
) -> None:
    """What they show, one after their cursors, and what they showed last where an episode was truncated."""
    for i in range(len(rows)):
        n = rows[i]
        t = cursor[n]
        for k in range(obs.shape[1]):
            obs_out[t + 1, n, k] = obs[n, k]
        if truncated[n]:
            for k in range(obs.shape[1]):
                final_out[t, n, k] = final_obs[n, k]


@_compiled
def all_finite(values: Array, rows: Array) -> bool:
    """Whether these rows (N, size) are free of NaN and infinity."""
    for i in range(len(rows)):
        n = rows[i]
        for k in range(values.shape[1]):
            if not math.isfinite(values[n, k]):
                return False
    return True
