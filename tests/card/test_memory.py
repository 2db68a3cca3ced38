"""Out of memory at any allocation of an iteration: the run goes on, ends with the same parameters, and says so."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest

import flatout
import simcard
from flatout.training.pipeline import Pipeline
from tests.card.runs import (
    DQN,
    ITERATION,
    PPO,
    PQN,
    PRIORITIZED,
    act_on,
    agent,
    difference,
    watch_iterations,
)
from tests.card.walk import Walk

pytestmark = pytest.mark.card

CLOSE = 1e-5
NORMALIZED = {"normalize_obs": True, "normalize_reward": True}
SNAKE = {"executor": "auto"}


@pytest.fixture(autouse=True)
def _garbage_is_collected_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection for each failed allocation, of all that torch has loaded, would take longer than the runs."""
    gc.collect()
    monkeypatch.setattr(gc, "collect", lambda: 0)


class Runs:
    """The same short run again and again, in which the n-th allocation of one iteration may fail."""

    def __init__(self, settings: dict[str, Any], env: Any, iteration: int) -> None:
        self._agent, self._iteration = agent("sim:0", settings, env), iteration
        self.n_allocations = 0
        """Of that iteration, in the last run."""
        self.notes: list[str] = []
        """Of the last run."""
        self._right = self._run(0)

    def _run(self, nth: int) -> flatout.Agent:
        run, take_notes = self._agent.changed({}), Pipeline.take_notes
        self.notes = []

        def watch(k: int, iterate: Callable[[], Any]) -> Any:
            if k != self._iteration:
                return iterate()
            simcard.reset()
            simcard.fail_allocation(nth)
            result = iterate()
            self.n_allocations = simcard.counters().allocations
            return result

        def noting(pipeline: Pipeline[Any]) -> list[str]:
            self.notes += (notes := take_notes(pipeline))
            return notes

        with pytest.MonkeyPatch.context() as patch:
            watch_iterations(patch, watch)
            patch.setattr(Pipeline, "take_notes", noting)
            run.learn((self._iteration + 2) * ITERATION)
        simcard.fail_allocation(0)
        return run

    def check(self, nth: int) -> None:
        run = self._run(nth)
        assert difference(run, self._right) <= CLOSE, f"allocation {nth}"
        assert any("out of memory" in note for note in self.notes), f"allocation {nth}"


# Settings, env, where the policy acts, iteration (the first one captures), and how many allocations are skipped.
CASES: dict[str, tuple[dict[str, Any], Any, str, int, int]] = {
    "ppo, captured": (PPO, Walk, "cpu", 0, 37),
    "ppo, eager": (PPO | {"compile": "off"}, Walk, "cpu", 1, 29),
    "ppo, normalized": (PPO | NORMALIZED, Walk, "cpu", 1, 11),
    "ppo, overlapped": (PPO | {"overlap": "on"}, Walk, "sim:0", 1, 7),
    "ppo that acts on the card, captured": (PPO, Walk, "sim:0", 0, 53),
    "pqn": (PQN, Walk, "cpu", 1, 11),
    "dqn": (DQN, Walk, "cpu", 3, 1),
    # With seed 3 the gradients of a unit cancel, and Adam's first step makes the rounding of smaller micro-batches visible.
    "dqn, captured": (DQN | {"seed": 4}, Walk, "cpu", 1, 61),
    "prioritized": (PRIORITIZED, Walk, "cpu", 3, 19),
    "prioritized, eager": (PRIORITIZED | {"compile": "off"}, Walk, "cpu", 3, 97),
    "snake": (PPO | SNAKE, "snake", "cpu", 2, 11),
    "snake, captured": (PPO | SNAKE, "snake", "cpu", 1, 43),
    "snake, not captured yet": (PPO | SNAKE, "snake", "cpu", 0, 59),
    "snake, dqn": (DQN | SNAKE, "snake", "cpu", 3, 31),
}


PARTS = 4
"""Tests that take turns with the allocations of a plain iteration, all of which fail once."""


@pytest.mark.parametrize("part", range(PARTS))
def test_each_failed_allocation_of_an_iteration_changes_nothing_but_is_told(
    part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    act_on(monkeypatch, "cpu")
    runs = Runs(PPO, Walk, 1)
    assert runs.n_allocations >= 4
    for nth in range(1 + part, runs.n_allocations + 1, PARTS):
        runs.check(nth)


@pytest.mark.parametrize("case", CASES)
def test_a_failed_allocation_changes_nothing_but_is_told(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, env, acting, iteration, stride = CASES[case]
    act_on(monkeypatch, acting)
    runs = Runs(settings, env, iteration)
    assert runs.n_allocations >= 4
    for nth in range(1, runs.n_allocations + 1, stride):
        runs.check(nth)
