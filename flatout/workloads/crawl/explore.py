"""One exploration of a site: fetched pages, known links, page templates and targets. No rewards and no actions.

The env is built on it; other strategies, such as breadth-first search, can be too.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.workloads.crawl.access import MAX_VARIANTS, Fault
from flatout.workloads.crawl.fetch import PARSE_SECONDS, Attempt, Fetcher
from flatout.workloads.crawl.page import Anchor, Page, Templates

if TYPE_CHECKING:
    import networkx as nx
MAX_TRIES = 2
"""Largest number of requests for a page that fails."""
MAX_HREFS = 100_000
"""Largest number of characters of a page's links; the rest are ignored, so that no page fills the memory."""


@dataclass(slots=True, eq=False)
class Shape:
    """Statistics of the links whose URLs have the same shape."""

    name: str
    n_links: int = 0
    n_fetched: int = 0
    n_targets: int = 0
    n_templates: int = 0
    row: bytes = b""
    """Its cached features; empty after a change."""


@dataclass(slots=True, eq=False)
class Link:
    """A URL seen in this exploration, with the text of its first link."""

    url: str
    text: str
    in_frame: bool
    tokens: tuple[str, ...]
    """The parts of its path below the start page."""
    has_query: bool
    shape: Shape
    source: str | None = None
    """The page where it was first seen."""
    row: bytes = b""
    """Its cached features without those of its shape."""
    tries: int = 0
    fault: str = ""
    """The kind of the last fault."""
    page: Visited | None = None

    @property
    def visited(self) -> Visited | None:
        """The page, unless another URL led to it."""
        return self.page if self.page is not None and self.page.link is self else None


