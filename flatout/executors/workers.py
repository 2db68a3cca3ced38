"""Worker processes: how they start, what they are told, and what happens when one dies or hangs.

Env workers and subprocess collectors use the same pool and the same commands. Workers come from a fork server that has
imported everything once. A dead or hung worker is killed and replaced, with its cause in one line; a RestartBudget
limits how often.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import Enum
from itertools import pairwise
from multiprocessing import get_context, reduction
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any

import cloudpickle
import numpy as np

from flatout.device.shared import SharedArrays
from flatout.envs.spaces import Array
from flatout.errors import EnvError, FlatoutError
from flatout.executors.base import Executor, RestartBudget
from flatout.executors.episodes import merge_snapshots, part_of_snapshot

ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
POLL_SECONDS = 0.1
DONE, FAILED, HOPELESS = b"D", b"!", b"#"
"""First byte of an answer. After an error a new worker may succeed (FAILED) or would fail as well (HOPELESS)."""


class Command(bytes, Enum):
    """First byte of a message to a worker; its arguments follow."""

    STEP = b"s"
    COLLECT = b"c"
    RESET = b"r"
    RESET_ENVS = b"e"
    MARK = b"m"
    SNAPSHOT = b"p"
    RESTORE = b"o"
    APPLY = b"a"


class ChildProcess:
    """One child with a connection to it; `target(connection, *args)` runs there."""

    def __init__(
        self, name: str, target: Callable[..., None], args: tuple[Any, ...], shared: Any = None
    ) -> None:
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

    def cause_of_death(self) -> str:
        """Why it ended without an answer: a signal's name or an exit code."""
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


class WorkerPool:
    """Processes with a share of the envs each; one that dies, fails or misses its deadline is replaced."""

    def __init__(
        self,
        name: str,
        n_workers: int,
        env_ids: Array,
        main: Callable[..., None],
        make_job: Callable[[int, int, int, int], Any],
        *,
        shared: SharedArrays,
        timeout: float,
        budget: RestartBudget,
    ) -> None:
        """A worker runs `main(connection, make_job(i, generation, first env, end of its envs), shared)`."""
        self._name, self._env_ids, self._main, self._make_job = name, env_ids, main, make_job
        self._shared, self._timeout, self._budget = shared, timeout, budget
        edges = np.linspace(0, len(env_ids), n_workers + 1).astype(int).tolist()
        self.shares = list(pairwise(edges))
        """For each worker the index of its first env, and one after its last."""
        self.restarted: set[int] = set()
        """Workers replaced since the caller last looked, whose envs have begun new episodes."""
        self._generations = [0] * n_workers
        self._deadlines = [float("inf")] * n_workers
        self._poll, self._polled = select.poll(), set[int]()
        self._by_fd: dict[int, int] = {}
        self._children: list[ChildProcess] = []
        try:
            for i in range(n_workers):
                self._children.append(self._child(i))
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """The workers' process ids."""
        return [child.pid for child in self._children]

    def send(self, i: int, message: bytes) -> None:
        """Send worker i a command; from now on it has until the deadline to answer."""
        self._deadlines[i] = perf_counter() + self._timeout
        # The `receive` that waits for the answer of a dead worker notices and replaces it.
        with suppress(OSError):
            self._children[i].connection.send_bytes(message)

    def receive(
        self, waiting: Iterable[int], seconds: float = POLL_SECONDS
    ) -> list[tuple[int, bytes | None]]:
        """Answers that come within `seconds`, as soon as there is one; None for a worker that was replaced."""
        waiting = set(waiting)
        answers = [(i, self._read(i)) for i in self._ready(waiting, seconds)]
        if not answers:
            now = perf_counter()
            for i in waiting:
                if now > self._deadlines[i]:
                    self._replace(i, f"no answer within {self._timeout:g} s")
                    answers.append((i, None))
        return answers

    def ask(self, messages: Mapping[int, bytes], stop: Callable[[], bool] | None = None) -> dict[int, bytes]:
        """Send messages to workers and wait for all answers; a worker that was replaced is asked again.

        A new worker has reset its envs, so it is not asked to restore: its answer to RESTORE is empty. When `stop`
        becomes true, the answers that are there are returned.
        """
        for i, message in messages.items():
            self.send(i, message)
        answers: dict[int, bytes] = {}
        while len(answers) < len(messages):
            for i, answer in self.receive(i for i in messages if i not in answers):
                if answer is not None:
                    answers[i] = answer
                    continue
                self.restarted.add(i)
                restores = messages[i].startswith(Command.RESTORE)
                self.send(i, Command.RESET if restores else messages[i])
            if stop is not None and stop():
                break
        return answers

    def ask_all(self, message: bytes) -> list[bytes]:
        """Send all workers the same message; their answers in order."""
        answers = self.ask(dict.fromkeys(range(len(self.shares)), message))
        return [answers[i] for i in range(len(self.shares))]

    def snapshot(self) -> dict[str, Array]:
        """One snapshot of the envs of all workers."""
        return merge_snapshots([pickle.loads(answer) for answer in self.ask_all(Command.SNAPSHOT)])

    def restore(self, snapshot: Mapping[str, Array]) -> list[int]:
        """Restore the envs of all workers; returns the indices of those that began a new episode."""
        parts = {i: part_of_snapshot(snapshot, *share) for i, share in enumerate(self.shares)}
        answers = self.ask({i: Command.RESTORE + pickle.dumps(part) for i, part in parts.items()})
        fresh: list[int] = []
        for i, (first, end) in enumerate(self.shares):
            own = pickle.loads(answers[i]) if answers[i] else range(end - first)
            fresh += [first + n for n in own]
        return fresh

    def close(self) -> None:
        """End every worker."""
        for child in self._children:
            child.kill()

    def _child(self, i: int) -> ChildProcess:
        job = self._make_job(i, self._generations[i], *self.shares[i])
        return ChildProcess(f"flatout {self._name} {i}", self._main, (job,), self._shared)

    def _ready(self, waiting: set[int], seconds: float) -> list[int]:
        """Those of the workers that have something to read or are dead, as soon as there is one."""
        if waiting != self._polled:  # registering costs more than waiting, and mostly they are the same
            self._poll, self._polled = select.poll(), waiting
            self._by_fd = {self._children[i].connection.fileno(): i for i in waiting}
            for fd in self._by_fd:
                self._poll.register(fd, select.POLLIN)
        return [self._by_fd[fd] for fd, _ in self._poll.poll(seconds * 1000)]

    def _read(self, i: int) -> bytes | None:
        """Worker i's answer; None if it has died or failed and was replaced. Raises HOPELESS errors."""
        try:
            answer: bytes = self._children[i].connection.recv_bytes()
        except (EOFError, OSError):
            self._replace(i, self._children[i].cause_of_death())
            return None
        if answer[:1] == DONE:
            return answer[1:]
        line, _, details = str(answer[1:], errors="replace").partition("\n")
        if answer[:1] == HOPELESS:
            raise EnvError(f"{line} ({self._describe(i)})")
        self._replace(i, line, details)
        return None

    def _replace(self, i: int, cause: str, traceback_text: str = "") -> None:
        """Kill worker i and start a new one, if the budget allows one more."""
        what = f"{self._describe(i)}: {cause}"
        self._children[i].kill()
        self._budget.spend(what, traceback_text)
        self._generations[i] += 1
        self._children[i] = self._child(i)
        self._polled = set()
        self._deadlines[i] = perf_counter() + self._timeout

    def _describe(self, i: int) -> str:
        ids = self._env_ids[slice(*self.shares[i])]
        return f"{self._name} {i} with envs {ids[0]} to {ids[-1]}, pid {self._children[i].pid}"


