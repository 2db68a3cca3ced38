"""HTTP clients: a small one for servers on this machine, aiohttp for all others.

The small one exists because the client is most of a step when pages come from this machine: with 256 envs the crawl made 1.5 x
the steps/s that it made with aiohttp (docs/crawl.md). It connects to loopback addresses only.
"""

from __future__ import annotations

import asyncio
import socket
import zlib
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol, TypeAlias
from urllib.parse import urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from flatout.workloads.crawl.access import Fault, address_refusal

USER_AGENT = "flatout-crawl/0.1 (reinforcement learning; obeys robots.txt)"
AGENT_NAME = "flatout-crawl"
ENCODINGS = "gzip, deflate"
RETRY_HEADER = "X-Retry-Attempt"
MAX_HEAD = READ_SIZE = 65_536

Connection: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]


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
            try:
                return await self._exchange(idle.pop(), request, max_bytes, idle)
            except NoResponseError:
                continue  # the server closed it while idle and saw no request
        return await self._exchange(await _connect(url), request, max_bytes, idle)

    async def close(self) -> None:
        for _, writer in chain.from_iterable(self._idle.values()):
            writer.transport.abort()
        self._idle.clear()
        await asyncio.sleep(0)  # the loop closes the sockets in its next iteration

    async def _exchange(
        self, connection: Connection, request: bytes, max_bytes: int, idle: list[Connection]
    ) -> Response:
        """Send a request and read its response; the connection then becomes idle, or is closed."""
        reader, writer = connection
        buffer = bytearray()
        is_reusable = False
        try:
            writer.write(request)
            while True:
                try:
                    data = await reader.read(READ_SIZE)
                except OSError:
                    data = b""
                if not data and not buffer:
                    raise NoResponseError("connection", "closed before a response")
                buffer += data
                found = _parse(buffer, max_bytes, ended=not data)
                if found is not None:
                    response, n_used = found
                    says_close = response.headers.get("connection", "").lower() == "close"
                    is_reusable = (
                        n_used == len(buffer) and response.status >= 200 and bool(data) and not says_close
                    )
                    return response
        finally:  # also when cancelled: the response may still arrive
            if is_reusable:
                idle.append(connection)
            else:
                writer.transport.abort()


class NoResponseError(Fault):
    """The server closed the connection without a response."""


async def _connect(url: str) -> Connection:
    parts = urlsplit(url)
    host = "127.0.0.1" if parts.hostname == "localhost" else str(parts.hostname)
    try:
        return await asyncio.open_connection(host, parts.port or 80)
    except OSError as error:
        raise Fault("connection", f"{parts.netloc}: {error.strerror or error}") from error


def _parse(buffer: bytearray, max_bytes: int, *, ended: bool) -> tuple[Response, int] | None:
    """The response at the start of the buffer and its length in bytes; None while it is incomplete."""
    start = buffer.find(b"\r\n\r\n") + 4
    if start < 4:
        if len(buffer) > MAX_HEAD or not b"HTTP/".startswith(buffer[:5]):
            raise Fault("garbage", "the response is not HTTP")
        body, end = None, 0
    else:
        status, headers = _head(bytes(buffer[: start - 4]))
        length = headers.get("content-length")
        end = start
        if status in (204, 304) or status < 200:
            body = b""
        elif "transfer-encoding" in headers:
            body, end = _chunked(buffer, start, headers["transfer-encoding"], max_bytes)
        elif length is not None:
            if not length.isdigit():
                raise Fault("garbage", f"Content-Length is '{length[:20]}'")
            if int(length) > max_bytes:
                raise Fault("size", f"{length} bytes, more than {max_bytes}")
            end = start + int(length)
            body = bytes(buffer[start:end]) if len(buffer) >= end else None
        else:  # the body ends with the connection
            if len(buffer) - start > max_bytes:
                raise Fault("size", f"more than {max_bytes} bytes")
            end = len(buffer)
            body = bytes(buffer[start:]) if ended else None
    if body is not None:
        return Response(status, headers, body), end
    if ended:
        raise Fault("connection", "closed before the response was complete")
    return None


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


def _chunked(buffer: bytearray, at: int, encoding: str, max_bytes: int) -> tuple[bytes | None, int]:
    """The body in chunks from `at` on, None while it is incomplete, and where it ends."""
    if encoding.strip().lower() != "chunked":
        raise Fault("garbage", f"Transfer-Encoding is '{encoding[:20]}'")
    body = bytearray()
    while (line_end := buffer.find(b"\r\n", at)) >= 0:
        try:
            size = int(bytes(buffer[at:line_end]).partition(b";")[0], 16)
        except ValueError:
            raise Fault("garbage", "a chunk without a length") from None
        if size < 0 or len(body) + size > max_bytes:
            raise Fault("size", f"more than {max_bytes} bytes")
        start, at = line_end + 2, line_end + 4 + size
        if size == 0:
            end = buffer.find(b"\r\n", start)
            return (bytes(body), end + 2) if end >= 0 else (None, 0)
        if len(buffer) < at:
            return None, 0
        body += buffer[start : start + size]
    if len(buffer) - at > 1024:
        raise Fault("garbage", "a chunk without a length")
    return None, 0


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
