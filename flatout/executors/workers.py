"""Worker processes: how they start, what they are told, how they end, and what happens when one dies or hangs.

Env workers and subprocess collectors use the same pool and the same commands. Workers come from a fork server that has
imported everything once. A dead or hung worker is killed and replaced, with its cause in one line; a RestartBudget
limits how often. Deadlines are per env step: workers count their steps in shared memory, where the pool looks.

Each worker leads a process group, so that what its envs have started ends with it. Workers take no notice of SIGINT,
SIGTERM and SIGHUP: the run decides when they end, and the kernel ends them if the run dies.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import Enum
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from time import perf_counter, sleep
from typing import Any

import cloudpickle
import numpy as np

from flatout.device.shared import SharedArrays, no_processes
from flatout.envs.spaces import Array
from flatout.errors import EnvError, FlatoutError
from flatout.executors.base import NOT_IN_ENV, Executor, RestartBudget
from flatout.executors.episodes import merge_snapshots, part_of_snapshot

ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
POLL_SECONDS = 0.1
OUTSIDE_SECONDS = 60.0
"""How long a worker may take for what is not an env's: to start, to import, to compile, to act."""
CLOSE_SECONDS = 3.0
"""How long workers may take to close their envs before they are killed."""
MAX_IN_VAIN = 5
"""Replacements of one worker in a row, without an answer in between, that end the run."""
IGNORED_SIGNALS = [s for s in signal.Signals if s.name in ("SIGINT", "SIGTERM", "SIGHUP")]
"""Signals that may be sent to all processes of a run at once."""
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
    CLOSE = b"x"


class ChildProcess:
    """One child with a connection to it; `target(connection, *args, *shared)` runs there."""

    def __init__(
        self,
        name: str,
        target: Callable[..., None],
        args: tuple[Any, ...],
        shared: tuple[Any, ...] = (),
        timeout: float = 0.0,
        context: str = "forkserver",
    ) -> None:
        """`shared` is pickled while the child starts; `timeout`: seconds that a message may take to be sent or read."""
        if reason := no_processes():
            raise FlatoutError(reason)
        self.connection, theirs = _context().Pipe()
        if timeout:
            _limit_transfers(self.connection, timeout)
        read_end, lifeline = _context().Pipe(duplex=False)
        self._args = (theirs, read_end, cloudpickle.dumps((target, args)), shared)
        try:
            self._process = self._started(name, get_context(context))
        finally:
            del self._args
            theirs.close()
            read_end.close()
        self.pid: int = self._process.pid
        # Also at exit, before multiprocessing sends its children SIGTERM and waits for them.
        self._finalize = Finalize(self, _free, (self._process, self.connection, lifeline), exitpriority=10)

    def _started(self, name: str, context: Any) -> Any:
        """The started process; the fork server is started again if it was killed."""
        n_tries = 3
        while True:
            process = context.Process(target=_child_main, args=self._args, name=name, daemon=True)
            try:
                with _bare_start():
                    process.start()
                return process
            except (ConnectionError, EOFError):
                n_tries -= 1
                if not n_tries:
                    raise
                sleep(POLL_SECONDS)

    def cause_of_death(self) -> str:
        """Why it ended without an answer: a signal's name or an exit code."""
        self._process.join(1.0)
        code = self._process.exitcode
        if code is None:
            return "it does not answer"
        return f"killed by {_signal_name(-code)}" if code < 0 else f"exited with code {code}"

    def ask_to_close(self) -> None:
        """Have it close its envs and exit; it may be dead or busy."""
        with suppress(OSError):
            os.set_blocking(self.connection.fileno(), False)
            self.connection.send_bytes(Command.CLOSE)

    def kill(self, after: float = 0.0) -> None:
        """End it and what it has started, if it has not exited in `after` seconds; a second call does nothing."""
        if self._finalize.still_active():
            self._process.join(max(after, 0.0))
            self._finalize()


