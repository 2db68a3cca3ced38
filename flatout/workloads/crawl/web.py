"""aiohttp as the client for every server that is not on this machine: one session for all envs of an event loop."""

from __future__ import annotations

import socket
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from flatout.workloads.crawl.fault import Fault
from flatout.workloads.crawl.response import ENCODINGS, RETRY_HEADER, USER_AGENT, Response
from flatout.workloads.crawl.rules import address_refusal


class CheckedResolver(AbstractResolver):
    """Resolves names as the system does and gives only addresses that the rules let connect to."""

    def __init__(self) -> None:
        self._inner = aiohttp.ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """The host's addresses; a Fault if there is one that may not be connected to."""
        found = await self._inner.resolve(host, port, family)
        for result in found:
            reason = address_refusal(host, result["host"])
            if reason is not None:
                raise Fault("refused", reason)
        return found

    async def close(self) -> None:
        """Nothing is kept."""


class WebClient:
    """One aiohttp session: no cookies, no proxies, nothing followed, nothing decompressed by itself."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def get(self, url: str, attempt: int, max_bytes: int) -> Response:
        """The response to one GET."""
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
        """Close the session."""
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
