"""Servers that mean harm cost a bounded time, never the run, the machine or the scope. Without its guard most of these hang."""

from __future__ import annotations

import asyncio
import inspect
import os
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import networkx as nx
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.executors.waiting import WaitingExecutor
from flatout.workloads.crawl import Crawl, fetch
from flatout.workloads.crawl.access import Fault, RateLimiter, Robots, Rules, address_refusal
from flatout.workloads.crawl.client import LiveClient, Response
from flatout.workloads.crawl.explore import MAX_HREFS
from flatout.workloads.crawl.fetch import FETCH_SECONDS, PARSE_SECONDS, Attempt, Fetcher, Network
from flatout.workloads.crawl.page import parse
from flatout.workloads.crawl.parser import MAX_SMALL, MAX_SMALL_TAGS, Parser
from tests.workloads.misbehaving_site import HTML, Misbehaving, misbehaving, page, reply

Site = tuple[Misbehaving, str]
HERE = "http://127.0.0.1:8000"


@pytest.fixture
def site() -> Iterator[Site]:
    with misbehaving() as site:
        yield site


def get(url: str, *paths: str) -> list[Attempt]:
    """The results of fetching the paths one after the other."""

    async def ask() -> list[Attempt]:
        network = Network(LiveClient())
        fetcher = Fetcher(Rules(url), network, timeout=5.0, max_bytes=100_000, rate=None)
        out = [await fetcher.page(f"{url}{path}") for path in paths]
        await network.close()
        return out

    return asyncio.run(ask())


def kinds(attempts: list[Attempt]) -> list[str]:
    return [attempt.fault.kind if attempt.fault else "fine" for attempt in attempts]


@pytest.mark.parametrize(
    "charset", ["idna", "punycode", "undefined", "a\0b", "unicode_escape", "utf-7", "zip", "²", "x" * 9000]
)
def test_a_charset_that_is_not_of_the_web_is_read_as_utf_8(charset: str, site: Site) -> None:
    site[0].pages["/x"] = reply("<p>\\ud800 é-</p>".encode(), kind=f"text/html; charset={charset}")
    assert get(site[1], "/x")[0].html == "<p>\\ud800 é-</p>"


@pytest.mark.parametrize(
    ("charset", "codec"), [("windows-1251", "cp1251"), ('"Shift_JIS"; x=y', "shift_jis"), ("UTF8", "utf_8")]
)
def test_charsets_of_the_web_are_read(charset: str, codec: str, site: Site) -> None:
    site[0].pages["/x"] = reply("<p>Да".encode(codec), kind=f"text/html; charset={charset}")
    assert get(site[1], "/x")[0].html == "<p>Да"


@pytest.mark.parametrize(
    "value", [b"\xb2", b"9" * 5000, b"Mon, 01 Jan 999999999999 00:00:00 GMT", b"Mon, 99 Jan 0 0:0:0 -9999999"]
)
def test_a_retry_after_that_is_not_a_time_is_ignored(value: bytes, site: Site) -> None:
    busy = reply(b"", "503 Unavailable", "text/html", "Retry-After: VALUE")
    site[0].pages["/x"] = busy.replace(b"VALUE", value)
    assert kinds(get(site[1], "/x", "/fine")) == ["status", "fine"]


def test_a_rule_with_many_wildcards_is_matched_without_backtracking() -> None:
    robots = Robots("User-agent: *\nDisallow: /" + "*a" * 200 + "$", "somebody")
    assert robots.allows("/" + "a" * 1800 + "b")
    assert not robots.allows("/" + "a" * 1800)
    robots = Robots("User-agent: *\nDisallow: /*a*b$\nAllow: /x*%2A$\nDisallow: /x", "somebody")
    assert [robots.allows(path) for path in ("/ab", "/abc", "/ba", "/x*", "/xy", "/x/y*")] == [
        False, True, True, True, False, True,
    ]  # fmt: skip


