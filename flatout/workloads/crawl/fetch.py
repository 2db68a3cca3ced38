"""Getting a page: the rules before every request, a redirect being one, and limits on all that comes back."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from urllib.parse import urljoin

from flatout.workloads.crawl.fault import Fault
from flatout.workloads.crawl.network import Network
from flatout.workloads.crawl.response import Response
from flatout.workloads.crawl.robots import NOTHING, Robots
from flatout.workloads.crawl.rules import Rules

MAX_REDIRECTS = 5
MAX_WAIT = 30.0
"""Seconds to wait for a host's turn; longer ones are a fault, and the agent may try elsewhere."""
HTML = ("text/html", "application/xhtml+xml")
REDIRECTS = (301, 302, 303, 307, 308)


@dataclass(slots=True)
class Attempt:
    """How asking for a page went."""

    url: str
    """Where the redirects ended."""
    n_requests: int = 0
    html: str | None = None
    fault: Fault | None = None
    robots: Robots = NOTHING
    """What the page's host lets be asked for."""
    origin: str = ""

    def allows(self, url: str) -> bool:
        """Whether a link on the page may be followed; one to another host is asked about when it is followed."""
        return not url.startswith(self.origin) or self.robots.allows(_path(url))


class Fetcher:
    """Asks for pages by the rules of one env."""

    def __init__(
        self, rules: Rules, network: Network, *, timeout: float, max_bytes: int, rate: float | None
    ) -> None:
        self._rules, self._network = rules, network
        self._timeout, self._max_bytes, self._rate = timeout, max_bytes, rate

    async def page(self, url: str, attempt: int = 0) -> Attempt:
        """The page at a URL, asked for the attempt-th time; whatever goes wrong is in the result."""
        out = Attempt(url)
        try:
            out.html = await self._follow(out, attempt)
        except Fault as fault:
            out.fault = fault
        except TimeoutError:
            out.fault = Fault("timeout", f"{out.url}: no answer within {self._timeout:g} s")
        return out

    async def _follow(self, out: Attempt, attempt: int) -> str:
        for _ in range(MAX_REDIRECTS + 1):
            origin = out.origin = self._rules.check(out.url)
            robots = out.robots = await self._network.robots(origin)
            if not robots.allows(_path(out.url)):
                raise Fault("robots", f"{out.url} is closed to crawlers by robots.txt")
            pace = self._network.pace(origin, self._rate)
            if robots.delay:
                pace.slow_down(robots.delay)
            wait = pace.turn(MAX_WAIT)
            if wait is None:
                raise Fault("busy", f"{origin} has no turn within {MAX_WAIT:g} s")
            if wait:
                await asyncio.sleep(wait)
            out.n_requests += 1
            async with asyncio.timeout(self._timeout):
                response = await self._network.client.get(out.url, attempt, self._max_bytes)
            if response.status in REDIRECTS and "location" in response.headers:
                out.url = _target(out.url, response.headers["location"])
                continue
            if response.status in (429, 503):
                pace.hold(_retry_after(response))
            return self._html(response, out.url)
        raise Fault("redirects", f"{out.url} redirects more than {MAX_REDIRECTS} times")

    def _html(self, response: Response, url: str) -> str:
        if response.status != 200:
            raise Fault("status", f"{url} answered {response.status}")
        kind, _, options = response.headers.get("content-type", "").partition(";")
        if kind.strip().lower() not in HTML:
            raise Fault("type", f"{url} is '{kind[:40]}', not a page")
        body = response.decoded(self._max_bytes)
        charset = options.lower().partition("charset=")[2].strip(" \"'")[:40] or "utf-8"
        try:
            return body.decode(charset, "replace")
        except LookupError:
            return body.decode("utf-8", "replace")


def _path(url: str) -> str:
    start = url.find("/", 8)
    return url[start:] if start > 0 else "/"


def _target(url: str, location: str) -> str:
    try:
        return urljoin(url, location).partition("#")[0]
    except ValueError as error:
        raise Fault("garbage", f"{url} redirects to '{location[:60]}'") from error


def _retry_after(response: Response) -> float:
    """Seconds that the host asks to be left alone; 0 where it does not say."""
    text = response.headers.get("retry-after", "")
    if text.isdigit():
        return float(text[:9])
    try:
        return max(parsedate_to_datetime(text).timestamp() - time.time(), 0.0)
    except (ValueError, TypeError):
        return 0.0
