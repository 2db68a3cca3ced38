"""A page as the crawler sees it: links, what it is made of, whether it is a target. HTML comes in.

Pages of one template at a glance: what their HTML has in common is parsed once, links and texts are cut out of the rest.

Two pages that differ only in where links lead and in texts have the same elements, provided that their HTML is as plain
as PLAIN: every `<` begins a tag and every `>` ends one. HTML of any other kind is parsed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
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


TEXT = r"[^<>&\x00-\x08\r]"
SAYS = r"[^\S\r]*+[^<>&\x00-\x08\s]"
"""The beginning of a text that is not blank; blanks belong to the outline, as tables treat the two differently."""
VALUE = r'[^"<>&\x00-\x08\s]'
HREF = rf"{VALUE}++(?:&(?:amp;|[a-zA-Z0-9]++=){VALUE}*+)*"
"""Of all that may be escaped only `&amp;`; `&name=` is read as it stands."""
LINK = re.compile(rf' href="({HREF})"({TEXT}*+)>({SAYS}{TEXT}{{0,300}})</a(?=>)')
"""Where a link leads, what else its tag says, which belongs to the outline, and its text."""
WORDS = re.compile(rf">{SAYS}{TEXT}*+<")
PLAIN = re.compile(
    r"(?:<!(?i:doctype html)>)?"
    r"(?:</?[a-zA-Z][a-zA-Z0-9-]*+"
    r'(?:[ \t\n\f\r]++[a-zA-Z][a-zA-Z0-9:_-]*+(?:="[^"<>\x00-\x08]*+")?)*[ \t\n\f\r]*+/?>'
    r"|[^<>\x00-\x08]++)*"
)
CUT, SAID = "\x01", "\x02"
MAX_OUTLINES, MAX_HTML = 2048, 50_000
"""How many are kept, and the length of HTML above which none is."""


@dataclass(frozen=True, slots=True)
class Outline:
    """What all pages of one outline share."""

    in_frame: tuple[bool, ...]
    """Of each link."""
    marks: frozenset[str]
    is_target: bool
    n_elements: int


TO_PARSE = Outline((), frozenset(), False, 0)
"""In the place of an outline whose pages have to be parsed."""
_outlines: dict[bytes, Outline] = {}
"""By outline and selector."""


def glance(html: str, target: str) -> Page:
    """What `read` gives; quicker from the second page of an outline on."""
    if len(html) > MAX_HTML or (not _is_structural(target) and may_match(html, target)):
        return read(html, target)
    parts = LINK.split(html)
    n_links = len(parts) // 4
    said = WORDS.sub(f">{SAID}<", CUT.join(parts[::4] + parts[2::4]))
    key = blake2b(f"{target}{CUT}{said}".encode("utf-8", "surrogatepass"), digest_size=16).digest()
    known = _outlines.get(key)
    if known is None:
        if len(_outlines) >= MAX_OUTLINES:
            _outlines.clear()
        known = _outlines[key] = _learn(html, target, said, n_links) or TO_PARSE
    if known is TO_PARSE or len(known.in_frame) != n_links:
        return read(html, target)
    hrefs = parts[1::4]
    if "&amp;" in html:
        hrefs = [href.replace("&amp;", "&") for href in hrefs]
    anchors = tuple(zip(hrefs, map(tidy, parts[3::4]), known.in_frame, strict=True))
    return Page(anchors, known.marks, known.is_target, known.n_elements, _title(html))


def _learn(html: str, target: str, said: str, n_links: int) -> Outline | None:
    """The outline, if every page that has it is sure to have its links in these places, and its title."""
    if not PLAIN.fullmatch(html):
        return None
    pieces = said.split(CUT)
    ends = (f' href="{k}"{pieces[n_links + 1 + k]}>{k}</a' for k in range(n_links))
    numbered = "".join(piece for pair in zip(pieces, (*ends, ""), strict=False) for piece in pair)
    numbered = numbered.replace(f"<title>{SAID}", "<title>title", 1).replace(SAID, "text")
    page = read(numbered, target)
    if [anchor[:2] for anchor in page.anchors] != [(str(k), str(k)) for k in range(n_links)]:
        return None
    if page.title != _title(numbered):
        return None
    is_target = page.is_target and _is_structural(target)
    return Outline(tuple(in_frame for _, _, in_frame in page.anchors), page.marks, is_target, page.n_elements)


def _title(html: str) -> str:
    start = html.find("<title>") + 7
    return tidy(html[start : html.find("<", start)][:MAX_TEXT]) if start > 6 else ""


@lru_cache(64)
def _is_structural(selector: str) -> bool:
    """Whether a selector is sure to look at nothing but what belongs to the outline."""
    return not re.search(r"[:\\]|href", selector, re.IGNORECASE)
