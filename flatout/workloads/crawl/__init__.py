"""Crawl: explore a website over HTTP.

The envs are imported on first use, because the site server, which is part of this package, does not need aiohttp.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flatout.workloads.crawl.crawl import AsyncCrawl, Crawl

__all__ = ["AsyncCrawl", "Crawl"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'flatout.workloads.crawl' has no attribute {name!r}")
    from flatout.workloads.crawl import crawl

    return getattr(crawl, name)
