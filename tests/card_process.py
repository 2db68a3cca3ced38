"""Tests marked `card` run in a child process: a process in which the simulated card was installed has it for good.

There is one child for each pytest process. It runs the tests it is asked for, one at a time, with a pytest of its own,
and is replaced if it dies.
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
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

ROOT = Path(__file__).parents[1]
IN_CHILD = "SIMCARD_TESTS"
SECONDS = 280
"""for one test and, the first time, the build of the card"""

_child: subprocess.Popen[str] | None = None


def run_in_child(item: pytest.Item) -> None:
    """Runs a test in the child and reports what came out as if it had run here."""
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for phase in _ask(item.nodeid):
        report = pytest.TestReport(item.nodeid, item.location, dict.fromkeys(item.keywords, 1), **phase)
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)


def _ask(nodeid: str) -> list[dict[str, Any]]:
    """The reports of a test's phases."""
    global _child
    if _child is None or _child.poll() is not None:
        _child = _start()
    assert _child.stdin
    assert _child.stdout
    _child.stdin.write(nodeid + "\n")
    _child.stdin.flush()
    ready, _, _ = select.select([_child.stdout], [], [], SECONDS)
    answer = _child.stdout.readline() if ready else ""
    if answer:
        return list(json.loads(answer))
    _child.kill()
    code = _child.wait()
    what = f"it ended the process with code {code}" if ready else f"it did not end within {SECONDS} s"
    _child = None
    return [{"when": "call", "outcome": "failed", "longrepr": f"{nodeid}: {what}"}]


def _start() -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.card_process"],
        cwd=ROOT,
        env=os.environ | {IN_CHILD: "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(child.kill)
    return child


class Server:
    """In the child: a pytest session for each file, which runs what is asked for instead of everything."""

    def __init__(self, questions: Iterator[str], answers: IO[str]) -> None:
        self.questions = questions
        self.answers = answers
        self.asked: str | None = next(questions, None)
        self.reports: list[dict[str, Any]] = []

    def serve(self) -> None:
        """Answers until nobody asks any more."""
        while self.asked is not None:
            asked, said = self.asked, io.StringIO()
            with contextlib.redirect_stdout(said):
                pytest.main(
                    ["-p", "no:cacheprovider", "-p", "no:xdist", asked.partition("::")[0]], plugins=[self]
                )
            if self.asked is asked:  # no such test, or a file that cannot be imported
                self._answer([{"when": "call", "outcome": "failed", "longrepr": said.getvalue()}])

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Runs tests of this session's file for as long as they are asked for."""
        items = {item.nodeid: item for item in session.items}
        while self.asked in items:
            self.reports = []
            item = items[self.asked]
            item.ihook.pytest_runtest_protocol(item=item, nextitem=None)
            self._answer(self.reports)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keeps what a phase gave."""
        text: Any = None if report.longrepr is None else report.longreprtext
        if report.skipped and isinstance(report.longrepr, tuple):
            text = report.longrepr
        sections = "".join(f"\n--- {name}\n{content}" for name, content in report.sections)
        longrepr = text + sections if report.failed else text
        self.reports.append({"when": report.when, "outcome": report.outcome, "longrepr": longrepr})

    def _answer(self, reports: list[dict[str, Any]]) -> None:
        self.answers.write(json.dumps(reports) + "\n")
        self.answers.flush()
        self.asked = next(self.questions, None)


def main() -> None:
    """The child: a test's node id on each line in, its reports on each line out."""
    with os.fdopen(os.dup(0)) as questions, os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # what tests print is not an answer
        Server((line.strip() for line in questions), answers).serve()


if __name__ == "__main__":
    main()
