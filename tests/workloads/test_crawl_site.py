"""Generated sites and their server: determinism, targets, errors, and bad configs."""

from __future__ import annotations

import http.client
import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from flatout.errors import FlatoutError
from flatout.workloads.crawl.page import Templates, parse
from flatout.workloads.site.pages import TARGET_MARK, SiteConfig, answer, latency, read_site, site
from flatout.workloads.site.server import SiteServer, site_server

SELECTOR = '[itemtype$="/Dataset"]'
CALM = SiteConfig(error_rate=0, redirect_rate=0)


def links(config: SiteConfig, path: str) -> list[str]:
    return re.findall(r'href="([^"]+)"', answer(config, path).body.decode())


def distances(config: SiteConfig, seed: int, max_pages: int = 4000) -> dict[str, int]:
    """How many clicks each page is away from the home page."""
    found, queue = {f"/{seed}/": 0}, deque([f"/{seed}/"])
    while queue and len(found) < max_pages:
        path = queue.popleft()
        if TARGET_MARK.encode() in answer(config, path).body:
            continue  # the few targets on shallow pages lead back up to their lists
        for link in links(config, path):
            if link not in found:
                found[link] = found[path] + 1
                queue.append(link)
    return found


@pytest.mark.parametrize("depth", [3, 4, 5])
def test_lists_of_targets_are_at_the_configured_depth(depth: int) -> None:
    config = SiteConfig(error_rate=0, redirect_rate=0, depth=depth, size=6)
    plan = site(config, 7)
    lists = [
        away
        for path, away in distances(config, 7).items()
        if path.endswith(f"/{plan.data}/") and path.count("/") == depth + 1
    ]
    assert lists
    assert min(lists) == depth - 1


@pytest.mark.parametrize("size", range(4, 41))
def test_every_size_that_is_allowed_gives_a_site(size: int) -> None:
    config = SiteConfig(error_rate=0, size=size)
    assert all(len(distances(config, seed, 60)) >= 60 for seed in range(3))


def test_most_links_do_not_lead_to_targets() -> None:
    paths = [path for path, away in distances(CALM, 3, 600).items() if away <= 2]
    shallow = [path for path in paths if TARGET_MARK.encode() in answer(CALM, path).body]
    assert len(shallow) < 0.05 * len(paths)


def test_every_link_has_a_page() -> None:
    for seed in range(4):
        for path in list(distances(CALM, seed, 300))[:300]:
            assert answer(CALM, path).status == 200, path


def test_pages_of_one_kind_share_a_template_that_no_other_kind_has() -> None:
    plan, templates = site(CALM, 11), Templates()
    topic = f"/11/{plan.research}/{plan.topics[0]}"
    other = f"/11/{plan.research}/{plan.topics[1]}"

    def number(path: str) -> int:
        return templates.number(parse(answer(CALM, path).body.decode(), SELECTOR).elements)

    kinds = [
        f"/11/{plan.research}/",
        f"{topic}/",
        f"{topic}/{plan.data}/",
        f"{topic}/{plan.data}/a-1",
        "/11/about",
    ]
    numbers = [number(path) for path in kinds]
    assert numbers == [0, 1, 2, 3, 4]
    again = [f"{other}/", f"{other}/{plan.data}/", f"{other}/{plan.data}/b-7"]
    assert [number(path) for path in again] == [1, 2, 3]


def test_a_seed_decides_the_site() -> None:
    assert answer(CALM, "/5/").body == answer(CALM, "/5/").body
    assert len({answer(CALM, f"/{seed}/").body.replace(f"/{seed}/".encode(), b"") for seed in range(20)}) > 15


def test_errors_and_redirects_have_the_configured_rate_and_a_retry_may_succeed() -> None:
    config = SiteConfig(error_rate=0.3, redirect_rate=0.2)
    paths = [f"/{seed}/about" for seed in range(2000)]
    failed = [path for path in paths if answer(config, path).status == 500]
    assert 0.25 < len(failed) / len(paths) < 0.35
    assert 0.2 < sum(answer(config, path, 1).status == 500 for path in failed) / len(failed) < 0.4
    hrefs = [link for seed in range(200) for link in links(config, f"/{seed}/")]
    assert any("/go/" in link for link in hrefs)
    via = next(link for link in hrefs if "/go/" in link)
    assert answer(SiteConfig(error_rate=0), via).location == via.replace("/go/", "/", 1)


def test_the_calendar_is_endless_and_optional() -> None:
    seed = next(seed for seed in range(50) if "events" in site(CALM, seed).sections.values())
    word = next(word for word, kind in site(CALM, seed).sections.items() if kind == "events")
    path = f"/{seed}/{word}/"
    seen = set()
    for _ in range(50):
        body = answer(CALM, path).body.decode()
        path = re.findall(r'href="([^"]+)">next month', body)[0]
        seen.add(path)
    assert len(seen) == 50
    quiet = SiteConfig(traps=False)
    assert all("events" not in site(quiet, seed).sections.values() for seed in range(50))


