"""Compiled loops over a replay in RAM: storing steps, drawing slots, gathering n-step transitions.

N envs with M slots each; slot i = n · M + t. Slot numbers of an env count up forever, t is that number modulo M.
Random numbers are SplitMix64 (Steele, Lea and Flood 2014), a pure function of (seed, draw, place): there is no
generator state to save or to share between threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from flatout.device.jit import compiled
from flatout.envs.spaces import Array

GOES_ON, TERMINATED, TRUNCATED, EMPTY = 0, 1, 2, 3
"""How a slot's transition ended; an empty slot has none: it is unwritten, or holds an env's newest or a final observation."""

_WORD = 0xFFFFFFFFFFFFFFFF
_WEYL, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_U_WEYL, _U_MIX1, _U_MIX2 = np.uint64(_WEYL), np.uint64(_MIX1), np.uint64(_MIX2)
_U11, _U27, _U30, _U31 = np.uint64(11), np.uint64(27), np.uint64(30), np.uint64(31)

Rings = tuple[int, Array, Array, Array]
"""A replay's n_slots, head, start and end; see `replay.Rings`."""
Data = tuple[Array, Array]
"""Actions and rewards of all slots."""


def _prefetch(_typing: Any, array: Any, place: Any) -> Any:
    """Prefetch an element of a flat array into the cache."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        pointer, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        address = builder.bitcast(builder.gep(data, [args[1]]), pointer)
        kind = ir.FunctionType(ir.VoidType(), [pointer, word, word, word])
        call = builder.module.declare_intrinsic("llvm.prefetch.p0", (), kind)
        builder.call(call, [address, word(0), word(3), word(1)])  # to read, to keep, data
        return context.get_dummy_value()

    return types.void(array, place), generate


prefetch: Any = intrinsic(_prefetch)


def draw_key(seed: int, draw: int) -> np.uint64:
    """The key of draw number `draw`, for `uniform`."""
    key = _mix((seed & _WORD) * _WEYL + _WEYL)
    return np.uint64(_mix(key + (draw + 1) * _WEYL))


def _mix(x: int) -> int:
    x &= _WORD
    x = ((x ^ (x >> 30)) * _MIX1) & _WORD
    x = ((x ^ (x >> 27)) * _MIX2) & _WORD
    return x ^ (x >> 31)


@compiled
def uniform(key: Any, place: int) -> float:
    """The number at `place` of a key's stream, strictly between 0 and 1."""
    x = key + np.uint64(place + 1) * _U_WEYL
    x = (x ^ (x >> _U30)) * _U_MIX1
    x = (x ^ (x >> _U27)) * _U_MIX2
    x = x ^ (x >> _U31)
    # 53 bits, of which the last is always set: the upper end cannot round to 1.
    return float((x >> _U11) | np.uint64(1)) * 2.0**-53


@compiled
def fill_uniforms(key: Any, out: Any) -> None:
    """The first numbers of a key's stream."""
    for i in range(len(out)):
        out[i] = uniform(key, i)


@compiled
def slot_of(n: int, number: int, n_slots: int) -> int:
    """The slot of an env's slot number."""
    return n * n_slots + number % n_slots


@compiled
def advance(steps: tuple[Array, ...], rings: Rings, data: Data, obs_at: Array, final_at: Array) -> None:
    """Store (T, N) transitions: action, reward, terminated, truncated.

    Writes to `obs_at` and `final_at` the numbers of the slots that take the next observations.
    """
    action, reward, terminated, truncated = steps
    n_slots, head, start, end = rings
    action_out, reward_out = data
    for t in range(reward.shape[0]):
        for n in range(reward.shape[1]):
            here = slot_of(n, head[n], n_slots)
            for j in range(action.shape[2]):
                action_out[here, j] = action[t, n, j]
            reward_out[here] = reward[t, n]
            head[n] += 1
            final_at[t, n] = -1
            end[here] = GOES_ON
            if terminated[t, n]:
                end[here] = TERMINATED
                start[n] = head[n]
            elif truncated[t, n]:
                end[here] = TRUNCATED
                final_at[t, n] = head[n]
                end[slot_of(n, head[n], n_slots)] = EMPTY
                head[n] += 1
                start[n] = head[n]
            obs_at[t, n] = head[n]
            end[slot_of(n, head[n], n_slots)] = EMPTY


@compiled
def put(obs_at: Array, obs: Array, final_at: Array, final_obs: Array, out: Array, n_before: int) -> None:
    """Write (T, N, bytes) observations to their slots in order of time, of stacked frames the last; see `frame_slot`.

    `obs_at`, `final_at`: numbers of the slots; a negative one of a final observation means none.
    """
    n_slots, width = out.shape[0] // obs_at.shape[1], out.shape[1]
    older = obs.shape[2] - width
    for t in range(obs_at.shape[0]):
        for n in range(obs_at.shape[1]):
            if final_at[t, n] >= 0:
                slot = frame_slot(n, final_at[t, n], n_slots, n_before)
                for j in range(width):
                    out[slot, j] = final_obs[t, n, older + j]
            slot = frame_slot(n, obs_at[t, n], n_slots, n_before)
            for j in range(width):
                out[slot, j] = obs[t, n, older + j]


