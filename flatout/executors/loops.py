"""Compiled loops over the envs that are ready.

Where envs are ready one by one, most batches have only a few of them, and NumPy's indexing would cost more than
everything else that is done with them. T: time steps, N: envs; observations are passed as rows of bytes.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy.typing as npt

from flatout.device.jit import compiled

Array = npt.NDArray[Any]
_compiled = partial(compiled, nogil=False)


@_compiled
def take_rows(source: Array, cursor: Array, env_indices: Array, out: Array) -> None:
    """out[i] = source[cursor[n], n] for the i-th env index n."""
    for i in range(len(env_indices)):
        n = env_indices[i]
        t = cursor[n]
        for k in range(out.shape[1]):
            out[i, k] = source[t, n, k]


@_compiled
def put_rows(values: Array, cursor: Array, env_indices: Array, out: Array) -> None:
    """out[cursor[n], n] = values[i] for the i-th env index n."""
    for i in range(len(env_indices)):
        n = env_indices[i]
        t = cursor[n]
        for k in range(values.shape[1]):
            out[t, n, k] = values[i, k]


@_compiled
def put_steps(
    reward: Array, terminated: Array, truncated: Array, cursor: Array, env_indices: Array,
    reward_out: Array, terminated_out: Array, truncated_out: Array,
) -> None:  # fmt: skip
    """Store what the steps of these envs returned, at their cursors."""
    for i in range(len(env_indices)):
        n = env_indices[i]
        t = cursor[n]
        reward_out[t, n] = reward[n]
        terminated_out[t, n] = terminated[n]
        truncated_out[t, n] = truncated[n]


@_compiled
def put_obs(
    obs: Array,
    final_obs: Array,
    truncated: Array,
    cursor: Array,
    env_indices: Array,
    obs_out: Array,
    final_out: Array,
) -> None:
    """Store their observations one after their cursors, and the final ones where an episode was truncated."""
    for i in range(len(env_indices)):
        n = env_indices[i]
        t = cursor[n]
        for k in range(obs.shape[1]):
            obs_out[t + 1, n, k] = obs[n, k]
        if truncated[n]:
            for k in range(obs.shape[1]):
                final_out[t, n, k] = final_obs[n, k]


@_compiled
def all_finite(values: Array, env_indices: Array) -> bool:
    """Whether the rows of these envs in `values` (N, size) are free of NaN and infinity."""
    for i in range(len(env_indices)):
        n = env_indices[i]
        for k in range(values.shape[1]):
            if not math.isfinite(values[n, k]):
                return False
    return True
