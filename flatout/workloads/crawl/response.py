"""A response as every way of getting one gives it: status, headers by lower-case name, body as it was sent."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Protocol

from flatout.workloads.crawl.fault import Fault

USER_AGENT = "flatout-crawl/0.1 (reinforcement learning; obeys robots.txt)"
AGENT_NAME = "flatout-crawl"
ENCODINGS = "gzip, deflate"
RETRY_HEADER = "X-Retry-Attempt"


@dataclass(frozen=True, slots=True)
class Response:
    """One answer to one request; redirects are answers."""

    status: int
    headers: dict[str, str]
    body: bytes

    def decoded(self, max_bytes: int) -> bytes:
        """The body decompressed, a Fault if that is more than so many bytes."""
        encoding = self.headers.get("content-encoding", "identity").strip().lower()
        if encoding in ("", "identity"):
            return self.body
        if encoding not in ("gzip", "x-gzip", "deflate"):
            raise Fault("garbage", f"the body is compressed with '{encoding[:20]}', which nobody asked for")
        raw = encoding == "deflate" and self.body[:1] != b"\x78"
        machine = zlib.decompressobj(-zlib.MAX_WBITS if raw else zlib.MAX_WBITS | 32)
        try:
            out = machine.decompress(self.body, max_bytes + 1)
        except zlib.error as error:
            raise Fault("garbage", f"the body is not the {encoding} that it says: {error}") from error
        if len(out) > max_bytes:
            raise Fault("size", f"more than {max_bytes} bytes when decompressed")
        return out


class Client(Protocol):
    """Gets one response, following nothing."""

    async def get(self, url: str, attempt: int, max_bytes: int) -> Response:
        """The response to one GET; a Fault for whatever goes wrong."""
        ...

    async def close(self) -> None:
        """Let go of connections."""
        ...
