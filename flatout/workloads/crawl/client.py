"""HTTP clients: a small one for servers on this machine, aiohttp for all others.

The small one exists because the client is most of a step when pages come from this machine: with 256 envs the crawl made 1.5 x
the steps/s that it made with aiohttp (docs/crawl.md). It connects to loopback addresses only.
"""

from __future__ import annotations

import asyncio
import socket
import zlib
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from flatout.workloads.crawl.access import Fault, address_refusal

USER_AGENT = "flatout-crawl/0.1 (reinforcement learning; obeys robots.txt)"
AGENT_NAME = "flatout-crawl"
ENCODINGS = "gzip, deflate"
RETRY_HEADER = "X-Retry-Attempt"


@dataclass(frozen=True, slots=True)
class Response:
    """Status, headers by lower-case name, and the body as sent; redirects are responses too."""

    status: int
    headers: dict[str, str]
    body: bytes

    def decoded(self, max_bytes: int) -> bytes:
        """The decompressed body; raises a Fault if it is larger than `max_bytes`."""
        encoding = self.headers.get("content-encoding", "identity").strip().lower()
        if encoding in ("", "identity"):
            return self.body
        if encoding not in ("gzip", "x-gzip", "deflate"):
            raise Fault("garbage", f"the body is compressed with '{encoding[:20]}', which was not requested")
        raw = encoding == "deflate" and self.body[:1] != b"\x78"
        machine = zlib.decompressobj(-zlib.MAX_WBITS if raw else zlib.MAX_WBITS | 32)
        try:
            out = machine.decompress(self.body, max_bytes + 1)
        except zlib.error as error:
            raise Fault("garbage", f"the body is not {encoding} as declared: {error}") from error
        if len(out) > max_bytes:
            raise Fault("size", f"more than {max_bytes} bytes when decompressed")
        return out


class Client(Protocol):
    """Makes single GET requests without following redirects."""

    async def get(self, url: str, attempt: int, max_bytes: int) -> Response:
        """The response to a GET; raises a Fault if there is none."""
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...


MAX_HEAD = 65_536


class LoopbackClient:
    """Keep-alive HTTP/1.1 connections to servers on this machine, on one event loop."""

    def __init__(self) -> None:
        self._idle: dict[str, list[Connection]] = {}

    async def get(self, url: str, attempt: int, max_bytes: int) -> Response:
        start = url.find("/", 8)
        netloc, path = (url[7:start], url[start:]) if start > 0 else (url[7:], "/")
        retry = f"{RETRY_HEADER}: {attempt}\r\n" if attempt else ""
        request = (
            f"GET {path} HTTP/1.1\r\nHost: {netloc}\r\nUser-Agent: {USER_AGENT}\r\n"
            f"Accept: text/html\r\nAccept-Encoding: {ENCODINGS}\r\n{retry}\r\n"
        ).encode("ascii")
        idle = self._idle.setdefault(netloc, [])
        while idle:
            connection = idle.pop()
            if connection.is_open:
                try:
                    return await self._exchange(connection, request, max_bytes, idle)
                except StaleError:
                    continue  # the server closed it while idle and saw no request
        return await self._exchange(await self._connect(url), request, max_bytes, idle)

    async def close(self) -> None:
        for idle in self._idle.values():
            for connection in idle:
                connection.abort()
        self._idle.clear()
        await asyncio.sleep(0)  # the loop closes the sockets in its next iteration

    async def _connect(self, url: str) -> Connection:
        parts = urlsplit(url)
        host = "127.0.0.1" if parts.hostname == "localhost" else str(parts.hostname)
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(Connection, host, parts.port or 80)
        except OSError as error:
            raise Fault("connection", f"{parts.netloc}: {error.strerror or error}") from error
        return connection

    async def _exchange(
        self, connection: Connection, request: bytes, max_bytes: int, idle: list[Connection]
    ) -> Response:
        try:
            response = await connection.exchange(request, max_bytes)
        except BaseException:  # also when cancelled: the response may still arrive
            connection.abort()
            raise
        if connection.is_open:
            idle.append(connection)
        return response


class StaleError(Fault):
    """The server closed an idle connection before it answered."""


