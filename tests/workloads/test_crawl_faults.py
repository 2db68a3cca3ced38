"""Whatever a server does wrong is a step with a penalty, and the crawl goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import flatout
from flatout.errors import EnvError
from flatout.workloads.crawl import Crawl
from flatout.workloads.crawl.access import Rules
from flatout.workloads.crawl.client import LiveClient, WebClient
from flatout.workloads.crawl.crawl import FAULT, MAX_FAULTS, REQUEST
from flatout.workloads.crawl.fetch import Fetcher, Network
from tests.workloads.misbehaving_site import FAULTS, Misbehaving, misbehaving, page, reply

Site = tuple[Misbehaving, str]


@pytest.fixture(scope="module")
def shared() -> Iterator[Site]:
    with misbehaving() as site:
        yield site


@pytest.fixture
def site() -> Iterator[Site]:
    with misbehaving() as site:
        yield site


def fetch(url: str, client: type[LiveClient] | type[WebClient], *paths: str) -> list[Any]:
    """The results of fetching the paths one after the other."""

    async def ask() -> list[Any]:
        network = Network(client())
        fetcher = Fetcher(Rules(url), network, timeout=0.4, max_bytes=100_000, rate=None)
        out = [await fetcher.page(f"{url}{path}") for path in paths]
        await network.close()
        await asyncio.sleep(0.01)
        return out

    return asyncio.run(ask())


@pytest.mark.parametrize("client", [LiveClient, WebClient])
@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_has_its_kind_and_the_next_page_is_fetched(name: str, client: Any, shared: Site) -> None:
    fault, fine = fetch(shared[1], client, f"/{name}", "/fine")
    assert fault.html is None
    # aiohttp calls some garbage a lost connection, and drops what it cannot read
    kinds = {FAULTS[name]} | ({"garbage", "connection"} if FAULTS[name] == "garbage" else set())
    assert fault.fault.kind in kinds, fault.fault
    assert "\n" not in str(fault.fault)
    assert fine.html is not None


@pytest.mark.parametrize("client", [LiveClient, WebClient])
def test_valid_responses_are_read(client: Any, site: Site) -> None:
    server, url = site
    import gzip
    import zlib

    body = page("/fine")
    server.pages |= {
        "/gzip": reply(gzip.compress(body), "200 OK", "text/html", "Content-Encoding: gzip"),
        "/deflate": reply(zlib.compress(body), "200 OK", "text/html", "Content-Encoding: deflate"),
        "/parts": b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nTransfer-Encoding: chunked\r\n\r\n"
        + b"5\r\n%b\r\n%x;note=1\r\n%b\r\n0\r\n\r\n" % (body[:5], len(body) - 5, body[5:]),
        "/latin": reply("<p>é</p>".encode("latin-1"), kind="text/html; charset=latin-1"),
        "/one": reply(b"", "302 Found", "", "Location: two"),
        "/two": reply(b"", "307 Found", "", f"Location: {url}/fine#part"),
    }
    paths = ["/gzip", "/deflate", "/parts", "/latin", "/one", "/fine"]
    got = fetch(url, client, *paths)
    assert [attempt.html for attempt in got[:3]] == [body.decode()] * 3
    assert got[3].html == "<p>é</p>"
    assert (got[4].url, got[4].n_requests) == (f"{url}/fine", 3)
    head = server.heads[-1].lower()
    assert head.startswith("get ")
    assert "user-agent: flatout-crawl/" in head
    assert "cookie" not in head
    assert server.requests.count("/robots.txt") == 1


@pytest.mark.parametrize("name", ["hang", "garbage", "huge", "bomb", "loop", "half", "away", "broken"])
def test_a_fault_is_a_step_with_a_penalty(name: str, shared: Site) -> None:
    url = shared[1]
    shared[0].pages["/start"] = reply(page(f"/{name}", "/fine"))
    env = Crawl(url=f"{url}/start", timeout=0.4, max_bytes=100_000)
    env.reset(seed=1)
    after, reward, terminated, truncated, info = env.step(0)
    assert env.observation_space.contains(after)
    assert not terminated
    assert not truncated
    assert info["fault"].startswith(f"{FAULTS[name]}: ")
    n_requests = info["requests"] - 1
    assert n_requests == (6 if name == "loop" else 1)
    assert reward == pytest.approx(FAULT + REQUEST * n_requests)
    assert info["url"] == f"{url}/start"
    link = int(np.flatnonzero([link.url.endswith("/fine") for link in env._slots])[0])
    assert env.step(link)[4]["url"] == f"{url}/fine"
    env.close()


def test_episodes_on_a_dead_site_are_truncated() -> None:
    with misbehaving() as (server, url):
        server.pages["/"] = reply(page(*(f"/{n}" for n in range(12))))
        env = Crawl(url=f"{url}/", timeout=0.4)
        obs, _ = env.reset(seed=1)
    for _ in range(2):
        for _ in range(MAX_FAULTS):
            action = int(np.flatnonzero(obs["action_mask"])[0])
            obs, reward, terminated, truncated, info = env.step(action)
            assert info["fault"].startswith(("connection: ", "robots: "))
            assert reward < 0
            assert not terminated
            assert env.observation_space.contains(obs)
            if truncated:
                break
        assert truncated
        obs, _ = env.reset()
    env.close()


def test_an_unreachable_start_page_is_an_error_that_names_it() -> None:
    env = Crawl(url="http://127.0.0.1:9/nothing")
    with pytest.raises(
        EnvError, match=r"^the start page http://127\.0\.0\.1:9/nothing cannot be fetched: [^\n]+$"
    ):
        env.reset()
    env.close()


def test_training_survives_every_fault(site: Site) -> None:
    agent = flatout.PPO(
        "crawl",
        env_kwargs={"url": f"{site[1]}/", "timeout": 0.2, "max_bytes": 100_000, "budget": 20, "n_links": 32},
        n_envs=8,
        n_steps=32,
        batch_size=64,
        timesteps=256,
        seed=1,
    )
    agent.learn()
    assert agent.summary["status"] == "finished"
    assert agent.summary["restarts"] == 0
    assert agent.summary["episodes"] > 0
    assert {f"/{name}" for name in FAULTS} - set(site[0].requests) <= {"/closed"}


@pytest.mark.parametrize("client", [LiveClient, WebClient])
def test_retry_after_is_obeyed(client: Any, site: Site) -> None:
    site[0].pages["/busy"] = reply(b"", "429 Too Many Requests", "text/html", "Retry-After: 1")
    began = time.monotonic()
    busy, fine = fetch(site[1], client, "/busy", "/fine")
    assert busy.fault.kind == "status"
    assert fine.html is not None
    assert time.monotonic() - began >= 1.0


def test_a_long_retry_after_is_a_fault_without_a_request(site: Site) -> None:
    site[0].pages["/busy"] = reply(b"", "503 Unavailable", "text/html", "Retry-After: 3000")
    _, fine = fetch(site[1], LiveClient, "/busy", "/fine")
    assert (fine.fault.kind, fine.n_requests) == ("busy", 0)
    assert "/fine" not in site[0].requests


def test_a_site_whose_robots_txt_fails_is_not_crawled(site: Site) -> None:
    site[0].robots = reply(b"", "503 Unavailable")
    (fine,) = fetch(site[1], LiveClient, "/fine")
    assert fine.fault.kind == "robots"
    assert site[0].requests == ["/robots.txt"]


def test_an_idle_connection_closed_by_the_server_is_replaced(site: Site) -> None:
    async def ask() -> list[int]:
        client = LiveClient()
        out = [(await client.get(f"{site[1]}/fine", 0, 10_000)).status]
        await client.get(f"{site[1]}/fine", 0, 10_000)
        with pytest.raises(Exception, match="closed"):
            await client.get(f"{site[1]}/close", 0, 10_000)
        out.append((await client.get(f"{site[1]}/fine", 0, 10_000)).status)
        await client.close()
        return out

    assert asyncio.run(ask()) == [200, 200]


@pytest.mark.parametrize("path", ["/twice", "/once"])
def test_an_idle_connection_on_which_bytes_or_the_end_arrived_is_not_used_again(
    path: str, site: Site
) -> None:
    async def ask() -> list[int]:
        client = LiveClient()
        first = await client.get(f"{site[1]}{path}", 0, 10_000)
        ((idle,),) = client._idle.values()
        async with asyncio.timeout(60):
            while idle.is_clean:
                await asyncio.sleep(0.001)
        second = await client.get(f"{site[1]}/fine", 0, 10_000)
        assert idle.transport.is_closing()
        assert idle not in next(iter(client._idle.values()))
        await client.close()
        return [first.status, second.status]

    assert asyncio.run(ask()) == [200, 200]
    assert site[0].requests == [path, "/fine"]
