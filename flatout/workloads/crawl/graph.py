"""The link graph as explored so far: pages met, links seen, what was found where. To NetworkX and GraphML."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
