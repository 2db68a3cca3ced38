"""Market: account-steps/s compared with one env per account, and a trained agent's growth on held-out bars.

`python -m benchmarks.workloads_market [--quick] [--timesteps N] [--seeds 1,2,3]` prints the tables.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np

from benchmarks.page import table
from benchmarks.stepping import Way, alternate
from flatout.envs.spaces import Array
from flatout.workloads.market import Market, MarketAccounts, backtest, buy_and_hold
from tests.workloads.plain_market import PlainAccount

SIZES = (1, 64, 1024, 4096)
PEER_SIZE = 1024
LIGHT = 1_500_000
"""Env steps of each training here; the recipe takes twice as many."""


def stepped(make: Callable[[], Any]) -> tuple[Callable[[], int], Callable[[], None]]:
    """A vector env under random orders, and what closes it."""
    envs = make()
    envs.reset(seed=1)
    n = int(envs.num_envs)
    actions = np.random.default_rng(0).random((64, n, 4), dtype=np.float32)
    t = 0

    def step_all() -> int:
        nonlocal t
        t += 1
        envs.step(actions[t % 64])
        return n

    return step_all, envs.close


def speed(rounds: int, seconds: float) -> list[str]:
    """Account-steps/s by number of accounts, and beside Gymnasium's way with one env per account."""
    ours = f"MarketAccounts, {PEER_SIZE:,}"
    ways: dict[str, Way] = {
        f"MarketAccounts, {n:,}": partial(stepped, partial(MarketAccounts, n)) for n in SIZES
    }
    for kind in (PlainAccount, Market):
        many = partial(gym.vector.SyncVectorEnv, [kind] * PEER_SIZE)
        label = "plain Python" if kind is PlainAccount else "flatout/Market-v0"
        ways[f"Gymnasium Sync, {PEER_SIZE:,} × {label}"] = partial(stepped, many)
    speeds = alternate(ways, rounds, seconds)
    rows = []
    for name in ways:
        rates = speeds[name]
        ratio = statistics.median(a / b for a, b in zip(speeds[ours], rates, strict=True))
        against = "" if "Accounts" in name else f"{ratio:.0f} × slower"
        rows.append([name, f"{statistics.median(rates):,.0f}", against])
    header = ["random orders, 4 assets", "account-steps/s", f"against {ours}"]
    reached = statistics.median(speeds[ours])
    verdict = "reached" if reached >= 1e6 else "MISSED"
    return [*table(header, rows).splitlines(), "", f"Goal at {PEER_SIZE:,}: 1,000,000 ({verdict})."]


def act(agent: Any, obs: Array) -> Array:
    """The agent's greedy orders."""
    actions: Array = agent.predict(obs, deterministic=True)[0]
    return actions


def at_random(rng: np.random.Generator, obs: Array) -> Array:
    """Orders by chance."""
    return rng.random((len(obs), 4))


def learning(timesteps: int | None, seeds: list[int]) -> list[str]:
    """Growth on held-out windows: agents, buy-and-hold and random actions, on the market of regimes and on a random walk."""
    import flatout

    given: dict[str, Any] = {} if timesteps is None else {"timesteps": timesteps}
    rows = []
    for kind in ("regime", "walk"):
        hold = backtest(partial(buy_and_hold, n_assets=4), data=kind)
        chance = backtest(partial(at_random, np.random.default_rng(0)), data=kind)
        agents = []
        for seed in seeds:
            agent = flatout.PPO("market", env_kwargs={"data": kind}, seed=seed, **given).learn()
            agents.append(backtest(partial(act, agent), data=kind))
            cells = [_percent(agents[-1]), _percent(agents[-1], hold), _percent(agents[-1], chance)]
            rows.append([kind, f"agent, seed {seed}", *cells])
        mean = np.mean(agents, axis=0)
        rows.append([kind, "**agents' mean**", _percent(mean), _percent(mean, hold), _percent(mean, chance)])
        rows.append([kind, "buy and hold", _percent(hold), "", ""])
        rows.append([kind, "random", _percent(chance), "", ""])
    header = ["market", "who", "growth", "over holding", "over random"]
    return [*table(header, rows).splitlines(), "", *_notes(len(hold), timesteps)]


def _percent(growth: Array, other: Array | float = 1.0) -> str:
    """Mean and standard error over windows, in percent of the first cash."""
    gain = 100 * (growth - other)
    return f"{gain.mean():+.1f} ± {gain.std() / np.sqrt(len(gain)):.1f} %"


def _notes(n_windows: int, timesteps: int | None) -> list[str]:
    steps = "the recipe's env steps" if timesteps is None else f"{timesteps:,} env steps each"
    return [
        f"Mean growth of the first cash over {n_windows} held-out windows of 250 bars that do not overlap, ± its "
        f"standard error; {steps}. On the walk nobody can gain: whoever does has seen the future."
    ]


def run(quick: bool) -> list[str]:
    """The lines of Market's part of docs/benchmarks.md."""
    if quick:
        return [*speed(3, 0.2), "", *learning(300_000, [1])]
    return [*speed(9, 0.4), "", *learning(LIGHT, [1, 2, 3])]


def main() -> None:
    """Print the tables, with the whole recipe unless told otherwise."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--timesteps", type=int)
    parser.add_argument("--seeds", default="1,2,3")
    args = parser.parse_args()
    seeds = [int(seed) for seed in args.seeds.split(",")]
    lines = run(True) if args.quick else [*speed(9, 0.4), "", *learning(args.timesteps, seeds)]
    print("\n".join(lines))


if __name__ == "__main__":
    main()
