"""A page as the crawler sees it: links, what it is made of, whether it is a target. HTML comes in."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

from selectolax.lexbor import LexborHTMLParser, SelectolaxError

from flatout.errors import FlatoutError

MAX_LINKS = 500
MAX_TEXT = 120
AROUND = ("header", "footer", "nav", "aside")
"""Elements whose links belong to the site's frame rather than to the page."""

SAME = 0.8
"""Share of all marks that two pages of one kind have in common."""


Anchor: TypeAlias = tuple[str, str, bool]
"""A link as it stands on a page: where it leads, its text, whether it belongs to the site's frame."""


@dataclass(frozen=True, slots=True)
class Page:
    """What a page's HTML says."""

    anchors: tuple[Anchor, ...]
    marks: frozenset[str]
    """Its elements' tags with their classes, whichever way they are repeated or ordered: what a template leaves."""
    is_target: bool
    n_elements: int
    title: str


def read(html: str, target: str) -> Page:
    """The page in some HTML, broken or not; `target` is the CSS selector that targets match."""
    tree = LexborHTMLParser(html)
    frame = {node.mem_id for tag in AROUND for part in tree.tags(tag) for node in part.traverse()}
    anchors: list[Anchor] = []
    marks: set[str] = set()
    n_elements = 0
    for node in tree.body.traverse() if tree.body is not None else ():
        n_elements += 1
        tag, attributes = node.tag, node.attributes
        if tag != "a":
            marks.add(f"{tag}.{attributes['class']}" if "class" in attributes else str(tag))
        elif (href := attributes.get("href")) and len(anchors) < MAX_LINKS:
            anchors.append((href, tidy(node.text()[:MAX_TEXT]), node.mem_id in frame))
    titles = tree.tags("title")
    return Page(
        tuple(anchors),
        frozenset(marks),
        # Setting up a tree's selectors takes as long as parsing a small page.
        may_match(html, target) and tree.css_first(target) is not None,
        n_elements,
        tidy(titles[0].text()[:MAX_TEXT]) if titles else "",
    )


@lru_cache(16_384)
def tidy(text: str) -> str:
    """The beginning of a text, in one line."""
    return " ".join(text[:MAX_TEXT].split())


def may_match(html: str, selector: str) -> bool:
    """Whether some HTML holds the attributes without which nothing in it can match."""
    needed = _needed(selector)
    lowered = html.lower() if needed else ""
    return all(name in lowered for name in needed)


@lru_cache(64)
def _needed(selector: str) -> tuple[str, ...]:
    """Names of attributes without which no element can match; none where that is not plain to see."""
    bare = re.sub(r"\"[^\"]*\"|'[^']*'", "", selector.lower())
    return () if re.search(r"[,:\\]", bare) else tuple(re.findall(r"\[\s*([a-z-]+)", bare))


def check_selector(target: Any) -> str:
    """The selector, or a FlatoutError of one line if it is none."""
    try:
        LexborHTMLParser("<p></p>").css_first(target)
    except (SelectolaxError, TypeError, ValueError) as error:
        raise FlatoutError(f"target {target!r} is not a CSS selector: {error}") from error
    return str(target)


def alike(one: frozenset[str], other: frozenset[str]) -> bool:
    """Whether pages with these marks are of one kind."""
    n_common = len(one & other)
    return n_common >= SAME * (len(one) + len(other) - n_common)


class Templates:
    """The kinds of pages met so far: a page is of a known kind if it is made of nearly the same elements."""

    def __init__(self) -> None:
        self._kinds: list[frozenset[str]] = []
        self._exact: dict[frozenset[str], int] = {}

    def __len__(self) -> int:
        return len(self._kinds)

    def number(self, marks: frozenset[str]) -> int:
        """The number of the page's kind, a new one where it is of none that is known."""
        known = self._exact.get(marks)
        if known is not None:
            return known
        for number, kind in enumerate(self._kinds):
            if alike(marks, kind):
                self._exact[marks] = number
                return number
        self._kinds.append(marks)
        self._exact[marks] = len(self._kinds) - 1
        return len(self._kinds) - 1
