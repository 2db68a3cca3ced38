"""Crawl: explore a website over HTTP."""

from flatout.errors import FlatoutError

try:
    import fcntl  # noqa: F401
    import resource  # noqa: F401
except ImportError as error:
    raise FlatoutError(f"crawl does not run on this platform: Python has no {error.name} here") from None

from flatout.workloads.crawl.crawl import AsyncCrawl, Crawl

__all__ = ["AsyncCrawl", "Crawl"]