@dataclass(frozen=True, slots=True)
class Visited:
    """A fetched page."""

    link: Link
    links: tuple[Link, ...]
    template: int
    is_target: bool
    n_elements: int
    title: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of following a link."""

    visited: Visited | None
    n_requests: int = 0
    is_repeat: bool = False
    new_template: bool = False
    new_target: bool = False
    fault: Fault | None = None


@dataclass(slots=True)
class Exploration:
    """The state of exploring one site."""

    start_url: str
    fetcher: Fetcher
    target: str
    requested: dict[str, Link] = field(default_factory=dict)
    """Links by URL, in the order of the requests; of a redirect the last URL."""
    templates: Templates = field(default_factory=Templates)
    template_visits: Counter[int] = field(default_factory=Counter)
    n_targets: int = 0
    n_requests: int = 0
    n_faults: int = 0
    links: dict[str, Link] = field(default_factory=dict)
    shapes: dict[str, Shape] = field(default_factory=dict)
    _by_href: dict[str, Link | None] = field(default_factory=dict)
    """Links by the href on pages of the start page's host; None: must not be followed."""
    _variants: Counter[str] = field(default_factory=Counter)
    """Number of queries seen with each path."""

    @property
    def start(self) -> Link:
        """The link to the start page."""
        return self.links.get(self.start_url) or self._link(self.start_url, "", in_frame=False)

    async def follow(self, link: Link) -> Outcome:
        """Follow a link; a page that was fetched before costs no request."""
        if link.page is not None:
            return Outcome(link.page, is_repeat=True)
        attempt = await self.fetcher.page(link.url, link.tries)
        link.tries += 1
        self.n_requests += attempt.n_requests
        if attempt.html is None:
            assert attempt.fault is not None
            return self._fail(link, attempt.fault, attempt.n_requests)
        end = self.links.get(attempt.url)
        if end is None:  # a redirect; hrefs that were refused may be this URL and are checked again
            self._by_href = {href: known for href, known in self._by_href.items() if known is not None}
            end = self._link(attempt.url, link.text, link.in_frame, link.source)
        if end.page is not None:  # another URL of a page that was fetched before
            link.page = end.page
            return Outcome(end.page, attempt.n_requests, is_repeat=True)
        try:
            until = attempt.deadline + PARSE_SECONDS
            page = await self.fetcher.network.parser.parse(attempt.html, self.target, until)
        except Fault as fault:
            return self._fail(link, fault, attempt.n_requests)
        return self._arrive(link, end, attempt, page)

    def _fail(self, link: Link, fault: Fault, n_requests: int) -> Outcome:
        self.n_faults += 1
        link.fault = fault.kind
        self.requested[link.url] = link
        return Outcome(None, n_requests, fault=fault)

    def _arrive(self, link: Link, end: Link, attempt: Attempt, page: Page) -> Outcome:
        template = self.templates.number(page.elements)
        is_new = template not in self.template_visits
        self.template_visits[template] += 1
        links = self._links(end, page, attempt.allows)
        visited = Visited(end, links, template, page.is_target, page.n_elements, page.title)
        link.page = end.page = visited
        for shape in (link.shape,) if link.shape is end.shape else (link.shape, end.shape):
            shape.n_fetched += 1
            shape.n_targets += page.is_target
            shape.n_templates += is_new
            shape.row = b""
        self.n_targets += page.is_target
        self.requested[end.url] = end
        return Outcome(visited, attempt.n_requests, new_template=is_new, new_target=page.is_target)

    def to_networkx(self) -> nx.DiGraph[str]:
        """The explored link graph: requested pages with their properties, and their links, also to pages not requested."""
        import networkx as nx

        graph: Any = nx.DiGraph()
        for order, link in enumerate(self.requested.values()):
            about: dict[str, Any] = {"target": False, "template": -1, "title": "", "fault": link.fault}
            if (page := link.visited) is not None:
                about = {
                    "target": page.is_target,
                    "template": page.template,
                    "title": page.title,
                    "fault": "",
                }
            graph.add_node(link.url, order=order, visited=page is not None, **about)
        for link in self.requested.values():
            others = [other.url for other in link.visited.links] if link.visited else []
            graph.add_nodes_from((url for url in others if url not in graph), visited=False)
            graph.add_edges_from((link.url, url) for url in others)
        return graph

    def write_graphml(self, path: str | Path) -> None:
        """Write the graph as GraphML, which Gephi, yEd and NetworkX read."""
        import networkx as nx

        nx.write_graphml(self.to_networkx(), path)

    def _links(self, here: Link, page: Page, allows: Callable[[str], bool]) -> tuple[Link, ...]:
        """The links of a page that may be followed, in order, without repeats."""
        by_href = self._by_href if here.url.startswith(f"{self.fetcher.rules.origin}/") else {}
        out: dict[Link, None] = {}
        n_left = MAX_HREFS
        for anchor in page.anchors:
            href = anchor[0]
            n_left -= len(href)
            if n_left < 0:
                break
            if href in by_href:  # most links of a page were on the previous one too
                link = by_href[href]
            else:
                link = self._link_of(here.url, anchor, allows)
                if href.startswith("/"):
                    by_href[href] = link
            if link is not None:
                out[link] = None
        out.pop(here, None)
        return tuple(out)

    def _link_of(self, base: str, anchor: Anchor, allows: Callable[[str], bool]) -> Link | None:
        """The Link of an anchor; None if it must not be followed."""
        href, text, in_frame = anchor
        url = self.fetcher.rules.follow(base, href)
        if url in self.links:
            return self.links[url]
        if url is None or not allows(url):
            return None
        if "?" in url:
            path = url.partition("?")[0]
            self._variants[path] += 1
            if self._variants[path] > MAX_VARIANTS:
                return None
        return self._link(url, text, in_frame, base)

    def _link(self, url: str, text: str, in_frame: bool, source: str | None = None) -> Link:
        tokens, has_query, name = split_url(url.removeprefix(self.start_url))
        shape = self.shapes.get(name)
        if shape is None:
            shape = self.shapes[name] = Shape(name)
        shape.n_links += 1
        shape.row = b""
        link = self.links[url] = Link(url, text, in_frame, tokens, has_query, shape, source)
        return link


@lru_cache(65_536)
def split_url(below: str) -> tuple[tuple[str, ...], bool, str]:
    """The path parts below the start page, whether there is a query, and the name of the shape.

    The name is the path with `#` for parts that contain digits and `*` for the last part of longer paths.
    """
    path, mark, _ = below.partition("?")
    tokens = tuple(filter(None, path.split("/")))
    parts = ["#" if re.search(r"\d", token) else token for token in tokens]
    if len(parts) > 1 and parts[-1] != "#":
        parts[-1] = "*"
    return tokens, bool(mark), "/".join(parts) + mark
