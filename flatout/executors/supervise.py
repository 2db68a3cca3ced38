"""Child processes that cannot bring a run down: started cheaply, named when they die, gone when we are.

Children come from a fork server that has imported everything once. A dead or hung one is killed and its cause
told in one line; a budget says when it has happened too often.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import get_context, reduction
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any

import cloudpickle

from flatout.errors import EnvError, FlatoutError

ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
FAILED, HOPELESS = b"!", b"#"
"""First byte of a child's last words: an error that a new child may not have, and one that it would have too."""


class ChildProcess:
    """One child with a connection to it; `target(connection, *args)` runs there."""

    def __init__(
        self, name: str, target: Callable[..., None], args: tuple[Any, ...], shared: Any = None
    ) -> None:
        self.name = name
        self.connection, theirs = _context().Pipe()
        read_end, self._lifeline = os.pipe()
        payload = cloudpickle.dumps((target, args))
        self._process = _context().Process(
            target=_child_main,
            args=(theirs, reduction.DupFd(read_end), payload, shared),
            name=name,
            daemon=True,
        )
        try:
            with _bare_start():
                self._process.start()
        finally:
            theirs.close()
            os.close(read_end)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid or 0

    @property
    def sentinel(self) -> int:
        """Becomes readable when the process ends."""
        return int(self._process.sentinel)

    def cause_of_death(self) -> str:
        """Why it ended without a word: a signal's name or an exit code."""
        self._process.join(1.0)
        code = self._process.exitcode
        if code is None:
            return "it does not answer"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    def kill(self) -> None:
        """End it at once and free what it held; a second call does nothing."""
        if self._lifeline >= 0:
            self._process.kill()
            self._process.join()
            self._process.close()
            self.connection.close()
            os.close(self._lifeline)
            self._lifeline = -1


class RestartBudget:
    """At most `most` restarts within `seconds`; more is a storm, and the run should end cleanly."""

    def __init__(self, most: int = 10, seconds: float = 60.0) -> None:
        self._most, self._seconds = most, seconds
        self._times: deque[float] = deque()
        self.n_restarts = 0
        self.notes: list[str] = []
        """What happened, one line each."""
        self.tracebacks: list[str] = []
        """The children's own tracebacks, where they had any, one for each note."""

    def spend(self, what: str, traceback_text: str = "") -> None:
        """Count one restart, with its one-line reason; raises EnvError when there were too many."""
        now = perf_counter()
        self._times.append(now)
        while self._times[0] < now - self._seconds:
            self._times.popleft()
        if len(self._times) > self._most:
            raise EnvError(
                f"gave up after {self._most} restarts within {self._seconds:.0f} s; the last: {what}"
            )
        self.n_restarts += 1
        self.notes.append(what)
        self.tracebacks.append(traceback_text)


