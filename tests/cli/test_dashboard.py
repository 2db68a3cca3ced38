"""`flatout dashboard` as a real process: in a real browser with a real run, and attacked."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By

from tests.cli.test_monitor import training, wait_until
from tests.command import command, flatout
from tests.runlog.lane_examples import CONFIG, SUMMARY, write_killed_run, write_run
from tests.views.test_browser import browser, console

__all__ = ["browser"]
EVIL = "<img src=x onerror=alert(1)><script>alert(1)</script>"


@dataclass
class Server:
    """A dashboard that runs."""

    process: subprocess.Popen[str]
    url: str
    cookie: str = ""

    @property
    def base(self) -> str:
        return self.url.partition("?")[0]

    @property
    def port(self) -> int:
        return int(self.base.rstrip("/").rpartition(":")[2])

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def ask(
        self, path: str, headers: dict[str, str] | None = None, body: str | None = None
    ) -> tuple[int, str, dict[str, str]]:
        """Status, text and headers of an answer, with the session's cookie unless `headers` say otherwise."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=200)) as connection:
            return self._ask(connection, path, headers, body)

    def _ask(
        self,
        connection: http.client.HTTPConnection,
        path: str,
        headers: dict[str, str] | None,
        body: str | None,
    ) -> tuple[int, str, dict[str, str]]:
        sent = {"Host": self.host, "Cookie": self.cookie} | (headers or {})
        connection.putrequest("GET" if body is None else "POST", path, skip_host=True)
        for name, value in sent.items():
            connection.putheader(name, value)
        if body is not None:
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body.encode() if body is not None else None)
        answer = connection.getresponse()
        text = answer.read().decode()
        return answer.status, text, {name.lower(): value for name, value in answer.getheaders()}

    def act(self, verb: str, run: str, **headers: str) -> tuple[int, str]:
        sent = {"Origin": f"http://{self.host}"} | headers
        return self.ask(f"/api/{verb}", sent, json.dumps({"run": run}))[:2]

    def status(self, run: str) -> str:
        rows = json.loads(self.ask("/api/runs")[1])["rows"]
        return str(next((row["status"] for row in rows if row["name"] == run), ""))


