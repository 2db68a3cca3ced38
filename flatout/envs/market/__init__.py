"""Portfolio trading on price bars: `flatout/Market-v0`."""

from flatout.envs.market.accounts import Market, MarketAccounts
from flatout.envs.market.backtest import backtest, buy_and_hold
from flatout.envs.market.bars import Bars
from flatout.envs.market.config import MarketConfig

__all__ = ["Bars", "Market", "MarketAccounts", "MarketConfig", "backtest", "buy_and_hold"]
