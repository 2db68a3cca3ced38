"""The dashboard: a small web server over a folder of runs, for a browser on this machine or behind an SSH tunnel.

Every request passes `Guard`: the host that it names, its origin and the token decide whether it is answered at all. Names of
runs are looked up among the runs that were found, so no request names a path. Reading happens in threads, a few at a time.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from string import Template
from typing import Any
from urllib.parse import parse_qsl, quote

import psutil
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flatout.errors import FlatoutError
from flatout.runlog.meters import GpuWatch
from flatout.runlog.records import read_run
from flatout.views.jobs import JobRow
from flatout.views.report import asset, drawn, page_of_run, page_parts
from flatout.views.runs import RunIndex, curve_of, newest_recording

CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; media-src 'self'; "
    "connect-src 'self'; frame-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SWEEP_CSP = "sandbox allow-same-origin; default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'self'"
"""Of a sweep's own page, which has its styles inside: nothing in it runs or is loaded. The page around it reads its height."""
HEADERS = {
    "content-security-policy": CSP,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
ASSETS = {"page.css": "text/css", "dashboard.css": "text/css"}
ASSETS |= dict.fromkeys(
    ("charts.js", "page.js", "dashboard.js", "run.js", "jobs.js", "sweep.js"), "text/javascript"
)
LOCAL = ("localhost", "127.0.0.1", "::1")
TICK_SECONDS = 1.0
MAX_STREAMS = 800
"""Pages that are kept up to date at a time."""
MAX_CURVES = 60
MAX_BODY = 4096
N_READERS = 2
"""Runs that are read at a time, whatever number of pages asks."""
MAX_PAGES = 16
"""Pages of runs that are kept, until the run writes more."""


@dataclass(frozen=True, kw_only=True)
class Actions:
    """What the dashboard's buttons do, and what it shows besides runs."""

    stop: Callable[[Path], str]
    resume: Callable[[Path], str]
    jobs: Callable[[], Sequence[JobRow]]
    is_read_only: bool = False


class Guard:
    """Refuses requests that do not come from a page of this server opened by somebody who has its token."""

    def __init__(self, app: ASGIApp, token: str, host: str, names: Collection[str] = ()) -> None:
        """`host`: the address that the server listens on. `names`: further names of this machine."""
        self._app, self._token, self._names = app, token, {*LOCAL, *names, host}
        self._any_address = host in ("0.0.0.0", "::")
        self.cookie = f"flatout-{_digest('name ' + token)[:8]}"
        self._session = _digest("session " + token)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        answer: ASGIApp = self._app
        if scope["type"] == "http":
            answer = self._refusal(scope) or self._app
        await answer(scope, receive, send_guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if len(headers.getlist("host")) != 1 or not self._is_ours(_hostname(host)):
            return _text("this server does not answer to that host name", 421)
        origin = headers.get("origin")
        is_reading = scope["method"] in ("GET", "HEAD")
        if (origin is not None or not is_reading) and origin != f"http://{host}":
            return _text("requests of other sites are refused", 403)
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and not _opens_page(headers):
            return _text("requests of other sites are refused", 403)
        tokens = [
            value for key, value in parse_qsl(scope["query_string"].decode("latin-1")) if key == "token"
        ]
        if tokens and is_reading:
            return self._welcome(scope) if _same(tokens[0], self._token) else _no_token()
        if _same(Request(scope).cookies.get(self.cookie, ""), self._session):
            return None
        return _no_token()

    def _is_ours(self, name: str) -> bool:
        return name in self._names or (self._any_address and _is_address(name))

    def _welcome(self, scope: Scope) -> Response:
        """Keep the session in a cookie and open the page again, without the token in its address.

        Not a redirect: after a click elsewhere, that would count as the other site's and come without the cookie.
        """
        path = quote(scope["path"]) if not scope["path"].startswith("//") else "/"
        icon = '<link rel="icon" href="data:,">'  # else the browser asks for one
        page = (
            f'<!doctype html><title>flatout</title>{icon}<meta http-equiv="refresh" content="0;url={path}">'
        )
        answer = HTMLResponse(page)
        answer.set_cookie(self.cookie, self._session, httponly=True, samesite="strict", path="/")
        return answer


def _opens_page(headers: Headers) -> bool:
    """Whether a person follows a link here, which shows no more than the page that asks for the token."""
    return headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"


def _hostname(host: str) -> str:
    """The name in a Host header, without its port, which differs behind an SSH tunnel."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _same(a: str, b: str) -> bool:
    return secrets.compare_digest(a.encode("utf-8", "replace"), b.encode())


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _text(text: str, status: int) -> Response:
    return Response(f"flatout: {text}\n", status, media_type="text/plain")


def _no_token() -> Response:
    text = "Open the address with <code>?token=…</code> that <code>flatout dashboard</code> printed in its terminal."
    return HTMLResponse(_shell("flatout", f"<main><p>{text}</p></main>"), 401)


class _NoSuchPage(FlatoutError):
    """A page of a run or sweep that does not exist."""


class Dashboard:
    """Answers the requests that the guard lets through."""

    def __init__(self, root: Path, actions: Actions) -> None:
        self._index, self._actions = RunIndex(root), actions
        self._reading = asyncio.Lock()
        self._readers = asyncio.Semaphore(N_READERS)
        self._pages: dict[tuple[str, str], tuple[object, Any]] = {}
        self._cards = GpuWatch()
        self._n_streams, self._tick = 0, asyncio.Event()
        self._watching: asyncio.Task[None] | None = None
        self._machine: dict[str, Any] = {}
        self._events: dict[int, tuple[int, str]] = {}

    def app(self) -> Starlette:
        """The routes."""
        get: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "/": self._front,
            "/jobs": self._jobs_page,
            "/api/jobs": self._jobs,
            "/api/runs": self._runs,
            "/api/curves": self._curves,
            "/api/run/{name:path}": self._run_data,
            "/run/{name:path}": self._run_page,
            "/recording/{name:path}": self._recording,
            "/sweep/{name:path}": self._sweep,
            "/sweep-page/{name:path}": self._sweep_page,
            "/assets/{name}": self._asset,
            "/events": self._stream,
        }
        routes = [Route(path, answer, methods=["GET"]) for path, answer in get.items()]
        routes.append(Route("/api/{verb}", self._act, methods=["POST"]))
        return Starlette(
            routes=routes,
            exception_handlers={_NoSuchPage: _not_found, FlatoutError: _failed, OSError: _failed},
        )

    async def _front(self, _: Request) -> Response:
        root = self._index.root.resolve()
        text = {"folder": escape(str(root)), "nav": _nav(self._actions.is_read_only)}
        return HTMLResponse(Template(asset("dashboard.html")).substitute(text))

    async def _asset(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in ASSETS:
            return _text("there is no such file", 404)
        return Response(asset(name), media_type=ASSETS[name])

    async def _runs(self, _: Request) -> Response:
        await self._refresh()
        rows = [asdict(row) for row in self._index.rows.values()]
        about = {"version": self._index.version, "sweeps": list(self._index.sweeps)}
        return JSONResponse({"rows": rows, **about})

    async def _curves(self, request: Request) -> Response:
        names = request.query_params.getlist("run")[:MAX_CURVES]
        found = {name: await self._read(name, "curve", curve_of) for name in names if await self._path(name)}
        return JSONResponse(found)

    async def _run_page(self, request: Request) -> Response:
        name = request.path_params["name"]
        if await self._path(name) is None:
            raise _NoSuchPage(f"There is no run {name} here.")
        return HTMLResponse(await self._read(name, "page", lambda path: self._page(name, path)))

    async def _run_data(self, request: Request) -> Response:
        name = request.path_params["name"]
        if await self._path(name) is None:
            return _text("there is no such run", 404)
        return JSONResponse(await self._read(name, "data", lambda path: _live_parts(name, path)))

    async def _recording(self, request: Request) -> Response:
        path = await self._path(request.path_params["name"])
        found = newest_recording(path) if path is not None else None
        return FileResponse(found) if found is not None else _text("there is no recording", 404)

    async def _sweep(self, request: Request) -> Response:
        name = await self._sweep_name(request)
        address = f"/sweep-page/{quote(name)}"
        frame = f'<iframe class="sweep" sandbox="allow-same-origin" src="{address}" title="sweep"></iframe>'
        frame += '<script src="/assets/sweep.js"></script>'
        return HTMLResponse(_shell(f"{name} · flatout", _nav(self._actions.is_read_only) + frame))

    async def _sweep_page(self, request: Request) -> Response:
        path = self._index.sweeps[await self._sweep_name(request)] / "sweep.html"
        return FileResponse(path, media_type="text/html", headers={"content-security-policy": SWEEP_CSP})

    async def _sweep_name(self, request: Request) -> str:
        await self._refresh()
        if (name := request.path_params["name"]) not in self._index.sweeps:
            raise _NoSuchPage(f"There is no sweep {name} here.")
        return str(name)

    async def _jobs_page(self, _: Request) -> Response:
        body = _nav(self._actions.is_read_only) + (
            '<main><section><h2>Jobs</h2><div class="wide"><table id="jobs"></table></div>'
            '<p class="none" id="empty" hidden>There are no jobs here yet: flatout jobs FILE.toml runs some.</p></section></main>'
            '<script src="/assets/charts.js"></script><script src="/assets/jobs.js"></script>'
        )
        return HTMLResponse(_shell("jobs · flatout", body))

    async def _jobs(self, _: Request) -> Response:
        rows = await asyncio.to_thread(self._actions.jobs)
        return JSONResponse([asdict(row) for row in rows])

    async def _act(self, request: Request) -> Response:
        """A button: stop or resume a run."""
        verbs = {"stop": self._actions.stop, "resume": self._actions.resume}
        if self._actions.is_read_only:
            return _text("this dashboard is read-only", 403)
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY:
                return _text("the request is too long", 413)
        try:
            name = json.loads(body)["run"]
        except (ValueError, TypeError, KeyError):
            return _text('the request must be {"run": NAME}', 400)
        path = await self._path(name) if isinstance(name, str) else None
        act = verbs.get(request.path_params["verb"])
        if path is None or act is None:
            return _text("there is no such run or action", 404)
        return JSONResponse({"done": await asyncio.to_thread(act, path)})

    async def _stream(self, request: Request) -> Response:
        if self._n_streams >= MAX_STREAMS:
            return _text("too many pages are open", 503)
        since = request.query_params.get("since", "")
        seen = int(since) if since.isdecimal() and len(since) < 10 else 0
        return StreamingResponse(self._follow(seen), media_type="text/event-stream")

    async def _follow(self, seen: int) -> AsyncIterator[str]:
        """Changes of the runs and the load of the machine, every second; a page that reads slowly skips some."""
        self._n_streams += 1
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch())
        yield "retry: 2000\n\n"
        try:
            while True:
                await self._tick.wait()
                seen, event = self._event(seen)
                yield event
        finally:
            self._n_streams -= 1

    async def _watch(self) -> None:
        """Read the folder again and again while a page is open."""
        loop = asyncio.get_running_loop()
        while self._n_streams:
            began = loop.time()
            await self._refresh()
            self._machine = await asyncio.to_thread(self._gauges)
            self._events.clear()
            self._tick.set()
            self._tick = asyncio.Event()
            await asyncio.sleep(max(TICK_SECONDS, 5 * (loop.time() - began)))

    def _event(self, since: int) -> tuple[int, str]:
        """The version now and what a page that has seen version `since` is sent; the same for all of them."""
        if since not in self._events:
            version = self._index.version
            rows, gone = self._index.changes(since)
            changed = {"rows": [asdict(row) for row in rows], "gone": gone}
            changed |= {"machine": self._machine, "sweeps": list(self._index.sweeps)}
            self._events[since] = version, f"data: {json.dumps(changed)}\n\n"
        return self._events[since]

    def _gauges(self) -> dict[str, Any]:
        memory = psutil.virtual_memory()
        cards = {name: asdict(sample) for name, sample in self._cards.newest().items()}
        used = 1 - memory.available / memory.total
        return {"cores": psutil.cpu_percent(None) / 100, "memory": used, "cards": cards}

    async def _refresh(self) -> None:
        async with self._reading:
            await asyncio.to_thread(self._index.read)

    async def _path(self, name: str) -> Path | None:
        """The folder of a run; one that is not known may be new."""
        if self._index.path(name) is None:
            await self._refresh()
        return self._index.path(name)

    async def _read(self, name: str, kind: str, read: Callable[[Path], Any]) -> Any:
        """What `read` makes of a run, kept until the run writes more."""
        path = self._index.path(name)
        if path is None:
            raise FlatoutError("there is no such run")
        async with self._readers:
            mark = await asyncio.to_thread(_mark, path)
            if (kept := self._pages.get((name, kind))) is None or kept[0] != mark:
                value = await asyncio.to_thread(read, path)
                most = MAX_PAGES if kind != "curve" else 20 * MAX_PAGES
                while sum(key[1] == kind for key in self._pages) >= most:
                    self._pages.pop(next(key for key in self._pages if key[1] == kind))
                self._pages[name, kind] = kept = mark, value
            return kept[1]

    def _page(self, name: str, path: Path) -> str:
        head = '<link rel="stylesheet" href="/assets/page.css"><link rel="stylesheet" href="/assets/dashboard.css">'
        scripts = "".join(f'<script src="/assets/{it}.js"></script>' for it in ("charts", "page", "run"))
        buttons = (
            ""
            if self._actions.is_read_only
            else '<button id="stop" hidden>stop</button><button id="resume" hidden>resume</button>'
        )
        nav = _nav(self._actions.is_read_only, f'<span id="acts" data-run="{escape(name)}">{buttons}</span>')
        recording = f'<div id="gauges"></div><div id="recording">{_recording_part(name, path)}</div>'
        return page_of_run(read_run(path), name, head=head, scripts=scripts, nav=nav, recording=recording)


def _live_parts(name: str, path: Path) -> dict[str, Any]:
    records = read_run(path)
    parts = page_parts(records) | {"recording": _recording_part(name, path)}
    return {"parts": parts, "data": drawn(records), "status": records.summary.get("status")}


def _recording_part(name: str, path: Path) -> str:
    if (found := newest_recording(path)) is None:
        return ""
    source = f"/recording/{quote(name)}?{found.stat().st_mtime_ns}"
    tag = f'<img src="{source}" alt="the agent at play">'
    if found.suffix == ".mp4":
        tag = f'<video src="{source}" autoplay loop muted playsinline></video>'
    return f"<section><h2>The agent at play</h2>{tag}</section>"


def _mark(path: Path) -> object:
    """What changes when a run writes; of files, that they have grown or were replaced."""
    found = []
    for name in ("metrics.csv", "spans.jsonl", "progress.json", "summary.json", "agent.gif", "agent.mp4"):
        try:
            about = (path / name).stat()
            found.append((name, about.st_mtime_ns, about.st_size))
        except OSError:
            continue
    return found


def _nav(is_read_only: bool, more: str = "") -> str:
    note = '<span class="soft">read-only</span>' if is_read_only else ""
    links = '<a class="brand" href="/">flatout</a><a href="/">runs</a><a href="/jobs">jobs</a>'
    return f'<nav>{links}{note}<span class="grow"></span>{more}<span id="live" class="soft"></span></nav>'


def _shell(title: str, body: str) -> str:
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title>"
        '<link rel="stylesheet" href="/assets/page.css"><link rel="stylesheet" href="/assets/dashboard.css">'
        f"</head><body>{body}</body></html>"
    )


async def _not_found(_: Request, error: Exception) -> Response:
    text = f'{escape(str(error))} <a href="/">All runs</a>'
    return HTMLResponse(_shell("flatout", f"{_nav(False)}<main><section><p>{text}</p></section></main>"), 404)


async def _failed(_: Request, error: Exception) -> Response:
    return _text(" ".join(str(error).split()), 404 if "no such" in str(error) else 409)
