"""`--devices N`: runs a command once for each device, as ranks that train one agent together, and watches them.

Every rank is the same command with torchrun's environment variables; see `training/distributed.py`. When one dies, the others
cannot go on: all are ended and started again, and go on from the newest checkpoint.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter, sleep, time
from types import FrameType
from typing import TypeVar

from flatout.errors import FlatoutError

T = TypeVar("T")
POLL_SECONDS = 0.1
PATIENCE_SECONDS = 15.0
"""How long the other ranks may take to end by themselves after one has died."""
LOST = 75
"""Exit code of a rank that has lost the others."""
SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


def is_rank() -> bool:
    """Whether this process is one of several ranks, started from here or by torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_first() -> bool:
    """Whether this process prints: it is no rank, or rank 0."""
    return not is_rank() or os.environ["RANK"] == "0"


def from_first(make: Callable[[], T]) -> T:
    """What `make` returns, in rank 0 if there are ranks."""
    if not is_rank():
        return make()
    from flatout.training.distributed import join

    ranks = join()
    assert ranks is not None, "there are ranks"
    return ranks.from_first(make)


def is_of_this_run(path: Path) -> bool:
    """Whether a file was written since the ranks were first started."""
    return path.exists() and path.stat().st_mtime >= float(os.environ.get("FLATOUT_LAUNCHED", "0"))


def is_restarted() -> bool:
    """Whether the ranks were started again because one was lost."""
    return is_rank() and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def launch(argv: Sequence[str], n: int, max_restarts: int, tell: Callable[[str], None]) -> int:
    """Run `flatout ARGV` as `n` ranks; returns the exit code."""
    if n < 1:
        raise FlatoutError(f"--devices is {n}; it must be at least 1")
    if max_restarts < 0:
        raise FlatoutError(f"--max-restarts is {max_restarts}; it must be at least 0")
    if is_rank():
        raise FlatoutError("--devices starts ranks, and torchrun has started them already; leave it out")
    os.environ["FLATOUT_LAUNCHED"] = str(time())
    for nth in range(max_restarts + 1):
        with tempfile.TemporaryDirectory(prefix="flatout-ranks-") as folder:
            ranks = RankProcesses(_command(argv), n, nth, Path(folder))
            with ranks.forwarding_signals():
                ranks.watch()
            failed = [code for code in ranks.codes if code]
            may_go_on = all(code < 0 or code == LOST for code in failed) and ranks.stopped_by is None
            if not failed or not may_go_on or nth == max_restarts:
                return ranks.end()
            tell(
                f"note: {ranks.first_loss()}; restart {nth + 1} of {max_restarts}, from the newest checkpoint"
            )
    raise AssertionError("the last attempt returns")


def _command(argv: Sequence[str]) -> list[str]:
    """The command line of this process up to `argv`, and `argv`."""
    now = sys.orig_argv
    n_own = next((k for k in range(len(now)) if now[k : k + 1] == list(argv[:1])), None)
    return [*now[:n_own], *argv] if n_own else [sys.executable, "-m", "flatout", *argv]


class RankProcesses:
    """The processes of one attempt."""

    def __init__(self, command: Sequence[str], n: int, nth: int, folder: Path) -> None:
        self.stopped_by: signal.Signals | None = None
        self._folder = folder
        # Ranks end when this process closes its end, even if it is killed.
        read_end, self._lifeline = os.pipe()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._first_lost: int | None = None
        self._given_up: set[int] = set()
        """Ranks that did not end by themselves after another was lost."""
        variables = {
            "WORLD_SIZE": n,
            "LOCAL_WORLD_SIZE": n,
            "FLATOUT_RENDEZVOUS": f"file://{folder}/meeting",
            "FLATOUT_LIFELINE": read_end,
            "TORCHELASTIC_RESTART_COUNT": nth,
        }
        if sys.platform == "linux":
            variables["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
        try:
            for rank in range(n):
                own = variables | {"RANK": rank, "LOCAL_RANK": rank}
                env = os.environ | {name: str(value) for name, value in own.items()}
                with self._errors(rank).open("wb") as errors:
                    # A session of its own: Ctrl-C reaches it once, through this process.
                    process = subprocess.Popen(
                        command,
                        env=env,
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL if rank else None,
                        stderr=errors if rank else None,
                        start_new_session=True,
                        pass_fds=[read_end],
                    )
                self._processes.append(process)
        finally:
            os.close(read_end)

    def _errors(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.txt"

    @property
    def codes(self) -> list[int | None]:
        """Exit codes, None for those that run."""
        return [process.poll() for process in self._processes]

    def watch(self) -> None:
        """Wait until all have ended; after one has failed the others have PATIENCE_SECONDS."""
        until = float("inf")
        while None in (codes := self.codes):
            lost = [rank for rank, code in enumerate(codes) if code]
            if lost and self._first_lost is None:
                self._first_lost, until = lost[0], perf_counter() + PATIENCE_SECONDS
            if perf_counter() > until:
                for rank in [rank for rank, code in enumerate(codes) if code is None]:
                    self._given_up.add(rank)
                    self._processes[rank].kill()
            sleep(POLL_SECONDS)
        os.close(self._lifeline)

    @contextmanager
    def forwarding_signals(self) -> Iterator[None]:
        """Send every signal on to the ranks, which agree to stop after the iteration, and save."""

        def forward(signum: int, _: FrameType | None) -> None:
            self.stopped_by = self.stopped_by or signal.Signals(signum)
            for process in self._processes:
                if process.poll() is None:
                    process.send_signal(signum)

        before = {n: signal.signal(n, forward) for n in SIGNALS if signal.getsignal(n) != signal.SIG_IGN}
        try:
            yield
        finally:
            for n, handler in before.items():
                signal.signal(n, handler)

    def first_loss(self) -> str:
        """Which rank was lost first, and how, in a few words."""
        rank = self._first_lost or 0
        code = self.codes[rank] or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"rank {rank} {how}"

    def end(self) -> int:
        """The run's exit code; what a rank other than the first has to say about its failure is printed."""
        codes = [code or 0 for code in self.codes]
        own = [
            rank for rank, code in enumerate(codes) if code not in (0, LOST) and rank not in self._given_up
        ]
        if codes[0] not in (0, LOST) or not own:
            return _exit_code(codes[0] or max(codes))
        said = self._errors(own[0]).read_text(errors="replace").strip()
        print(said or f"flatout: {self.first_loss()}", file=sys.stderr)
        return _exit_code(codes[own[0]])


def _exit_code(code: int) -> int:
    return code if code >= 0 else 128 - code
