"""Prioritized replay compared with peers: sampling and updating, adding, and the cost of size.

The ways of a case are all opened in one process and alternate in short turns. A peer that is not installed is left out
and named. `python -m benchmarks.replay [--rounds 15] [--seconds 0.3]` → docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from benchmarks.page import conditions, table, write_section
from benchmarks.stepping import Way, alternate
from flatout.buffers.batch import alloc_batch
from flatout.buffers.priority import Prioritized
from flatout.buffers.replay import Replay
from flatout.buffers.rollout import Rollout
from flatout.envs.spaces import ActionLayout, ObsLayout

BATCH = 256
CAPACITY = 1_000_000
N_ENVS = 32
OBS_SIZE = 4
ALPHA, BETA = 0.6, 0.4
SIZES = (10_000, 100_000, 1_000_000, 10_000_000)
ERRORS = np.random.default_rng(1).exponential(size=(64, BATCH)).astype(np.float32)

Opened = tuple[Callable[[], int], Callable[[], None]]


class Steps:
    """Random transitions of 32 envs, the same for everyone."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.obs = rng.normal(size=(64, N_ENVS, OBS_SIZE)).astype(np.float32)
        self.action = rng.integers(2, size=(64, N_ENVS))
        self.reward = rng.normal(size=(64, N_ENVS)).astype(np.float32)
        self.terminated = rng.random((64, N_ENVS)) < 0.01
        self.truncated = rng.random((64, N_ENVS)) < 0.005


