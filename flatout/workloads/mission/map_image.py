"""The map as text and as an image. Cells out of sight are dark; patrols are always shown."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from flatout.workloads.mission.game import CARRIER, Game
from flatout.workloads.mission.grid import DIRECTIONS

CELL = 28
"""Pixels per cell."""
SCALE = 3
"""Supersampling factor, for smooth edges."""
SIDE = CELL * SCALE
BAR = 12
"""Height in pixels of the bar under the map, which shows the time left."""

BACKGROUND, FLOOR, WALL, WALL_TOP = (17, 20, 27), (226, 222, 211), (62, 70, 84), (84, 94, 111)
GOLD, RED, ORANGE = (233, 176, 44), (201, 52, 48), (236, 132, 52)
UNITS = ((46, 134, 193), (142, 84, 176), (34, 153, 84))
LETTERS, ARROWS = "SBC", "^>v<"
ARROW = ((0.42, 0.0), (-0.32, 0.36), (-0.12, 0.0), (-0.32, -0.36))
"""Corners of a patrol, ahead and aside, in cells."""


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
    image = Image.new("RGB", (n_columns * SIDE, n_rows * SIDE + BAR * SCALE), BACKGROUND)
    draw = ImageDraw.Draw(image)
    _floor(draw, game)
    _patrols(image, draw, game)
    objective = game.scenario.objective
    draw.ellipse(_box(objective, 0.06), outline=GOLD, width=SIDE // 10)
    draw.arc(_box(objective, -0.08), -90, -90 + 360 * game.held / game.scenario.hold, GOLD, SIDE // 8)
    draw.ellipse(_box(objective, 0.34), GOLD)
    _units(draw, game)
    (width, bottom), colour = image.size, {"success": UNITS[CARRIER], None: GOLD}.get(game.outcome, RED)
    top, left = bottom - (BAR - 2) * SCALE, 1.0 - game.time / game.scenario.time_limit
    draw.rectangle((0, top, width, bottom), _shade(colour, 0.35))
    draw.rectangle((0, top, width * left, bottom), colour)
    small = image.reduce(SCALE)
    return np.asarray(small, np.uint8).copy()


def _box(cell: tuple[float, float], inset: float = 0.0) -> tuple[float, float, float, float]:
    """Left, top, right, bottom of a cell in pixels."""
    low, high = inset * SIDE, SIDE - 1 - inset * SIDE
    left, top = cell[1] * SIDE, cell[0] * SIDE
    return left + low, top + low, left + high, top + high


def _floor(draw: ImageDraw.ImageDraw, game: Game) -> None:
    for row, column in np.ndindex(*game.walls.shape):
        cell = (row, column)
        light = 1.0 if game.in_sight[cell] else 0.62 if game.known[cell] else 0.3
        is_wall = game.walls[cell]
        draw.rectangle(_box(cell), _shade(WALL, light) if is_wall else _shade(FLOOR, light * 0.94))
        draw.rectangle(_box(cell, 0.08 if is_wall else 0.02), _shade(WALL_TOP if is_wall else FLOOR, light))


def _patrols(image: Image.Image, draw: ImageDraw.ImageDraw, game: Game) -> None:
    """The patrols as arrows, over the cells that they see."""
    veil = Image.new("RGBA", image.size)
    pen = ImageDraw.Draw(veil)
    colours = [RED if patrol.mode == "chase" else ORANGE for patrol in game.patrols]
    for colour, cone in zip(colours, game.cones, strict=True):
        for row, column in np.argwhere(cone & ~game.walls).tolist():
            pen.rectangle(_box((row, column)), (*colour, 110))
    image.paste(veil, (0, 0), veil)
    for colour, patrol in zip(colours, game.patrols, strict=True):
        middle = (np.array(patrol.at[::-1]) + 0.5) * SIDE
        ahead = np.array(DIRECTIONS[patrol.facing][::-1]) * SIDE
        aside = ahead[::-1] * (1, -1)
        corners = [middle + forward * ahead + sideways * aside for forward, sideways in ARROW]
        draw.polygon([tuple(corner.tolist()) for corner in corners], colour, BACKGROUND, SIDE // 24)


def _units(draw: ImageDraw.ImageDraw, game: Game) -> None:
    """Units in one cell are drawn side by side; captured ones as crosses."""
    for unit, cell in enumerate(game.units):
        together = [other for other in range(3) if game.units[other] == cell]
        shift = (together.index(unit) - (len(together) - 1) / 2) * 0.26
        box = _box((cell[0], cell[1] + shift), 0.16 if len(together) == 1 else 0.24)
        (left, top, right, bottom), colour = box, UNITS[unit]
        if not game.free[unit]:
            draw.line(box, colour, SIDE // 10)
            draw.line((left, bottom, right, top), colour, SIDE // 10)
            continue
        if unit == CARRIER:
            draw.rounded_rectangle(box, SIDE // 6, colour, "white", SIDE // 16)
        else:
            draw.ellipse(box, colour, "white", SIDE // 16)
        middle = ((left + right) / 2, (top + bottom) / 2)
        draw.text(middle, LETTERS[unit], "white", anchor="mm", font_size=SIDE * 0.42)


def _shade(colour: tuple[int, ...], light: float) -> tuple[int, ...]:
    return tuple(round(light * a + (1 - light) * b) for a, b in zip(colour, BACKGROUND, strict=True))
