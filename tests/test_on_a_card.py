"""`make test-gpu` on a card: a text for an issue."""

from __future__ import annotations

import pytest

import simcard
from benchmarks.on_a_card import main

pytestmark = pytest.mark.card


def test_on_a_card_it_prints_a_text_to_paste(capsys: pytest.CaptureFixture[str]) -> None:
    simcard.install()
    assert main(["--cases", "snake,dqn", "--seconds", "0.5", "--device", "sim:1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (lines[0], lines[-1]) == ("--- paste from here ---", "--- to here ---")
    assert lines[1].startswith("card     ")
    assert lines[1].endswith(", 12.0 GB, as sim:1")
    assert any(line.startswith("driver   ") for line in lines)
    assert any(line.startswith("torch    ") for line in lines)
    assert [line.split("|")[1].strip() for line in lines[-3:-1]] == ["snake", "dqn"]
    assert all("graph" in line for line in lines[-3:-1])
    assert main(["--device", "nowhere"]) == 2
