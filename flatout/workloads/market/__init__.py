"""Portfolio trading on price bars: `flatout/Market-v0`."""

from flatout.workloads.market.accounts import Market, MarketAccounts
from flatout.workloads.market.backtest import backtest, buy_and_hold
from flatout.workloads.market.bars import Bars
from flatout.workloads.market.config import MarketConfig

__all__ = ["Bars", "Market", "MarketAccounts", "MarketConfig", "backtest", "buy_and_hold"]
