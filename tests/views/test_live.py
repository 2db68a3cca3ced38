"""The live view on a pseudo-terminal of several widths, and with odd figures."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

import pytest

from flatout.views.display import make_display
from flatout.views.live import History, LiveDisplay, bar, sparkline
from tests.runlog.progress_examples import progress

TOKEN = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|.", re.DOTALL)


def screen(text: str, columns: int) -> list[str]:
    """What a terminal of that width shows: the few escape codes in use, and wrapping as terminals do it."""
    lines: list[list[str]] = [[]]
    row = column = 0
    for token in TOKEN.findall(text):
        if token == "\r":
            column = 0
        elif token == "\n":
            row += 1
        elif token.startswith("\x1b"):
            if token.endswith("A"):
                row = max(0, row - int(token[2:-1] or 1))
            elif token.endswith("K"):
                lines[row].clear()
        else:
            if column == columns:
                row, column = row + 1, 0
            lines += [[] for _ in range(row + 1 - len(lines))]
            lines[row] += [" "] * (column + 1 - len(lines[row]))
            lines[row][column] = token
            column += 1
        lines += [[] for _ in range(row + 1 - len(lines))]
    return ["".join(line).rstrip() for line in lines]


class Terminal:
    """A pseudo-terminal of a given width; `stream` is the run's side of it."""

    def __init__(self, columns: int, encoding: str = "utf-8") -> None:
        self._ours, theirs = pty.openpty()
        self.stream: TextIO = os.fdopen(theirs, "w", encoding=encoding)
        self.resize(columns)
        self._chunks: list[bytes] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def resize(self, columns: int) -> None:
        self.columns = columns
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def _read(self) -> None:
        # Reading fails once the other side is closed and all is read.
        with suppress(OSError):
            while chunk := os.read(self._ours, 65_536):
                self._chunks.append(chunk)

    def close(self) -> None:
        self.stream.close()
        self._reader.join(5)
        os.close(self._ours)

    @property
    def raw(self) -> str:
        return b"".join(self._chunks).decode(errors="replace")

    @property
    def lines(self) -> list[str]:
        return screen(self.raw, self.columns)

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, words: str, seconds: float = 5.0) -> None:
        deadline = time.monotonic() + seconds
        while words not in self.text and time.monotonic() < deadline:
            time.sleep(0.02)
        assert words in self.text


@contextmanager
def terminal(columns: int, encoding: str = "utf-8") -> Iterator[Terminal]:
    opened = Terminal(columns, encoding)
    try:
        yield opened
    finally:
        opened.close()


@pytest.fixture(autouse=True)
def _capable_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")


def show(seen: Terminal, phase: Callable[[], str] = lambda: "learn") -> LiveDisplay:
    display = make_display(seen.stream, phase=phase)
    assert isinstance(display, LiveDisplay)
    display.start(["CartPole-v1 · PPO"])
    return display


def test_a_wide_terminal_shows_everything_in_six_lines() -> None:
    with terminal(140) as seen:
        display = show(seen)
        for nth in range(10):
            display.write(progress(return_mean=14.3 * nth))
        display.write(progress(metrics={**progress().metrics, "eval/mean_reward": 480.0}))
        display.write(progress())
        seen.wait_for("143.2 ± 30.1")
        display.close()
    header, *frame = [line for line in seen.lines if line]
    assert header == "CartPole-v1 · PPO"
    assert [len(line) for line in frame] == [100] * 6
    for words in (
        "125,000 of 500,000 (25 %)",
        " s left",
        "18,200 steps/s",
        "▁",
        "█",
        "evaluated 480.0",
        "length 143.2",
        "episodes 1,204",
        "learner busy 61 %",
        "time in learn 59 %",
        "KL 0.011",
        "clipped 12 %",
        "entropy 0.580",
        "explained variance 0.810",
    ):
        assert words in seen.text


@pytest.mark.parametrize("columns", [80, 60, 40, 24, 12, 8])
def test_a_narrow_terminal_drops_figures_and_keeps_its_shape(columns: int) -> None:
    with terminal(columns) as seen:
        display = show(seen)
        display.write(progress())
        seen.wait_for("━")
        display.write(progress())
        display.close()
    frame = [line for line in seen.lines if line][-6:]
    assert [len(line) for line in frame] == [columns] * 6
    assert seen.text.count("╭") == seen.text.count("╯") == 1
    if columns >= 60:
        for words in (
            "125,000 of 500,000 (25 %)",
            "143.2 ± 30.1",
            "18,200 steps/s",
            "learner busy 61 %",
            "KL 0.011",
            "clip 12 %",
            "entropy 0.580",
            "EV 0.810",
        ):
            assert words in seen.text


