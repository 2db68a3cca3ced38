"""Responses stored in a folder, so that a crawl can be repeated without the network.

One file per URL and attempt: a line of JSON (status and headers, or the fault), then the body. URLs of the start page's host are
stored without it, so that a local site may use another port later.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from flatout.errors import FlatoutError
from flatout.workloads.crawl.access import Fault
from flatout.workloads.crawl.client import Client, Response


class Folder:
    """The folder of a recording."""

    def __init__(self, path: Path, origin: str) -> None:
        self.path, self._origin = path, origin

    def file(self, url: str, attempt: int) -> Path:
        """The file of one response."""
        name = hashlib.sha256(f"{attempt} {url.removeprefix(self._origin)}".encode()).hexdigest()
        return self.path / name[:2] / name[2:34]


class Recorder:
    """Passes requests on and stores responses and faults."""

    def __init__(self, client: Client, folder: Folder) -> None:
        self._client, self._folder = client, folder
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FlatoutError(f"record folder {folder.path}: {error.strerror}") from error

    async def get(self, url: str, attempt: int, max_bytes: int) -> Response:
        """The response, stored."""
        try:
            response = await self._client.get(url, attempt, max_bytes)
        except Fault as fault:
            self._store(url, attempt, {"fault": fault.kind, "message": str(fault)}, b"")
            raise
        self._store(url, attempt, {"status": response.status, "headers": response.headers}, response.body)
        return response

    async def close(self) -> None:
        await self._client.close()

    def _store(self, url: str, attempt: int, head: dict[str, object], body: bytes) -> None:
        file = self._folder.file(url, attempt)
        file.parent.mkdir(exist_ok=True)
        part = file.with_name(f"{file.name}.{os.getpid()}.{id(self)}.part")
        part.write_bytes(json.dumps({"url": url, **head}).encode() + b"\n" + body)
        part.replace(file)


class Replayer:
    """Returns stored responses, and a fault for anything else; never uses the network."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder

    async def get(self, url: str, attempt: int, max_bytes: int) -> Response:
        file = self._folder.file(url, attempt)
        try:
            head, _, body = file.read_bytes().partition(b"\n")
            data = json.loads(head)
            if "fault" in data:
                raise Fault(data["fault"], data["message"])
            if len(body) > max_bytes:
                raise Fault("size", f"{len(body)} bytes, more than {max_bytes}")
            return Response(data["status"], data["headers"], body)
        except FileNotFoundError as error:
            raise Fault("connection", f"{url} is not in the recording {self._folder.path}") from error
        except (ValueError, KeyError) as error:
            raise FlatoutError(f"recording {file} is damaged: {error}; record the crawl again") from error

    async def close(self) -> None:
        """Nothing to close."""
