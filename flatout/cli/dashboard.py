"""`flatout dashboard [DIR]`."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import tempfile
import threading
import webbrowser
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from platform import node
from time import monotonic, sleep
from typing import IO, TYPE_CHECKING

import psutil

from flatout.cli.jobs import rows
from flatout.cli.parser import Parser
from flatout.cli.runs import folder_of_runs
from flatout.errors import FlatoutError
from flatout.runlog.folder import LOCK_FILE, holder, is_locked
from flatout.runlog.records import run_status
from flatout.scale.jobs import Queue
from flatout.scale.processes import FLATOUT

if TYPE_CHECKING:
    from starlette.types import ASGIApp

PORT = 7733
RESUME_SECONDS = 60.0
"""Until a run that is resumed must have begun, or said why not."""


def dashboard(argv: Sequence[str]) -> int:
    """Serve a folder of runs to a browser until Ctrl-C; returns the exit code."""
    parser = Parser(
        "dashboard",
        "Show the runs of a folder in a browser, live: a table, their curves, a page for each, and buttons that stop and "
        "resume them. Only who has the printed address gets in.",
    )
    parser.flag(
        "dir",
        "folder that contains the runs (runs)",
        nargs="?",
        type=Path,
        default=Path("runs"),
        metavar="DIR",
    )
    parser.flag("--port", f"port to listen on ({PORT}, or a free one)", type=int, metavar="N")
    parser.flag(
        "--host", "address to listen on (127.0.0.1: only this machine)", default="127.0.0.1", metavar="H"
    )
    parser.flag("--no-browser", "do not open a browser")
    parser.flag("--read-only", "no buttons: nothing can be stopped or resumed")
    args = parser.parse(argv)
    if args.port is not None and not 0 <= args.port <= 65535:
        raise FlatoutError(f"--port is {args.port}; it must be from 0 to 65535")
    if args.dir.exists():
        folder_of_runs(args.dir)
    try:
        from flatout.views.dashboard import Actions, Dashboard, Guard
    except ImportError as error:
        raise FlatoutError(f"the dashboard needs {error.name}: pip install 'flatout[dashboard]'") from error
    bound = _bind(args.host, args.port)
    port, token = bound.getsockname()[1], secrets.token_urlsafe(32)
    resumed = _Resumed()
    actions = Actions(
        stop=stop,
        resume=resumed.resume,
        jobs=lambda: rows(Queue(args.dir).jobs()),
        is_read_only=args.read_only,
    )
    names = (node().lower(), socket.getfqdn().lower()) if args.host in ("0.0.0.0", "::") else ()
    _say_where(args.host, port, token, args.read_only)
    shown = f"http://127.0.0.1:{port}/?token={token}"
    if not args.no_browser and "SSH_CONNECTION" not in os.environ and args.host in ("127.0.0.1", "localhost"):
        threading.Thread(target=webbrowser.open, args=(shown,), daemon=True).start()
    _serve(lambda: Guard(Dashboard(args.dir, actions).app(), token, args.host, names), bound)
    return 0


def _bind(host: str, port: int | None) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    error: OSError | None = None
    for attempt in [PORT, 0] if port is None else [port]:
        bound = socket.socket(family)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((host, attempt))
            bound.listen(256)  # from now on a browser waits instead of being refused
            return bound
        except (OSError, UnicodeError) as failed:
            bound.close()
            error = failed if isinstance(failed, OSError) else OSError(str(failed))
    raise FlatoutError(
        f"cannot listen on {host}, port {port or PORT}: {error.strerror if error else ''}; try another --port"
    )


def _say_where(host: str, port: int, token: str, is_read_only: bool) -> None:
    is_local = host in ("127.0.0.1", "localhost", "::1")
    name = "127.0.0.1" if is_local else socket.gethostname() if host in ("0.0.0.0", "::") else host
    print(f"http://{f'[{name}]' if ':' in name else name}:{port}/?token={token}", flush=True)
    if is_local and "SSH_CONNECTION" in os.environ:
        print(f"from your own machine: ssh -L {port}:127.0.0.1:{port} {node()}, then open that address there")
    if not is_local:
        may = "see your runs" if is_read_only else "see, stop and resume your runs"
        print(
            f"note: with --host {host} other machines reach this port, and whoever learns the address can {may}; the "
            "traffic is not encrypted. An SSH tunnel to 127.0.0.1 is safer."
        )
    print("Ctrl-C ends the dashboard, not the runs.", flush=True)


def _serve(make: Callable[[], ASGIApp], bound: socket.socket) -> None:
    import asyncio

    import uvicorn

    _allow_many_files()

    async def serve() -> None:
        config = uvicorn.Config(
            make(),
            loop="asyncio",
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_graceful_shutdown=1,
            backlog=256,
        )
        await uvicorn.Server(config).serve(sockets=[bound])

    with suppress(KeyboardInterrupt):
        asyncio.run(serve())


def _allow_many_files() -> None:
    """A page that is open is a socket; the usual limit is 1,024 files."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY and (hard == resource.RLIM_INFINITY or soft < min(hard, 8192)):
            most = 8192 if hard == resource.RLIM_INFINITY else min(hard, 8192)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def stop(run: Path) -> str:
    """Ask the process that trains in a folder to save and stop."""
    who = holder(run)
    pid = who.get("pid")
    if not is_locked(run):
        raise FlatoutError("this run is not running")
    if who.get("host") != node() or not isinstance(pid, int):
        raise FlatoutError(f"this run is running on {who.get('host')}; stop it there")
    # The lock file may say anything: the process must be one that holds this very file.
    if not _has_open(pid, run / LOCK_FILE):
        raise FlatoutError("the process that trains is not the one that the lock file names")
    os.kill(pid, signal.SIGTERM)
    return "stopping: it saves a checkpoint first"


def _has_open(pid: int, file: Path) -> bool:
    try:
        return any(Path(it.path) == file.resolve() for it in psutil.Process(pid).open_files())
    except (psutil.Error, ValueError, OverflowError):
        return False


class _Resumed:
    """Runs that the dashboard has resumed; they outlive it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._processes: list[subprocess.Popen[bytes]] = []

    def resume(self, run: Path) -> str:
        """Start `flatout resume` in a process of its own; raises if that fails at once."""
        with self._lock:
            self._processes = [it for it in self._processes if it.poll() is None]
            if run_status(run)[0] == "running":
                raise FlatoutError("this run is running")
            with tempfile.TemporaryFile() as errors:
                process = subprocess.Popen(
                    [*FLATOUT, "resume", str(run), "--quiet"],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    start_new_session=True,
                )
                self._processes.append(process)
                return _begun(run, process, errors)


def _begun(run: Path, process: subprocess.Popen[bytes], errors: IO[bytes]) -> str:
    """Wait until the run goes on; raises with its own words if it does not."""
    until = monotonic() + RESUME_SECONDS
    while process.poll() is None and monotonic() < until:
        if run_status(run)[1].get("pid") == process.pid:
            return "resumed"
        sleep(0.1)
    if process.poll():
        errors.seek(0)
        lines = errors.read().decode(errors="replace").strip().splitlines()
        raise FlatoutError(lines[-1].removeprefix("flatout: ") if lines else "it could not be resumed")
    return "resumed" if process.returncode == 0 else "it is starting"
