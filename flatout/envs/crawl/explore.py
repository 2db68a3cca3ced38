"""One exploration of a site: pages got, links known, kinds of pages and targets found. No rewards, no actions.

The env walks with it; breadth-first search, or any other strategy, can be written on it as well.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from flatout.envs.crawl.fault import Fault
from flatout.envs.crawl.fetch import Fetcher
from flatout.envs.crawl.graph import LinkGraph, Node
from flatout.envs.crawl.page import Page, Templates, read
from flatout.envs.crawl.rules import MAX_VARIANTS, Rules

MAX_TRIES = 2
"""How often a page is asked for that does not come."""


@dataclass(slots=True)
class Shape:
    """Links whose URLs look alike, and what following some of them gave."""

    name: str
    n_links: int = 0
    n_got: int = 0
    n_targets: int = 0
    n_templates: int = 0


@dataclass(slots=True, eq=False)
class Link:
    """A URL that was seen in this exploration, with the text it was first seen under."""

    url: str
    text: str
    in_frame: bool
    tokens: tuple[str, ...]
    """Its path below the start page, in parts."""
    has_query: bool
    shape: Shape
    source: str | None = None
    """The page it was first seen on."""
    code: Any = None
    """What its words say, once somebody has asked."""
    tries: int = 0
    page: Visited | None = None


@dataclass(frozen=True, slots=True)
class Visited:
    """A page that was got."""

    link: Link
    links: tuple[Link, ...]
    template: int
    is_target: bool
    n_elements: int
    title: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of following a link."""

    visited: Visited | None
    n_requests: int = 0
    is_repeat: bool = False
    new_template: bool = False
    new_target: bool = False
    fault: Fault | None = None


@dataclass(slots=True)
class Exploration:
    """What is known of one site."""

    start_url: str
    rules: Rules
    fetcher: Fetcher
    target: str
    graph: LinkGraph = field(default_factory=LinkGraph)
    templates: Templates = field(default_factory=Templates)
    template_visits: dict[int, int] = field(default_factory=dict)
    n_targets: int = 0
    n_requests: int = 0
    n_faults: int = 0
    links: dict[str, Link] = field(default_factory=dict)
    shapes: dict[str, Shape] = field(default_factory=dict)
    _urls: dict[str, str | None] = field(default_factory=dict)
    _variants: dict[str, int] = field(default_factory=dict)

    @property
    def start(self) -> Link:
        """The link to the start page."""
        return self.links.get(self.start_url) or self._link(self.start_url, "", in_frame=False)

    async def follow(self, link: Link) -> Outcome:
        """Go where a link leads: to a page known already without asking again, else by a request."""
        if link.page is not None:
            return Outcome(link.page, is_repeat=True)
        attempt = await self.fetcher.page(link.url, link.tries)
        link.tries += 1
        self.n_requests += attempt.n_requests
        if attempt.html is None:
            assert attempt.fault is not None
            self.n_faults += 1
            self.graph.add(
                Node(link.url, len(self.graph.nodes), fault=attempt.fault.kind, parent=link.source), []
            )
            return Outcome(None, attempt.n_requests, fault=attempt.fault)
        end = self.links.get(attempt.url) or self._link(attempt.url, link.text, link.in_frame)
        if end.page is not None:  # another way to a page that was got before
            link.page = end.page
            return Outcome(end.page, attempt.n_requests, is_repeat=True)
        return await self._arrive(link, end, attempt.html, attempt.n_requests)

    async def _arrive(self, link: Link, end: Link, html: str, n_requests: int) -> Outcome:
        page = read(html, self.target)
        n_before = len(self.templates)
        template = self.templates.number(page.marks)
        is_new = template == n_before
        self.template_visits[template] = self.template_visits.get(template, 0) + 1
        links = await self._links(end.url, page)
        visited = Visited(end, links, template, page.is_target, page.n_elements, page.title)
        link.page = end.page = visited
        for shape in {link.shape.name: link.shape, end.shape.name: end.shape}.values():
            shape.n_got += 1
            shape.n_targets += page.is_target
            shape.n_templates += is_new
        self.n_targets += page.is_target
        node = Node(end.url, len(self.graph.nodes), template, page.is_target, page.title, parent=link.source)
        self.graph.add(node, [each.url for each in visited.links])
        return Outcome(visited, n_requests, new_template=is_new, new_target=page.is_target)

    async def _links(self, base: str, page: Page) -> tuple[Link, ...]:
        """The page's links that may be followed, each once, in their order."""
        allows = await self.fetcher.robots(base)
        out: dict[str, Link] = {}
        for anchor in page.anchors:
            url = self._url(base, anchor.href)
            if url is None or url in out or url == base:
                continue
            link = self.links.get(url)
            if link is None:
                if not allows(url) or not self._is_worth(url):
                    continue
                link = self._link(url, anchor.text, anchor.in_frame, base)
            out[url] = link
        return tuple(out.values())

    def _url(self, base: str, href: str) -> str | None:
        if not href.startswith("/") or not base.startswith(self.rules.origin):
            return self.rules.follow(base, href)
        if href not in self._urls:  # most links of a page were on the last one too
            self._urls[href] = self.rules.follow(base, href)
        return self._urls[href]

    def _is_worth(self, url: str) -> bool:
        """Whether there are not too many URLs already that differ from this one in their query only."""
        path, query, _ = url.partition("?")
        if not query:
            return True
        self._variants[path] = self._variants.get(path, 0) + 1
        return self._variants[path] <= MAX_VARIANTS

    def _link(self, url: str, text: str, in_frame: bool, source: str | None = None) -> Link:
        path, query, _ = url.removeprefix(self.start_url).partition("?")
        tokens = tuple(token for token in path.split("/") if token)
        name = shape_name(tokens) + query
        shape = self.shapes.setdefault(name, Shape(name))
        shape.n_links += 1
        link = self.links[url] = Link(url, text, in_frame, tokens, bool(query), shape, source)
        return link


DIGIT = re.compile(r"\d")


@lru_cache(65_536)
def shape_name(tokens: tuple[str, ...]) -> str:
    """What URLs of the same kind have in common: parts with digits are alike, and so are the last ones of long paths."""
    parts = ["#" if DIGIT.search(token) else token for token in tokens]
    if len(parts) > 1 and parts[-1] != "#":
        parts[-1] = "*"
    return "/".join(parts)