@contextmanager
def serving(cwd: Path, *argv: str) -> Iterator[Server]:
    words = command("dashboard", "--no-browser", "--port", "0", *argv)
    with subprocess.Popen(words, cwd=cwd, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            server = Server(process, process.stdout.readline().strip())
            assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{40,}", server.url)
            token = server.url.partition("?")[2]
            cookie = server.ask(f"/?{token}")[2]["set-cookie"]
            assert "HttpOnly" in cookie
            assert "SameSite=strict" in cookie
            server.cookie = cookie.partition(";")[0]
            yield server
        finally:
            process.kill()


def seconds(of: Callable[[], Any]) -> float:
    began = time.perf_counter()
    of()
    return time.perf_counter() - began


def shown(browser: webdriver.Chrome, selector: str) -> str:
    """The text of the first such element; one call, because the page may replace elements at any time."""
    script = "return document.querySelector(arguments[0])?.innerText ?? ''"
    return str(browser.execute_script(script, selector))


def test_a_live_run_in_a_browser_is_stopped_and_resumed(browser: webdriver.Chrome, tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "old", gpu=True)
    write_killed_run(tmp_path / "runs" / "other")
    write_run(tmp_path / "runs" / "swept" / "trial-0000")
    (tmp_path / "runs" / "swept" / "sweep.html").touch()
    with training(tmp_path, "live") as process, serving(tmp_path) as server:
        browser.get(server.url)

        text = partial(shown, browser)
        wait_until(lambda: "live" in text("#runs tbody") and text("#live") == "live")
        assert "token" not in browser.current_url
        assert browser.get_cookies()[0]["httpOnly"]
        wait_until(lambda: "4 runs, 1 running" in text("#counts"))
        steps = "#runs tbody tr:first-child .c-env_steps"
        before = text(steps)
        wait_until(lambda: text(steps) != before)
        wait_until(lambda: len(browser.find_elements(By.CSS_SELECTOR, "#overlay path")) == 3)
        path = "return [...document.querySelectorAll('#overlay path')].map((p) => p.getAttribute('d')).join()"
        drawn = browser.execute_script(path)
        wait_until(lambda: browser.execute_script(path) != drawn)
        browser.find_element(By.ID, "filter").send_keys("cartpole old")
        wait_until(lambda: len(browser.find_elements(By.CSS_SELECTOR, "#runs tbody tr")) == 1)
        browser.find_element(By.ID, "filter").clear()
        browser.find_element(By.ID, "grouped").click()
        wait_until(lambda: len(browser.find_elements(By.CSS_SELECTOR, "#overlay path.band")) == 1)

        browser.get(server.base + "run/live")
        wait_until(lambda: text("#verdict").startswith("Still running"))
        verdict = text("#verdict")
        wait_until(lambda: text("#verdict") != verdict)
        browser.find_element(By.ID, "stop").click()
        assert process.wait(200) == 143
        wait_until(lambda: text("#status") == "stopped" and text("#live") == "live")
        done = json.loads((tmp_path / "runs" / "live" / "summary.json").read_text())["env_steps"]
        browser.find_element(By.ID, "resume").click()
        wait_until(lambda: text("#status") == "running")
        wait_until(lambda: server.status("live") == "running")
        assert server.act("stop", "live")[0] == 200
        wait_until(lambda: server.status("live") == "stopped")
        again = json.loads((tmp_path / "runs" / "live" / "summary.json").read_text())["env_steps"]
        assert again > done
        assert console(browser) == []
        browser.get("about:blank")


def test_names_and_texts_of_a_run_are_shown_and_not_run(browser: webdriver.Chrome, tmp_path: Path) -> None:
    name = EVIL.replace("/", "∕")
    run = write_run(tmp_path / "runs" / name, config=CONFIG | {"env": EVIL, "notes": EVIL, EVIL: EVIL})
    executor = {"kind": EVIL, "reason": EVIL, "collectors": 1, "workers": 1}
    texts = {"env": EVIL, "status": EVIL, "device": EVIL, "error": EVIL, "executor": executor}
    (run / "summary.json").write_text(json.dumps(SUMMARY | texts))
    (run / "faults.log").write_text(EVIL)
    (run / "system.json").write_text(json.dumps({"cpu": EVIL, EVIL: EVIL}))
    metrics = (run / "metrics.csv").read_text()
    (run / "metrics.csv").write_text(metrics.replace("\n", f",{EVIL}\n", 1))
    with (run / "spans.jsonl").open("a") as file:
        file.write(json.dumps({"lane": EVIL, "phase": EVIL, "start": 0.0, "end": 1.0}) + "\n")
    (tmp_path / "runs" / "swept").mkdir()
    (tmp_path / "runs" / "swept" / "sweep.html").write_text(f"<p id=x>hello</p>{EVIL}")
    browser.get("about:blank")
    console(browser)  # what other tests have left there
    with serving(tmp_path) as server:
        browser.get(server.url)
        wait_until(lambda: len(browser.find_elements(By.CSS_SELECTOR, "#runs tbody tr")) == 1)
        top = "return document.querySelector('#runs tbody').getBoundingClientRect().top"
        before = browser.execute_script(top)
        wait_until(lambda: "cores" in shown(browser, "#gauges"))
        wait_until(lambda: bool(browser.find_elements(By.CSS_SELECTOR, "#overlay path")))
        assert browser.execute_script(top) == before, "what comes later moves no link away from the mouse"
        assert name in shown(browser, ".c-name")
        browser.find_element(By.CSS_SELECTOR, ".c-name a").click()
        wait_until(lambda: name in shown(browser, "h1"))
        assert EVIL in shown(browser, "#missing") + shown(browser, "#figures")
        wait_until(lambda: shown(browser, "#live") == "live")
        # The page is brought up to date, and its parts replaced.
        (run / "summary.json").write_text(json.dumps(SUMMARY | texts | {"env_steps": 51_234}))
        wait_until(lambda: "51,234" in shown(browser, "#figures") + shown(browser, "#verdict"))
        assert not browser.find_elements(By.CSS_SELECTOR, "img, body script:not([src]):not([type])")
        assert [line for line in console(browser) if server.base in line] == []  # others may come late
        browser.get(server.base + "sweep/swept")
        browser.switch_to.frame(browser.find_element(By.TAG_NAME, "iframe"))
        assert browser.find_element(By.ID, "x").text == "hello"
        browser.switch_to.default_content()
        wait_until(lambda: shown(browser, "#live") == "live")
        (tmp_path / "runs" / "swept" / "sweep.html").write_text(f"<p id=x>again</p>{EVIL}")
        os.utime(tmp_path / "runs" / "swept" / "sweep.html", (2e9, 2e9))
        read = "return document.querySelector('iframe').contentDocument.querySelector('#x')?.innerText"
        wait_until(lambda: browser.execute_script(read) == "again")
        # An alert would have raised in any of the calls above.
        policy = server.ask("/sweep-page/swept")[2]["content-security-policy"]
        assert policy.startswith("sandbox allow-same-origin; default-src 'none'")


def test_what_does_not_come_from_its_own_page_is_refused(tmp_path: Path) -> None:
    write_killed_run(tmp_path / "runs" / "a")
    (tmp_path / "secret").write_text("hidden words")
    (tmp_path / "runs" / "out").symlink_to(tmp_path)
    linked = write_run(tmp_path / "runs" / "linked")
    (linked / "faults.log").symlink_to(tmp_path / "secret")
    with serving(tmp_path) as server:
        assert server.ask("/api/runs")[0] == 200
        assert [row["name"] for row in json.loads(server.ask("/api/runs")[1])["rows"]] == ["a"]
        token = server.url.partition("token=")[2]
        for path in ("/", "/api/runs", "/run/a", "/events", "/assets/page.css"):
            for headers in (
                {"Cookie": ""},
                {"Cookie": "", "Referer": server.url},
                {"Cookie": f"token={token}"},
            ):
                assert server.ask(path, headers)[0] == 401, (path, headers)
        assert server.ask("/?token=wrong", {"Cookie": ""})[0] == 401
        for host in ("evil.example", f"evil.example:{server.port}", "", "127.0.0.1.evil.example", "[::2]"):
            assert server.ask("/api/runs", {"Host": host})[0] == 421, host
        # Another port is what an SSH tunnel looks like.
        assert server.ask("/api/runs", {"Host": "localhost:9999"})[0] == 200
        for origin in ("http://evil.example", "null", f"https://{server.host}", "http://127.0.0.1:1"):
            assert server.ask("/api/runs", {"Origin": origin})[0] == 403, origin
            assert server.act("resume", "a", Origin=origin)[0] == 403
        assert server.ask("/api/resume", {}, '{"run": "a"}')[0] == 403  # without an origin
        assert server.ask("/api/runs", {"Sec-Fetch-Site": "cross-site"})[0] == 403
        for path in (
            *(
                "/run/../secret",
                "/run/..%2fsecret",
                "/run/%2e%2e/secret",
                "/run/%252e%252e%252fsecret",
                "/api/run/..%2fsecret",
                "/run/..%5csecret",
                "/recording/../secret",
                "/run//etc/passwd",
            ),
            *(
                "/assets/..%2f..%2fpyproject.toml",
                "/sweep-page/%2e%2e",
                "/run/out",
                "/run/linked",
                "/run/a%00",
            ),
        ):
            status, text, _ = server.ask(path)
            assert status == 404, path
            assert "hidden" not in text
        assert server.act("stop", "../secret")[0] == 404
        assert server.act("delete", "a")[0] == 404
        assert server.act("stop", "a") == (409, "flatout: this run is not running\n")
        assert server.act("resume", "a")[0] == 409  # it has no checkpoint
        assert server.ask("/api/stop", {"Origin": f"http://{server.host}"}, "x" * 100_000)[0] == 413
        headers = server.ask("/")[2]
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe-inline" not in headers["content-security-policy"]
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["x-content-type-options"] == "nosniff"
    with serving(tmp_path, "--read-only") as server:
        assert server.act("stop", "a")[0] == 403
        assert "resume" not in server.ask("/run/a")[1].partition("<main>")[0]


def test_a_lock_file_that_names_another_process_stops_nothing(tmp_path: Path) -> None:
    run = write_killed_run(tmp_path / "runs" / "a")
    with subprocess.Popen(["sleep", "100"]) as innocent, serving(tmp_path) as server:
        script = f'import fcntl, time; f = open({str(run / ".lock")!r}, \'w\'); fcntl.flock(f, fcntl.LOCK_EX); f.write(\'{{"pid": {innocent.pid}, "host": "{os.uname().nodename}"}}\'); f.flush(); print(1, flush=True); time.sleep(100)'
        with subprocess.Popen(["python3", "-c", script], stdout=subprocess.PIPE) as holder:
            assert holder.stdout is not None
            holder.stdout.readline()
            status, text = server.act("stop", "a")
            holder.kill()
        assert status == 409
        assert "not the one" in text
        assert innocent.poll() is None
        innocent.kill()


def test_many_runs_long_files_and_idle_clients(tmp_path: Path) -> None:
    first = write_run(tmp_path / "runs" / "run-0")
    header, row = (first / "metrics.csv").read_text().splitlines()[:2]
    cells = row.split(",")
    (first / "metrics.csv").write_text(
        "\n".join([header, *(",".join([str(i), *cells[1:]]) for i in range(1, 100_001))]) + "\n"
    )
    for nth in range(1, 200):
        shutil.copytree(first, tmp_path / "runs" / f"run-{nth}", copy_function=os.link)
    huge = write_run(tmp_path / "runs" / "huge")
    names, _, lines = (huge / "metrics.csv").read_bytes().partition(b"\n")
    with (huge / "metrics.csv").open("wb") as file:
        file.write(names + b"\n")
        block = lines * (1 + (1 << 20) // len(lines))
        while file.tell() < 1 << 30:
            file.write(block)
    with serving(tmp_path) as server, ExitStack() as clients:
        assert server.ask("/api/jobs")[0] == 200
        listed = seconds(lambda: server.ask("/api/runs"))
        shown = seconds(lambda: server.ask("/run/run-7"))
        assert server.ask("/run/huge")[0] == 200
        for _ in range(500):
            client = clients.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            client.sendall(
                f"GET /events HTTP/1.1\r\nHost: {server.host}\r\nCookie: {server.cookie}\r\n\r\n".encode()
            )
        for _ in range(100):  # clients that never end their request
            client = clients.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            client.sendall(b"GET / HTTP/1.1\r\nHost: ")
        for _ in range(100):  # clients that never read the answer
            client = clients.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            client.sendall(
                f"GET /run/run-7 HTTP/1.1\r\nHost: {server.host}\r\nCookie: {server.cookie}\r\n\r\n".encode()
            )
        assert server.ask("/api/runs")[0] == 200
        again = seconds(lambda: server.ask("/run/run-8"))
        memory = psutil.Process(server.process.pid).memory_info().rss / 1e6
        print(f"list {listed:.2f} s, page {shown:.2f} s, with 700 clients {again:.2f} s, {memory:.0f} MB")
        assert memory < 300


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--port", "99999"], "--port is 99999; it must be from 0 to 65535"),
        (["--host", "203.0.113.7"], "cannot listen on 203.0.113.7"),
        (["runs/a"], "runs/a is a run; name the folder that contains it"),
        (["--reed-only"], "--read-only"),
    ],
)
def test_bad_input_is_one_line(argv: list[str], words: str, tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a")
    done = flatout("dashboard", "--no-browser", *argv, cwd=tmp_path)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_curves_of_one_point_and_pages_that_do_not_exist_are_shown(
    browser: webdriver.Chrome, tmp_path: Path
) -> None:
    for name, n_lines in (("long", 100), ("one", 2)):
        run = write_run(tmp_path / "runs" / name)
        lines = (run / "metrics.csv").read_text().splitlines(keepends=True)
        (run / "metrics.csv").write_text("".join(lines[:n_lines]))
    with serving(tmp_path) as server:
        browser.get(server.url)
        wait_until(lambda: len(browser.find_elements(By.CSS_SELECTOR, "#overlay circle")) == 1)
        assert len(browser.find_elements(By.CSS_SELECTOR, "#overlay path")) == 1
        assert "card busy" not in shown(browser, "#runs thead")
        assert "age ↑" in shown(browser, "#runs thead")  # the newest run first
        browser.get(server.base + "run/gone")
        assert "There is no run gone here." in shown(browser, "main")
        browser.find_element(By.LINK_TEXT, "All runs").click()
        wait_until(lambda: "2 runs, 0 running" in shown(browser, "#counts"))
        browser.get("about:blank")
