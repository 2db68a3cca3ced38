"""The site server as a process: one for each kind of site, shared by all envs of this process, ended with it."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
from pathlib import Path

from flatout.errors import EnvError
from flatout.workloads.crawl.site.config import SiteConfig

ROOT = Path(__file__).parents[4]

_lock = threading.Lock()
_servers: dict[tuple[int, SiteConfig], SiteServer] = {}


class SiteServer:
    """A running server."""

    def __init__(self, config: SiteConfig) -> None:
        command = [sys.executable, "-m", "flatout.workloads.crawl.site.server", config.to_json()]
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,  # Ctrl-C is for the run, which still asks for pages while it stops
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        if not line.isdigit():
            self.close()
            raise EnvError(f"the local site server did not start: {' '.join(command[:3])}")
        self.url = f"http://127.0.0.1:{int(line)}"

    def close(self) -> None:
        """End the server; may be called twice."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        self.process.terminate()
        self.process.wait()


def site_server(config: SiteConfig) -> SiteServer:
    """The running server for such sites, started where there is none or it has died."""
    with _lock:
        key = os.getpid(), config
        server = _servers.get(key)
        if server is None or server.process.poll() is not None:
            server = _servers[key] = SiteServer(config)
        return server


@atexit.register
def close_all() -> None:
    """End the servers that this process has started."""
    with _lock:
        for (owner, _), server in list(_servers.items()):
            if owner == os.getpid():
                server.close()
        _servers.clear()
