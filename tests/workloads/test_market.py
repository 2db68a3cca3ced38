"""Market: trades, costs and limits equal a plain Python account and closed forms; no observation uses the future."""

from __future__ import annotations

import dataclasses
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import flatout
from flatout.config.run_config import resolve
from flatout.envs.spaces import Array
from flatout.errors import FlatoutError
from flatout.workloads.market import Bars, Market, MarketAccounts
from flatout.workloads.market.data import COLUMNS, FEATURES, LONGEST, generate
from tests.workloads.plain_market import PlainAccount, plain_features

SMALL: dict[str, Any] = {"bars": 1_000, "window": 40}


def changed(bars: Bars, rows: Array, source: Array) -> Bars:
    """The bars with `rows` taken from `source` instead."""
    out = {name: getattr(bars, name).copy() for name in COLUMNS}
    for values in out.values():
        values[rows] = values[source]
    return Bars(bars.names, **out)


def flat_market(n_bars: int, prices: Array) -> Bars:
    """One asset that moves only between bars, never within one, and is traded without end."""
    close = prices[:n_bars, None]
    return Bars(("A",), close, close, close, close, np.full_like(close, 1e12))


def test_the_envs_pass_gymnasiums_checker(recwarn: pytest.WarningsRecorder) -> None:
    check_env(gym.make("flatout/Market-v0").unwrapped)
    check_env(gym.make("flatout/Market-v0", short=True, assets=1, render_mode="rgb_array").unwrapped)
    assert not recwarn.list


HARSH = {"short": True, "max_leverage": 3.0, "max_position": 2.0, "fee": 0.01, "slippage": 30.0, "ruin": 0.8}


@pytest.mark.parametrize("settings", [{}, HARSH, {"min_order": 0.3, "max_position": 0.5, "assets": 2}])
def test_every_account_trades_like_one_in_plain_python(settings: dict[str, Any]) -> None:
    n = 8
    accounts = MarketAccounts(n, **SMALL, **settings)
    obs, _ = accounts.reset(seed=3)
    plain = [PlainAccount(**SMALL, **settings) for _ in range(n)]
    starts = accounts.ledger.bar.copy()
    first = np.stack([p.reset(options={"start": s})[0] for p, s in zip(plain, starts, strict=True)])
    np.testing.assert_array_equal(obs, first)
    rng, n_ended = np.random.default_rng(0), {"terminated": 0, "truncated": 0}
    low = accounts.single_action_space.low[0]  # type: ignore[attr-defined]
    for _ in range(200):
        actions = rng.uniform(low, 1, (n, accounts.ledger.n_assets)).astype(np.float32)
        actions[rng.random(actions.shape) < 0.2] = 0.0
        obs, reward, terminated, truncated, infos = accounts.step(actions)
        for i, account in enumerate(plain):
            expected = account.step(actions[i])
            final = infos["final_obs"][i] if terminated[i] or truncated[i] else obs[i]
            np.testing.assert_allclose(final, expected[0], rtol=1e-5, atol=1e-6)
            assert reward[i] == pytest.approx(expected[1], abs=1e-8)
            assert (terminated[i], truncated[i]) == expected[2:4]
            assert infos["equity"][i] == pytest.approx(expected[4]["equity"], rel=1e-10)
            assert infos["costs"][i] == pytest.approx(expected[4]["costs"], abs=1e-12)
            n_ended["terminated"] += int(terminated[i])
            n_ended["truncated"] += int(truncated[i])
            if terminated[i] or truncated[i]:
                first_obs, _ = account.reset(options={"start": accounts.ledger.bar[i]})
                np.testing.assert_array_equal(obs[i], first_obs)
    assert n_ended["truncated"] + n_ended["terminated"] >= 4 * n
    assert (n_ended["terminated"] > 0) == (settings is HARSH)


def test_one_account_alone_is_the_same_as_one_of_many() -> None:
    alone, accounts = Market(**SMALL), MarketAccounts(1, **SMALL)
    obs, _ = alone.reset(seed=7)
    np.testing.assert_array_equal(obs, accounts.reset(seed=7)[0][0])
    rng = np.random.default_rng(1)
    for _ in range(SMALL["window"]):
        action = rng.random(4).astype(np.float32)
        one, many = alone.step(action), accounts.step(action[None])
        assert one[1:4] == (many[1][0], many[2][0], many[3][0])
        assert one[4]["equity"] == many[4]["equity"][0]
    assert one[3]
    np.testing.assert_array_equal(one[0], many[4]["final_obs"][0])


