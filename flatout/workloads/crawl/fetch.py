"""Fetching a page: the rules are checked before every request and every redirect, and responses are limited.

All envs of an event loop share a `Network`: connections, robots.txt by host, and rate limits.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from pathlib import Path
from urllib.parse import urljoin, urlsplit
from weakref import WeakKeyDictionary

from flatout.workloads.crawl.access import MAX_ROBOTS_BYTES, Fault, RateLimiter, Robots, Rules, is_loopback
from flatout.workloads.crawl.client import AGENT_NAME, Client, LiveClient, Recording, Response

ROBOTS_SECONDS = 3600.0
ROBOTS_TIMEOUT = 10.0
WEB_RATE = 2.0
"""Default requests/s to a host that is not on this machine."""
MAX_REDIRECTS = 5
MAX_WAIT = 30.0
"""Longest wait for the rate limit in seconds; more is a fault."""
HTML = ("text/html", "application/xhtml+xml")
REDIRECTS = (301, 302, 303, 307, 308)


class Network:
    """A client, with robots.txt and the rate limit of each host."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.n_users = 0
        self._robots: dict[str, tuple[float, asyncio.Task[Robots]]] = {}
        self._limiters: dict[str, RateLimiter] = {}

    def limiter(self, origin: str, rate: float | None) -> RateLimiter:
        """The rate limiter of a host; the first env decides its rate."""
        if origin not in self._limiters:
            here = is_loopback(urlsplit(origin).hostname or "")
            self._limiters[origin] = RateLimiter(origin, rate or (None if here else WEB_RATE))
        return self._limiters[origin]

    async def robots(self, origin: str) -> Robots:
        """The robots.txt of a host, requested once per hour for all envs."""
        until, task = self._robots.get(origin, (0.0, None))
        has_failed = task is not None and task.done() and (task.cancelled() or task.exception() is not None)
        if task is None or has_failed or time.monotonic() > until:
            task = asyncio.get_running_loop().create_task(self._fetch_robots(origin))
            self._robots[origin] = time.monotonic() + ROBOTS_SECONDS, task
        return task.result() if task.done() else await asyncio.shield(task)

    async def _fetch_robots(self, origin: str) -> Robots:
        async with asyncio.timeout(ROBOTS_TIMEOUT):
            response = await self.client.get(f"{origin}/robots.txt", 0, MAX_ROBOTS_BYTES)
        body = response.decoded(MAX_ROBOTS_BYTES) if response.status == 200 else b""
        return Robots.of(response.status, body, AGENT_NAME)

    async def close(self) -> None:
        """Cancel pending requests and close all connections."""
        for _, task in self._robots.values():
            task.cancel()
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
    """The result of fetching a page."""

    url: str
    """The last URL, after redirects."""
    n_requests: int = 0
    html: str | None = None
    fault: Fault | None = None
    robots: Robots = field(init=False)
    """The robots.txt of the page's host."""
    origin: str = ""

    def allows(self, url: str) -> bool:
        """Whether robots.txt allows a link; links to other hosts are checked when they are followed."""
        return not url.startswith(self.origin) or self.robots.allows(_path(url))


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
            out.html = await self._follow(out, attempt)
        except Fault as fault:
            out.fault = fault
        except TimeoutError:
            out.fault = Fault("timeout", f"{out.url}: no response within {self.timeout:g} s")
        return out

    async def _follow(self, out: Attempt, attempt: int) -> str:
        for _ in range(MAX_REDIRECTS + 1):
            origin = out.origin = self.rules.check(out.url)
            robots = out.robots = await self.network.robots(origin)
            if not robots.allows(_path(out.url)):
                raise Fault("robots", f"{out.url} is disallowed by robots.txt")
            limiter = self.network.limiter(origin, self.rate)
            if robots.delay:
                limiter.set_min_interval(robots.delay)
            wait = limiter.reserve(MAX_WAIT)
            if wait is None:
                raise Fault("busy", f"{origin}: the rate limit has no free slot within {MAX_WAIT:g} s")
            if wait:
                await asyncio.sleep(wait)
            out.n_requests += 1
            async with asyncio.timeout(self.timeout):
                response = await self.network.client.get(out.url, attempt, self.max_bytes)
            if response.status in REDIRECTS and "location" in response.headers:
                location = response.headers["location"]
                try:
                    out.url = urljoin(out.url, location).partition("#")[0]
                except ValueError as error:
                    raise Fault("garbage", f"{out.url} redirects to '{location[:60]}'") from error
                continue
            if response.status in (429, 503):
                limiter.pause(_retry_after(response))
            return self._html(response, out.url)
        raise Fault("redirects", f"{out.url} redirects more than {MAX_REDIRECTS} times")

    def _html(self, response: Response, url: str) -> str:
        if response.status != 200:
            raise Fault("status", f"{url} answered {response.status}")
        kind, _, options = response.headers.get("content-type", "").partition(";")
        if kind.strip().lower() not in HTML:
            raise Fault("type", f"{url} is '{kind[:40]}', not HTML")
        body = response.decoded(self.max_bytes)
        charset = options.lower().partition("charset=")[2].strip(" \"'")[:40] or "utf-8"
        try:
            return body.decode(charset, "replace")
        except LookupError:
            return body.decode("utf-8", "replace")


def _path(url: str) -> str:
    start = url.find("/", 8)
    return url[start:] if start > 0 else "/"


def _retry_after(response: Response) -> float:
    """Retry-After in seconds; 0 if there is none."""
    text = response.headers.get("retry-after", "")
    if text.isdigit():
        return float(text[:9])
    try:
        return max(parsedate_to_datetime(text).timestamp() - time.time(), 0.0)
    except (ValueError, TypeError):
        return 0.0
