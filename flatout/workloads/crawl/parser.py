"""Where pages are parsed: small ones here, large ones in a child process with limits on its memory and CPU time.

A parser that follows the HTML standard takes minutes for some pages of 2 MB, and gigabytes for some of 50 KB. The limits of
a small page are such that even the worst one takes about 0.1 s.
"""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from contextlib import suppress

from flatout.workloads.crawl import page as page_module
from flatout.workloads.crawl.access import Fault
from flatout.workloads.crawl.page import MAX_CPU_SECONDS, MAX_MEMORY, Page, parse_cached

MAX_SMALL, MAX_SMALL_TAGS = 30_000, 600
"""Characters, and `<`, of a page that is parsed in this process."""


class Parser:
    """Parses pages for all envs of an event loop. The child is started for the first large page, and again if it has died."""

    def __init__(self) -> None:
        self._child: Process | None = None
        self._lock = asyncio.Lock()

    async def parse(self, html: str, target: str, deadline: float) -> Page:
        """The page; raises a Fault if that takes too much memory or time. `deadline` is a time of the loop."""
        if len(html) <= MAX_SMALL and html.count("<") <= MAX_SMALL_TAGS:
            return parse_cached(html, target)
        try:
            async with asyncio.timeout_at(deadline), self._lock:
                return await self._ask(html, target)
        except TimeoutError as error:
            raise Fault("timeout", "the page was not parsed in time") from error

    async def _ask(self, html: str, target: str) -> Page:
        """Have the child parse a page; a child that does not answer is ended."""
        child, self._child = self._child or await _start(), None
        assert child.stdin is not None
        assert child.stdout is not None
        answer = None
        try:
            child.stdin.write(json.dumps([html, target]).encode() + b"\n")
            with suppress(ConnectionError):
                await child.stdin.drain()
            answer = await child.stdout.readline()
        finally:
            if answer:
                self._child = child
            else:  # nothing: it has ended at a limit; None: nobody waits for it any more
                await _end(child, kill=answer is None)
        if not answer:
            limits = f"{MAX_CPU_SECONDS} s or {MAX_MEMORY >> 20} MB"
            raise Fault("garbage", f"HTML that takes more than {limits} to parse")
        anchors, elements, *rest = json.loads(answer)
        return Page(tuple(map(tuple, anchors)), frozenset(elements), *rest)

    async def close(self) -> None:
        """End the child."""
        child, self._child = self._child, None
        if child is not None:
            await _end(child, kill=False)


async def _start() -> Process:
    """A child that imports nothing of flatout; it ends with its standard input."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", page_module.__file__),
        stdin=PIPE,
        stdout=PIPE,
        stderr=DEVNULL,
        limit=1 << 25,  # more than the longest answer
        start_new_session=True,  # Ctrl-C must not reach it: a stopping run still parses pages
    )


async def _end(child: Process, *, kill: bool) -> None:
    if kill:
        with suppress(ProcessLookupError):
            child.kill()
    await child.communicate(b"")  # closes its standard input