def test_it_is_redrawn_by_itself_and_follows_phase_and_window() -> None:
    phase = "collect"
    with terminal(60) as seen:
        display = show(seen, lambda: phase)
        seen.wait_for("now: collect")
        seen.wait_for("collecting the first rollout")
        display.write(progress())
        phase = "evaluate"
        seen.wait_for("now: evaluate")
        seen.resize(100)
        seen.wait_for("explained variance")
        display.close()
        display.close()
    assert [len(line) for line in seen.lines if line][-6:] == [100] * 6


def test_notes_stay_above_and_the_last_frame_below() -> None:
    with terminal(100) as seen:
        display = show(seen)
        display.write(progress())
        display.note("KL above the bound [bold]at 25[/bold]")
        display.write(progress(env_steps=500_000))
        display.close()
        seen.wait_for("done")
    assert seen.lines[:2] == ["CartPole-v1 · PPO", "KL above the bound [bold]at 25[/bold]"]
    assert seen.lines[2].startswith("╭─ done ─")
    assert "500,000 of 500,000 (100 %)" in seen.lines[3]
    # The cursor is shown again.
    assert seen.raw.rindex("\x1b[?25h") > seen.raw.rindex("\x1b[?25l")


def test_a_run_that_ends_early_says_stopped() -> None:
    with terminal(100) as seen:
        display = show(seen)
        display.close()
        seen.wait_for("stopped")


def test_no_figure_can_break_it() -> None:
    def broken() -> str:
        raise RuntimeError("no phase")

    nan = float("nan")
    odd = progress(
        total_steps=0,
        return_mean=nan,
        return_std=None,
        length_mean=nan,
        steps_per_second=nan,
        learner_busy=nan,
        metrics={"train/approx_kl": nan, "train/loss": float("inf")},
        phases={"learn": nan},
    )
    with terminal(100) as seen:
        display = show(seen)
        display.write(odd)
        display.write(progress(return_mean=None, return_std=None, length_mean=None, metrics={}, phases={}))
        display.write(odd)
        seen.wait_for("KL nan")
        display.close()
    with terminal(100) as seen:
        display = show(seen, broken)
        display.write(progress())
        seen.wait_for("display: no phase")
        display.close()


def test_a_terminal_that_goes_away_does_not_end_the_run() -> None:
    ours, theirs = pty.openpty()
    stream = os.fdopen(theirs, "w")
    display = make_display(stream)
    display.start([])
    os.close(ours)
    display.write(progress())
    display.note("still here")
    time.sleep(0.6)
    display.close()
    time.sleep(0.3)
    assert not [thread for thread in threading.enumerate() if type(thread).__name__ == "_RefreshThread"]
    with pytest.raises(OSError, match="Input/output error"):
        stream.close()


def test_a_terminal_without_unicode_gets_ascii() -> None:
    with terminal(100, encoding="ascii") as seen:
        display = show(seen)
        display.write(progress())
        seen.wait_for("143.2 ~ 30.1")
        display.close()
    assert seen.raw.isascii()


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    with terminal(100) as seen:
        display = make_display(seen.stream)
        display.start(["header"])
        display.write(progress())
        seen.wait_for("return 143.2 ± 30.1")
    assert "\x1b" not in seen.raw


def test_what_the_env_prints_goes_above_the_view_even_from_a_forked_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with terminal(100) as seen:
        monkeypatch.setattr(sys, "stdout", seen.stream)
        display = show(seen)
        display.write(progress())
        assert sys.stdout is not seen.stream
        print("from the env")
        child = os.fork()
        if child == 0:
            os._exit(0 if sys.stdout is seen.stream else 1)
        assert os.waitpid(child, 0)[1] == 0
        display.close()
        assert sys.stdout is seen.stream
        seen.wait_for("from the env")


def test_an_update_costs_microseconds() -> None:
    with terminal(100) as seen:
        display = show(seen)
        latest = progress()
        began = time.perf_counter()
        for _ in range(10_000):
            display.write(latest)
        each = (time.perf_counter() - began) / 10_000
        display.close()
    assert each < 50e-6


def test_history_spans_the_whole_run_in_bounded_memory() -> None:
    history = History(capacity=16)
    for value in range(100_000):
        history.add(float(value))
    assert len(history.values) <= 16
    assert history.values[0] == 0
    assert history.values[-1] > 80_000
    gaps = {b - a for a, b in zip(history.values, history.values[1:], strict=False)}
    assert len(gaps) == 1


def test_sparkline_and_bar() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([5, 5, float("nan"), 5], 8) == "▁▁▁"
    assert sparkline([1.0], 8) == ""
    assert len(sparkline([float(n) for n in range(100)], 20)) == 20
    assert bar(0.25, 10).plain == "━━╸───────"
    assert bar(0.0, 4).plain == "────"
    assert bar(1.0, 4).plain == "━━━━"


def test_another_algorithms_figures_are_shown_too() -> None:
    dqn = progress(metrics={"train/loss": 0.02, "rollout/exploration_rate": 0.05})
    with terminal(100) as seen:
        display = show(seen)
        display.write(dqn)
        seen.wait_for("update   explore 5 %")
        seen.wait_for("loss 0.020")
        display.close()
