"""A chart of an episode: prices, positions and equity, one above the other."""

from __future__ import annotations

import colorsys

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from flatout.envs.spaces import Array
from flatout.workloads.market.ledger import Journal

WIDTH, HEIGHT = 800, 560
SCALE = 2
"""Supersampling factor, for smooth lines."""
LEFT, RIGHT, TOP, GUTTER = 64, 112, 34, 34
PAPER, GRID, INK, FAINT = "#ffffff", "#e6e9ef", "#1f2430", "#6b7385"
EQUITY, HELD = "#1a6dd6", "#9aa3b2"


def draw(journal: Journal) -> Array:
    """The chart as an RGB image, (HEIGHT, WIDTH, 3)."""
    image = Image.new("RGB", (WIDTH * SCALE, HEIGHT * SCALE), PAPER)
    pen = ImageDraw.Draw(image)
    prices, weights = journal.prices, np.array(journal.weights)
    equity, held = np.array(journal.equity), prices.mean(axis=1)
    colors = palette(len(journal.names))
    parts = np.array([0.40, 0.22, 0.38]) * (HEIGHT - TOP - 3 * GUTTER + 12)
    tops = TOP + np.concatenate([[0], np.cumsum(parts + GUTTER)[:2]])

    panel = _Panel(pen, tops[0], parts[0], journal.window, *_span(prices))
    panel.frame("prices, starting at 1")
    for column, color in zip(prices.T, colors, strict=True):
        panel.line(column, color)
    panel.labels(dict(zip(journal.names, prices[-1], strict=True)), colors)

    low, high = min(float(np.minimum(weights, 0).sum(axis=1).min()), 0.0), 1.0
    high = max(float(np.maximum(weights, 0).sum(axis=1).max()), high)
    panel = _Panel(pen, tops[1], parts[1], journal.window, low, high)
    panel.frame("positions, share of equity")
    panel.stack(np.maximum(weights, 0), colors)
    panel.stack(np.minimum(weights, 0), colors)

    panel = _Panel(pen, tops[2], parts[2], journal.window, *_span(np.concatenate([equity, held])))
    panel.frame(f"equity, starting at 1 (after costs of {journal.costs:.2%})")
    panel.line(held, HELD)
    panel.line(equity, EQUITY, 2.2)
    panel.labels({"account": equity[-1], "all, held": held[-1]}, [EQUITY, HELD])
    return np.asarray(image.resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS)).copy()


def palette(n: int) -> list[str]:
    """`n` distinct colors."""
    rgb = [colorsys.hls_to_rgb((0.08 + i / n) % 1.0, 0.52, 0.58) for i in range(n)]
    return ["#" + "".join(f"{round(255 * c):02x}" for c in color) for color in rgb]


def _span(values: Array) -> tuple[float, float]:
    low, high = float(values.min()), float(values.max())
    room = max(high - low, 0.02) * 0.08
    return low - room, high + room


class _Panel:
    """Axes over the bars of an episode."""

    def __init__(
        self, pen: ImageDraw.ImageDraw, top: float, height: float, window: int, low: float, high: float
    ) -> None:
        self._pen, self._top, self._height = pen, top, height
        self._low, self._high, self._window = low, high, window

    def _x(self, bar: float) -> float:
        return SCALE * (LEFT + bar / self._window * (WIDTH - LEFT - RIGHT))

    def _y(self, value: float) -> float:
        return SCALE * (self._top + (self._high - value) / (self._high - self._low) * self._height)

    def frame(self, title: str) -> None:
        """Grid, scale and title."""
        for value in _ticks(self._low, self._high):
            y = self._y(value)
            self._pen.line([(self._x(0), y), (self._x(self._window), y)], GRID, SCALE)
            text = f"{value:.2f}".rstrip("0").rstrip(".")
            self._text(self._x(0) / SCALE - 8, y / SCALE, text, FAINT, "rm", 12)
        self._text(LEFT, self._top - 13, title, INK, "lm", 13)

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
                    corners = [
                        self._x(bar - 1),
                        *sorted((self._y(edges[bar, k]), self._y(edges[bar, k + 1]))),
                    ]
                    self._pen.rectangle((corners[0], corners[1], self._x(bar), corners[2]), color)

    def labels(self, values: dict[str, float], colors: list[str]) -> None:
        """Names and last values at the right edge, without overlap."""
        wanted = {name: self._y(value) / SCALE for name, value in values.items()}
        at = -np.inf
        for (name, y), color in sorted(zip(wanted.items(), colors, strict=True), key=lambda item: item[0][1]):
            at = max(y, at + 15)
            self._text(WIDTH - RIGHT + 8, at, f"{name} {values[name]:.2f}", color, "lm", 12)

    def _text(self, x: float, y: float, text: str, color: str, anchor: str, size: int) -> None:
        font = ImageFont.load_default(size * SCALE)
        self._pen.text((x * SCALE, y * SCALE), text, color, font, anchor)


def _ticks(low: float, high: float) -> list[float]:
    """About four round values between `low` and `high`."""
    rough = (high - low) / 4
    power = 10.0 ** np.floor(np.log10(rough))
    step = min((m * power for m in (1, 2, 5, 10)), key=lambda step: abs(step - rough))
    return [float(step * k) for k in range(int(np.ceil(low / step)), int(np.floor(high / step)) + 1)]