class Crew:
    """Children that answer messages; one that dies, fails or misses its deadline is replaced by a new one."""

    def __init__(
        self,
        n: int,
        start: Callable[[int, int], ChildProcess],
        describe: Callable[[int], str],
        *,
        timeout: float,
        budget: RestartBudget,
    ) -> None:
        self._start, self._describe = start, describe
        self._timeout, self.budget = timeout, budget
        self._generations = [0] * n
        self._deadlines = [float("inf")] * n
        self._poll, self._polled = select.poll(), set[int]()
        self._by_fd: dict[int, int] = {}
        self._children: list[ChildProcess] = []
        try:
            for i in range(n):
                self._children.append(start(i, 0))
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """The children's process ids."""
        return [child.pid for child in self._children]

    def send(self, i: int, message: bytes) -> None:
        """Ask child i something; from now on it has until the deadline to answer."""
        self._deadlines[i] = perf_counter() + self._timeout
        # A dead child is found, and replaced, by the `receive` that waits for its answer.
        with suppress(OSError):
            self._children[i].connection.send_bytes(message)

    def receive(self, waiting: Iterable[int], seconds: float) -> list[tuple[int, bytes | None]]:
        """Answers that come within `seconds`, as soon as there is one; None for a child that was replaced."""
        waiting = set(waiting)
        answers: list[tuple[int, bytes | None]] = []
        for i in self._ready(waiting, seconds):
            answer, words = self._read(i)
            if answer is None:
                self.replace(i, *words)
            answers.append((i, answer))
        if not answers:
            now = perf_counter()
            for i in waiting:
                if now > self._deadlines[i]:
                    self.replace(i, f"no answer within {self._timeout:g} s")
                    answers.append((i, None))
        return answers

    def _ready(self, waiting: set[int], seconds: float) -> list[int]:
        """Those of the children that have something to read, or are dead, as soon as there is one."""
        if (
            waiting != self._polled
        ):  # mostly the same ones are waited for: registering costs more than waiting
            self._poll, self._polled = select.poll(), waiting
            self._by_fd = {self._children[i].connection.fileno(): i for i in waiting}
            for fd in self._by_fd:
                self._poll.register(fd, select.POLLIN)
        return [self._by_fd[fd] for fd, _ in self._poll.poll(seconds * 1000)]

    def _read(self, i: int) -> tuple[bytes | None, tuple[str, str]]:
        """Child i's answer, or None with its cause of death and traceback; raises what a new one would too."""
        try:
            answer: bytes = self._children[i].connection.recv_bytes()
        except (EOFError, OSError):
            return None, (self._children[i].cause_of_death(), "")
        if answer[:1] not in (FAILED, HOPELESS):
            return answer, ("", "")
        line, _, details = str(answer[1:], errors="replace").partition("\n")
        if answer[:1] == HOPELESS:
            raise EnvError(f"{line} ({self._describe(i)}, pid {self._children[i].pid})")
        return None, (line, details)

    def replace(self, i: int, cause: str, traceback_text: str = "") -> None:
        """Kill child i and start its successor, if the budget allows one more."""
        what = f"{self._describe(i)}, pid {self._children[i].pid}: {cause}"
        self._children[i].kill()
        self.budget.spend(what, traceback_text)
        self._generations[i] += 1
        self._children[i] = self._start(i, self._generations[i])
        self._polled = set()
        self._deadlines[i] = perf_counter() + self._timeout

    def close(self) -> None:
        """End every child."""
        for child in self._children:
            child.kill()


def fail(connection: Connection, error: Exception) -> None:
    """Tell the parent this child's last error: one line for users, then the traceback."""
    text = str(error) if isinstance(error, FlatoutError) else f"{type(error).__name__}: {error}"
    # Our own complaint about the env's contract holds for every env; what the env's code raised may not.
    hopeless = isinstance(error, FlatoutError) and error.__cause__ is None
    words = " ".join(text.split()) + "\n" + "".join(traceback.format_exception(error.__cause__ or error))
    with suppress(OSError):
        connection.send_bytes((HOPELESS if hopeless else FAILED) + words.encode())


def _child_main(connection: Connection, lifeline: Any, payload: bytes, shared: Any) -> None:
    """A child's first steps: no Ctrl-C of its own, no life without its parent, one thread."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _die_with(lifeline.detach())
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    try:
        target, args = cloudpickle.loads(payload)
        target(connection, *args, *([shared] if shared is not None else []))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent is gone or has closed this child
    except Exception as error:
        fail(connection, error)


def _die_with(lifeline: int) -> None:
    """Have the kernel end this process when the parent's end of the lifeline closes, even in a hung C call."""
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC | os.O_NONBLOCK)
    with suppress(BlockingIOError):
        if os.read(lifeline, 1) == b"":  # it closed before the signal was set up
            os._exit(1)


_LOCK = threading.Lock()


def _context() -> Any:
    return get_context("forkserver")


@contextmanager
def _bare_start() -> Iterator[None]:
    """Start children without the user's main module, which cloudpickle carries by value where it is needed.

    So scripts need no `if __name__ == "__main__"`. The fork server, started with the first child, imports what
    children need once, with one thread per maths library.
    """
    main = sys.modules["__main__"]
    names = ("__file__", "__spec__")
    with _LOCK:
        kept = {name: main.__dict__.pop(name) for name in names if name in main.__dict__}
        before = {name: os.environ.get(name) for name in ONE_THREAD}
        main.__dict__["__spec__"] = None
        os.environ |= dict.fromkeys(ONE_THREAD, "1")
        try:
            _context().set_forkserver_preload(["flatout.collect.child"])
            yield
        finally:
            main.__dict__.pop("__spec__")
            main.__dict__.update(kept)
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