@compiled
def frame_slot(n: int, number: int, n_slots: int, n_before: int) -> int:
    """The slot of a frame in a ring of its own, which has `n_before` slots more than there are steps."""
    return n * n_slots + (number + n_before) % n_slots


@compiled
def put_ages(
    first: Array, obs_at: Array, final_at: Array, ended: Array, n_slots: int, max_age: int, age: Array
) -> None:
    """Write how many frames of its episode came before each observation, at most `max_age`.

    `first`: numbers of the slots that the envs acted from first.
    """
    for n in range(obs_at.shape[1]):
        at = first[n]
        for t in range(obs_at.shape[0]):
            older = min(age[slot_of(n, at, n_slots)] + 1, max_age)
            if final_at[t, n] >= 0:
                age[slot_of(n, final_at[t, n], n_slots)] = older
            at = obs_at[t, n]
            age[slot_of(n, at, n_slots)] = 0 if ended[t, n] else older


@compiled
def take_frames(frames: Array, age: Array, index: Array, rings: Rings, n_before: int, out: Array) -> None:
    """out[b] = the stacked frames of the observation in slot index[b], the oldest first."""
    n_slots, head, width = rings[0], rings[1], frames.shape[1]
    n_frames, stack = frames.shape[0] // len(head), out.shape[1] // width
    for b in range(len(index)):
        n, slot = index[b] // n_slots, index[b]
        number = head[n] - (head[n] - slot % n_slots) % n_slots
        for k in range(stack):
            back = min(stack - 1 - k, np.int64(age[slot]))
            source = frame_slot(n, number - back, n_frames, n_before)
            for j in range(width):
                out[b, k * width + j] = frames[source, j]


@compiled
def windows(index: Array, gamma: float, n_step: int, rings: Rings, data: Data, out: tuple[Array, ...]) -> int:
    """Action, n-step return, discount, bootstrap slot and slot number of each index.

    Returns the first place in `index` without a transition, or -1.
    """
    n_slots, head, _, end = rings
    action, reward = data
    action_out, return_out, discount_out, next_out, serial_out = out
    flat_action, width = action.reshape(-1), action.shape[1]
    for b in range(len(index)):
        prefetch(reward, index[b])
        prefetch(end, index[b])
        prefetch(flat_action, index[b] * width)
    for b in range(len(index)):
        slot = index[b]
        if slot < 0 or slot >= len(end) or end[slot] == EMPTY:
            return b
        for j in range(width):
            action_out[b, j] = action[slot, j]
        n, t = slot // n_slots, slot % n_slots
        n_stored = (head[n] - t) % n_slots
        serial_out[b] = head[n] - n_stored
        total, discount, m = 0.0, 1.0, 0
        while True:
            total += discount * reward[slot]
            discount *= gamma
            m += 1
            how = end[slot]
            slot, t = slot + 1, t + 1
            if t == n_slots:
                slot, t = slot - n_slots, 0
            if how == TERMINATED:
                discount = 0.0
            if how != GOES_ON or m in (n_step, n_stored):
                break
        return_out[b], discount_out[b], next_out[b] = total, discount, slot
    return -1


@compiled
def take_two(source: Array, index: Array, next_index: Array, out: Array, next_out: Array) -> None:
    """out[b] = source[index[b]], and the same for the next index, whose memory is mostly near."""
    flat, width = source.reshape(-1), source.shape[1]
    for b in range(len(index)):
        prefetch(flat, index[b] * width)
        prefetch(flat, next_index[b] * width)
    for b in range(len(index)):
        i, k = index[b], next_index[b]
        for j in range(out.shape[1]):
            out[b, j] = source[i, j]
        for j in range(out.shape[1]):
            next_out[b, j] = source[k, j]


@compiled
def first_and_end(n: int, n_step: int, rings: Rings) -> tuple[int, int]:
    """The range of an env's slot numbers whose whole n-step window is stored; some of the slots may be empty."""
    n_slots, head, start = rings[:3]
    first = max(0, head[n] - n_slots + 1)
    return first, max(first, start[n], head[n] - n_step + 1)


@compiled
def draw_uniform(key: Any, n_step: int, rings: Rings, index_out: Array) -> bool:
    """Fill `index_out` with eligible slots, all equally likely; false if there are none."""
    n_slots, head, end = rings[0], rings[1], rings[3]
    n_envs, total, upto = len(head), 0, np.empty(len(head), np.int64)
    for n in range(n_envs):
        first, last = first_and_end(n, n_step, rings)
        total += last - first
        upto[n] = total
    if total == 0:
        return False
    place = 0
    for b in range(len(index_out)):
        slot = -1
        # At most every second slot of the range is empty: few tries are needed.
        while slot < 0 or end[slot] == EMPTY:
            nth = min(int(uniform(key, place) * total), total - 1)
            place += 1
            low, high = 0, n_envs - 1
            while low < high:
                middle = (low + high) // 2
                if upto[middle] > nth:
                    high = middle
                else:
                    low = middle + 1
            _, last = first_and_end(low, n_step, rings)
            slot = slot_of(low, last - (upto[low] - nth), n_slots)
        index_out[b] = slot
    return True
