"""Parsing a page: its links, its structure, and whether it is a target. Run as a script, it parses pages for `parser.py`.

Pages of one template are parsed once. Two pages whose HTML differs only in texts and link targets have the same elements, provided
that the HTML matches PLAIN: every `<` starts a tag and every `>` ends one. Other HTML is always parsed.
"""

from __future__ import annotations

import json
import re
import resource
import sys
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import chain
from typing import TypeAlias

from selectolax.lexbor import LexborHTMLParser

MAX_LINKS, MAX_ELEMENTS = 500, 1000
MAX_TEXT, MAX_ELEMENT = 120, 300
"""Characters that are kept of a text, and of an element's name and class."""
AROUND = ("header", "footer", "nav", "aside")
"""Elements that make up the frame of a site; their links do not belong to the page itself."""

SAME = 0.8
"""Jaccard similarity from which two pages have the same template."""


Anchor: TypeAlias = tuple[str, str, bool]
"""A link on a page: href, text, whether it is in the site's frame (header, navigation, footer)."""


@dataclass(frozen=True, slots=True)
class Page:
    """A parsed page."""

    anchors: tuple[Anchor, ...]
    elements: frozenset[str]
    """The set of its elements as tag.class, which tells its template."""
    is_target: bool
    n_elements: int
    title: str


def parse(html: str, target: str) -> Page:
    """Parse HTML, valid or not; `target` is the CSS selector of targets."""
    tree = LexborHTMLParser(html)
    frame: set[int] = set()
    for part in chain.from_iterable(map(tree.tags, AROUND)):
        if part.mem_id not in frame:  # otherwise it was added with an element around it
            frame.update(node.mem_id for node in part.traverse())
    anchors: list[Anchor] = []
    elements: set[str] = set()
    n_elements = 0
    for node in tree.body.traverse() if tree.body is not None else ():
        n_elements += 1
        tag, attributes = node.tag, node.attributes
        if tag != "a":
            if len(elements) < MAX_ELEMENTS:
                name = f"{tag}.{attributes['class']}" if "class" in attributes else str(tag)
                elements.add(name[:MAX_ELEMENT])
        elif (href := attributes.get("href")) and len(anchors) < MAX_LINKS:
            anchors.append((href, tidy(node.text()[:MAX_TEXT]), node.mem_id in frame))
    titles = tree.tags("title")
    return Page(
        tuple(anchors),
        frozenset(elements),
        # Matching a selector takes as long as parsing a small page.
        may_match(html, target) and tree.css_first(target) is not None,
        n_elements,
        tidy(titles[0].text()[:MAX_TEXT]) if titles else "",
    )


@lru_cache(16_384)
def tidy(text: str, max_length: int = MAX_TEXT) -> str:
    """The start of a text in one line, without control characters, which a terminal or XML would take for commands."""
    line = " ".join(text[:max_length].split())
    if line.isprintable():
        return line
    return " ".join("".join(char if char.isprintable() else " " for char in line).split())


def may_match(html: str, selector: str) -> bool:
    """False if the HTML lacks an attribute that the selector needs."""
    needed = _needed(selector)
    lowered = html.lower() if needed else ""
    return all(name in lowered for name in needed)


@lru_cache(64)
def _needed(selector: str) -> tuple[str, ...]:
    """Attributes that a matching element must have; empty if the selector is not simple."""
    bare = re.sub(r"\"[^\"]*\"|'[^']*'", "", selector.lower())
    return () if re.search(r"[,:\\]", bare) else tuple(re.findall(r"\[\s*([a-z-]+)", bare))


def alike(one: frozenset[str], other: frozenset[str]) -> bool:
    """Whether pages with these elements have the same template."""
    n_common = len(one & other)
    return n_common >= SAME * (len(one) + len(other) - n_common)


class Templates:
    """The page templates met so far; pages with nearly the same elements share one."""

    def __init__(self) -> None:
        self._kinds: list[frozenset[str]] = []
        self._exact: dict[frozenset[str], int] = {}

    def __len__(self) -> int:
        return len(self._kinds)

    def number(self, elements: frozenset[str]) -> int:
        """The number of a page's template; a new one if it matches none."""
        known = self._exact.get(elements)
        if known is None:
            matches = (number for number, kind in enumerate(self._kinds) if alike(elements, kind))
            known = self._exact[elements] = next(matches, len(self._kinds))
            if known == len(self._kinds):
                self._kinds.append(elements)
        return known


