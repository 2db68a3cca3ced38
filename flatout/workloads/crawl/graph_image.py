"""The exploration rendered: the link graph as an image, or the page and its links as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from math import cos, pi, sin
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from flatout.workloads.crawl.explore import Exploration, Link, Visited

WIDTH, HEIGHT, PANEL, SCALE = 640, 480, 150, 2
INK, PAPER, FAINT, GOLD, RED = (38, 42, 51), (250, 250, 247), (205, 208, 214), (240, 170, 20), (205, 60, 60)
COLORS = [
    (76, 114, 176), (85, 168, 104), (129, 114, 179), (100, 181, 205), (196, 120, 90), (140, 140, 140),
    (218, 139, 195), (122, 160, 60), (60, 150, 150), (170, 110, 60), (90, 90, 200), (180, 180, 90),
]  # fmt: skip
TRAIL = 4
"""Number of pages of the agent's path that are drawn."""
Color: TypeAlias = tuple[int, int, int]


def text(exploration: Exploration, trail: Sequence[Visited], slots: Sequence[Link], budget: int) -> str:
    """The page, its links by slot, and the counters of the exploration."""
    here = trail[-1] if trail else None
    lines = [
        f"{here.link.url if here else exploration.start_url}  {here.title if here else '(not fetched)'}",
        f"requests {exploration.n_requests}/{budget}  targets {exploration.n_targets}  "
        f"templates {len(exploration.templates)}  faults {exploration.n_faults}",
    ]
    for k, link in enumerate(slots):
        mark = "·" if link.page is not None else "!" if link.tries else " "
        lines.append(f"{k:3} {mark} {link.text[:30]:30} {'/'.join(link.tokens)[:60]}")
    return "\n".join(lines)


def image(exploration: Exploration, trail: Sequence[Visited], budget: int) -> NDArray[np.uint8]:
    """The pages as a tree around the start page: colour is the template, gold a target, red a fault."""
    canvas = Image.new("RGB", (WIDTH * SCALE, HEIGHT * SCALE), PAPER)
    pen = ImageDraw.Draw(canvas)
    requested = exploration.requested
    places = _places(requested)
    path = [visited.link.url for visited in trail]
    for url, link in requested.items():
        if link.source in places:
            pen.line([places[link.source], places[url]], FAINT, SCALE)
    walked = [places[url] for url in path[-TRAIL:]]
    if len(walked) > 1:
        pen.line(walked, GOLD, 2 * SCALE, joint="curve")
    for url, link in requested.items():
        x, y = places[url]
        if link.visited is None:
            for sign in (-1, 1):
                pen.line([(x - 8, y - 8 * sign), (x + 8, y + 8 * sign)], RED, 2 * SCALE)
            continue
        if link.visited.is_target:
            pen.regular_polygon((x, y, 8 * SCALE + 4), 5, fill=GOLD, outline=INK)
        else:
            r = 6 * SCALE
            pen.ellipse([x - r, y - r, x + r, y + r], COLORS[link.visited.template % len(COLORS)])
    if path:
        (x, y), r = places[path[-1]], 12 * SCALE
        pen.ellipse([x - r, y - r, x + r, y + r], outline=INK, width=2 * SCALE)
    _panel(pen, exploration, path, budget)
    return np.asarray(canvas.reduce(SCALE), np.uint8).copy()


def _places(requested: Mapping[str, Link]) -> dict[str, tuple[float, float]]:
    """A radial tree: each page is in the sector of its parent, one ring further out."""
    children: dict[str | None, list[str]] = {}
    for url, link in requested.items():
        parent = link.source if link.source in requested and link.source != url else None
        children.setdefault(parent, []).append(url)
    weight: dict[str, float] = {}
    for url in reversed(list(requested)):
        weight[url] = max(1.0, sum(weight.get(child, 1.0) for child in children.get(url, ())))
    spots: dict[str, tuple[float, int]] = {}
    """Angle and ring of each page."""
    ahead: list[tuple[str, float, float, int]] = [(url, 0.0, 2 * pi, 0) for url in children.get(None, ())[:1]]
    while ahead:
        url, low, high, level = ahead.pop()
        spots[url] = (low + high) / 2, level
        below = children.get(url, [])
        total = sum(weight[child] for child in below)
        for child in below:
            width = (high - low) * weight[child] / total
            ahead.append((child, low, low + width, level + 1))
            low += width
    n_rings = max((level for _, level in spots.values()), default=0)
    ring = (min(WIDTH - PANEL, HEIGHT) * SCALE / 2 - 24 * SCALE) / max(n_rings, 1)
    x, y = (WIDTH - PANEL) * SCALE / 2, HEIGHT * SCALE / 2
    at = {url: (x + ring * n * cos(angle), y + ring * n * sin(angle)) for url, (angle, n) in spots.items()}
    return {url: at.get(url, (x, y)) for url in requested}


def _panel(pen: ImageDraw.ImageDraw, exploration: Exploration, path: Sequence[str], budget: int) -> None:
    left, width = WIDTH - PANEL, PANEL - 32
    big, small = (_font(size * SCALE) for size in (30, 12))

    def write(x: float, y: float, text: str, color: Color = INK, font: Any = small) -> None:
        pen.text(((left + 16 + x) * SCALE, y * SCALE), text, color, font)

    def bar(color: Color, share: float) -> None:
        x, y = (left + 16) * SCALE, 196 * SCALE
        pen.rectangle([x, y, x + int(width * SCALE * share), y + 8 * SCALE], fill=color)

    pen.rectangle([left * SCALE, 0, WIDTH * SCALE, HEIGHT * SCALE], fill=(240, 241, 238))
    counts = {"targets": exploration.n_targets, "page templates": len(exploration.templates)}
    for i, (name, count) in enumerate(counts.items()):
        write(0, 20 + 72 * i, str(count), font=big)
        write(0, 56 + 72 * i, name)
    write(0, 176, f"requests {exploration.n_requests} of {budget}")
    bar(FAINT, 1)
    bar(COLORS[0], min(exploration.n_requests / budget, 1))
    tokens = path[-1].split("/")[3:] if path else []
    for i, token in enumerate(tokens[:8]):
        write(8 * i, 230 + 18 * i, f"/{token[:14]}")
    if exploration.n_faults:
        write(0, HEIGHT - 30, f"faults {exploration.n_faults}", RED)


@cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