def test_a_robots_txt_with_more_rules_than_can_be_obeyed_disallows_everything() -> None:
    few = "User-agent: *\n" + "\n".join(f"Disallow: /{n}" for n in range(4000))
    assert Robots(few, "somebody").allows("/x")
    assert not Robots(few * 2, "somebody").allows("/x")
    assert not Robots("User-agent: *\nDisallow: /" + "*a" * 20_000, "somebody").allows("/x")


def test_a_robots_txt_with_many_agents_takes_no_more_memory_than_its_length() -> None:
    agents = "".join(f"User-agent: {n}\n" for n in range(14_000))
    assert not Robots(f"{agents}User-agent: *\nDisallow: /x\n" + "a: b\n" * 40_000, "me").allows("/x")


@pytest.mark.parametrize("hops", [1, 5])
def test_a_redirected_robots_txt_is_obeyed(hops: int, site: Site) -> None:
    server, url = site
    for n in range(hops):
        server.pages[f"/r{n}"] = reply(b"", "301 Moved", "", f"Location: /r{n + 1}")
    server.robots = server.pages["/r0"]
    server.pages[f"/r{hops}"] = reply(b"User-agent: *\nDisallow: /fine", kind="text/plain")
    assert kinds(get(url, "/fine", "/broken")) == ["robots", "status"]


@pytest.mark.parametrize("status", ["404 Not Found", "403 Forbidden"])
def test_a_site_without_a_robots_txt_is_crawled(status: str, site: Site) -> None:
    site[0].robots = reply(b"User-agent: *\nDisallow: /", status)
    assert kinds(get(site[1], "/fine")) == ["fine"]


def test_a_site_whose_robots_txt_leads_away_or_in_circles_is_not_crawled(site: Site) -> None:
    server, url = site
    with misbehaving() as (other, elsewhere):
        for location in (f"{elsewhere}/robots.txt", "/robots.txt", "http://[", "file:///etc/passwd"):
            server.robots = reply(b"", "302 Found", "", f"Location: {location}")
            assert kinds(get(url, "/fine")) != ["fine"]
        assert not other.requests
    server.robots = reply(b"", "302 Found", "")
    assert kinds(get(url, "/fine")) == ["robots"]
    assert set(server.requests) == {"/robots.txt"}


def test_two_pages_take_less_time_than_executors_allow_a_step() -> None:
    allowed = inspect.signature(WaitingExecutor).parameters["step_timeout"].default
    assert allowed > 2 * (FETCH_SECONDS + PARSE_SECONDS)  # the last step of an episode resets the env too


def test_waits_and_redirects_share_one_deadline(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "FETCH_SECONDS", 0.7)
    (slow,) = get(site[1], "/slow")
    assert kinds([slow]) == ["timeout"]
    assert slow.n_requests < 6
    site[0].robots = reply(b"User-agent: *\nCrawl-delay: 2", kind="text/plain")
    assert kinds(get(site[1], "/fine", "/fine")) == ["fine", "busy"]


def link_to(folder: Path, target: Path) -> None:
    folder.symlink_to(target)