def _free(process: Any, connection: Connection, lifeline: Connection) -> None:
    """Kill a child and free what it held; never waits for ever."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join(CLOSE_SECONDS)
    if process.exitcode is not None:  # else the kernel cannot end it, as in a hung file system
        process.close()
    connection.close()
    lifeline.close()


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
        """A worker runs `main(connection, make_job(i, generation, first env, end of its envs), shared, signs, i)`.

        `timeout`: seconds that one reset or step of an env may take.
        """
        self._name, self._env_ids, self._main, self._make_job = name, env_ids, main, make_job
        self._shared, self._timeout, self._budget = shared, timeout, budget
        self._signs = SharedArrays({"at": ((n_workers, 2), np.int64), "stop": ((1,), np.int64)})
        self._seen = self._signs["at"].copy()
        self._look_at = 0.0
        self._moved_at = [0.0] * n_workers
        """When each worker was last seen to go on."""
        self._in_vain = [0] * n_workers
        self._closed = False
        edges = np.linspace(0, len(env_ids), n_workers + 1).astype(int).tolist()
        self.shares = list(pairwise(edges))
        """For each worker the index of its first env, and one after its last."""
        self.restarted: set[int] = set()
        """Workers replaced since the caller last looked, whose envs have begun new episodes."""
        self._generations = [0] * n_workers
        self._poll, self._polled = select.poll(), set[int]()
        self._by_fd: dict[int, int] = {}
        self._children: list[ChildProcess] = []
        self._finalize = Finalize(self, _close, (self._children, self._signs["stop"]), exitpriority=20)
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
        """Send worker i a command."""
        self._moved_at[i] = perf_counter()
        # The `receive` that waits for the answer of a dead worker notices and replaces it.
        with suppress(OSError):
            try:
                self._children[i].connection.send_bytes(message)
            except BlockingIOError:  # it has not read for that long
                self._moved_at[i] = float("-inf")

    def receive(self, waiting: Iterable[int]) -> list[tuple[int, bytes | None]]:
        """Answers that come soon, as soon as there is one; None for a worker that was replaced."""
        waiting = set(waiting)
        answers = [(i, self._read(i)) for i in self._ready(waiting)]
        now = perf_counter()
        if now >= self._look_at:
            self._look_at = now + POLL_SECONDS
            late = self._late(waiting.difference(i for i, _ in answers), now)
            answers += [(i, None) for i in late]
        return answers

    def _late(self, waiting: Iterable[int], now: float) -> list[int]:
        """Replace those workers that have not moved on to another env step for too long; returns them."""
        late = []
        for i in waiting:
            at = self._signs["at"][i]
            if self._moved_at[i] > 0 and (at != self._seen[i]).any():
                self._seen[i], self._moved_at[i] = at, now
            in_env = at[0] != NOT_IN_ENV
            limit = self._timeout if in_env else max(self._timeout, OUTSIDE_SECONDS)
            if now - self._moved_at[i] > limit:
                who = f"env {self._env_ids[self.shares[i][0] + int(at[0])]}" if in_env else "it"
                self._replace(i, f"{who} gave no answer within {limit:g} s")
                late.append(i)
        return late

    def ask(self, messages: Mapping[int, bytes], stop: Callable[[], bool] | None = None) -> dict[int, bytes]:
        """Send messages to workers and wait for all answers; a worker that was replaced is asked again.

        A new worker has reset its envs, so it is not asked to restore: its answer to RESTORE is empty. When `stop`
        becomes true, workers are told to stop collecting, and the answers that come soon are returned.
        """
        until = float("inf")
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
                self._signs["stop"][0] = 1
                until = min(until, perf_counter() + CLOSE_SECONDS)
                if perf_counter() >= until:
                    break
        self._signs["stop"][0] = 0
        return answers

    def ask_all(self, message: bytes) -> list[bytes]:
        """Send all workers the same message; their answers in order."""
        answers = self.ask(dict.fromkeys(range(len(self.shares)), message))
        return [answers[i] for i in range(len(self.shares))]

    def settle(self, waiting: Iterable[int], seconds: float) -> bool:
        """Whether these workers finish within so many seconds what they are doing; nobody is replaced."""
        left, until = set(waiting), perf_counter() + seconds
        while left and perf_counter() < until:
            for i in self._ready(left):
                try:
                    is_done = self._children[i].connection.recv_bytes()[:1] == DONE
                except (EOFError, OSError):
                    is_done = False
                if not is_done:
                    return False
                left = left - {i}
        return not left

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
        """Have every worker close its envs and exit; those that do not are killed."""
        self._closed = True
        self._finalize()

    def _child(self, i: int) -> ChildProcess:
        job = self._make_job(i, self._generations[i], *self.shares[i])
        self._signs["at"][i] = self._seen[i] = NOT_IN_ENV
        self._moved_at[i] = perf_counter()
        shared = (self._shared, self._signs, i)
        return ChildProcess(f"flatout {self._name} {i}", self._main, (job,), shared, self._timeout)

    def _ready(self, waiting: set[int]) -> list[int]:
        """Those of the workers that have something to read or are dead, as soon as there is one, or none soon."""
        if waiting != self._polled:  # registering costs more than waiting, and mostly they are the same
            self._poll, self._polled = select.poll(), waiting
            self._by_fd = {self._children[i].connection.fileno(): i for i in waiting}
            for fd in self._by_fd:
                self._poll.register(fd, select.POLLIN)
        return [self._by_fd[fd] for fd, _ in self._poll.poll(POLL_SECONDS * 1000)]

    def _read(self, i: int) -> bytes | None:
        """Worker i's answer; None if it has died or failed and was replaced. Raises HOPELESS errors."""
        try:
            answer: bytes = self._children[i].connection.recv_bytes()
        except (EOFError, OSError):
            self._replace(i, self._children[i].cause_of_death())
            return None
        if answer[:1] == DONE:
            self._in_vain[i] = 0
            return answer[1:]
        line, _, details = str(answer[1:], errors="replace").partition("\n")
        if answer[:1] == HOPELESS:
            raise EnvError(f"{line} ({self._describe(i)})")
        self._replace(i, line, details)
        return None

    def _replace(self, i: int, cause: str, traceback_text: str = "") -> None:
        """End worker i and start a new one, if the budget allows one more."""
        if self._closed:
            raise EnvError(f"the {self._name}s were closed while they worked")
        what = f"{self._describe(i)}: {cause}"
        # After an error it closes its envs itself.
        self._children[i].kill(after=CLOSE_SECONDS if traceback_text else 0.0)
        self._in_vain[i] += 1
        if self._in_vain[i] > MAX_IN_VAIN:
            raise EnvError(
                f"gave up: {what}; it was replaced {MAX_IN_VAIN} times without completing anything"
            )
        self._budget.spend(what, traceback_text)
        self._generations[i] += 1
        self._children[i] = self._child(i)
        self._polled = set()

    def _describe(self, i: int) -> str:
        ids = self._env_ids[slice(*self.shares[i])]
        return f"{self._name} {i} with envs {ids[0]} to {ids[-1]}, pid {self._children[i].pid}"


