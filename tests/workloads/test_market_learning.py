"""A trained agent beats the market where past prices carry information, and only there."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import flatout
from flatout.envs.spaces import Array
from flatout.workloads.market import backtest, buy_and_hold

LIGHT: dict[str, Any] = {
    "n_envs": 256,
    "n_steps": 16,
    "batch_size": 2048,
    "learning_rate": 3e-3,
    "network_arch": (32, 32),
    "compile": "off",
}


def deviations(gains: Array) -> float:
    """How many standard errors the mean is above 0."""
    return float(gains.mean() / (gains.std() / np.sqrt(len(gains))))


def act(agent: flatout.PPO, obs: Array) -> Array:
    actions: Array = agent.predict(obs, deterministic=True)[0]
    return actions


def at_random(rng: np.random.Generator, obs: Array) -> Array:
    return rng.random((len(obs), 2))


@pytest.fixture(scope="module")
def held_out() -> dict[str, dict[str, Array]]:
    """Growth on each held-out window of both markets: of a lightly trained agent, of holding, of chance."""
    out = {}
    for kind in ("regime", "walk"):
        market: dict[str, Any] = {"data": kind, "assets": 2, "window": 100}
        agent = flatout.PPO("market", env_kwargs=market, seed=1, **LIGHT).learn(160_000)
        out[kind] = {
            "agent": backtest(partial(act, agent), **market),
            "hold": backtest(partial(buy_and_hold, n_assets=2), **market),
            "random": backtest(partial(at_random, np.random.default_rng(0)), **market),
        }
    return out


def test_on_held_out_regimes_the_agent_beats_buy_and_hold_and_random_actions(
    held_out: dict[str, dict[str, Array]],
) -> None:
    growth = held_out["regime"]
    assert len(growth["agent"]) == 99
    assert deviations(growth["agent"] - growth["hold"]) > 3
    assert deviations(growth["agent"] - growth["random"]) > 3
    assert deviations(growth["agent"] - 1) > 3


def test_on_a_random_walk_the_agent_beats_neither_cash_nor_buy_and_hold(
    held_out: dict[str, dict[str, Array]],
) -> None:
    """Prices there are expected to stay where they are, so whoever gains on held-out bars has seen the future."""
    growth = held_out["walk"]
    assert deviations(growth["agent"] - 1) < 2.5
    assert deviations(growth["agent"] - growth["hold"]) < 2.5


def test_buy_and_hold_trades_once() -> None:
    market: dict[str, Any] = {"assets": 2, "bars": 1_000, "window": 50, "slippage": 0.0, "fee": 0.01}
    free = backtest(partial(buy_and_hold, n_assets=2), **(market | {"fee": 0.0}))
    paid = backtest(partial(buy_and_hold, n_assets=2), **market)
    np.testing.assert_allclose(paid / free, 1 - 0.01, atol=2e-3)
    cash = backtest(lambda obs: np.zeros((len(obs), 2)), **market)
    np.testing.assert_array_equal(cash, 1.0)