def open_to_all(folder: Path, target: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def a_file(folder: Path, target: Path) -> None:
    folder.write_text("")


@pytest.mark.parametrize("prepare", [link_to, open_to_all, a_file])
def test_a_rate_limit_is_not_kept_in_a_folder_that_others_prepared(
    prepare: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    target = tmp_path / "target"
    target.mkdir(0o700)
    prepare(tmp_path / f"flatout-pace-{os.getuid()}", target)
    limiter = RateLimiter(HERE, None)
    with pytest.warns(UserWarning, match="is not private; the rate limit of http"):
        limiter.pause(100.0)
    with pytest.warns(UserWarning, match="is not private"):
        assert limiter.reserve(1.0) is None
    assert not list(target.iterdir())
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] in (
        [],
        [f"flatout-pace-{os.getuid()}"],
    )


def test_a_file_of_the_rate_limit_that_is_a_link_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    RateLimiter(HERE, 1.0).reserve(1.0)
    (file,) = (tmp_path / f"flatout-pace-{os.getuid()}").iterdir()
    precious = tmp_path / "precious"
    precious.write_text("precious")
    file.unlink()
    file.symlink_to(precious)
    with pytest.warns(UserWarning, match="is not private"):
        RateLimiter(HERE, 1.0).pause(100.0)
    assert precious.read_text() == "precious"


@pytest.mark.parametrize(
    ("address", "fine"),
    [
        ("64:ff9b::127.0.0.1", False),
        ("64:ff9b::169.254.169.254", False),
        ("64:ff9b::10.0.0.7", False),
        ("64:ff9b::8.8.8.8", True),
        ("64:ff9b:1::8.8.8.8", False),
        ("2002:7f00:1::1", False),
        ("2002:808:808::1", True),
        ("2001:0:7f00:1::1", False),
        ("::ffff:10.0.0.7", False),
        ("::ffff:8.8.8.8", True),
        ("::ffff:0:127.0.0.1", False),
        ("::127.0.0.1", False),
        ("::", False),
        ("fec0::1", False),
        ("fd00::1", False),
        ("ff02::1", False),
        ("2606:4700::1111", True),
    ],
)
def test_an_ipv4_address_inside_an_ipv6_address_must_be_public(address: str, fine: bool) -> None:
    assert (address_refusal("example.com", address) is None) == fine


@pytest.mark.parametrize(
    "url",
    [f"{HERE}?x=1", f"{HERE}?x/y", "http://127.0.0.1:08000/", f"{HERE}//x/../private", f"{HERE}/a/%2E%2e/b"],
)
def test_other_ways_to_write_an_allowed_url_are_refused(url: str) -> None:
    """Each host would have connections of its own for every way to write it, and robots.txt would not see the path."""
    with pytest.raises(Fault, match=r"is outside|dot segments"):
        Rules(f"{HERE}/").check(url)
    assert Rules(f"{HERE}/").check("HTTP" + HERE[4:]) == HERE


def parsers() -> list[psutil.Process]:
    return [
        child for child in psutil.Process().children() if any("page.py" in arg for arg in child.cmdline())
    ]


def many_formats(n: int) -> str:
    """The standard demands n² elements for these 11 n bytes."""
    return "<p>" + "".join(f"<b {k:x}>" for k in range(n)) + "<p>x" * n


@pytest.mark.parametrize("html", [many_formats(6000), "<ul><li>" * 200_000], ids=["memory", "time"])
def test_html_that_takes_gigabytes_or_minutes_is_a_fault_and_the_next_page_is_parsed(
    html: str, site: Site
) -> None:
    server, url = site
    server.pages |= {"/": reply(page("/x", "/y")), "/x": reply(html.encode())}
    server.pages["/y"] = reply(page("/z", extra="<p>" * MAX_SMALL))
    env = Crawl(url=f"{url}/")
    env.reset(seed=1)
    assert env.step(0)[4]["fault"].startswith("garbage: HTML that takes more than ")
    assert env.step(1)[4]["url"] == f"{url}/y"
    assert len(parsers()) == 1
    env.close()
    assert not parsers()


def test_deeply_nested_navigation_is_parsed(site: Site) -> None:
    site[0].pages["/"] = reply(b"<nav>" * 8000 + b'<a href="/fine">fine</a>')
    env = Crawl(url=f"{site[1]}/")
    env.reset(seed=1)
    (link,) = env._slots
    assert (link.url, link.in_frame) == (f"{site[1]}/fine", True)
    env.close()


def test_large_pages_are_parsed_as_small_ones() -> None:
    extra = "<nav class='x'><a href=q>\n q</a><p itemtype='/Dataset'>"
    text = page(*(f"/{n}?é={n}&b" for n in range(700)), extra=extra).decode()

    async def ask() -> Any:
        parser = Parser()
        async with asyncio.timeout(60):
            out = [
                await parser.parse(text, "[itemtype]", asyncio.get_running_loop().time() + 60)
                for _ in range(2)
            ]
        await parser.close()
        return out

    assert text.count("<") > MAX_SMALL_TAGS
    assert asyncio.run(ask()) == [parse(text, "[itemtype]")] * 2


def test_a_page_that_waits_for_the_parser_past_its_deadline_is_a_fault() -> None:
    async def ask() -> None:
        parser = Parser()
        with pytest.raises(Fault) as caught:
            await parser.parse("<ul><li>" * 200_000, "p", asyncio.get_running_loop().time() + 0.2)
        assert caught.value.kind == "timeout"
        await parser.close()

    asyncio.run(ask())
    assert not parsers()


def test_the_links_of_a_page_that_are_kept_are_limited(site: Site) -> None:
    site[0].pages["/"] = reply(page(*(f"/{n:04}{'x' * 1900}" for n in range(400))))
    env = Crawl(url=f"{site[1]}/")
    env.reset(seed=1)
    assert 0 < sum(len(link.url) for link in env.exploration.links.values()) < MAX_HREFS + 10_000
    env.close()


def test_control_characters_reach_neither_the_terminal_nor_the_graph(site: Site, tmp_path: Path) -> None:
    server, url = site
    evil = "\x1b[31mred\x07\x9b\u202e\x0c"
    server.pages["/"] = reply(f"<title>{evil}</title><a href=/fine>{evil}</a><a href=/x>x</a>".encode())
    server.pages["/x"] = reply(b"", kind=evil.replace("\u202e", ""))
    env = Crawl(url=f"{url}/", render_mode="ansi")
    env.reset(seed=1)
    faults = [env.step(k)[4]["fault"] for k in (1, 0)]
    assert "red" in str(env.render()) + faults[0]
    assert str(env.render()).replace("\n", "").isprintable()
    assert all(fault.isprintable() for fault in faults)
    env.graph.write_graphml(tmp_path / "graph.xml")
    assert len(nx.read_graphml(tmp_path / "graph.xml")) > 1
    env.close()


def test_bytes_that_nobody_asked_for_are_not_collected(site: Site) -> None:
    async def ask() -> int:
        client = LiveClient()
        await client.get(f"{site[1]}/flood", 0, 10_000)
        ((idle,),) = client._idle.values()
        async with asyncio.timeout(60):
            while not idle.transport.is_closing():
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        await client.close()
        return len(idle._buffer)

    assert 0 < asyncio.run(ask()) < 2_000_000


@pytest.mark.parametrize(
    ("chunks", "kind"),
    [
        ((b"1;" + b"e" * 1000 + b"\r\nx\r\n") * 5000, "size"),
        (b"1\r\nx\r\n" * 90_000, "size"),
        (b"0\r\n" + b"a: b\r\n" * 90_000, "size"),
        (b"-1\r\nx\r\n", "garbage"),
        (b"1_0\r\nx\r\n", "garbage"),
        (b"1\r\nxy\r\n", "garbage"),
        (b"1\r\nx\r\n" * 100 + b"0\r\na: b\r\n\r\n", "fine"),
    ],
)
def test_chunks_that_are_mostly_overhead_are_not_read_to_the_end(
    chunks: bytes, kind: str, site: Site
) -> None:
    site[0].pages["/x"] = f"{HTML}Transfer-Encoding: chunked\r\n\r\n".encode() + chunks
    assert kinds(get(site[1], "/x", "/fine")) == [kind, "fine"]


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=60), st.text(alphabet="/.?#%[]:@*$ab\u00b2\u212a\ud800\n", max_size=30))
def test_no_text_of_a_server_raises(text: str, other: str) -> None:
    rules = Rules(f"{HERE}/")
    for href in (text, other, f"http://{other}", f"//{other}", f"{HERE}{other}"):
        url = rules.follow(f"{HERE}/a", href)
        assert url is None or (url.startswith(HERE) and url.isascii())
    robots = Robots(f"User-agent: *\nDisallow: {text}\nAllow: {other}\nCrawl-delay: {other}", "somebody")
    assert robots.allows(other) in (True, False)
    assert fetch._retry_after(Response(503, {"retry-after": text}, b"")) >= 0
    "".encode(fetch._charset(f"charset={other}"))
    assert str(Fault("garbage", text + other)).isprintable()


def test_each_host_has_its_own_rate_limit() -> None:
    one, other = (RateLimiter(f"http://{uuid.uuid4()}", None) for _ in range(2))
    one.pause(100.0)
    assert one.reserve(1.0) is None
    assert other.reserve(1.0) == 0.0
