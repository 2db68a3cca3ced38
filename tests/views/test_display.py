from __future__ import annotations

import io
import math
import os

import pytest

from flatout.views.display import PlainDisplay, make_display, plain_line
from tests.runlog.progress_examples import progress


def test_a_line_has_all_figures() -> None:
    assert plain_line(progress()) == (
        "  25 %  125,000 steps  18,200 steps/s  return 143.2 ± 30.1  learner busy 61 %  21 s left"
    )
    assert plain_line(progress(env_steps=500_000, metrics={"eval/mean_reward": 480.0})) == (
        " 100 %  500,000 steps  18,200 steps/s  return 143.2 ± 30.1  learner busy 61 %  evaluated 480.0"
    )


def test_unknown_figures_are_dashes() -> None:
    early = progress(
        return_mean=None, return_std=None, steps_per_second=0.0, learner_busy=math.nan, seconds_left=None
    )
    assert plain_line(early) == "  25 %  125,000 steps  0.0 steps/s  return –  learner busy –"


def test_a_pipe_gets_plain_lines_header_first_and_the_end_always() -> None:
    stream = io.StringIO()
    display = make_display(stream)
    assert isinstance(display, PlainDisplay)
    display.start(["CartPole-v1 · PPO", "16 envs"])
    display.write(progress(env_steps=10, seconds=0.1))
    display.write(progress(env_steps=20, seconds=0.2))
    display.note("a warning")
    display.close()
    display.close()
    lines = stream.getvalue().splitlines()
    assert lines[:3] == ["CartPole-v1 · PPO", "16 envs", "a warning"]
    assert len(lines) == 4
    assert "  20 steps  " in lines[3]


@pytest.mark.parametrize(
    ("minutes", "fewest", "most"),
    [(0.02, 1, 3), (0.2, 3, 4), (1, 9, 12), (60, 55, 65)],
)
def test_the_number_of_lines_is_limited_in_short_and_long_runs(
    minutes: float, fewest: int, most: int
) -> None:
    stream = io.StringIO()
    display = make_display(stream)
    for nth in range(1, 5001):
        share = nth / 5000
        display.write(progress(env_steps=int(500_000 * share), seconds=60 * minutes * share))
    display.close()
    lines = stream.getvalue().splitlines()
    assert fewest <= len(lines) <= most
    assert lines[-1].startswith(" 100 %")


def test_a_closed_pipe_does_not_end_the_run() -> None:
    read, write = os.pipe()
    stream = os.fdopen(write, "w")
    display = make_display(stream)
    display.start(["header"])
    os.close(read)
    for nth in range(100):
        display.write(progress(seconds=100.0 * nth, env_steps=50_000 * nth))
    display.close()
    with pytest.raises(BrokenPipeError):
        stream.close()

    closed = io.StringIO()
    closed.close()
    display = make_display(closed)
    display.start(["header"])
    display.close()


def test_a_stream_without_unicode_gets_ascii_of_the_same_length() -> None:
    raw = io.BytesIO()
    display = make_display(io.TextIOWrapper(raw, encoding="latin-1", write_through=True))
    display.start(["CartPole-v1 · PPO · 日本", "odd \udcff name"])
    display.write(progress())
    lines = raw.getvalue().decode("ascii").splitlines()
    assert lines[:2] == ["CartPole-v1 | PPO | ??", "odd ? name"]
    assert "return 143.2 ~ 30.1" in lines[2]