def test_features_use_only_earlier_bars() -> None:
    accounts = MarketAccounts(1, **SMALL)
    obs, _ = accounts.reset(options={"start": 200})
    assert obs.shape == (1, 4 * len(FEATURES) + 4 + 2)
    expected = [plain_features(accounts.ledger.bars, 200, a) for a in range(4)]
    np.testing.assert_allclose(obs[0, :44].reshape(4, -1), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(obs[0, 44:], [0, 0, 0, 0, 1, 0])


def test_buy_and_hold_earns_the_price_change_minus_the_fee() -> None:
    bars = flat_market(400, np.exp(np.random.default_rng(0).normal(0, 0.02, 400).cumsum()))
    env = Market(data=bars, window=50, fee=0.002, slippage=0.0)
    env.reset(options={"start": 100})
    rewards = [env.step(np.ones(1, np.float32))[1] for _ in range(50)]
    bought = 1 - 0.002 / (1 - 0.002)
    paid = 0.002 * bought
    expected = bought * bars.close[150, 0] / bars.close[101, 0] + (1 - bought - paid)
    assert env.ledger.equity[0] / env.ledger.config.cash == pytest.approx(expected, rel=1e-5)
    assert sum(rewards) == pytest.approx(100 * np.log(expected), abs=1e-3)


def test_slippage_grows_with_the_root_of_the_order() -> None:
    prices = np.exp(np.random.default_rng(0).normal(0, 0.01, 400).cumsum())
    costs = []
    for cash in (1e6, 4e6):
        env = Market(data=flat_market(400, prices), window=50, fee=0.0, cash=cash)
        env.reset(options={"start": 100})
        costs.append(env.step(np.full(1, 0.5, np.float32))[4]["costs"])
    volatility = np.sqrt(np.mean(np.diff(np.log(prices[40:101])) ** 2))
    share = 0.5e6 / np.mean(1e12 * prices[81:101])
    assert costs[0] == pytest.approx(0.5 * volatility * np.sqrt(share), rel=1e-3)
    assert costs[1] / costs[0] == pytest.approx(2, rel=1e-3)


def test_an_account_in_cash_keeps_its_equity() -> None:
    accounts = MarketAccounts(16, **SMALL)
    accounts.reset(seed=0)
    for _ in range(39):
        obs, reward, *_, infos = accounts.step(np.zeros((16, 4), np.float32))
        assert not reward.any()
        assert (infos["equity"] == 1).all()
    np.testing.assert_array_equal(obs[:, 44:], [[0, 0, 0, 0, 1, 0]] * 16)


@pytest.mark.parametrize("leverage", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("short", [False, True])
def test_no_order_breaks_a_limit(short: bool, leverage: float) -> None:
    """Seen at the close of bars that do not move after their open, at costs that would break limits first."""
    made = generate("regime", 1_000, 3, 0)
    bars = Bars(made.names, made.close, made.close, made.close, made.close, made.volume)
    settings = {"short": short, "max_leverage": leverage, "max_position": 0.9, "fee": 0.05, "slippage": 50.0}
    accounts = MarketAccounts(64, data=bars, window=200, ruin=0.001, **settings)
    accounts.reset(seed=0)
    ledger, rng = accounts.ledger, np.random.default_rng(0)
    for _ in range(150):
        accounts.step(rng.uniform(-1.5, 1.5, (64, 3)))
        shares = ledger.holdings / ledger.equity
        assert np.abs(shares).sum(axis=0).max() <= leverage + 1e-9
        assert np.abs(shares).max() <= 0.9 + 1e-9
        if not short:
            assert shares.min() >= 0
        if leverage <= 1:
            assert ledger.cash.min() >= -1e-6 * ledger.config.cash


def play(bars: Bars, start: int, n_steps: int, **settings: Any) -> list[Array]:
    """Everything that an account with fixed random orders sees and earns."""
    accounts = MarketAccounts(1, data=bars, **settings)
    seen = [accounts.reset(seed=0, options={"start": start})[0]]
    rng = np.random.default_rng(5)
    for _ in range(n_steps):
        obs, reward, terminated, truncated, infos = accounts.step(rng.random((1, len(bars.names))))
        account = np.concatenate([accounts.ledger.holdings[:, 0], accounts.ledger.cash])
        seen += [obs, reward, terminated, truncated, infos["equity"], infos["costs"], account]
    return seen


@pytest.mark.parametrize("kind", ["regime", "walk"])
def test_the_future_does_not_change_the_past(kind: str) -> None:
    """Whatever comes after bar t, shuffled here: observations, rewards and accounts up to t are the same bits."""
    bars, rng = generate(kind, 1_000, 4, 0), np.random.default_rng(0)
    for start, n_steps in ((100, 1), (100, 60), (400, 100)):
        t = start + n_steps
        future = np.arange(t + 1, len(bars))
        other = changed(bars, future, rng.permutation(future))
        before, after = (play(b, start, n_steps, window=150) for b in (bars, other))
        for one, same in zip(before, after, strict=True):
            np.testing.assert_array_equal(one, same)
        last = changed(bars, future - 1, rng.permutation(future))
        assert not np.array_equal(play(last, start, n_steps, window=150)[-2:], before[-2:]), (
            "t itself matters"
        )


def test_training_and_held_out_bars_do_not_overlap() -> None:
    bars = generate("regime", 1_000, 4, 0)
    train, test = (
        MarketAccounts(1, data=bars, split=split, window=100).ledger for split in ("train", "test")
    )
    assert (train.first, train.last + 100) == (LONGEST, 749)
    assert (test.first, test.last + 100) == (750 + LONGEST, 999)
    old, new = np.arange(750), np.arange(750, 1_000)
    later = changed(bars, new, new[::-1])
    for one, same in zip(*(play(b, train.last, 100, window=100) for b in (bars, later)), strict=True):
        np.testing.assert_array_equal(one, same)
    earlier = changed(bars, old, old[::-1])
    ways = [play(b, test.first, 100, window=100, split="test") for b in (bars, earlier)]
    for one, same in zip(*ways, strict=True):
        np.testing.assert_allclose(one, same, rtol=1e-5, atol=1e-6)


def test_a_ruined_account_terminates_and_is_reset() -> None:
    prices = np.exp(np.random.default_rng(0).normal(0, 0.001, 400).cumsum())
    prices[105:] *= 0.5
    accounts = MarketAccounts(2, data=flat_market(400, prices), window=50, max_leverage=3, max_position=3)
    accounts.reset(options={"start": [100, 120]})
    for _ in range(5):
        obs, reward, terminated, truncated, infos = accounts.step(np.ones((2, 1), np.float32))
    assert terminated.tolist() == [True, False]
    assert not truncated.any()
    assert infos["_final_obs"].tolist() == [True, False]
    assert infos["final_obs"][0, -1] < -1, "more was lost than there was"
    assert infos["equity"][0] < 0
    assert reward[0] == pytest.approx(100 * np.log(1e-3), rel=0.05)
    assert obs[0, -3:].tolist() == [0, 1, 0]


def test_the_same_seed_gives_the_same_episodes() -> None:
    accounts = MarketAccounts(200, **SMALL)
    firsts = []
    for seed in (1, 1, 2):
        accounts.reset(seed=seed)
        firsts.append(accounts.ledger.bar.copy())
    assert np.array_equal(firsts[0], firsts[1])
    assert not np.array_equal(firsts[0], firsts[2])
    assert firsts[0].min() >= accounts.ledger.first
    assert firsts[0].max() <= accounts.ledger.last
    assert len(set(firsts[0].tolist())) > 100
    one, same, other = (generate("regime", 100, 2, seed).close for seed in (0, 0, 1))
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)


def test_returned_observations_are_not_overwritten() -> None:
    accounts = MarketAccounts(4, **SMALL)
    first, _ = accounts.reset(seed=0)
    kept = first.copy()
    second = accounts.step(np.ones((4, 4), np.float32))[0]
    again = second.copy()
    accounts.step(np.zeros((4, 4), np.float32))
    np.testing.assert_array_equal(first, kept)
    np.testing.assert_array_equal(second, again)


def predictability(kind: str, leak: int = 0) -> float:
    """How a linear forecast of the next bar, fitted on training bars, correlates with held-out ones, in deviations.

    With a `leak`, features are those of so many bars later."""
    accounts = MarketAccounts(1, data=kind)
    ledger = accounts.ledger
    tables, cut = ledger._tables, ledger.last + ledger.config.window
    features = np.roll(tables.observed[:, :44].reshape(-1, 4, len(FEATURES)), -leak, axis=0)
    gains = np.log(tables.moves[0, :, 1:] * tables.moves[1, :, 1:]).T
    x, y = features[LONGEST:cut].reshape(-1, len(FEATURES)), gains[LONGEST:cut].reshape(-1)
    weights = np.linalg.lstsq(np.c_[x, np.ones(len(x))], y, rcond=None)[0]
    held = features[cut + LONGEST : -1].reshape(-1, len(FEATURES))
    forecast = np.c_[held, np.ones(len(held))] @ weights
    result = gains[cut + LONGEST :].reshape(-1)
    return float(np.corrcoef(forecast, result)[0, 1] * np.sqrt(len(held)))


def test_past_prices_predict_regimes_and_not_a_random_walk() -> None:
    assert predictability("regime") > 6
    assert abs(predictability("walk")) < 3
    assert predictability("walk", leak=1) > 100, "a leak would be noticed"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"windw": 3}, "market takes no 'windw'; did you mean 'window'"),
        ({"split": "tst"}, "split is 'tst'; it must be train or test"),
        ({"fee": -1}, "fee is -1; it must be a number from 0 to 0.05"),
        ({"window": 2.5}, "window is 2.5; it must be a whole number"),
        ({"max_leverage": float("nan")}, "max_leverage is nan"),
        ({"data": "regimes"}, "did you mean 'regime'"),
        ({"data": "nowhere.csv"}, "nowhere.csv: no such file"),
        ({"bars": 300}, "regime has 300 bars, 225 of them for train; window 250 needs 311 there"),
        ({"data": "x.csv", "assets": 3}, "assets and bars are for generated markets"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    for make in (Market, MarketAccounts):
        with pytest.raises(FlatoutError, match=message) as caught:
            make(**settings)
        assert "\n" not in str(caught.value)


def test_invalid_bars_are_refused() -> None:
    bars = generate("walk", 50, 2, 0)
    close = bars.close.copy()
    close[7, 1] = np.nan
    with pytest.raises(FlatoutError, match="bar 7 of 'A2': close is nan"):
        dataclasses.replace(bars, close=close)
    with pytest.raises(FlatoutError, match="open of shape"):
        dataclasses.replace(bars, open=bars.open[1:])


def test_an_episode_starts_only_within_its_split() -> None:
    with pytest.raises(FlatoutError, match="train episodes start at bars 60 to 709"):
        Market(**SMALL).reset(options={"start": 720})


def test_the_chart_and_the_line_show_the_episode() -> None:
    env = Market(render_mode="rgb_array", **SMALL)
    env.reset(seed=0)
    pictures = [env.render()]
    for _ in range(20):
        env.step(np.array([1, 0, 0.5, 0], np.float32))
        pictures.append(env.render())
    assert all(p.shape == (560, 800, 3) and p.dtype == np.uint8 for p in pictures)
    assert (pictures[-1] != pictures[0]).any(axis=2).mean() > 0.02
    told = Market(render_mode="ansi", **SMALL)
    told.reset(seed=0)
    told.step(np.array([0.5, 0, 0, 0], np.float32))
    line = told.render()
    assert "\n" not in line
    assert "(1/40)" in line
    assert "A1 +50%" in line
    with pytest.raises(FlatoutError, match="one of None, rgb_array, ansi"):
        Market(render_mode="human")


def test_the_short_name_uses_the_recipe() -> None:
    config = resolve("market", {}, device="cpu", n_cores=2)
    assert config.env == "flatout/Market-v0"
    assert config.n_envs == 1024
    assert (
        resolve("market", {"batch_size": 1024 * 32}, device="cpu", n_cores=2).algorithm.batch_size
        == 1024 * 32
    )


def test_an_agent_can_be_evaluated_with_other_env_kwargs() -> None:
    agent = flatout.PPO("market", env_kwargs=SMALL, n_envs=8, n_steps=8, seed=0)
    assert agent.evaluate(4).length_mean == 40
    assert agent.evaluate(4, env_kwargs={"split": "test", "window": 5}).length_mean == 5
    assert agent.evaluate(4).length_mean == 40
    with pytest.raises(FlatoutError, match="observation space is not the one"):
        agent.evaluate(4, env_kwargs={"assets": 2})
    with pytest.raises(FlatoutError, match="did you mean 'split'"):
        agent.evaluate(4, env_kwargs={"splt": "test"})
