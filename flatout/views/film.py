"""Pictures of agents at play: rendered frames in a grid with captions, written as a GIF, an MP4 or text."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageChops, ImageDraw, ImageFont

from flatout.errors import FlatoutError
from flatout.views.figures import number

Picture: TypeAlias = Image.Image
CAPTION, PAPER, INK, SOFT, BAR, CHOSEN = 46, "#14171d", "#eceef2", "#9aa2b1", "#3f74d6", "#f59a56"
GAP = "#2a2f38"
GRID_WIDTH = 960
"""Of a GIF or MP4, at most; cells are not enlarged beyond MAX_CELL."""
MIN_CELL, MAX_CELL = 240, 600
MAX_BARS = 32
VISIBLE, MAX_OFF = 28, 0.002
"""A colour of a GIF may differ by this much of 255 from the env's; of more than this share of pixels it must not."""
CODES, MARKED = re.compile(r"\x1b\[[0-9;]*m"), re.compile(r"\x1b\[4\dm(.*?)\x1b\[0m")


@dataclass(frozen=True, kw_only=True, slots=True)
class Shot:
    """One env at one step."""

    image: npt.NDArray[np.uint8] | str
    """An RGB image, or text."""
    step: int
    total_reward: float
    over: str = ""
    """Why the episode is over, if it is."""
    shares: Sequence[float] = ()
    """A bar for each action, 0 to 1: probabilities, values between their least and largest, or a continuous action itself."""
    zeros: Sequence[float] = ()
    """Where each bar begins; at the bottom if not given."""
    chosen: Collection[int] = ()
    """Of the bars, the actions that were taken."""
    note: str = ""
    """Such as the value that the agent expects."""


