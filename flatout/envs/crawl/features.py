"""What the agent sees of an exploration: the page it is on, and a row of numbers for each link it may follow.

Words of link texts and URLs become short random codes, the same for the same word everywhere, so that what a word
promises on one site can be learned and used on another.
"""

from __future__ import annotations

import re
from functools import lru_cache
from hashlib import blake2b
from itertools import chain, islice, zip_longest
from math import log1p

import numpy as np
from numpy.typing import NDArray

from flatout.envs.crawl.explore import MAX_TRIES, Exploration, Link, Shape, Visited

CODE = 8
"""Numbers in a word's code."""
N_SHAPE = 4
FIRST = 3 * CODE
"""Where a link's codes end, and a 1 says that there is a link."""
GOT_IT, FAILED, SAME_SHAPE = FIRST + 1, FIRST + 2, FIRST + 7
N_LINK = FIRST + 8 + N_SHAPE
N_PAGE = 2 * CODE + 12
SEEN = [min(log1p(n) / 5, 1.0) for n in range(200)]
GOT = [min(log1p(n) / 3, 1.0) for n in range(200)]
WORD = re.compile(r"[a-z]+")

Row = NDArray[np.float32]
NO_LINK: Row = np.zeros(N_LINK, np.float32)


@lru_cache(65_536)
def code(text: str) -> Row:
    """The mean code of a text's words, scaled to keep its spread; zeros where there is no word."""
    words = WORD.findall(text.lower())[:12]
    out = np.zeros(CODE, np.float32)
    for word in words:
        bits = blake2b(word.encode(), digest_size=1).digest()[0]
        out += [1.0 if bits >> i & 1 else -1.0 for i in range(CODE)]
    clipped: Row = np.clip(out / max(len(words), 1) ** 0.5, -1, 1)
    return clipped


def slots(visited: Visited, n_slots: int) -> tuple[list[Link], int]:
    """The links that get a slot, and how many of them are new.

    New ones come first, of each shape in turn, the page's own before the site's frame.
    """
    own: dict[Shape, list[Link]] = {}
    frame: dict[Shape, list[Link]] = {}
    old: list[Link] = []
    for link in visited.links:
        if link.page is not None:
            old.append(link)
        elif link.tries < MAX_TRIES:
            groups = frame if link.in_frame else own
            group = groups.get(link.shape)
            if group is None:
                groups[link.shape] = [link]
            else:
                group.append(link)
    in_turn = chain.from_iterable(zip_longest(*own.values(), *frame.values()))
    new = list(islice(filter(None, in_turn), n_slots))
    return (new + old)[:n_slots], len(new)


def link_rows(links: list[Link], n_new: int, here: Visited | None, n_slots: int) -> NDArray[np.float32]:
    """A row for each slot, zeros where it is empty: the link's own numbers, then those of its shape."""
    n = len(links)
    if not n or here is None:
        return np.zeros((n_slots, N_LINK), np.float32)
    rows = [link.row if link.row is not None else _link_row(link) for link in links]
    out = np.concatenate(rows + [NO_LINK] * (n_slots - n)).reshape(n_slots, N_LINK)
    shapes = [link.shape for link in links]
    out[:n, -N_SHAPE:] = np.concatenate(
        [shape.row if shape.row is not None else _shape_row(shape) for shape in shapes]
    ).reshape(n, N_SHAPE)
    out[n_new:n, GOT_IT] = 1.0
    shape_here = here.link.shape
    same = [shape is shape_here for shape in shapes]
    if True in same:
        out[:n, SAME_SHAPE] = same
    for k in range(n_new):
        if links[k].tries:
            out[k, FAILED] = 1.0
    return out


def _link_row(link: Link) -> Row:
    """The codes of a link's text and of the last two parts of its path, and what never changes; worked out once."""
    last, before = ("", "", *link.tokens)[:-3:-1]
    rest = _rest(link.in_frame, link.has_query, len(link.tokens), "#" in link.shape.name)
    link.row = np.concatenate((code(link.text), code(last), code(before), rest))
    return link.row  # type: ignore[no-any-return]


@lru_cache(1024)
def _rest(in_frame: bool, has_query: bool, n_tokens: int, has_number: bool) -> Row:
    """A link's row after its codes."""
    row = np.zeros(N_LINK - FIRST, np.float32)
    row[0] = 1.0
    row[3:7] = in_frame, has_query, min(n_tokens / 6, 1.0), has_number
    return row


def _shape_row(shape: Shape) -> Row:
    """How often a shape was seen and got, and what came of it; worked out when it has changed."""
    n_got = max(shape.n_got, 1)
    seen, got = SEEN[min(shape.n_links, 199)], GOT[min(shape.n_got, 199)]
    shape.row = np.array((seen, got, shape.n_targets / n_got, shape.n_templates / n_got), np.float32)
    return shape.row  # type: ignore[no-any-return]


def page_row(
    exploration: Exploration, here: Visited | None, n_new: int, depth: int, n_faults_in_turn: int
) -> NDArray[np.float32]:
    """The page that the agent is on, and how the exploration stands."""
    out = np.zeros(N_PAGE, np.float32)
    if here is not None:
        tokens = here.link.tokens
        if tokens:
            out[:CODE] = code(tokens[-1])
            if len(tokens) > 1:
                out[CODE : 2 * CODE] = code(tokens[-2])
        out[2 * CODE : 2 * CODE + 8] = (
            1.0,
            here.is_target,
            min(len(tokens) / 6, 1.0),
            min(log1p(len(here.links)) / 5, 1.0),
            min(log1p(n_new) / 4, 1.0),
            min(log1p(exploration.template_visits.get(here.template, 0)) / 4, 1.0),
            min(log1p(here.n_elements) / 8, 1.0),
            here.link.shape.n_targets / max(here.link.shape.n_got, 1),
        )
    out[-4:] = (
        min(depth / 10, 1.0),
        min(len(exploration.templates) / 20, 1.0),
        min(log1p(exploration.n_targets) / 4, 1.0),
        min(n_faults_in_turn / 5, 1.0),
    )
    return out