class Connection(asyncio.Protocol):
    """One connection with at most one request in flight."""

    def __init__(self) -> None:
        self._waiter: asyncio.Future[Response] | None = None
        self._was_used = False
        self._max_bytes = 0
        self.is_open = True

    def exchange(self, request: bytes, max_bytes: int) -> asyncio.Future[Response]:
        """Send a request; returns the future of its response."""
        self._buffer = bytearray()
        self._head: tuple[int, dict[str, str]] | None = None
        self._max_bytes = max_bytes
        self._waiter = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._waiter

    def abort(self) -> None:
        self.is_open = False
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Parse as much of the response as has arrived."""
        if self._waiter is None:
            self.abort()
            return
        self._buffer += data
        try:
            self._read(ended=False)
        except Fault as fault:
            self._fail(fault)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Finish a body without a length, or fail."""
        self.is_open = False
        if self._waiter is None:
            return
        if self._was_used and not self._buffer and self._head is None:
            self._fail(StaleError("connection", "closed while idle"))
            return
        try:
            self._read(ended=True)
        except Fault as fault:
            self._fail(fault)

    def _read(self, *, ended: bool) -> None:
        if self._head is None:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                if len(self._buffer) > MAX_HEAD or (len(self._buffer) > 4 and self._buffer[:5] != b"HTTP/"):
                    raise Fault("garbage", "the response is not HTTP")
                if ended:
                    raise Fault("connection", "closed before the response was complete")
                return
            self._head = _head(bytes(self._buffer[:end]))
            del self._buffer[: end + 4]
        status, headers = self._head
        length = headers.get("content-length")
        if status in (204, 304) or 100 <= status < 200:
            body: bytes | None = b""
        elif "transfer-encoding" in headers:
            body = _chunked(self._buffer, headers["transfer-encoding"], self._max_bytes)
        elif length is not None:
            if not length.isdigit():
                raise Fault("garbage", f"Content-Length is '{length[:20]}'")
            if int(length) > self._max_bytes:
                raise Fault("size", f"{length} bytes, more than {self._max_bytes}")
            body = bytes(self._buffer[: int(length)]) if len(self._buffer) >= int(length) else None
        else:
            if len(self._buffer) > self._max_bytes:
                raise Fault("size", f"more than {self._max_bytes} bytes")
            body = bytes(self._buffer) if ended else None
        if body is not None:
            self._succeed(Response(status, headers, body))
        elif ended:
            raise Fault("connection", "closed before the response was complete")

    def _succeed(self, response: Response) -> None:
        waiter, self._waiter, self._was_used = self._waiter, None, True
        left = len(self._buffer) > len(response.body) and "transfer-encoding" not in response.headers
        if response.headers.get("connection", "").lower() == "close" or response.status < 200 or left:
            self.abort()
        if waiter is not None and not waiter.done():
            waiter.set_result(response)

    def _fail(self, fault: Fault) -> None:
        waiter, self._waiter = self._waiter, None
        self.abort()
        if waiter is not None and not waiter.done():
            waiter.set_exception(fault)


def _head(data: bytes) -> tuple[int, dict[str, str]]:
    first, *lines = data.decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
        raise Fault("garbage", f"the response starts with '{first[:40]!r}'")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon:
            raise Fault("garbage", f"a header is '{line[:40]!r}'")
        headers[name.strip().lower()] = value.strip()
    if version == "HTTP/1.0":
        headers.setdefault("connection", "close")
    return int(rest[:3]), headers


def _chunked(buffer: bytearray, encoding: str, max_bytes: int) -> bytes | None:
    """The body, or None while chunks are missing."""
    if encoding.strip().lower() != "chunked":
        raise Fault("garbage", f"Transfer-Encoding is '{encoding[:20]}'")
    parts: list[bytes] = []
    at, total = 0, 0
    while True:
        end = buffer.find(b"\r\n", at)
        if end < 0:
            if len(buffer) - at > 1024:
                raise Fault("garbage", "a chunk without a length")
            return None
        try:
            size = int(bytes(buffer[at:end]).partition(b";")[0], 16)
        except ValueError:
            raise Fault("garbage", "a chunk without a length") from None
        if size < 0 or total + size > max_bytes:
            raise Fault("size", f"more than {max_bytes} bytes")
        if size == 0:
            return b"".join(parts) if buffer.find(b"\r\n", end + 2) >= 0 else None
        if len(buffer) < end + 4 + size:
            return None
        parts.append(bytes(buffer[end + 2 : end + 2 + size]))
        total += size
        at = end + 4 + size


class CheckedResolver(AbstractResolver):
    """The system's resolver, restricted to addresses that may be connected to."""

    def __init__(self) -> None:
        self._inner = aiohttp.ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """The addresses of a host; raises a Fault if one of them is refused."""
        found = await self._inner.resolve(host, port, family)
        for result in found:
            reason = address_refusal(host, result["host"])
            if reason is not None:
                raise Fault("refused", reason)
        return found

    async def close(self) -> None:
        """Nothing to close."""


class WebClient:
    """One aiohttp session for all envs of a loop: no cookies, proxies, redirects or automatic decompression."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def get(self, url: str, attempt: int, max_bytes: int) -> Response:
        headers = {RETRY_HEADER: str(attempt)} if attempt else None
        try:
            async with self._open().get(
                URL(url, encoded=True), allow_redirects=False, headers=headers
            ) as response:
                length = response.content_length
                if length is not None and length > max_bytes:
                    response.close()
                    raise Fault("size", f"{length} bytes, more than {max_bytes}")
                body = bytearray()
                async for data in response.content.iter_any():
                    body += data
                    if len(body) > max_bytes:
                        response.close()
                        raise Fault("size", f"more than {max_bytes} bytes")
                kept = {name.lower(): value for name, value in response.headers.items()}
                return Response(response.status, kept, bytes(body))
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            raise Fault("connection", " ".join(str(error).split())[:200] or type(error).__name__) from error
        except (aiohttp.ClientError, ValueError) as error:
            raise Fault("garbage", " ".join(str(error).split())[:200] or type(error).__name__) from error

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            options: dict[str, Any] = {"limit": 0, "resolver": CheckedResolver(), "ttl_dns_cache": 60}
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(**options),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None),
                headers={"User-Agent": USER_AGENT, "Accept": "text/html", "Accept-Encoding": ENCODINGS},
                auto_decompress=False,
            )
        return self._session