def test_latency_is_spread_around_its_median() -> None:
    config = SiteConfig(latency=0.1, latency_spread=0.5)
    waits = sorted(latency(config, f"/1/{n}") for n in range(999))
    assert 0.09 < waits[499] < 0.11
    assert waits[0] < 0.05
    assert waits[-1] > 0.2
    assert latency(SiteConfig(), "/1/") == 0


def get(url: str, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)
    connection.request(method, path, headers=headers)
    response = connection.getresponse()
    data = response.read()
    connection.close()
    return response.status, data


def test_the_server_sends_the_pages() -> None:
    config = SiteConfig(error_rate=0.5)
    url = site_server(config).url
    assert site_server(config).url == url
    for path in ("/5/", "/6/about", "/robots.txt", "/nonsense", "/5/nonsense"):
        made = answer(config, path)
        assert get(url, path) == (made.status, made.body)
    assert get(url, "/5/", "HEAD") == (200, b"")
    assert get(url, "/5/", "POST")[0] == 405
    failing = next(f"/{n}/about" for n in range(99) if answer(config, f"/{n}/about").status == 500)
    for attempt in range(5):
        assert (
            get(url, failing, **{"X-Retry-Attempt": str(attempt)})[0]
            == answer(config, failing, attempt).status
        )


def test_a_server_that_has_died_is_replaced() -> None:
    config = SiteConfig(size=7)
    first = site_server(config)
    os.kill(first.process.pid, signal.SIGKILL)
    first.process.wait()
    second = site_server(config)
    assert second.process.pid != first.process.pid
    assert get(second.url, "/1/")[0] == 200
    first.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, None])
def test_the_server_ends_with_the_process_that_started_it(how: signal.Signals | None) -> None:
    code = (
        "import sys\nfrom flatout.workloads.site.server import site_server\n"
        "from flatout.workloads.site.pages import SiteConfig\n"
        "print(site_server(SiteConfig()).process.pid, flush=True)\nsys.stdin.read()"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdin is not None
    pid = int(parent.stdout.readline())
    if how is None:
        parent.stdin.close()
    else:
        parent.send_signal(how)
    parent.wait()
    deadline = time.monotonic() + 10
    while _is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _is_alive(pid)
    parent.stdin.close()
    parent.stdout.close()


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"dept": 4}', "takes no 'dept'; did you mean 'depth'"),
        ('{"depth": 99}', "depth is 99; it must be a whole number from 3 to 8"),
        ('{"depth": "deep"}', "depth is 'deep'"),
        ('{"depth": 3.5}', "depth is 3.5; it must be a whole number"),
        ('{"traps": 1}', "traps is 1; it must be true or false"),
        ('{"error_rate": NaN}', "error_rate is nan"),
        ("[1]", "is a list"),
        ('{"depth": ', "not JSON"),
    ],
)
def test_a_malformed_site_config_is_refused_by_name(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "my-site.json"
    path.write_text(text)
    with pytest.raises(FlatoutError) as caught:
        read_site(str(path))
    assert str(caught.value).startswith(f"site config {path}")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(FlatoutError, match="No such file"):
        read_site(str(tmp_path / "none.json"))


def test_a_config_survives_json() -> None:
    import json

    config = SiteConfig(latency=0.5, depth=5, traps=False)
    assert read_site(json.loads(config.to_json())) == config
    server = SiteServer(config)
    server.close()
    server.close()


@pytest.mark.parametrize(
    ("selector", "html", "matches"),
    [
        (SELECTOR, '<i ITEMTYPE="https://schema.org/Dataset">', True),
        (SELECTOR, '<i itemtype="https://schema.org/&#68;ataset">', True),
        (SELECTOR, '<i itemtype="https://schema.org/Person">', False),
        ("table.values, form[action]", "<form action=x>", True),
        ("p:not([hidden])", "<p>", True),
        ("a[title='[x']", '<a title="[x">', True),
        ("h1", "", False),
    ],
)
def test_targets_are_what_the_selector_matches(selector: str, html: str, matches: bool) -> None:
    assert parse(html, selector).is_target == matches


def test_broken_html_is_parsed() -> None:
    for html in (
        "",
        "<",
        "\x00\xff",
        "<a href>",
        "<frameset><frame></frameset>",
        "<a href='x'><a href=y>" * 2000,
    ):
        page = parse(html, "p")
        assert len(page.anchors) <= 500
    page = parse("<title>A <b>b</title><nav><a href=1>\n n </a></nav><a href=2>m</a>", "p")
    assert list(page.anchors) == [
        ("1", "n", True),
        ("2", "m", False),
    ]
