"""Serves generated sites on loopback over HTTP/1.1, in a subprocess that ends with the process that started it.

The server is an asyncio protocol: it adds about ten microseconds to making the page.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import re
import subprocess
import sys
import threading
from functools import lru_cache
from http import HTTPStatus
from pathlib import Path

from flatout.errors import EnvError
from flatout.workloads.site.pages import SiteConfig, answer, latency, read_site

_lock = threading.Lock()
_servers: dict[tuple[int, SiteConfig], SiteServer] = {}


class SiteServer:
    """A server subprocess."""

    def __init__(self, config: SiteConfig) -> None:
        command = [sys.executable, "-m", "flatout.workloads.site.server", config.to_json()]
        paths = [str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,  # Ctrl-C must not reach it: a stopping run still requests pages
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        if not line.isdigit():
            self.close()
            raise EnvError(f"the local site server did not start: {' '.join(command[:3])}")
        self.url = f"http://127.0.0.1:{int(line)}"

    def close(self) -> None:
        """Stop the server; may be called twice."""
        with self.process:  # closes its pipes and waits
            self.process.terminate()


def site_server(config: SiteConfig) -> SiteServer:
    """The server for sites of this config, shared by all envs of the process; started if there is none or it has died."""
    with _lock:
        key = os.getpid(), config
        server = _servers.get(key)
        if server is None or server.process.poll() is not None:
            server = _servers[key] = SiteServer(config)
        return server


@atexit.register
def close_all() -> None:
    """Stop the servers that this process has started."""
    with _lock:
        for (owner, _), server in list(_servers.items()):
            if owner == os.getpid():
                server.close()
        _servers.clear()


ATTEMPT = re.compile(rb"\r\nX-Retry-Attempt: *(\d+)", re.IGNORECASE)
MAX_REQUEST = 16_384
NOT_ALLOWED = b"HTTP/1.1 405 Method Not Allowed\r\nAllow: GET, HEAD\r\nContent-Length: 0\r\n\r\n"


@lru_cache(8192)
def response(config: SiteConfig, path: str, attempt: int, *, with_body: bool) -> bytes:
    """The HTTP response to a request."""
    made = answer(config, path, attempt)
    head = f"HTTP/1.1 {made.status} {HTTPStatus(made.status).phrase}\r\nContent-Type: {made.content_type}\r\n"
    head += f"Content-Length: {len(made.body)}\r\n"
    head += f"Location: {made.location}\r\n" if made.location else ""
    return f"{head}\r\n".encode() + (made.body if with_body else b"")


class Connection(asyncio.Protocol):
    """One keep-alive connection."""

    def __init__(self, config: SiteConfig) -> None:
        self._config, self._buffer = config, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Answer all complete requests."""
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            request, self._buffer = self._buffer[:end], self._buffer[end + 4 :]
            self._answer(request)
        if len(self._buffer) > MAX_REQUEST:
            self._transport.abort()

    def _answer(self, request: bytes) -> None:
        method, _, rest = request.partition(b" ")
        if method not in (b"GET", b"HEAD"):
            self._transport.write(NOT_ALLOWED)
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
    """Print the port and serve until standard input is closed."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(config), "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await loop.run_in_executor(None, sys.stdin.buffer.read)


if __name__ == "__main__":
    asyncio.run(serve(read_site(json.loads(sys.argv[1]))))
