"""What all envs of an event loop share: connections, robots.txt by host, and each host's pace."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from flatout.workloads.crawl.lean import LeanClient
from flatout.workloads.crawl.pace import Pace
from flatout.workloads.crawl.record import Folder, Recorder, Replayer
from flatout.workloads.crawl.response import AGENT_NAME, Client, Response
from flatout.workloads.crawl.robots import EVERYTHING, MAX_BYTES, NOTHING, Robots
from flatout.workloads.crawl.rules import is_loopback
from flatout.workloads.crawl.web import WebClient

ROBOTS_SECONDS = 3600.0
ROBOTS_TIMEOUT = 10.0
WEB_RATE = 2.0
"""Requests a second to a host that is not on this machine, unless the user says otherwise."""


class Live:
    """The real network: a lean client for this machine, aiohttp for all others."""

    def __init__(self) -> None:
        self._lean, self._web = LeanClient(), WebClient()

    async def get(self, url: str, attempt: int, max_bytes: int) -> Response:
        """The response to one GET."""
        client: Client = self._lean if _is_here(url) else self._web
        return await client.get(url, attempt, max_bytes)

    async def close(self) -> None:
        """Let go of all connections."""
        await self._lean.close()
        await self._web.close()


def _is_here(url: str) -> bool:
    """Whether a URL is plain HTTP to this machine."""
    if not url.startswith("http://"):
        return False
    netloc = url[7:].partition("/")[0]
    return "@" not in netloc and is_loopback(netloc.rpartition(":")[0])


class Network:
    """A client, and what is known of the hosts that it has met."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.n_users = 0
        self._robots: dict[str, tuple[float, asyncio.Task[Robots]]] = {}
        self._paces: dict[str, Pace] = {}

    def pace(self, origin: str, rate: float | None) -> Pace:
        """The host's turns; all who share it keep to the first one's rate."""
        if origin not in self._paces:
            here = is_loopback(urlsplit(origin).hostname or "")
            self._paces[origin] = Pace(origin, rate or (None if here else WEB_RATE))
        return self._paces[origin]

    async def robots(self, origin: str) -> Robots:
        """The host's robots.txt: asked for once an hour, however many wait for it."""
        known = self._robots.get(origin)
        if known is None or time.monotonic() > known[0] or _failed(known[1]):
            task = asyncio.get_running_loop().create_task(self._ask(origin))
            known = self._robots[origin] = time.monotonic() + ROBOTS_SECONDS, task
        if known[1].done():
            return known[1].result()
        return await asyncio.shield(known[1])

    async def _ask(self, origin: str) -> Robots:
        url = f"{origin}/robots.txt"
        async with asyncio.timeout(ROBOTS_TIMEOUT):
            response = await self.client.get(url, 0, MAX_BYTES)
        if response.status >= 500 or response.status == 429:
            return NOTHING
        if response.status != 200:
            return EVERYTHING
        return Robots(response.decoded(MAX_BYTES).decode("utf-8", "replace"), AGENT_NAME)

    async def close(self) -> None:
        """End what is under way and let go of all connections."""
        for _, task in self._robots.values():
            task.cancel()
        await self.client.close()


def _failed(task: asyncio.Task[Robots]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


_networks: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Network]] = WeakKeyDictionary()


def join(origin: str, record: Path | None, replay: Path | None) -> Network:
    """The network that envs of this loop share; `leave` it in the end."""
    by_key = _networks.setdefault(asyncio.get_running_loop(), {})
    key = f"{record} {replay} {origin if record or replay else ''}"
    if key not in by_key:
        by_key[key] = Network(_client(origin, record, replay))
    by_key[key].n_users += 1
    return by_key[key]


async def leave(network: Network) -> None:
    """The last one to leave closes it."""
    network.n_users -= 1
    if network.n_users:
        return
    by_key = _networks.get(asyncio.get_running_loop(), {})
    for key in [key for key, value in by_key.items() if value is network]:
        del by_key[key]
    await network.close()


def _client(origin: str, record: Path | None, replay: Path | None) -> Client:
    if replay is not None:
        return Replayer(Folder(replay, origin))
    return Recorder(Live(), Folder(record, origin)) if record is not None else Live()
