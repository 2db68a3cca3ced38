"""What the agent sees of an exploration: the page it is on, and a row of numbers for each link it may follow.

Words of link texts and URLs become short random codes, the same for the same word everywhere, so that what a word
promises on one site can be learned and used on another.
"""

from __future__ import annotations

import re
from functools import lru_cache
from hashlib import blake2b
from math import log1p

import numpy as np
from numpy.typing import NDArray

from flatout.envs.crawl.explore import MAX_TRIES, Exploration, Link, Visited

CODE = 8
"""Numbers in a word's code."""
N_LINK = 3 * CODE + 12
N_PAGE = 2 * CODE + 12
SEEN = [min(log1p(n) / 5, 1.0) for n in range(200)]
GOT = [min(log1p(n) / 3, 1.0) for n in range(200)]
WORD = re.compile(r"[a-z]+")

Row = NDArray[np.float32]


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


def slots(visited: Visited, n_slots: int) -> list[Link]:
    """The links that get a slot: new ones first, of each shape in turn, the page's own before the site's frame."""
    new: dict[tuple[bool, str], list[Link]] = {}
    old: list[Link] = []
    for link in visited.links:
        if link.page is not None:
            old.append(link)
        elif link.tries < MAX_TRIES:
            new.setdefault((link.in_frame, link.shape.name), []).append(link)
    out: list[Link] = []
    groups = [new[key] for key in sorted(new, key=lambda key: key[0])]
    depth = 0
    while groups and len(out) < n_slots:
        out += [group[depth] for group in groups]
        depth += 1
        groups = [group for group in groups if len(group) > depth]
    return (out + old)[:n_slots]


def link_rows(links: list[Link], here: Visited | None, n_slots: int) -> NDArray[np.float32]:
    """A row for each slot, zeros where it is empty."""
    out = np.zeros((n_slots, N_LINK), np.float32)
    if not links or here is None:
        return out
    n, shape_here = len(links), here.link.shape
    out[:n, : 3 * CODE] = [link.code if link.code is not None else _coded(link) for link in links]
    out[:n, 3 * CODE :] = [
        (
            1.0,
            link.page is not None,
            link.tries > 0 and link.page is None,
            link.in_frame,
            link.has_query,
            min(len(link.tokens) / 6, 1.0),
            "#" in link.shape.name,
            link.shape is shape_here,
            SEEN[min(link.shape.n_links, 199)],
            GOT[min(link.shape.n_got, 199)],
            link.shape.n_targets / max(link.shape.n_got, 1),
            link.shape.n_templates / max(link.shape.n_got, 1),
        )
        for link in links
    ]
    return out


def _coded(link: Link) -> Row:
    """The codes of a link's text and of the last two parts of its path, worked out once."""
    last, before = ("", "", *link.tokens)[:-3:-1]
    link.code = np.concatenate([code(link.text), code(last), code(before)])
    return link.code  # type: ignore[no-any-return]


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
