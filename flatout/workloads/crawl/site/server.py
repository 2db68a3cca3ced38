"""Serves generated sites on loopback over HTTP/1.1, in a process of its own that ends with the one that started it.

Written on asyncio's protocols: answering costs some ten microseconds besides making the page.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from functools import lru_cache
from http import HTTPStatus

from flatout.workloads.crawl.site.config import SiteConfig, read_site
from flatout.workloads.crawl.site.pages import answer, latency

ATTEMPT = re.compile(rb"\r\nX-Retry-Attempt: *(\d+)", re.IGNORECASE)
MAX_REQUEST = 16_384


@lru_cache(8192)
def response(config: SiteConfig, path: str, attempt: int, *, with_body: bool) -> bytes:
    """The bytes that answer a request."""
    made = answer(config, path, attempt)
    lines = [
        f"HTTP/1.1 {made.status} {HTTPStatus(made.status).phrase}",
        f"Content-Type: {made.content_type}",
        f"Content-Length: {len(made.body)}",
    ]
    if made.location:
        lines.append(f"Location: {made.location}")
    return "\r\n".join([*lines, "\r\n"]).encode() + (made.body if with_body else b"")


class Connection(asyncio.Protocol):
    """One client's connection, kept alive."""

    def __init__(self, config: SiteConfig) -> None:
        self._config, self._buffer = config, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep what is written to."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Answer every whole request."""
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            request, self._buffer = self._buffer[:end], self._buffer[end + 4 :]
            self._answer(request)
        if len(self._buffer) > MAX_REQUEST:
            self._transport.abort()

    def _answer(self, request: bytes) -> None:
        method, _, rest = request.partition(b" ")
        if method not in (b"GET", b"HEAD"):
            self._transport.write(
                b"HTTP/1.1 405 Method Not Allowed\r\nAllow: GET, HEAD\r\nContent-Length: 0\r\n\r\n"
            )
            return
        path = rest.partition(b" ")[0].decode("latin-1")
        found = ATTEMPT.search(request)
        attempt = int(found[1]) if found else 0
        data = response(self._config, path, attempt, with_body=method == b"GET")
        wait = latency(self._config, path, attempt)
        if wait:
            asyncio.get_running_loop().call_later(wait, self._transport.write, data)
        else:
            self._transport.write(data)


async def serve(config: SiteConfig) -> None:
    """Serve until standard input ends; the first line of standard output is the port."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(config), "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await loop.run_in_executor(None, sys.stdin.buffer.read)


if __name__ == "__main__":
    asyncio.run(serve(read_site(json.loads(sys.argv[1]))))