def serve(connection: Connection, answers: Mapping[bytes, Callable[[bytes], bytes]]) -> None:
    """A worker's main loop: answer commands until the parent closes the connection."""
    while True:
        message = connection.recv_bytes()
        connection.send_bytes(DONE + answers[message[:1]](message[1:]))


def env_answers(executor: Executor) -> dict[bytes, Callable[[bytes], bytes]]:
    """How every worker answers the commands about its envs."""

    def reset(_: bytes) -> bytes:
        executor.reset()
        return b""

    return {
        Command.RESET: reset,
        Command.SNAPSHOT: lambda _: pickle.dumps(executor.snapshot()),
        Command.RESTORE: lambda body: pickle.dumps(executor.restore(pickle.loads(body))),
    }


def worker_seed(seed: int, generation: int) -> int:
    """The seed of a worker's envs: the run's, or another one for each time that the worker was replaced."""
    if generation == 0:
        return seed
    return int(np.random.SeedSequence([seed, generation, 2**31]).generate_state(1)[0])


def _child_main(connection: Connection, lifeline: Any, payload: bytes, shared: Any) -> None:
    """A child's start: it ignores Ctrl-C, ends with its parent, and uses one thread."""
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
        _report_failure(connection, error)


def _report_failure(connection: Connection, error: Exception) -> None:
    """Send the parent this child's error: one line for users, then the traceback."""
    text = str(error) if isinstance(error, FlatoutError) else f"{type(error).__name__}: {error}"
    # Our own complaint about the env's spaces holds for every env; what the env's code raised may not.
    hopeless = isinstance(error, FlatoutError) and error.__cause__ is None
    words = " ".join(text.split()) + "\n" + "".join(traceback.format_exception(error.__cause__ or error))
    with suppress(OSError):
        connection.send_bytes((HOPELESS if hopeless else FAILED) + words.encode())


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
    """Start children without the user's main module, which cloudpickle sends by value where it is needed.

    So scripts need no `if __name__ == "__main__"`. The fork server, started with the first child, imports what
    children need once, with one thread per maths library.
    """
    main = sys.modules["__main__"]
    names = ("__file__", "__spec__")
    with _LOCK:
        hidden = {name: main.__dict__.pop(name) for name in names if name in main.__dict__}
        before = {name: os.environ.get(name) for name in ONE_THREAD}
        main.__dict__["__spec__"] = None
        os.environ |= dict.fromkeys(ONE_THREAD, "1")
        try:
            _context().set_forkserver_preload(["flatout.collect.subprocess"])
            yield
        finally:
            main.__dict__.pop("__spec__")
            main.__dict__.update(hidden)
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
