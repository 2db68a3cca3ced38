"""Crawl: explore a website over HTTP."""

from flatout.workloads.crawl.crawl import AsyncCrawl, Crawl

__all__ = ["AsyncCrawl", "Crawl"]
