"""Tests marked `card` run in a child process: a process in which the simulated card was installed has it for good.

There is one child for each pytest process. It runs one test at a time with a pytest of its own, and is replaced if it dies.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
IN_CHILD = "SIMCARD_TESTS"
SECONDS = 280
"""for one test and, at first, the build of the card"""

_child: subprocess.Popen[bytes] | None = None


def run_in_child(item: pytest.Item) -> None:
    """Runs a test in the child and reports what came out as if it had run here."""
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    code, output = _ask(item.nodeid)
    for when in ("setup", "call", "teardown"):
        failed = when == "call" and code != 0
        report = pytest.TestReport(
            nodeid=item.nodeid,
            location=item.location,
            keywords=dict.fromkeys(item.keywords, 1),
            outcome="failed" if failed else "passed",
            longrepr=output if failed else None,
            when=when,  # type: ignore[arg-type]
        )
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)


def _ask(nodeid: str) -> tuple[int, str]:
    global _child
    if _child is None or _child.poll() is not None:
        _child = _start()
    assert _child.stdin
    assert _child.stdout
    _child.stdin.write(json.dumps(nodeid).encode() + b"\n")
    _child.stdin.flush()
    ready, _, _ = select.select([_child.stdout], [], [], SECONDS)
    line = _child.stdout.readline() if ready else b""
    if line:
        code, output = json.loads(line)
        return code, output
    _child.kill()
    _child.wait()
    how = "did not end" if not ready else f"ended the process with code {_child.returncode}"
    _child = None
    return 1, f"the test {how}"


def _start() -> subprocess.Popen[bytes]:
    environment = os.environ | {IN_CHILD: "1", "PYTHONPATH": str(ROOT)}
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.card_process"],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    atexit.register(child.kill)
    return child


def _serve() -> None:
    """The child: a node id on each line in, the exit code and the output of its test on each line out."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        for line in sys.stdin:
            answers.write(json.dumps(_run(json.loads(line))) + "\n")
            answers.flush()


def _run(nodeid: str) -> tuple[int, str]:
    output = io.StringIO()
    arguments: list[Any] = ["-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", "-q", nodeid]
    with contextlib.redirect_stdout(output):
        code = pytest.main(arguments)
    return int(code), output.getvalue()


if __name__ == "__main__":
    _serve()
