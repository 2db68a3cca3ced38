"""The link graph as explored so far: pages met, links seen, what was found where. To NetworkX and GraphML.

One exploration of a site: pages got, links known, kinds of pages and targets found. No rewards, no actions.

The env walks with it; breadth-first search, or any other strategy, can be written on it as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.workloads.crawl.access import MAX_VARIANTS, Fault, Rules
from flatout.workloads.crawl.fetch import Attempt, Fetcher
from flatout.workloads.crawl.page import Anchor, Page, Templates, glance

if TYPE_CHECKING:
    import networkx as nx


@dataclass(slots=True)
class Node:
    """A page that was got, or that asking for failed."""

    url: str
    order: int
    template: int = -1
    """-1: it was never got."""
    is_target: bool = False
    title: str = ""
    fault: str = ""
    parent: str | None = None
    """The page that its link was first seen on."""


@dataclass(slots=True)
class LinkGraph:
    """Pages by URL, and the links between them and to pages not asked for."""

    nodes: dict[str, Node] = field(default_factory=dict)
    links: dict[str, list[str]] = field(default_factory=dict)

    def add(self, node: Node, links: list[str]) -> None:
        """Keep a page and where it links to."""
        self.nodes[node.url] = node
        self.links[node.url] = links

    def to_networkx(self) -> nx.DiGraph[str]:
        """A directed graph whose nodes carry what is known of each page."""
        import networkx as nx

        graph: Any = nx.DiGraph()
        for node in self.nodes.values():
            graph.add_node(
                node.url,
                order=node.order,
                template=node.template,
                target=node.is_target,
                title=node.title,
                fault=node.fault,
                visited=node.template >= 0,
            )
        for url, links in self.links.items():
            for link in links:
                if link not in graph:
                    graph.add_node(link, visited=False)
                graph.add_edge(url, link)
        return graph

    def write_graphml(self, path: str | Path) -> None:
        """Write the graph to a file that Gephi, yEd and NetworkX read."""
        import networkx as nx

        nx.write_graphml(self.to_networkx(), path)


MAX_TRIES = 2
"""How often a page is asked for that does not come."""


@dataclass(slots=True, eq=False)
class Shape:
    """Links whose URLs look alike, and what following some of them gave."""

    name: str
    n_links: int = 0
    n_got: int = 0
    n_targets: int = 0
    n_templates: int = 0
    row: bytes = b""
    """What the agent sees of it, empty while nobody has asked since it last changed."""


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
    row: bytes = b""
    """What the agent sees of it besides its shape, once somebody has asked."""
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
    _by_href: dict[str, Link | None] = field(default_factory=dict)
    """Links of the start page's host as they stand on its pages; None: not to be followed."""
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
        end = self.links.get(attempt.url) or self._end(attempt.url, link)
        if end.page is not None:  # another way to a page that was got before
            link.page = end.page
            return Outcome(end.page, attempt.n_requests, is_repeat=True)
        return self._arrive(link, end, attempt)

    def _arrive(self, link: Link, end: Link, attempt: Attempt) -> Outcome:
        page = glance(attempt.html or "", self.target)
        n_before = len(self.templates)
        template = self.templates.number(page.marks)
        is_new = template == n_before
        self.template_visits[template] = self.template_visits.get(template, 0) + 1
        links = self._links(end, page, attempt.allows)
        visited = Visited(end, links, template, page.is_target, page.n_elements, page.title)
        link.page = end.page = visited
        for shape in (link.shape,) if link.shape is end.shape else (link.shape, end.shape):
            shape.n_got += 1
            shape.n_targets += page.is_target
            shape.n_templates += is_new
            shape.row = b""
        self.n_targets += page.is_target
        node = Node(end.url, len(self.graph.nodes), template, page.is_target, page.title, parent=link.source)
        self.graph.add(node, [each.url for each in visited.links])
        return Outcome(visited, attempt.n_requests, new_template=is_new, new_target=page.is_target)

    def _links(self, here: Link, page: Page, allows: Callable[[str], bool]) -> tuple[Link, ...]:
        """The page's links that may be followed, each once, in their order."""
        by_href = self._by_href if here.url.startswith(f"{self.rules.origin}/") else {}
        out: dict[Link, None] = {}
        for anchor in page.anchors:
            href = anchor[0]
            if href in by_href:  # most links of a page were on the last one too
                link = by_href[href]
            else:
                link = self._met(here.url, anchor, allows)
                if href.startswith("/"):
                    by_href[href] = link
            if link is not None:
                out[link] = None
        out.pop(here, None)
        return tuple(out)

    def _met(self, base: str, anchor: Anchor, allows: Callable[[str], bool]) -> Link | None:
        """The link that stands on a page, None if it is not to be followed."""
        href, text, in_frame = anchor
        url = self.rules.follow(base, href)
        if url is None:
            return None
        known = self.links.get(url)
        if known is not None:
            return known
        if not allows(url) or not self._is_worth(url):
            return None
        return self._link(url, text, in_frame, base)

    def _end(self, url: str, link: Link) -> Link:
        """Where a redirect has led that no link is known to; one that was not to be followed may lead there too."""
        self._by_href = {href: known for href, known in self._by_href.items() if known is not None}
        return self._link(url, link.text, link.in_frame)

    def _is_worth(self, url: str) -> bool:
        """Whether there are not too many URLs already that differ from this one in their query only."""
        if "?" not in url:
            return True
        path = url.partition("?")[0]
        self._variants[path] = self._variants.get(path, 0) + 1
        return self._variants[path] <= MAX_VARIANTS

    def _link(self, url: str, text: str, in_frame: bool, source: str | None = None) -> Link:
        tokens, has_query, name = anatomy(url.removeprefix(self.start_url))
        shape = self.shapes.get(name)
        if shape is None:
            shape = self.shapes[name] = Shape(name)
        shape.n_links += 1
        shape.row = b""
        link = self.links[url] = Link(url, text, in_frame, tokens, has_query, shape, source)
        return link


@lru_cache(65_536)
def anatomy(below: str) -> tuple[tuple[str, ...], bool, str]:
    """The parts of a URL below the start page, whether it has a query, and the name of its shape."""
    path, mark, _ = below.partition("?")
    tokens = tuple(filter(None, path.split("/")))
    return tokens, bool(mark), shape_name(tokens) + mark


DIGIT = re.compile(r"\d")


def shape_name(tokens: tuple[str, ...]) -> str:
    """What URLs of the same kind have in common: parts with digits are alike, and so are the last ones of long paths."""
    parts = ["#" if DIGIT.search(token) else token for token in tokens]
    if len(parts) > 1 and parts[-1] != "#":
        parts[-1] = "*"
    return "/".join(parts)
