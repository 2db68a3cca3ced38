"""`flatout` commands that end by themselves, each in a process of its own that does not import everything anew.

Importing torch, Gymnasium and Numba takes a command longer than most of what the tests ask of it, so commands are forked
by a helper process of one thread that has them imported. A test about starting, or one that needs the process while it
runs, uses `command` and `subprocess` instead.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

_helper: subprocess.Popen[str] | None = None


def command(*argv: str) -> list[str]:
    """The words of a command that starts from nothing."""
    return [sys.executable, "-m", "flatout", *argv]


def flatout(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    global _helper
    if _helper is None or _helper.poll() is not None:
        _helper = _start()
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
        files = [out.name, err.name]
        try:
            code = _ask(_helper, {"argv": argv, "cwd": str(cwd), "env": dict(os.environ), "files": files})
        except BaseException:  # a timeout: the command must end, and its answer is not the next one's
            _end(_helper)
            raise
        return subprocess.CompletedProcess(command(*argv), code, out.read(), err.read())


def _ask(helper: subprocess.Popen[str], question: dict[str, Any]) -> int:
    assert helper.stdin
    assert helper.stdout
    helper.stdin.write(json.dumps(question) + "\n")
    helper.stdin.flush()
    return int(helper.stdout.readline())


def _start() -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "tests.command"]
    pipe = subprocess.PIPE
    helper = subprocess.Popen(words, cwd=ROOT, stdin=pipe, stdout=pipe, text=True, start_new_session=True)
    atexit.register(_end, helper)
    return helper


def _end(helper: subprocess.Popen[str]) -> None:
    """End the helper and what it has forked."""
    if helper.poll() is None:
        os.killpg(helper.pid, signal.SIGKILL)
        helper.wait()


def _become(argv: list[str], cwd: str, env: dict[str, str], files: list[str]) -> None:
    """In a fork of the helper: be the process that `python -m flatout` would have been."""
    for number, file in enumerate([os.devnull, *files]):
        os.dup2(os.open(file, os.O_RDWR), number)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.path[0] = cwd
    tempfile.tempdir = None
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    sys.argv[1:] = argv
    code: Any = 1
    try:
        runpy.run_module("flatout", run_name="__main__", alter_sys=True)
    except SystemExit as leaves:
        code = leaves.code
    except BaseException:
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # freeing all that torch has loaded would take longer than most commands


def main() -> None:
    """The helper: a command on each line in, its exit code on each line out."""
    import flatout.agent
    import flatout.cli.train  # noqa: F401

    gc.freeze()  # a collection in a fork would copy what it visits
    with os.fdopen(os.dup(0)) as questions, os.fdopen(os.dup(1), "w") as answers:
        for line in questions:
            if (pid := os.fork()) == 0:
                _become(**json.loads(line))
            _, status = os.waitpid(pid, 0)
            print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


if __name__ == "__main__":
    main()
