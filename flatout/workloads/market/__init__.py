"""Portfolio trading on price bars: `flatout/Market-v0`."""

from flatout.workloads.market.data import Bars
from flatout.workloads.market.ledger import MarketConfig
from flatout.workloads.market.market import Market, MarketAccounts, backtest, buy_and_hold

__all__ = ["Bars", "Market", "MarketAccounts", "MarketConfig", "backtest", "buy_and_hold"]