class Grid:
    """Draws all envs at one step as one picture; an env that has not changed is not drawn again."""

    def __init__(self) -> None:
        self._drawn: dict[int, tuple[Shot, Picture]] = {}

    def frame(self, shots: Sequence[Shot]) -> Picture:
        """The envs side by side, as one picture of even width and height."""
        columns = math.ceil(math.sqrt(len(shots)))
        cells = [self._cell(nth, shot, columns) for nth, shot in enumerate(shots)]
        width, height = max(it.width for it in cells), max(it.height for it in cells)
        rows = -(-len(cells) // columns)
        size = columns * width + (columns - 1) * 6, rows * height + (rows - 1) * 6
        whole = Image.new("RGB", (size[0] // 2 * 2, size[1] // 2 * 2), GAP)
        for nth, cell in enumerate(cells):
            whole.paste(cell, (nth % columns * (width + 6), nth // columns * (height + 6)))
        return whole

    def _cell(self, nth: int, shot: Shot, columns: int) -> Picture:
        before = self._drawn.get(nth)
        if before is None or before[0] is not shot:
            self._drawn[nth] = before = shot, _cell(shot, GRID_WIDTH // columns)
        return before[1]


def _cell(shot: Shot, widest: int) -> Picture:
    """The env with its caption below."""
    image = _picture(shot.image)
    width = max(min(image.width, widest, MAX_CELL), min(MIN_CELL, widest))
    if image.width != width:
        how = Image.Resampling.NEAREST if image.width < width else Image.Resampling.BILINEAR
        image = image.resize((width, max(1, round(image.height * width / image.width))), how)
    cell = Image.new("RGB", (width, image.height + CAPTION), PAPER)
    cell.paste(image, (0, 0))
    pen, top, font = ImageDraw.Draw(cell), image.height, _font(13)
    words = f"return {amount(shot.total_reward)}   step {shot.step:,}"
    pen.text((8, top + 5), words, fill=INK, font=font)
    right = shot.over or shot.note
    length = pen.textlength(right, font)
    if 8 + pen.textlength(words, font) + 12 + length < width:
        pen.text((width - 8 - length, top + 5), right, fill=CHOSEN if shot.over else SOFT, font=font)
    _bars(pen, shot, width, top)
    return cell


@cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def amount(value: float) -> str:
    """A return: whole numbers without decimals, and no rest of rounding such as 1e-16."""
    value = round(value, 6) + 0.0
    return f"{value:,.0f}" if value == int(value) else number(value)


def _bars(pen: ImageDraw.ImageDraw, shot: Shot, width: int, top: int) -> None:
    shares = list(shot.shares)[:MAX_BARS]
    if not shares:
        return
    room, base, font = (width - 16) / len(shares), top + CAPTION - 5, _font(10)
    for nth, share in enumerate(shares):
        left = 8 + nth * room
        ends = share, shot.zeros[nth] if shot.zeros else 0.0
        high, low = (base - 17 * min(1.0, max(0.0, it)) for it in (max(ends), min(ends)))
        pen.rectangle((left, base - 17, left + room - 3, base), fill="#222732")
        if low - high >= 1:
            pen.rectangle((left, high, left + room - 3, low), fill=CHOSEN if nth in shot.chosen else BAR)
        if room >= 20:
            pen.text((left + 4, base - 14), str(nth), fill=INK, font=font)


def _picture(image: npt.NDArray[np.uint8] | str) -> Picture:
    if not isinstance(image, str):
        return Image.fromarray(np.ascontiguousarray(image[..., :3]))
    # Pillow's own bitmap font: all its letters are equally wide.
    font = ImageFont.load_default_imagefont()
    image = without_codes(image)
    lines = [line.encode("latin-1", "replace").decode("latin-1") for line in image.splitlines()] or [""]
    size = max(len(line) for line in lines) * 6 + 12, len(lines) * 12 + 12
    drawn = Image.new("RGB", size, "#0d1015")
    pen = ImageDraw.Draw(drawn)
    for nth, line in enumerate(lines):
        pen.text((6, 6 + 12 * nth), line, fill="#d7dbe3", font=font)
    return drawn.resize((size[0] * 2, size[1] * 2), Image.Resampling.NEAREST)


def without_codes(text: str) -> str:
    """Text without a terminal's colour codes, in which envs such as FrozenLake mark the agent: [ ] instead."""
    return CODES.sub("", MARKED.sub(r"[\1]", text))


def write_film(path: Path, frames: Iterator[Picture], fps: float) -> int:
    """Write the frames as the kind of film that the file's name says; returns how many there were."""
    kinds = {".gif": _write_gif, ".mp4": _write_mp4, ".png": _write_png}
    if path.suffix.lower() not in kinds:
        raise FlatoutError(f"--out {path}: name a .gif, .mp4, .png or .txt file")
    part = path.with_name(f".part-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        n = kinds[path.suffix.lower()](part, frames, fps)
        part.replace(path)
    except OSError as error:
        raise FlatoutError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        part.unlink(missing_ok=True)
    return n


class Palette:
    """Up to 256 colours for many frames; chosen anew only when a frame has others.

    Choosing colours takes twenty times as long as using them, and frames that share colours take less room.
    """

    def __init__(self) -> None:
        self._samples: list[Picture] = []
        self._colours: Picture | None = None

    def apply(self, frame: Picture) -> Picture:
        """The frame in the palette's colours."""
        sample = frame.resize((frame.width // 3, frame.height // 3), Image.Resampling.NEAREST)
        if self._colours is None or _share_off(sample, self._reduced(sample)) > MAX_OFF:
            self._samples = [*self._samples[-7:], sample]
            several = Image.new("RGB", (sample.width, sample.height * len(self._samples)))
            for nth, it in enumerate(self._samples):
                several.paste(it, (0, nth * sample.height))
            self._colours = several.quantize(256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
        return self._reduced(frame)

    def _reduced(self, image: Picture) -> Picture:
        assert self._colours is not None
        return image.quantize(palette=self._colours, dither=Image.Dither.NONE)


def _share_off(image: Picture, reduced: Picture) -> float:
    """The share of pixels whose colour has visibly changed."""
    off = np.asarray(ImageChops.difference(image, reduced.convert("RGB"))).max(axis=-1) > VISIBLE
    return float(off.mean())


def _write_gif(path: Path, frames: Iterator[Picture], fps: float) -> int:
    palette = Palette()
    drawn = [palette.apply(it) for it in frames]
    times = [round(1000 / fps)] * (len(drawn) - 1) + [1500]  # the end stays for a moment
    drawn[0].save(path, "GIF", save_all=True, append_images=drawn[1:], duration=times, loop=0)
    return len(drawn)


def _write_mp4(path: Path, frames: Iterator[Picture], fps: float) -> int:
    try:
        from imageio_ffmpeg import write_frames
    except ImportError as error:
        raise FlatoutError(
            "an MP4 needs imageio-ffmpeg: pip install 'flatout[video]'; a .gif needs nothing"
        ) from error
    first = next(frames)
    film: Any = write_frames(str(path), first.size, fps=fps, macro_block_size=2, quality=8)
    film.send(None)
    n, last = 0, first
    try:
        for n, it in enumerate(_chained(first, frames), 1):  # noqa: B007
            last = it if it.size == first.size else it.resize(first.size)
            film.send(last.tobytes())
        for _ in range(round(fps)):
            film.send(last.tobytes())
    finally:
        film.close()
    return n


def _write_png(path: Path, frames: Iterator[Picture], _: float) -> int:
    n = 0
    for n, last in enumerate(frames, 1):  # noqa: B007
        pass
    last.save(path, "PNG")
    return n


def _chained(first: Picture, rest: Iterator[Picture]) -> Iterator[Picture]:
    yield first
    yield from rest
