"""HTTP clients: a small one for servers on this machine, aiohttp for all others, and recordings of their responses.

The small one exists because the client is most of a step when pages come from this machine: with 256 envs the crawl made 1.5 x
the steps/s that it made with aiohttp (docs/crawl.md). It connects to loopback addresses only.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import socket
import zlib
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import aiohttp
from aiohttp.abc import ResolveResult
from yarl import URL

from flatout.errors import FlatoutError
from flatout.workloads.crawl.access import Fault, address_refusal, is_loopback

USER_AGENT = "flatout-crawl/0.1 (reinforcement learning; obeys robots.txt)"
AGENT_NAME = "flatout-crawl"
ENCODINGS = "gzip, deflate"
RETRY_HEADER = "X-Retry-Attempt"
MAX_HEAD = 65_536


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

    async def close(self) -> None:
        """Close all connections."""


class Connection(asyncio.Protocol):
    """A keep-alive connection. Bytes that arrive while it is idle end it: they would be read as the next response."""

    def __init__(self) -> None:
        self._buffer, self._has_ended, self._is_idle = bytearray(), False, False
        self._received = asyncio.Event()

    def connection_made(self, transport: Any) -> None:
        self.transport: asyncio.Transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._received.set()
        if self._is_idle:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._has_ended = True
        self._received.set()

    @property
    def is_clean(self) -> bool:
        """Whether it is open and the server has sent nothing but responses to requests."""
        return not (self._buffer or self._has_ended)

    async def request(self, request: bytes, max_bytes: int) -> tuple[Response, bool]:
        """Send a request and read its response; also returns whether the connection may be used again."""
        self._is_idle = False
        self.transport.write(request)
        while len(self._buffer) < 5:
            if self._has_ended and not self._buffer:
                raise NoResponseError("connection", "closed before a response")
            await self._receive()
        if not self._buffer.startswith(b"HTTP/"):
            raise Fault("garbage", "the response is not HTTP")
        status, headers = _head(await self._read_until(b"\r\n\r\n"))
        body = b"" if status in (204, 304) or status < 200 else await self._body(headers, max_bytes)
        self._is_idle = status >= 200 and self.is_clean and headers.get("connection", "").lower() != "close"
        return Response(status, headers, body), self._is_idle

    async def _body(self, headers: dict[str, str], max_bytes: int) -> bytes:
        encoding, length = headers.get("transfer-encoding"), headers.get("content-length")
        if encoding is not None and encoding.lower() != "chunked":
            raise Fault("garbage", f"Transfer-Encoding is '{encoding}'")
        if encoding is not None:
            return await self._chunks(max_bytes)
        if length is not None:
            return await self._read(_number(length, 10), max_bytes)
        while not self._has_ended and len(self._buffer) <= max_bytes:  # the body ends with the connection
            await self._receive()
        return await self._read(len(self._buffer), max_bytes)

    async def _chunks(self, max_bytes: int) -> bytes:
        body, n_around, is_last = bytearray(), 0, False
        while (line := await self._read_until(b"\r\n")) or not is_last:
            n_around += len(line) + 2
            if n_around > MAX_HEAD + max_bytes // 8:
                raise Fault("size", "chunks with too many lengths, extensions or trailers")
            if is_last:  # a trailer
                continue
            size = _number(line.partition(b";")[0].decode("latin-1").strip(), 16)
            body += await self._read(size, max_bytes - len(body))
            is_last = not size
            if size and await self._read_until(b"\r\n"):
                raise Fault("garbage", "a chunk is longer than its length")
        return bytes(body)

    async def _read(self, n_bytes: int, max_bytes: int) -> bytes:
        if n_bytes > max_bytes:
            raise Fault("size", f"{n_bytes} bytes, more than {max_bytes}")
        while len(self._buffer) < n_bytes:
            await self._receive()
        return self._take(n_bytes)

    async def _read_until(self, end: bytes) -> bytes:
        """The bytes before `end`, which is removed too."""
        searched = 0
        while (at := self._buffer.find(end, searched, MAX_HEAD)) < 0:
            if len(self._buffer) >= MAX_HEAD:
                raise Fault("garbage", f"headers or a line of more than {MAX_HEAD} bytes")
            searched = max(len(self._buffer) - len(end) + 1, 0)
            await self._receive()
        data = self._take(at)
        del self._buffer[: len(end)]
        return data

    def _take(self, n_bytes: int) -> bytes:
        data = bytes(self._buffer[:n_bytes])
        del self._buffer[:n_bytes]
        return data

    async def _receive(self) -> None:
        """Wait for more bytes, or the end."""
        if self._has_ended:
            raise Fault("connection", "closed before the response was complete")
        self._received.clear()
        await self._received.wait()


class NoResponseError(Fault):
    """The server closed the connection without a response."""


class LiveClient:
    """The real network: keep-alive HTTP/1.1 connections to servers on this machine, WebClient for all others."""

    def __init__(self) -> None:
        self._idle: dict[str, list[Connection]] = {}
        self._web = WebClient()

    async def get(self, url: str, attempt: int, max_bytes: int) -> Response:
        start = url.find("/", 8)
        netloc, path = (url[7:start], url[start:]) if start > 0 else (url[7:], "/")
        if not url.startswith("http://") or not is_loopback(netloc.rpartition(":")[0]):
            return await self._web.get(url, attempt, max_bytes)
        retry = f"{RETRY_HEADER}: {attempt}\r\n" if attempt else ""
        request = (
            f"GET {path} HTTP/1.1\r\nHost: {netloc}\r\nUser-Agent: {USER_AGENT}\r\n"
            f"Accept: text/html\r\nAccept-Encoding: {ENCODINGS}\r\n{retry}\r\n"
        ).encode("ascii")
        idle = self._idle.setdefault(netloc, [])
        while True:
            is_new = not idle
            connection = await _connect(url) if is_new else idle.pop()
            is_reusable = False
            try:
                if is_new or connection.is_clean:
                    response, is_reusable = await connection.request(request, max_bytes)
                    return response
            except NoResponseError:
                if is_new:
                    raise  # otherwise the server closed it while idle and saw no request
            finally:  # also when cancelled: the response may still arrive
                if is_reusable:
                    idle.append(connection)
                else:
                    connection.transport.abort()

    async def close(self) -> None:
        for connection in chain.from_iterable(self._idle.values()):
            connection.transport.abort()
        self._idle.clear()
        await self._web.close()
        await asyncio.sleep(0)  # the loop closes the sockets in its next iteration


async def _connect(url: str) -> Connection:
    parts = urlsplit(url)
    host = "127.0.0.1" if parts.hostname == "localhost" else str(parts.hostname)
    try:
        return (await asyncio.get_running_loop().create_connection(Connection, host, parts.port or 80))[1]
    except OSError as error:
        raise Fault("connection", f"{parts.netloc}: {error.strerror or error}") from error


def _head(data: bytes) -> tuple[int, dict[str, str]]:
    first, *lines = data.decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    if not version.startswith("HTTP/1."):
        raise Fault("garbage", f"the response starts with '{first[:40]}'")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon:
            raise Fault("garbage", f"a header is '{line[:40]}'")
        headers[name.strip().lower()] = value.strip()
    if version == "HTTP/1.0":
        headers.setdefault("connection", "close")
    return _number(rest[:3], 10), headers


def _number(text: str, base: int) -> int:
    """A length in ASCII digits."""
    if not re.fullmatch(r"[0-9a-fA-F]{1,12}" if base == 16 else r"[0-9]{1,12}", text):
        raise Fault("garbage", f"a length is '{text[:20]}'")
    return int(text, base)


class CheckedResolver(aiohttp.ThreadedResolver):
    """The system's resolver, restricted to addresses that may be connected to."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """The addresses of a host; raises a Fault if one of them is refused."""
        found = await super().resolve(host, port, family)
        for result in found:
            reason = address_refusal(host, result["host"])
            if reason is not None:
                raise Fault("refused", reason)
        return found


