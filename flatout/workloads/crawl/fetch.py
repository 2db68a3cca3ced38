"""Fetching a page: the rules are checked before every request and every redirect, and responses are limited.

All envs of an event loop share a `Network`: connections, robots.txt by host, rate limits, and the parser.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from encodings.aliases import aliases
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit
from weakref import WeakKeyDictionary

from flatout.workloads.crawl.access import MAX_ROBOTS_BYTES, Fault, RateLimiter, Robots, Rules, is_loopback
from flatout.workloads.crawl.client import AGENT_NAME, Client, LiveClient, Recording, Response
from flatout.workloads.crawl.parser import Parser

ROBOTS_SECONDS = 3600.0
WEB_RATE = 2.0
"""Default requests/s to a host that is not on this machine."""
MAX_REDIRECTS = 5
FETCH_SECONDS, PARSE_SECONDS = 20.0, 5.0
"""Deadlines of a page: for robots.txt, rate limit, requests and redirects together, and then for parsing. The last step of an
episode has two pages, its own and that of the reset, and executors allow it 60 s."""
HTML = ("text/html", "application/xhtml+xml")
REDIRECTS = (301, 302, 303, 307, 308)
CHARSETS = {f"iso8859_{n}" for n in range(2, 17)} | {f"cp125{n}" for n in range(9)} | set(
    "ascii utf_8 utf_8_sig utf_16 utf_16_le utf_16_be latin_1 cp437 cp850 cp852 cp866 cp874 tis_620 koi8_r koi8_u mac_roman "
    "mac_cyrillic gb2312 gbk gb18030 big5 big5hkscs euc_jp iso2022_jp shift_jis cp932 euc_kr cp949".split()
)  # fmt: skip
"""Codecs for the web. Some of Python's others raise whatever the bytes are, or take quadratic time."""


class Network:
    """A client, with robots.txt and the rate limit of each host."""

    def __init__(self, client: Client) -> None:
        self.client, self.parser = client, Parser()
        self.n_users = 0
        self._robots: dict[str, tuple[float, asyncio.Task[Robots]]] = {}
        self._limiters: dict[str, RateLimiter] = {}

    def limiter(self, origin: str, rate: float | None) -> RateLimiter:
        """The rate limiter of a host; the first env decides its rate."""
        if origin not in self._limiters:
            here = is_loopback(urlsplit(origin).hostname or "")
            self._limiters[origin] = RateLimiter(origin, rate or (None if here else WEB_RATE))
        return self._limiters[origin]

    async def robots(
        self, origin: str, fetch: Callable[[], Coroutine[Any, Any, Robots]], deadline: float
    ) -> Robots:
        """The robots.txt of a host, requested once per hour for all envs."""
        until, task = self._robots.get(origin, (0.0, None))
        has_failed = task is not None and task.done() and (task.cancelled() or task.exception() is not None)
        if task is None or has_failed or time.monotonic() > until:
            task = asyncio.get_running_loop().create_task(fetch())
            self._robots[origin] = time.monotonic() + ROBOTS_SECONDS, task
        if not task.done():
            async with asyncio.timeout_at(deadline):
                await asyncio.shield(task)
        return task.result()

    async def close(self) -> None:
        """Cancel pending requests, close all connections and end the parser."""
        for _, task in self._robots.values():
            task.cancel()
        await self.parser.close()
        await self.client.close()


_networks: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Network]] = WeakKeyDictionary()


def join_network(origin: str, record: Path | None, replay: Path | None) -> Network:
    """The network shared by the envs of this event loop; `leave_network` when done."""
    by_key = _networks.setdefault(asyncio.get_running_loop(), {})
    key = f"{record} {replay} {origin if record or replay else ''}"
    if key not in by_key:
        live, folder = LiveClient(), replay or record
        client = Recording(folder, origin, None if replay else live) if folder else live
        by_key[key] = Network(client)
    by_key[key].n_users += 1
    return by_key[key]


async def leave_network(network: Network) -> None:
    """Leave; the last env to leave closes it."""
    network.n_users -= 1
    if not network.n_users:
        by_key = _networks.get(asyncio.get_running_loop(), {})
        by_key.pop(next((key for key, value in by_key.items() if value is network), ""), None)
        await network.close()


