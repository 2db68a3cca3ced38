"""The observation: features of the current page and of each link that the agent may follow.

Words of link texts and URLs become short random codes. A word has the same code on every site, so what it predicts can be
learned on one site and used on another.
"""

from __future__ import annotations

import re
from collections import defaultdict
from functools import lru_cache
from hashlib import blake2b
from itertools import chain, islice, zip_longest
from math import log1p
from struct import Struct
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from flatout.workloads.crawl.explore import MAX_TRIES, Exploration, Link, Shape, Visited

CODE = 8
"""Length of a word's code."""
N_SHAPE = 4
FIRST = 3 * CODE
"""Index after a link's codes; holds 1 if there is a link."""
VISITED, FAILED, SAME_SHAPE = FIRST + 1, FIRST + 2, FIRST + 7
N_LINK = FIRST + 8 + N_SHAPE
N_PAGE = 2 * CODE + 12
SEEN = [min(log1p(n) / 5, 1.0) for n in range(200)]
FETCHED = [min(log1p(n) / 3, 1.0) for n in range(200)]
WORD = re.compile(r"[a-z]+")

Rows: TypeAlias = NDArray[np.float32]
# Rows are joined as bytes, which is several times faster than NumPy for this many small pieces.
_four, _eight = Struct("4f").pack, Struct("8f").pack
NO_LINK, NO_PAGE = bytes(4 * N_LINK), bytes(4 * (N_PAGE - 4))


def code(text: str) -> Rows:
    """The sum of the codes of a text's words ÷ √(number of words), clipped to ±1; zeros without words."""
    words = WORD.findall(text.lower())[:12]
    out = np.zeros(CODE, np.float32)
    for word in words:
        bits = blake2b(word.encode(), digest_size=1).digest()[0]
        out += [1.0 if bits >> i & 1 else -1.0 for i in range(CODE)]
    clipped: Rows = np.clip(out / max(len(words), 1) ** 0.5, -1, 1)
    return clipped


@lru_cache(65_536)
def _code(text: str) -> bytes:
    return code(text).tobytes()


def slots(visited: Visited, n_slots: int) -> tuple[list[Link], int]:
    """The links in the slots, and how many of them are new.

    New links come first, alternating between shapes, the page's own before those of the site's frame.
    """
    own: dict[Shape, list[Link]] = defaultdict(list)
    frame: dict[Shape, list[Link]] = defaultdict(list)
    old: list[Link] = []
    for link in visited.links:
        if link.page is not None:
            old.append(link)
        elif link.tries < MAX_TRIES:
            (frame if link.in_frame else own)[link.shape].append(link)
    in_turn = chain.from_iterable(zip_longest(*own.values(), *frame.values()))
    new = list(islice(filter(None, in_turn), n_slots))
    return (new + old)[:n_slots], len(new)


def link_rows(links: list[Link], n_new: int, here: Visited | None, n_slots: int) -> Rows:
    """A row per slot, zeros if it is empty: features of the link, then of its shape."""
    n = len(links)
    if not n or here is None:
        return np.zeros((n_slots, N_LINK), np.float32)
    parts: list[bytes] = []
    marks = []
    for k, link in enumerate(links):
        shape = link.shape
        parts += link.row or _link_row(link), shape.row or _shape_row(shape)
        if shape is here.link.shape:
            marks.append((k, SAME_SHAPE))
        if link.tries and k < n_new:
            marks.append((k, FAILED))
    out = _array([*parts, NO_LINK * (n_slots - n)]).reshape(n_slots, N_LINK)
    out[n_new:n, VISITED] = 1.0
    for mark in marks:
        out[mark] = 1.0
    return out


def _array(parts: list[bytes]) -> Rows:
    return np.frombuffer(bytearray().join(parts), np.float32)


def _link_row(link: Link) -> bytes:
    """The features of a link that never change: codes of its text and of the last two parts of its path, and more."""
    flags = _flags(link.in_frame, link.has_query, len(link.tokens), "#" in link.shape.name)
    row = link.row = _code(link.text) + _path_codes(link) + flags
    return row


@lru_cache(1024)
def _flags(in_frame: bool, has_query: bool, n_tokens: int, has_number: bool) -> bytes:
    """The features between the codes and those of the shape."""
    return _eight(1.0, 0.0, 0.0, in_frame, has_query, min(n_tokens / 6, 1.0), has_number, 0.0)


def _path_codes(link: Link) -> bytes:
    """The codes of the last part of a link's path and of the part before."""
    n, tokens = len(link.tokens), link.tokens
    return _code(tokens[-1] if n else "") + _code(tokens[-2] if n > 1 else "")


def _shape_row(shape: Shape) -> bytes:
    """How many links of a shape were seen and fetched, and how many were targets or new templates."""
    n_fetched = max(shape.n_fetched, 1)
    seen, fetched = SEEN[min(shape.n_links, 199)], FETCHED[min(shape.n_fetched, 199)]
    row = shape.row = _four(seen, fetched, shape.n_targets / n_fetched, shape.n_templates / n_fetched)
    return row


def page_row(exploration: Exploration, here: Visited | None, n_new: int, depth: int, n_faults: int) -> Rows:
    """Features of the current page and of the exploration; `n_faults` is the number of consecutive faults."""
    parts = [NO_PAGE]
    if here is not None:
        link = here.link
        page = _eight(
            1.0,
            here.is_target,
            min(len(link.tokens) / 6, 1.0),
            min(log1p(len(here.links)) / 5, 1.0),
            min(log1p(n_new) / 4, 1.0),
            min(log1p(exploration.template_visits[here.template]) / 4, 1.0),
            min(log1p(here.n_elements) / 8, 1.0),
            link.shape.n_targets / max(link.shape.n_fetched, 1),
        )
        parts = [_path_codes(link), page]
    state = _four(
        min(depth / 10, 1.0),
        min(len(exploration.templates) / 20, 1.0),
        min(log1p(exploration.n_targets) / 4, 1.0),
        min(n_faults / 5, 1.0),
    )
    return _array([*parts, state])