class WebClient:
    """One aiohttp session for all envs of a loop: no cookies, proxies, redirects or automatic decompression."""

    async def get(self, url: str, attempt: int, max_bytes: int) -> Response:
        headers = {RETRY_HEADER: str(attempt)} if attempt else None
        target = URL(url, encoded=True)
        try:
            async with self._session.get(target, allow_redirects=False, headers=headers) as response:
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
        except (Fault, TimeoutError):
            raise
        except Exception as error:  # whatever a response makes aiohttp raise
            lost = isinstance(error, aiohttp.ClientConnectionError | aiohttp.ClientPayloadError | OSError)
            raise Fault("connection" if lost else "garbage", str(error) or type(error).__name__) from error

    async def close(self) -> None:
        if "_session" in vars(self):
            await self._session.close()

    @cached_property
    def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, resolver=CheckedResolver(), ttl_dns_cache=60),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None),
            headers={"User-Agent": USER_AGENT, "Accept": "text/html", "Accept-Encoding": ENCODINGS},
            auto_decompress=False,
        )


class Recording:
    """Responses and faults in a folder: stores those of a client, or returns the stored ones without any network.

    One file per URL and attempt: a line of JSON (status and headers, or the fault), then the body. URLs of the start page's
    host are stored without it, so that a local site may use another port later.
    """

    def __init__(self, folder: Path, origin: str, client: Client | None) -> None:
        self._folder, self._origin, self._client = folder, origin, client
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FlatoutError(f"record folder {folder}: {error.strerror}") from error

    async def get(self, url: str, attempt: int, max_bytes: int) -> Response:
        name = hashlib.sha256(f"{attempt} {url.removeprefix(self._origin)}".encode()).hexdigest()
        file = self._folder / name[:2] / name[2:34]
        if self._client is None:
            return self._load(file, url, max_bytes)
        try:
            response = await self._client.get(url, attempt, max_bytes)
        except Fault as fault:
            self._store(file, {"url": url, "fault": fault.kind, "message": str(fault)})
            raise
        self._store(file, {"url": url, "status": response.status, "headers": response.headers}, response.body)
        return response

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    def _store(self, file: Path, head: dict[str, object], body: bytes = b"") -> None:
        file.parent.mkdir(exist_ok=True)
        part = file.with_name(f"{file.name}.{os.getpid()}.{id(self)}.part")
        part.write_bytes(json.dumps(head).encode() + b"\n" + body)
        part.replace(file)

    def _load(self, file: Path, url: str, max_bytes: int) -> Response:
        try:
            head, _, body = file.read_bytes().partition(b"\n")
            data = json.loads(head)
            if "fault" in data:
                raise Fault(data["fault"], data["message"])
            if len(body) > max_bytes:
                raise Fault("size", f"{len(body)} bytes, more than {max_bytes}")
            return Response(data["status"], data["headers"], body)
        except FileNotFoundError as error:
            raise Fault("connection", f"{url} is not in the recording {self._folder}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise FlatoutError(f"recording {file} is damaged: {error}; record the crawl again") from error