def _close(children: list[ChildProcess], stop: Array) -> None:
    stop[0] = 1
    for child in children:
        child.ask_to_close()
    until = perf_counter() + CLOSE_SECONDS
    for child in children:
        child.kill(after=until - perf_counter())


def serve(connection: Connection, answers: Mapping[bytes, Callable[[bytes], bytes]]) -> None:
    """A worker's main loop: answer commands until it is told to close or one fails."""
    while (message := connection.recv_bytes()) != Command.CLOSE:
        try:
            answer = answers[message[:1]](message[1:])
        except Exception as error:
            _report_failure(connection, error)
            return
        connection.send_bytes(DONE + answer)


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


def _child_main(
    connection: Connection, lifeline: Connection, payload: bytes, shared: tuple[Any, ...]
) -> None:
    """A child's start: it ignores what is sent to all processes, ends with its parent, and uses one thread."""
    for number in IGNORED_SIGNALS:
        # A function, because programs that an env starts would inherit SIG_IGN.
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)
    with suppress(OSError):
        os.setpgid(0, 0)
    die_with(lifeline.fileno())
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    try:
        target, args = cloudpickle.loads(payload)
        target(connection, *args, *shared)
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


def die_with(lifeline: int) -> None:
    """Have the kernel end this process group when the parent's end of the lifeline closes, even in a hung C call."""
    import fcntl

    # Other signals would wait until a stopped process is continued.
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC | os.O_NONBLOCK)
    with suppress(BlockingIOError):
        if os.read(lifeline, 1) == b"":  # it closed before the signal was set up
            os._exit(1)


def _limit_transfers(connection: Connection, seconds: float) -> None:
    """Give up sending or reading a message in the middle when the other side does not go on for so long."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        limit = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


_LOCK = threading.Lock()


def _context() -> Any:
    return get_context("forkserver")


@contextmanager
def _bare_start() -> Iterator[None]:
    """Start children without the user's main module, which cloudpickle sends by value where it is needed.

    So scripts need no `if __name__ == "__main__"`. The fork server, started with the first child, imports what
    children need once, with one thread per maths library. It inherits that the signals sent to all are blocked.
    """
    main = sys.modules["__main__"]
    names = ("__file__", "__spec__")
    with _LOCK:
        hidden = {name: main.__dict__.pop(name) for name in names if name in main.__dict__}
        before = {name: os.environ.get(name) for name in ONE_THREAD}
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
        main.__dict__["__spec__"] = None
        os.environ |= dict.fromkeys(ONE_THREAD, "1")
        try:
            _context().set_forkserver_preload(["flatout.collect.subprocess"])
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            main.__dict__.pop("__spec__")
            main.__dict__.update(hidden)
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
