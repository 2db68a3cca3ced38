"""Trading as envs: N accounts at once, or one.

What a way of trading earns on every window of a split, side by side and without overlap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from flatout.envs.spaces import Array
from flatout.errors import FlatoutError
from flatout.workloads.market.chart import draw
from flatout.workloads.market.ledger import BOUND, Journal, Ledger
from flatout.workloads.market.settings import MarketConfig


class MarketAccounts(VectorEnv[Array, Array, Array]):
    """`num_envs` accounts that trade on one history, each in an episode of its own.

    Takes the keywords of MarketConfig. `reset(options={"start": bars})` begins at given bars instead of random ones.
    `infos["equity"]` is each account's equity in multiples of its first cash, `infos["costs"]` what the last orders
    cost in the same unit; of an account whose episode ended, that episode's last.
    """

    def __init__(self, num_envs: int = 1, **settings: Any) -> None:
        config = MarketConfig.of(settings)
        self.num_envs = num_envs
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.ledger = Ledger(config.tables(), config, num_envs)
        self.single_observation_space, self.single_action_space = _spaces(self.ledger)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        """Begin an episode in every account."""
        super().reset(seed=seed)
        _begin_all(self.ledger, self.np_random, options)
        return self.ledger.observe(), {}

    def step(self, actions: Array) -> tuple[Array, Array, Array, Array, dict[str, Any]]:
        """Trade one bar in every account; where an episode ended, the next has begun."""
        ledger = self.ledger
        reward, terminated, truncated = ledger.trade(np.asarray(actions))
        obs = ledger.observe()
        infos: dict[str, Any] = {
            "equity": ledger.equity / ledger.config.cash,
            "costs": ledger.costs / ledger.config.cash,
        }
        ended = terminated | truncated
        n_ended = int(np.count_nonzero(ended))
        if n_ended:
            infos |= {"final_obs": obs, "_final_obs": ended}
            ledger.begin(ended, ledger.draw(self.np_random, n_ended))
            obs = obs.copy()
            obs[ended] = ledger.observe(ended)
        return obs, reward, terminated, truncated, infos


class Market(gym.Env[Array, Array]):
    """One account; the same trades as in MarketAccounts, bar for bar. Takes the keywords of MarketConfig."""

    batched_form = MarketAccounts
    metadata = {"render_modes": ["rgb_array", "ansi"], "render_fps": 20}  # noqa: RUF012  # as Gymnasium has it

    def __init__(self, render_mode: str | None = None, **settings: Any) -> None:
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise FlatoutError(f"render_mode is {render_mode!r}; Market has rgb_array and ansi")
        config = MarketConfig.of(settings)
        self.render_mode = render_mode
        self.ledger = Ledger(config.tables(), config, 1)
        self.observation_space, self.action_space = _spaces(self.ledger)
        self._journal = Journal(self.ledger) if render_mode else None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed)
        _begin_all(self.ledger, self.np_random, options)
        if self._journal is not None:
            self._journal.begin()
        return self.ledger.observe()[0], self._info()

    def step(self, action: Array) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        """Trade one bar."""
        reward, terminated, truncated = self.ledger.trade(np.asarray(action)[None])
        if self._journal is not None:
            self._journal.note()
        return (
            self.ledger.observe()[0],
            float(reward[0]),
            bool(terminated[0]),
            bool(truncated[0]),
            self._info(),
        )

    def render(self) -> Any:
        """The episode so far: a chart, or a line of text."""
        if self._journal is None:
            return None
        return draw(self._journal) if self.render_mode == "rgb_array" else self._journal.line()

    def _info(self) -> dict[str, Any]:
        ledger, cash = self.ledger, self.ledger.config.cash
        return {
            "bar": int(ledger.bar[0]),
            "equity": float(ledger.equity[0] / cash),
            "costs": float(ledger.costs[0] / cash),
        }


def _spaces(ledger: Ledger) -> tuple[spaces.Box, spaces.Box]:
    least = -1.0 if ledger.config.short else 0.0
    return spaces.Box(-BOUND, BOUND, (ledger.n_observed,)), spaces.Box(least, 1.0, (ledger.n_assets,))


def _begin_all(ledger: Ledger, rng: np.random.Generator, options: dict[str, Any] | None) -> None:
    n = len(ledger.bar)
    if options is None or "start" not in options:
        starts = ledger.draw(rng, n)
    else:
        starts = np.broadcast_to(np.asarray(options["start"], np.int64), (n,))
        if starts.min() < ledger.first or starts.max() > ledger.last:
            raise FlatoutError(
                f"start is {options['start']}; {ledger.config.split} episodes begin at bars "
                f"{ledger.first} to {ledger.last}"
            )
    ledger.begin(np.ones(n, np.bool_), starts)


Trader = Callable[[Array], Array]
"""Observations of N accounts in, their actions out."""


def backtest(trader: Trader, **settings: Any) -> Array:
    """Final equity of each window, in multiples of its first cash; held-out windows unless `split` says otherwise."""
    settings = {"split": "test"} | settings
    first, last = (ledger := MarketAccounts(1, **settings).ledger).first, ledger.last
    starts = np.arange(first, last + 1, ledger.config.window)
    accounts = MarketAccounts(len(starts), **settings)
    obs, _ = accounts.reset(options={"start": starts})
    out, going = np.ones(len(starts)), np.ones(len(starts), np.bool_)
    for _ in range(ledger.config.window):
        obs, _, terminated, _, infos = accounts.step(trader(obs))
        out[going] = infos["equity"][going]
        going &= ~terminated
    return out


def buy_and_hold(obs: Array, n_assets: int) -> Array:
    """A trader: all cash into equal parts at the first bar, then left alone."""
    shares = obs[:, -2 - n_assets : -2]
    return np.where(obs[:, -2:-1] > 0.99, 1 / n_assets, shares)
