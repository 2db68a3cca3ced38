"""What may be requested: origins, addresses, URLs that change something, robots.txt, rate limits."""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import time
import uuid
from typing import Any

import pytest

from flatout.errors import FlatoutError
from flatout.workloads.crawl.access import (
    MAX_DEPTH,
    MAX_URL,
    Fault,
    RateLimiter,
    Robots,
    Rules,
    address_refusal,
    is_loopback,
)
from flatout.workloads.crawl.client import CheckedResolver, WebClient

HERE = "http://127.0.0.1:8000"
RULES = Rules(f"{HERE}/")


@pytest.mark.parametrize(
    "url",
    [
        "https://127.0.0.1:8000/",
        "http://127.0.0.1/",
        "http://127.0.0.1:8001/",
        "http://localhost:8000/",
        "http://127.0.0.1:8000.example.com/",
        "http://127.0.0.1:8000@example.com/",
        "http://example.com:8000/?http://127.0.0.1:8000/",
        "http://user@127.0.0.1:8000/",
        "//example.com/",
        "ftp://127.0.0.1:8000/",
        "file:///etc/passwd",
        "javascript:alert(1)",
        "http://127.0.0.1:99999/",
        "http://127.0.0.1:8000/a b",
        "http://127.0.0.1:8000/é",
        "http://127.0.0.1:8000/a\r\nHost: evil",
        f"{HERE}/{'a' * MAX_URL}",
        f"{HERE}/{'a/' * (MAX_DEPTH + 1)}",
        f"{HERE}/account/logout",
        f"{HERE}/Account/Log-Out?next=/",
        f"{HERE}/post/7/delete",
        f"{HERE}/cart?action=remove&id=3",
        f"{HERE}/image.PNG",
    ],
)
def test_urls_outside_the_origin_or_that_look_harmful_are_refused(url: str) -> None:
    with pytest.raises(Fault) as caught:
        RULES.check(url)
    assert caught.value.kind == "refused"
    assert "\n" not in str(caught.value)
    assert RULES.follow(f"{HERE}/", url) is None


@pytest.mark.parametrize(
    "path", ["/font.woff2", "/2/song.mp3", "/3/film.MP4", "/7/account/logout", "/post/8/delete"]
)
def test_links_to_files_or_that_look_harmful_are_not_followed(path: str) -> None:
    for _ in range(2):
        assert RULES.follow(f"{HERE}/x/", path) is None


@pytest.mark.parametrize("path", ["/", "/a/b?c=d", "/deleted-scenes", "/logouts", "/v1.2/page.html"])
def test_urls_inside_the_origin_are_allowed(path: str) -> None:
    assert RULES.check(f"{HERE}{path}") == HERE
    assert RULES.follow(f"{HERE}/x/", path) == f"{HERE}{path}"


@pytest.mark.parametrize(
    ("href", "url"),
    [
        ("next", f"{HERE}/a/next"),
        ("../up", f"{HERE}/up"),
        ("/a/../b", f"{HERE}/b"),
        ("?page=2", f"{HERE}/a/b?page=2"),
        ("/c#part", f"{HERE}/c"),
        ("#part", None),
        ("", None),
        ("//127.0.0.1:8000/d", f"{HERE}/d"),
        ("//evil.com/d", None),
        ("/\\evil.com", None),
        ("mailto:a@b.c", None),
        ("http://[::1", None),
    ],
)
def test_links_are_resolved_as_a_browser_does(href: str, url: str | None) -> None:
    assert RULES.follow(f"{HERE}/a/b", href) == url


def test_only_this_machine_is_allowed_unless_hosts_are_named() -> None:
    with pytest.raises(FlatoutError, match=r"^'https://example\.com/' is not on this machine.*hosts.*$"):
        Rules("https://example.com/")
    with pytest.raises(FlatoutError, match=r"'https://example\.com/' is not on the list of hosts http"):
        Rules("https://example.com/", ["https://example.org"])
    rules = Rules("https://example.com/a", ["https://example.com", "http://127.0.0.1:1"])
    assert rules.check("https://example.com/b") == "https://example.com:443"
    assert rules.check("https://example.com:443/b") == "https://example.com:443"
    for url in ("http://example.com/b", "https://www.example.com/b", "https://example.com:444/b"):
        with pytest.raises(Fault, match="is outside"):
            rules.check(url)
    for url in ("example.com", "ftp://example.com", "http://", "http://a:b/", "http://u:p@127.0.0.1/"):
        with pytest.raises(FlatoutError, match=r"URL|user name"):
            Rules(url, [url])