def spread(n: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Different priorities for all transitions, as after learning."""
    return np.random.default_rng(2).exponential(size=n).astype(np.float32)


def filled(capacity: int) -> tuple[Prioritized, Callable[[int], None]]:
    """flatout's buffer, full, with a priority of its own for each transition; and what adds a step of 32 envs."""
    obs, action = ObsLayout(spaces.Box(-9, 9, (OBS_SIZE,))), ActionLayout(spaces.Discrete(2))
    replay, steps = Replay(obs, action, N_ENVS, capacity), Steps()
    sampler = Prioritized(replay, gamma=0.99, alpha=ALPHA)
    rollouts = []
    for k in range(64):
        rollout = Rollout.alloc(obs, action, 1, N_ENVS)
        rollout.obs[0][:] = steps.obs[k - 1], steps.obs[k]
        rollout.final_obs[0][0] = steps.obs[k]
        rollout.action[0, :, 0], rollout.reward[0] = steps.action[k], steps.reward[k]
        rollout.terminated[0], rollout.truncated[0] = steps.terminated[k], steps.truncated[k]
        rollouts.append(rollout)

    def add(k: int) -> None:
        replay.add_rollout(rollouts[k % 64])

    for k in range(capacity // N_ENVS + 1):
        add(k)
    index = np.flatnonzero(sampler.priorities)
    lifted, serial = torch.from_numpy(index), torch.from_numpy(replay.serials(index))
    sampler.update(lifted, serial, torch.from_numpy(spread(len(index))))
    return sampler, add


def flatout_draws(capacity: int, *, again: bool) -> Opened:
    """Sample and update; with `again` in the same memory each time, as the learner's loop does it."""
    sampler, _ = filled(capacity)
    replay, errors, k = sampler.replay, torch.from_numpy(ERRORS), 0
    out = alloc_batch(replay.obs_layout, replay.action_layout, BATCH) if again else None

    def once() -> int:
        nonlocal k
        k += 1
        batch = sampler.sample(BATCH, BETA, out)
        sampler.update(batch.index, batch.serial, errors[k % 64])
        return 1

    return once, lambda: None


def flatout_adds() -> Opened:
    """32 transitions, with their priorities entered into the tree."""
    sampler, add = filled(CAPACITY)
    k = 0

    def once() -> int:
        nonlocal k
        k += 1
        add(k)
        _ = sampler.priorities
        return 1

    return once, lambda: None


def cpprb_buffer() -> tuple[Any, Callable[[int], None]]:
    """cpprb's buffer, full."""
    from cpprb import PrioritizedReplayBuffer

    fields = {
        "obs": {"shape": OBS_SIZE},
        "act": {"dtype": np.int64},
        "rew": {},
        "next_obs": {"shape": OBS_SIZE},
        "done": {},
    }
    buffer, steps = PrioritizedReplayBuffer(CAPACITY, fields, alpha=ALPHA), Steps()
    done = steps.terminated.astype(np.float32)

    def add(k: int) -> None:
        k %= 64
        seen, after = steps.obs[k - 1], steps.obs[k]
        buffer.add(obs=seen, act=steps.action[k], rew=steps.reward[k], next_obs=after, done=done[k])

    for k in range(CAPACITY // N_ENVS + 1):
        add(k)
    buffer.update_priorities(np.arange(CAPACITY), spread(CAPACITY))
    return buffer, add


def cpprb_draws() -> Opened:
    """Sample and update."""
    buffer, _ = cpprb_buffer()
    k = 0

    def once() -> int:
        nonlocal k
        k += 1
        batch = buffer.sample(BATCH, BETA)
        buffer.update_priorities(batch["indexes"], ERRORS[k % 64])
        return 1

    return once, lambda: None


def cpprb_adds() -> Opened:
    """32 transitions at once."""
    _, add = cpprb_buffer()
    k = 0

    def once() -> int:
        nonlocal k
        k += 1
        add(k)
        return 1

    return once, lambda: None


def tianshou_draws() -> Opened:
    """Sample and update. Its own adding would take minutes to fill the buffer, so its arrays are filled at once."""
    from tianshou.data import Batch, PrioritizedReplayBuffer

    buffer, steps = PrioritizedReplayBuffer(CAPACITY, alpha=ALPHA, beta=BETA), Steps()
    zero, no = np.zeros(OBS_SIZE, np.float32), False
    first = Batch(obs=zero, act=0, rew=0.0, terminated=no, truncated=no, done=no, obs_next=zero, info=Batch())
    buffer.add(first)
    repeats = -(-CAPACITY // (64 * N_ENVS))
    for name, values in (
        ("obs", steps.obs),
        ("obs_next", steps.obs),
        ("rew", steps.reward),
        ("act", steps.action),
    ):
        flat = values.reshape(64 * N_ENVS, *values.shape[2:])
        buffer._meta[name][:] = np.concatenate([flat] * repeats)[:CAPACITY]
    buffer._size = CAPACITY
    buffer.update_weight(np.arange(CAPACITY), spread(CAPACITY))
    assert len(buffer) == CAPACITY, "Tianshou's buffer is not full"
    k = 0

    def once() -> int:
        nonlocal k
        k += 1
        _, index = buffer.sample(BATCH)
        buffer.update_weight(index, ERRORS[k % 64])
        return 1

    return once, lambda: None


def tianshou_adds() -> Opened:
    """32 transitions, one of each env."""
    from tianshou.data import Batch, PrioritizedVectorReplayBuffer

    buffer, steps = PrioritizedVectorReplayBuffer(CAPACITY, N_ENVS, alpha=ALPHA, beta=BETA), Steps()
    ids, k = np.arange(N_ENVS), 0

    def once() -> int:
        nonlocal k
        k = (k + 1) % 64
        batch = Batch(
            obs=steps.obs[k - 1],
            act=steps.action[k],
            rew=steps.reward[k],
            terminated=steps.terminated[k],
            truncated=steps.truncated[k],
            done=steps.terminated[k] | steps.truncated[k],
            obs_next=steps.obs[k],
            info=Batch(),
        )
        buffer.add(batch, buffer_ids=ids)
        return 1

    return once, lambda: None


CASES: dict[str, dict[str, Way]] = {
    f"1. Prioritized sample + update, batch {BATCH}, {CAPACITY:,} transitions": {
        "flatout": partial(flatout_draws, CAPACITY, again=False),
        "flatout, reusing the batch's memory": partial(flatout_draws, CAPACITY, again=True),
        "Tianshou": tianshou_draws,
        "cpprb": cpprb_draws,
    },
    f"2. Adding {N_ENVS} transitions, {CAPACITY:,} stored": {
        "flatout": flatout_adds,
        "Tianshou": tianshou_adds,
        "cpprb": cpprb_adds,
    },
}


def case(title: str, ways: dict[str, Way], rounds: int, seconds: float) -> str:
    """Times of each way and their ratios to flatout's, both as medians over the rounds."""
    times = {name: [1e6 / x for x in speeds] for name, speeds in alternate(ways, rounds, seconds).items()}
    rows = []
    for name, values in times.items():
        if not values:
            rows.append([name, "not installed", "", ""])
            continue
        ratios = [mine / value for mine, value in zip(times["flatout"], values, strict=True)]
        cells = [f"{statistics.median(values):,.1f} µs", f"{statistics.median(ratios):.2f}"]
        rows.append([name, *cells, f"{min(ratios):.2f} to {max(ratios):.2f}"])
    return f"**{title}**\n\n" + table(["", "time", "flatout ÷ this", "range of the ratio"], rows)


def cost_by_size(rounds: int, seconds: float) -> str:
    """Sample and update against the number of transitions."""
    ways: dict[str, Way] = {f"{n:,}": partial(flatout_draws, n, again=True) for n in SIZES}
    times = [[1e6 / x for x in speeds] for speeds in alternate(ways, rounds, seconds).values()]
    rows = []
    for n, values in zip(SIZES, times, strict=True):
        ratio = statistics.median(value / first for value, first in zip(values, times[0], strict=True))
        logs = math.log(n) / math.log(SIZES[0])
        rows.append([f"{n:,}", f"{statistics.median(values):,.1f} µs", f"{ratio:.2f}", f"{logs:.2f}"])
    header = ["transitions", "time", f"÷ {SIZES[0]:,}", f"log N ÷ log {SIZES[0]:,}"]
    return f"**3. Sample + update, batch {BATCH}, by number of transitions**\n\n" + table(header, rows)


def main() -> None:
    """Alternate the ways of each case and write the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--cases", default="")
    args = parser.parse_args()
    torch.set_num_threads(1)
    parts = [
        case(title, ways, args.rounds, args.seconds)
        for title, ways in CASES.items()
        if title.startswith(args.cases)
    ]
    if "3".startswith(args.cases):
        parts.append(cost_by_size(args.rounds, args.seconds))
    if args.cases:
        print("\n\n".join(parts))
        return
    intro = (
        f"## Replay\n\n`python -m benchmarks.replay`: all rows of a table in one process, taking turns of "
        f"{args.seconds:g} s, {args.rounds} rounds. Medians; ratios are taken within a round. Observations of {OBS_SIZE} floats, {N_ENVS} envs, α {ALPHA}, "
        f"β {BETA}.\n{conditions()}\n\n"
    )
    write_section("replay", intro + "\n\n".join(parts))


if __name__ == "__main__":
    main()
