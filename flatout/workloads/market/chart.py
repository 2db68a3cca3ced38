"""An episode as a chart (prices, positions and equity, one above the other) or as a line of text."""

from __future__ import annotations

from functools import cache, partial
from typing import TypeAlias

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from flatout.envs.spaces import Array
from flatout.workloads.market.ledger import Ledger

WIDTH, HEIGHT = 800, 560
SCALE = 2
"""Supersampling factor, for smooth lines."""
LEFT, RIGHT, TOP, GUTTER = 64, 112, 34, 34
PAPER, GRID, INK, FAINT = "#ffffff", "#e6e9ef", "#1f2430", "#6b7385"
Pen: TypeAlias = ImageDraw.ImageDraw
Span: TypeAlias = tuple[float, float]
EQUITY, HELD = "#1a6dd6", "#9aa3b2"


class Journal:
    """One account's equity, positions and prices during an episode, relative to the initial cash and prices."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger, self.start, self.costs = ledger, int(ledger.bar[0]), 0.0
        self.names, self.window = ledger.bars.names, ledger.config.window
        self.equity: list[float] = []
        self.weights: list[Array] = []
        self.record()

    def record(self) -> None:
        ledger = self._ledger
        equity = max(float(ledger.equity[0]), 1e-9)
        self.equity.append(equity / ledger.config.cash)
        self.weights.append(ledger.holdings[:, 0] / equity)
        self.costs += float(ledger.costs[0]) / ledger.config.cash

    @property
    def prices(self) -> Array:
        """Close prices of the episode, (bars, assets), divided by the first."""
        close = self._ledger.bars.close[self.start : self.start + len(self.equity)]
        return np.asarray(close / close[:1])

    def line(self) -> str:
        """The account at this bar as one line of text."""
        n, now = len(self.equity) - 1, self.weights[-1]
        weights = " ".join(f"{name} {weight:+.0%}" for name, weight in zip(self.names, now, strict=True))
        return (
            f"bar {self.start + n} ({n}/{self.window})  equity {self.equity[-1]:.3f}  prices {self.prices[-1].mean():.3f}  "
            f"{weights}  cash {1 - now.sum():+.0%}  costs {self.costs:.2%}"
        )


def draw(journal: Journal) -> Array:
    """The chart as an RGB image, (HEIGHT, WIDTH, 3)."""
    image = Image.new("RGB", (WIDTH * SCALE, HEIGHT * SCALE), PAPER)
    pen = ImageDraw.Draw(image)
    prices, weights = journal.prices, np.array(journal.weights)
    equity, held = np.array(journal.equity), prices.mean(axis=1)
    hues = [360 * (0.08 + i / len(journal.names)) % 360 for i in range(len(journal.names))]
    colors = [f"hsl({hue:.3f}, 58%, 52%)" for hue in hues]
    parts = np.array([0.40, 0.22, 0.38]) * (HEIGHT - TOP - 3 * GUTTER + 12)
    tops = TOP + np.concatenate([[0], np.cumsum(parts + GUTTER)[:2]])

    long, short = np.maximum(weights, 0), np.minimum(weights, 0)
    spans = _span(prices), (short.sum(1).min(), max(long.sum(1).max(), 1.0)), _span(np.append(equity, held))
    after_costs = f"equity, starting at 1 (after costs of {journal.costs:.2%})"
    titles = "prices, starting at 1", "positions, share of equity", after_costs
    top, middle, bottom = map(partial(_Panel, pen, journal.window), titles, tops, parts, spans)
    for column, color in zip(prices.T, colors, strict=True):
        top.line(column, color)
    top.labels(dict(zip(journal.names, prices[-1], strict=True)), colors)
    middle.stack(long, colors)
    middle.stack(short, colors)
    bottom.line(held, HELD)
    bottom.line(equity, EQUITY, 2.2)
    bottom.labels({"account": equity[-1], "all, held": held[-1]}, [EQUITY, HELD])
    return np.asarray(image.reduce(SCALE)).copy()


def _span(values: Array) -> Span:
    low, high = float(values.min()), float(values.max())
    room = max(high - low, 0.02) * 0.08
    return low - room, high + room


class _Panel:
    """Axes over the bars of an episode, with grid, scale and title."""

    def __init__(self, pen: Pen, window: int, title: str, top: float, height: float, span: Span) -> None:
        low, high = span
        self._pen, self._x_scale = pen, (WIDTH - LEFT - RIGHT) / window
        self._top, self._high, self._y_scale = top, high, height / (high - low)
        for value in _ticks(low, high):
            y = self._y(value)
            pen.line([(self._x(0), y), (self._x(window), y)], GRID, SCALE)
            self._text(LEFT - 8, y / SCALE, f"{value:.2f}".rstrip("0").rstrip("."), FAINT, "rm", 12)
        self._text(LEFT, top - 13, title, INK, "lm", 13)

    def _x(self, bar: float) -> float:
        return SCALE * (LEFT + bar * self._x_scale)

    def _y(self, value: float) -> float:
        return SCALE * (self._top + (self._high - value) * self._y_scale)

    def line(self, values: Array, color: str, width: float = 1.4) -> None:
        """A line with one value per bar."""
        points = [(self._x(bar), self._y(value)) for bar, value in enumerate(values.tolist())]
        if len(points) > 1:
            self._pen.line(points, color, round(width * SCALE), "curve")

    def stack(self, weights: Array, colors: list[str]) -> None:
        """Stacked areas, (bars, assets)."""
        edges = np.concatenate([np.zeros((len(weights), 1)), np.cumsum(weights, axis=1)], axis=1)
        for k, color in enumerate(colors):
            for bar in range(1, len(weights)):
                if weights[bar, k]:
                    upper, lower = sorted((self._y(edges[bar, k]), self._y(edges[bar, k + 1])))
                    self._pen.rectangle((self._x(bar - 1), upper, self._x(bar), lower), color)

    def labels(self, values: dict[str, float], colors: list[str]) -> None:
        """Names and last values at the right edge, without overlap."""
        at = -np.inf
        from_top = sorted(zip(values.items(), colors, strict=True), key=lambda item: -item[0][1])
        for (name, value), color in from_top:
            at = max(self._y(value) / SCALE, at + 15)
            self._text(WIDTH - RIGHT + 8, at, f"{name} {value:.2f}", color, "lm", 12)

    def _text(self, x: float, y: float, text: str, color: str, anchor: str, size: int) -> None:
        self._pen.text((x * SCALE, y * SCALE), text, color, _font(size * SCALE), anchor)


def _ticks(low: float, high: float) -> list[float]:
    """About four round values between `low` and `high`."""
    rough = (high - low) / 4
    power = 10.0 ** np.floor(np.log10(rough))
    step = min((m * power for m in (1, 2, 5, 10)), key=lambda step: abs(step - rough))
    return [float(step * k) for k in range(int(np.ceil(low / step)), int(np.floor(high / step)) + 1)]


@cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