@pytest.mark.parametrize(
    ("host", "address", "fine"),
    [
        ("localhost", "127.0.0.1", True),
        ("localhost", "::1", True),
        ("localhost", "8.8.8.8", False),
        ("example.com", "93.184.216.34", True),
        ("example.com", "127.0.0.1", False),
        ("example.com", "::1", False),
        ("example.com", "::ffff:127.0.0.1", False),
        ("example.com", "10.0.0.7", False),
        ("example.com", "169.254.169.254", False),
        ("example.com", "fe80::1%eth0", False),
        ("example.com", "224.0.0.1", False),
        ("example.com", "0.0.0.0", False),
        ("example.com", "nonsense", False),
        ("10.0.0.7", "10.0.0.7", True),
        ("10.0.0.7", "10.0.0.8", False),
    ],
)
def test_host_names_must_resolve_to_public_addresses(host: str, address: str, fine: bool) -> None:
    assert (address_refusal(host, address) is None) == fine


def test_the_resolved_address_is_checked_before_connecting(monkeypatch: pytest.MonkeyPatch) -> None:
    def to_this_machine(*_: Any, **__: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 80))]

    monkeypatch.setattr(socket, "getaddrinfo", to_this_machine)

    async def ask() -> None:
        with pytest.raises(Fault, match=r"rebound\.example resolves to 127\.0\.0\.1"):
            await CheckedResolver().resolve("rebound.example", 80)
        client = WebClient()
        with pytest.raises(Fault) as caught:
            await client.get("http://rebound.example/", 0, 1000)
        assert caught.value.kind == "refused"
        await client.close()

    asyncio.run(ask())


def test_loopback_hosts_are_recognised() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "localhost", "[::1]", "::1")))
    assert not any(map(is_loopback, ("10.0.0.1", "0.0.0.0", "localhost.evil.com", "", "127.0.0.1.nip.io")))


ROBOTS = """
# everyone
User-agent: *
Disallow: /private/
Allow: /private/open
Disallow: /*.cgi$
Disallow: /*/search
Crawl-delay: 2

User-agent: other
User-agent: Flatout-Crawl
Disallow: /only-us
"""


@pytest.mark.parametrize(
    ("agent", "path", "allowed"),
    [
        ("somebody", "/", True),
        ("somebody", "/private/x", False),
        ("somebody", "/%70rivate/x", False),
        ("somebody", "/private/open/x", True),
        ("somebody", "/private", True),
        ("somebody", "/a/b.cgi", False),
        ("somebody", "/a/b.cgi?x=1", True),
        ("somebody", "/5/search?q=1", False),
        ("somebody", "/only-us", True),
        ("flatout-crawl", "/only-us/x", False),
        ("flatout-crawl", "/private/x", True),
    ],
)
def test_robots_txt_is_read_as_in_rfc_9309(agent: str, path: str, allowed: bool) -> None:
    robots = Robots(ROBOTS, agent)
    assert robots.allows(path) == allowed
    assert robots.delay == (2 if agent == "somebody" else 0)


@pytest.mark.parametrize("text", ["", "\x00\xff", "Disallow: /", "User-agent: *\nDisallow:", "a" * 10_000])
def test_an_empty_robots_txt_allows_everything(text: str) -> None:
    assert Robots(text, "somebody").allows("/x")


def take_turns(origin: str, rate: float, n: int, out: Any) -> None:
    limiter = RateLimiter(origin, rate)
    for _ in range(n):
        wait = limiter.reserve(10.0)
        assert wait is not None
        time.sleep(wait)
        out.put(time.monotonic())


def test_all_processes_share_one_rate_limit() -> None:
    origin, context = f"http://{uuid.uuid4()}", multiprocessing.get_context("fork")
    out = context.Queue()
    workers = [context.Process(target=take_turns, args=(origin, 20.0, 5, out)) for _ in range(3)]
    for worker in workers:
        worker.start()
    times = sorted(out.get() for _ in range(15))
    for worker in workers:
        worker.join()
    # 15 turns at 20 a second take 14 intervals, whoever has them
    assert times[-1] - times[0] >= 14 / 20 - 0.05


def test_without_a_limit_requests_do_not_wait_until_a_pause() -> None:
    limiter = RateLimiter(f"http://{uuid.uuid4()}", None)
    assert limiter.reserve(0.0) == 0.0
    limiter.pause(100.0)
    assert limiter.reserve(1.0) is None
    wait = limiter.reserve(200.0)
    assert wait is not None
    assert 99 < wait <= 100
