"""A short part of the fault injection, in one process and with collectors; `make chaos` plays many more."""

from __future__ import annotations

import pytest

from tests.chaos.cases import Case, play


@pytest.mark.parametrize("seed", [0, 4])
def test_a_run_with_faults_goes_on_or_ends_in_order(seed: int) -> None:
    outcome = play(seed)
    assert outcome.violations == [], f"{Case(seed)}; repeat with: python -m tests.chaos --case {seed}"
    assert outcome.faults
