"""A real server on loopback that misbehaves in every way, for the tests of Crawl."""

from __future__ import annotations

import asyncio
import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager

BOMB = gzip.compress(b"x" * 20_000_000, 1)
FAULTS = {
    "hang": "timeout",
    "drip": "timeout",
    "garbage": "garbage",
    "bytes": "garbage",
    "header": "garbage",
    "length": "garbage",
    "chunk": "garbage",
    "digit": "garbage",
    "digits": "garbage",
    "status": "garbage",
    "headers": "garbage",
    "bracket": "garbage",
    "port": "refused",
    "huge": "size",
    "endless": "size",
    "chunks": "size",
    "bomb": "size",
    "notgzip": "garbage",
    "brotli": "garbage",
    "half": "connection",
    "close": "connection",
    "loop": "redirects",
    "away": "refused",
    "otherport": "refused",
    "file": "refused",
    "closed": "robots",
    "image": "type",
    "untyped": "type",
    "missing": "status",
    "broken": "status",
    "empty": "status",
}
"""The kind of fault of each path."""


def page(*links: str, extra: str = "") -> bytes:
    """A page with these links."""
    body = "".join(f'<a href="{link}">{link.strip("/")}</a> ' for link in links) + extra
    return f"<html><body><main>{body}</main></body></html>".encode()


def reply(body: bytes, status: str = "200 OK", kind: str = "text/html", *headers: str) -> bytes:
    """A complete response."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    if kind:
        lines.append(f"Content-Type: {kind}")
    return "\r\n".join([*lines, "", ""]).encode() + body


HTML = "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n"


class Misbehaving:
    """The server; `requests` lists the requested paths, `pages` may be extended."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.heads: list[str] = []
        self.robots = reply(b"User-agent: *\nDisallow: /closed\n", kind="text/plain")
        self.pages: dict[str, bytes] = {
            "/": reply(page("/fine", *(f"/{name}" for name in FAULTS))),
            "/fine": reply(page("/")),
            "/garbage": b"\x00\x01\x02 this is not HTTP at all \xff\xfe" * 40,
            "/bytes": reply(
                bytes(range(256)) * 8, "200 OK", "text/html; charset=no-such", "Content-Encoding: gzip"
            ),
            "/header": b"HTTP/1.1 200 OK\r\nno colon here\r\n\r\n",
            "/length": f"{HTML}Content-Length: -7x\r\n\r\n".encode(),
            "/chunk": f"{HTML}Transfer-Encoding: chunked\r\n\r\nzzz\r\nabc\r\n".encode(),
            "/digit": f"{HTML}Content-Length: ".encode() + b"\xb2\r\n\r\n",  # ² is a digit for str.isdigit
            "/digits": f"{HTML}Content-Length: {'1' * 5000}\r\n\r\n".encode(),
            "/status": b"HTTP/1.1 \xb2\xb2\xb2 OK\r\n\r\n",
            "/headers": HTML.encode() + b"a: b\r\n" * 100_000,
            "/bracket": reply(b"", "302 Found", "", "Location: http://["),
            "/port": reply(b"", "302 Found", "", "Location: http://127.0.0.1:99999999/"),
            "/bomb": reply(BOMB, "200 OK", "text/html", "Content-Encoding: gzip"),
            "/notgzip": reply(b"plain", "200 OK", "text/html", "Content-Encoding: gzip"),
            "/brotli": reply(b"plain", "200 OK", "text/html", "Content-Encoding: br"),
            "/loop": reply(b"", "302 Found", "", "Location: /loop"),
            "/away": reply(b"", "302 Found", "", "Location: http://example.com/"),
            "/otherport": reply(b"", "301 Moved", "", "Location: http://127.0.0.1:1/"),
            "/file": reply(b"", "301 Moved", "", "Location: file:///etc/passwd"),
            "/image": reply(b"\x89PNG", kind="image/png"),
            "/untyped": reply(b"<p>", kind=""),
            "/broken": reply(b"oops", "500 Internal Server Error"),
            "/empty": b"HTTP/1.1 204 No Content\r\n\r\n",
        }

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                path = head.split(b" ")[1].decode()
                self.requests.append(path)
                self.heads.append(head.decode())
                if not await self._answer(path, writer):
                    break
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _answer(self, path: str, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection stays open."""
        if path == "/robots.txt":
            writer.write(self.robots)
        elif path == "/hang":
            await asyncio.sleep(60)
        elif path == "/drip":
            writer.write(f"{HTML}Content-Length: 1000\r\n\r\n".encode())
            while not writer.is_closing():
                writer.write(b"x")
                await asyncio.sleep(0.1)
        elif path in ("/huge", "/endless", "/chunks"):
            await self._flood(path, writer)
        elif path == "/half":
            writer.write(f"{HTML}Content-Length: 1000\r\n\r\nhalf".encode())
            return False
        elif path == "/close":
            return False
        elif path.startswith("/slow"):  # redirects without end, each after a while
            await asyncio.sleep(0.3)
            writer.write(reply(b"", "302 Found", "", f"Location: {path}x"))
        elif path == "/flood":  # a good response; while idle, 50 MB
            writer.write(reply(page("/fine")))
            await writer.drain()
            await asyncio.sleep(0.02)
            await self._flood("/endless", writer)
        elif path in ("/twice", "/once"):  # a good response; while idle, another one or the end
            writer.write(reply(page("/fine")))
            await writer.drain()
            await asyncio.sleep(0.02)
            writer.write(reply(b"unasked", "404 Not Found") if path == "/twice" else b"")
            return path == "/twice"
        else:
            writer.write(self.pages.get(path) or reply(b"none", "404 Not Found"))
        return True

    async def _flood(self, path: str, writer: asyncio.StreamWriter) -> None:
        """50 MB, with a length, without one, or in chunks."""
        how = {
            "/huge": "Content-Length: 50000000",
            "/endless": "X: y",
            "/chunks": "Transfer-Encoding: chunked",
        }
        writer.write(f"{HTML}{how[path]}\r\n\r\n".encode())
        block = b"x" * 50_000
        if path == "/chunks":
            block = b"c350\r\n" + block + b"\r\n"
        for _ in range(1000):
            if writer.is_closing():
                return
            writer.write(block)
            await writer.drain()


@contextmanager
def misbehaving() -> Iterator[tuple[Misbehaving, str]]:
    """The server in a thread of its own, and its URL."""
    site = Misbehaving()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> asyncio.Server:
        return await asyncio.start_server(site.answer, "127.0.0.1", 0)

    async def stop() -> None:
        server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    server = asyncio.run_coroutine_threadsafe(start(), loop).result()
    try:
        yield site, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        asyncio.run_coroutine_threadsafe(stop(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