TEXT = r"[^<>&\x00-\x08\r]"
SAYS = r"[^\S\r]*+[^<>&\x00-\x08\s]"
"""The start of a text that is not blank. Blank texts belong to the outline, because tables treat them differently."""
VALUE = r'[^"<>&\x00-\x08\s]'
HREF = rf"{VALUE}++(?:&(?:amp;|[a-zA-Z0-9]++=){VALUE}*+)*+"
"""The only escape allowed is `&amp;`; `&name=` is taken literally."""
LINK = re.compile(rf' href="({HREF})"({TEXT}{{0,1000}}+)>({SAYS}{TEXT}{{0,300}}+)</a(?=>)')
"""The href of a link, the rest of its tag (part of the outline), and its text; bounded, so that no HTML takes long to match."""
WORDS = re.compile(rf">{SAYS}{TEXT}*+<")
PLAIN = re.compile(
    r"(?:<!(?i:doctype html)>)?"
    r"(?:</?[a-zA-Z][a-zA-Z0-9-]*+"
    r'(?:[ \t\n\f\r]++[a-zA-Z][a-zA-Z0-9:_-]*+(?:="[^"<>\x00-\x08]*+")?)*+[ \t\n\f\r]*+/?>'
    r"|[^<>\x00-\x08]++)*+"
)
CUT, SAID = "\x01", "\x02"
MAX_OUTLINES, MAX_HTML = 2048, 50_000
"""Largest number of cached outlines, and of characters of a page that is cached."""


@dataclass(frozen=True, slots=True)
class Outline:
    """What all pages with the same outline share: their HTML without texts and hrefs."""

    in_frame: tuple[bool, ...]
    """For each link."""
    elements: frozenset[str]
    is_target: bool
    n_elements: int


TO_PARSE = Outline((), frozenset(), False, 0)
"""Marks an outline whose pages must be parsed."""
_outlines: dict[bytes, Outline] = {}
"""By the hash of outline and selector."""


def parse_cached(html: str, target: str) -> Page:
    """The same as `parse`, but fast from the second page with the same outline on."""
    if len(html) > MAX_HTML or (not _is_structural(target) and may_match(html, target)):
        return parse(html, target)
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
        return parse(html, target)
    hrefs = parts[1::4]
    if "&amp;" in html:
        hrefs = [href.replace("&amp;", "&") for href in hrefs]
    anchors = tuple(zip(hrefs, map(tidy, parts[3::4]), known.in_frame, strict=True))
    return Page(anchors, known.elements, known.is_target, known.n_elements, _title(html))


def _learn(html: str, target: str, said: str, n_links: int) -> Outline | None:
    """The outline; None unless every page that has it must have its links and its title in the same places."""
    if not PLAIN.fullmatch(html):
        return None
    pieces = said.split(CUT)
    ends = (f' href="{k}"{pieces[n_links + 1 + k]}>{k}</a' for k in range(n_links))
    numbered = "".join(piece for pair in zip(pieces, (*ends, ""), strict=False) for piece in pair)
    numbered = numbered.replace(f"<title>{SAID}", "<title>title", 1).replace(SAID, "text")
    page = parse(numbered, target)
    expected = [(str(k), str(k)) for k in range(n_links)]
    if [anchor[:2] for anchor in page.anchors] != expected or page.title != _title(numbered):
        return None
    in_frame = tuple(anchor[2] for anchor in page.anchors)
    return Outline(in_frame, page.elements, page.is_target and _is_structural(target), page.n_elements)


def _title(html: str) -> str:
    start = html.find("<title>") + 7
    return tidy(html[start : html.find("<", start)][:MAX_TEXT]) if start > 6 else ""


@lru_cache(64)
def _is_structural(selector: str) -> bool:
    """Whether a selector depends on nothing but the outline."""
    return not re.search(r"[:\\]|href", selector, re.IGNORECASE)


MAX_MEMORY, MAX_CPU_SECONDS = 1 << 30, 3
MAX_HREF = 3000
"""More than the longest URL that is followed."""


def serve() -> None:
    """Answer each line `[html, target]` of standard input with the page as JSON; a page above the limits ends the process."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    for line in sys.stdin:
        used = resource.getrusage(resource.RUSAGE_SELF)
        resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + MAX_CPU_SECONDS, hard))
        page = parse_cached(*json.loads(line))
        anchors = [(href[:MAX_HREF], text, in_frame) for href, text, in_frame in page.anchors]
        print(
            json.dumps([anchors, list(page.elements), page.is_target, page.n_elements, page.title]),
            flush=True,
        )


if __name__ == "__main__":
    serve()