@dataclass(slots=True)
class Attempt:
    """Fetching a page, and its result."""

    url: str
    """The last URL, after redirects."""
    n_requests: int = 0
    html: str | None = None
    fault: Fault | None = None
    robots: Robots = field(init=False)
    """The robots.txt of the page's host."""
    deadline: float = field(default_factory=lambda: time.monotonic() + FETCH_SECONDS)
    """When the fetch must be complete."""

    def allows(self, url: str) -> bool:
        """Whether robots.txt allows a link; links to other hosts are checked when they are followed."""
        host = self.url[: self.url.find("/", 8) + 1]
        return not url.startswith(host) or self.robots.allows(_path(url))


@dataclass(frozen=True, slots=True)
class Fetcher:
    """Fetches pages by the rules of one env."""

    rules: Rules
    network: Network
    timeout: float
    max_bytes: int
    rate: float | None

    async def page(self, url: str, attempt: int = 0) -> Attempt:
        """Fetch a page; faults are in the result. `attempt` counts earlier tries."""
        out = Attempt(url)
        try:
            out.html = self._html(await self._follow(out, attempt), out.url)
        except Fault as fault:
            out.fault = fault
        except TimeoutError:
            out.fault = Fault("timeout", f"{out.url}: no response within {self.timeout:g} s")
        return out

    async def _robots(self, origin: str) -> Robots:
        """Fetch robots.txt, also through redirects."""
        response = await self._follow(Attempt(f"{origin}/robots.txt"), 0, is_robots=True)
        return Robots.of(response.status, response.decoded(MAX_ROBOTS_BYTES), AGENT_NAME)

    async def _follow(self, out: Attempt, attempt: int, *, is_robots: bool = False) -> Response:
        """The response that is not a redirect."""
        for _ in range(MAX_REDIRECTS + 1):
            origin = self.rules.check(out.url)
            limiter = self.network.limiter(origin, self.rate)
            if not is_robots:
                out.robots = await self.network.robots(origin, partial(self._robots, origin), out.deadline)
                if not out.robots.allows(_path(out.url)):
                    raise Fault("robots", f"{out.url} is disallowed by robots.txt")
                limiter.set_min_interval(out.robots.delay)
            wait = limiter.reserve(out.deadline - time.monotonic())
            if wait is None:
                raise Fault("busy", f"{origin}: the rate limit has no free slot within {FETCH_SECONDS:g} s")
            if wait:
                await asyncio.sleep(wait)
            out.n_requests += 1
            async with asyncio.timeout_at(min(time.monotonic() + self.timeout, out.deadline)):
                max_bytes = MAX_ROBOTS_BYTES if is_robots else self.max_bytes
                response = await self.network.client.get(out.url, attempt, max_bytes)
            if response.status in (429, 503):
                limiter.pause(_retry_after(response))
            if response.status not in REDIRECTS or "location" not in response.headers:
                return response
            location = response.headers["location"]
            try:
                out.url = urljoin(out.url, location).partition("#")[0]
            except ValueError as error:
                raise Fault("garbage", f"{out.url} redirects to '{location}'") from error
        raise Fault("redirects", f"{out.url} redirects more than {MAX_REDIRECTS} times")

    def _html(self, response: Response, url: str) -> str:
        if response.status != 200:
            raise Fault("status", f"{url} answered {response.status}")
        kind, _, options = response.headers.get("content-type", "").lower().partition(";")
        if kind.strip() not in HTML:
            raise Fault("type", f"{url} is '{kind[:40]}', not HTML")
        return response.decoded(self.max_bytes).decode(_charset(options), "replace")


@lru_cache(256)
def _charset(options: str) -> str:
    """The codec of a Content-Type, UTF-8 if it names none for the web."""
    label = re.search(r"charset=[\s\"']*([\w.:-]+)", options)
    name = re.sub(r"[^a-z0-9]+", "_", label[1]) if label else ""
    codec = aliases.get(name, name)
    return codec if codec in CHARSETS else "utf_8"


def _path(url: str) -> str:
    start = url.find("/", 8)
    return url[start:] if start > 0 else "/"


def _retry_after(response: Response) -> float:
    """Retry-After in seconds; 0 if there is none."""
    text = response.headers.get("retry-after", "")
    if re.fullmatch("[0-9]{1,9}", text):
        return float(text)
    try:
        return max(parsedate_to_datetime(text[:40]).timestamp() - time.time(), 0.0)
    except (ValueError, TypeError, LookupError, ArithmeticError):
        return 0.0
