"""The map as text and as an image. Cells out of sight are dark; patrols are always shown."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from flatout.workloads.mission.game import CARRIER, Game
from flatout.workloads.mission.grid import DIRECTIONS, Cell

CELL = 28
"""Pixels per cell."""
SCALE = 3
"""Supersampling factor, for smooth edges."""
BAR = 12
"""Height in pixels of the bar under the map, which shows the time left."""

BACKGROUND, FLOOR, WALL, WALL_TOP = (17, 20, 27), (226, 222, 211), (62, 70, 84), (84, 94, 111)
GOLD, RED, ORANGE = (233, 176, 44), (201, 52, 48), (236, 132, 52)
UNITS = ((46, 134, 193), (142, 84, 176), (34, 153, 84))
LETTERS = "SBC"
ARROWS = "^>v<"


def text(game: Game) -> str:
    """The map as text: S, B, C the squad, O the objective, ^>v< patrols, ! where they look, ? unknown."""
    rows = np.where(game.walls, "#", ".").astype("<U1")
    for cone in game.cones:
        rows[cone & ~game.walls] = "!"
    rows[~game.known] = "?"
    rows[game.scenario.objective] = "O"
    for patrol in game.patrols:
        rows[patrol.at] = ARROWS[patrol.facing]
    for unit, cell in enumerate(game.units):
        if game.free[unit]:
            rows[cell] = LETTERS[unit]
    state = f"step {game.time}/{game.scenario.time_limit}  held {game.held}/{game.scenario.hold}  charges {game.charges}"
    return "\n".join(["".join(row) for row in rows] + [f"{state}  {game.outcome or ''}".rstrip()]) + "\n"


def image(game: Game) -> NDArray[np.uint8]:
    """An RGB image, (height, width, 3)."""
    n_rows, n_columns = game.walls.shape
    size = CELL * SCALE
    image = Image.new("RGB", (n_columns * size, n_rows * size + BAR * SCALE), BACKGROUND)
    draw = ImageDraw.Draw(image)
    _floor(draw, game, size)
    _cones(image, game, size)
    draw = ImageDraw.Draw(image)
    _objective(draw, game, size)
    for patrol in game.patrols:
        colour = RED if patrol.mode == "chase" else ORANGE
        _patrol(draw, patrol.at, patrol.facing, colour, size)
    _units(draw, game, size)
    _bars(draw, game, image.size)
    small = image.resize((image.width // SCALE, image.height // SCALE), Image.Resampling.LANCZOS)
    return np.asarray(small, np.uint8).copy()


def _box(cell: Cell, size: int, inset: float = 0.0) -> tuple[float, float, float, float]:
    row, column = cell
    edge = inset * size
    return (
        column * size + edge,
        row * size + edge,
        (column + 1) * size - 1 - edge,
        (row + 1) * size - 1 - edge,
    )


def _floor(draw: ImageDraw.ImageDraw, game: Game, size: int) -> None:
    for row, column in np.ndindex(*game.walls.shape):
        cell = (row, column)
        light = 1.0 if game.in_sight[cell] else 0.62 if game.known[cell] else 0.3
        if game.walls[cell]:
            draw.rectangle(_box(cell, size), _shade(WALL, light))
            draw.rectangle(_box(cell, size, 0.08), _shade(WALL_TOP, light))
        else:
            draw.rectangle(_box(cell, size), _shade(FLOOR, light * 0.94))
            draw.rectangle(_box(cell, size, 0.02), _shade(FLOOR, light))


def _cones(image: Image.Image, game: Game, size: int) -> None:
    veil = Image.new("RGBA", image.size)
    draw = ImageDraw.Draw(veil)
    for patrol, cone in zip(game.patrols, game.cones, strict=True):
        colour = RED if patrol.mode == "chase" else ORANGE
        for row, column in np.argwhere(cone & ~game.walls).tolist():
            draw.rectangle(_box((row, column), size), (*colour, 110))
    image.paste(veil, (0, 0), veil)


def _objective(draw: ImageDraw.ImageDraw, game: Game, size: int) -> None:
    at = game.scenario.objective
    draw.ellipse(_box(at, size, 0.06), outline=GOLD, width=size // 10)
    draw.arc(_box(at, size, -0.08), -90, -90 + 360 * game.held / game.scenario.hold, GOLD, size // 8)
    draw.ellipse(_box(at, size, 0.34), GOLD)


def _patrol(
    draw: ImageDraw.ImageDraw, at: Cell, facing: int, colour: tuple[int, int, int], size: int
) -> None:
    middle = np.array([at[1] + 0.5, at[0] + 0.5]) * size
    ahead = np.array(DIRECTIONS[facing][::-1]) * size
    aside = ahead[::-1] * (1, -1)
    tip, left, right = (
        middle + 0.42 * ahead,
        middle - 0.32 * ahead + 0.36 * aside,
        middle - 0.32 * ahead - 0.36 * aside,
    )
    draw.polygon(
        [tuple(p.tolist()) for p in (tip, left, middle - 0.12 * ahead, right)], colour, BACKGROUND, size // 24
    )


def _units(draw: ImageDraw.ImageDraw, game: Game, size: int) -> None:
    """Units in one cell are drawn side by side; captured ones as crosses."""
    for unit, cell in enumerate(game.units):
        together = [other for other in range(3) if game.units[other] == cell]
        shift = (together.index(unit) - (len(together) - 1) / 2) * 0.26 * size
        left, top, right, bottom = _box(cell, size, 0.16 if len(together) == 1 else 0.24)
        box = (left + shift, top, right + shift, bottom)
        if not game.free[unit]:
            draw.line(box, UNITS[unit], size // 10)
            draw.line((box[0], box[3], box[2], box[1]), UNITS[unit], size // 10)
        elif unit == CARRIER:
            draw.rounded_rectangle(box, size // 6, UNITS[unit], "white", size // 16)
        else:
            draw.ellipse(box, UNITS[unit], "white", size // 16)
        if game.free[unit]:
            middle = ((box[0] + box[2]) / 2, (box[1] + box[3]) / 2)
            draw.text(middle, LETTERS[unit], "white", anchor="mm", font_size=size * 0.42)


def _bars(draw: ImageDraw.ImageDraw, game: Game, size: tuple[int, int]) -> None:
    width, bottom = size
    top = bottom - BAR * SCALE + 2 * SCALE
    left = 1.0 - game.time / game.scenario.time_limit
    ended = {"success": UNITS[CARRIER], None: GOLD}.get(game.outcome, RED)
    draw.rectangle((0, top, width, bottom), _shade(ended, 0.35))
    draw.rectangle((0, top, width * left, bottom), ended)


def _shade(colour: tuple[int, int, int], light: float) -> tuple[int, int, int]:
    red, green, blue = (
        round(light * full + (1 - light) * dark) for full, dark in zip(colour, BACKGROUND, strict=True)
    )
    return red, green, blue
