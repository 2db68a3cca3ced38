"""What one account went through in this episode, for whoever draws it."""

from __future__ import annotations

import numpy as np

from flatout.envs.spaces import Array
from flatout.workloads.market.ledger import Ledger


class Journal:
    """Equity, positions and prices of an episode, bar by bar; all are shares of the first cash or price."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.names = ledger.bars.names
        self.window = ledger.config.window
        self.start = 0
        self.equity: list[float] = []
        self.weights: list[Array] = []
        self.costs = 0.0

    def begin(self) -> None:
        """A new episode: forget the last."""
        self.start, self.costs = int(self._ledger.bar[0]), 0.0
        self.equity, self.weights = [], []
        self.note()

    def note(self) -> None:
        """Write down how the account stands at this bar."""
        ledger = self._ledger
        equity = max(float(ledger.equity[0]), 1e-9)
        self.equity.append(equity / ledger.config.cash)
        self.weights.append(ledger.holdings[:, 0] / equity)
        self.costs += float(ledger.costs[0]) / ledger.config.cash

    @property
    def prices(self) -> Array:
        """Close prices since the episode began, (bars, assets), the first being 1."""
        close = self._ledger.bars.close[self.start : self.start + len(self.equity)]
        return np.asarray(close / close[:1])

    def line(self) -> str:
        """The account as it stands, in one line of text."""
        weights = " ".join(
            f"{name} {weight:+.0%}" for name, weight in zip(self.names, self.weights[-1], strict=True)
        )
        held = float(self.prices[-1].mean())
        return (
            f"bar {self.start + len(self.equity) - 1} ({len(self.equity) - 1}/{self.window})  "
            f"equity {self.equity[-1]:.3f}  prices {held:.3f}  {weights}  "
            f"cash {1 - float(self.weights[-1].sum()):+.0%}  costs {self.costs:.2%}"
        )
