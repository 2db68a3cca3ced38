"""One process trains in a folder; real processes, forks and kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from flatout.errors import FlatoutError
from flatout.runlog.folder import RunFolder, is_locked
from flatout.runlog.records import run_status

HOLDER = """
import os, subprocess, sys, time
from pathlib import Path
from flatout.runlog.folder import RunFolder
RunFolder.create(Path(sys.argv[1]), "a").config.write_text("{}")
child = os.fork() or time.sleep(60)
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child, other.pid, flush=True)
time.sleep(60)
"""


def test_the_lock_names_its_holder_and_ends_with_it_even_if_its_children_live(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        children = [int(word) for word in process.stdout.readline().split()]
        try:
            folder = RunFolder.open(tmp_path / "a")
            with pytest.raises(FlatoutError) as caught:
                folder.claim()
            assert str(caught.value) == (
                f"run 'a' is training in process {process.pid}; stop it first, or use another --run-name"
            )
            with pytest.raises(FlatoutError, match=f"process {process.pid}"):
                RunFolder.create(tmp_path, "a", overwrite=True)
            assert run_status(tmp_path / "a")[0] == "running"
            process.kill()
            process.wait()
            assert all(os.path.exists(f"/proc/{child}") for child in children)
            assert run_status(tmp_path / "a")[0] == "unknown"
            folder.claim()
            assert is_locked(tmp_path / "a")
        finally:
            for child in children:
                os.kill(child, signal.SIGKILL)


def test_readers_that_look_at_the_lock_do_not_keep_a_run_from_starting(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, "a").lock.release()
    ended = threading.Event()

    def look() -> None:
        while not ended.is_set():
            is_locked(tmp_path / "a")

    readers = [threading.Thread(target=look) for _ in range(3)]
    for reader in readers:
        reader.start()
    try:
        for _ in range(20):
            folder = RunFolder(tmp_path / "a")
            folder.claim()
            folder.lock.release()
    finally:
        ended.set()
        for reader in readers:
            reader.join()


def test_a_run_of_another_host_is_unknown_not_killed(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, "a").lock.release()
    about = {"pid": 2**22 + 1, "updated": time.time(), "env_steps": 7}
    (tmp_path / "a" / "progress.json").write_text(json.dumps(about))
    assert run_status(tmp_path / "a")[0] == "killed"
    for lock in (tmp_path / "a" / ".lock", None):  # a lock that is not seen here, and none
        if lock is None:
            (tmp_path / "a" / ".lock").unlink()
        (tmp_path / "a" / "progress.json").write_text(json.dumps(about | {"host": "elsewhere"}))
        status, record = run_status(tmp_path / "a")
        assert (status, record["env_steps"]) == ("unknown", 7)


def test_runs_of_the_same_second_are_numbered(tmp_path: Path) -> None:
    names: list[str] = []

    def create() -> None:
        names.append(RunFolder.create(tmp_path, "x", numbered=True).path.name)

    threads = [threading.Thread(target=create) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(names) == sorted(["x", *(f"x-{n}" for n in range(2, 9))])
    assert RunFolder.create(tmp_path, "x", overwrite=True, numbered=True).path.name == "x-9"
