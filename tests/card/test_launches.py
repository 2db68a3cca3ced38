"""How often the host waits for the card, and how many launches it makes, in an iteration in the middle of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

import flatout
import simcard
from flatout.learning.update import GraphBackend
from tests.card.runs import ALGORITHMS, N_STEPS, PPO, act_on, trained, watch_iterations
from tests.card.walk import Walk

pytestmark = pytest.mark.card

MIDDLE = 4


@dataclass
class Seen:
    """What the card did in one iteration."""

    run: flatout.Agent
    all: simcard.Counters
    updates: list[simcard.Counters]
    """The counters after each launch of updates."""
    n_updates: int
    """How many updates those launches were."""
    waits: Counter[str]
    """Waits of the host, by the file that waits."""


def seen(settings: dict[str, Any], env: Any, monkeypatch: pytest.MonkeyPatch, **more: Any) -> Seen:
    """Train, and watch one iteration."""
    updates: list[simcard.Counters] = []
    sizes: list[int] = []
    counted: list[simcard.Counters] = []
    waits: Counter[str] = Counter()
    replay = GraphBackend.replay

    def replayed(self: GraphBackend[Any]) -> None:
        replay(self)
        updates.append(simcard.counters())
        sizes.append(self.n_steps)

    def watch(k: int, iterate: Callable[[], Any]) -> Any:
        if k != MIDDLE:
            return iterate()
        simcard.reset()
        updates.clear()
        sizes.clear()
        with simcard.sync_lines() as lines:
            result = iterate()
        counted.append(simcard.counters())
        waits.update(line.line.rpartition(":")[0].rpartition("/")[2] for line in lines)
        during[:] = updates
        n_updates.append(sum(sizes))
        return result

    during: list[simcard.Counters] = []
    n_updates: list[int] = []
    monkeypatch.setattr(GraphBackend, "replay", replayed)
    watch_iterations(monkeypatch, watch)
    run = trained("sim:0", settings, env, **more)
    return Seen(run, counted[0], during, n_updates[0], waits)


REPLAYS = {"dqn": 3, "prioritized": 2}
"""Graphs of an iteration besides the updates: storing the rollout, what begins the updates, and the draw of all minibatches
if it is uniform."""


def waits_and_launches_of_updates(it: Seen) -> tuple[int, float]:
    """Between the first and the last launch of updates: waits of the host; and launches for each update."""
    first, last = it.updates[0], it.updates[-1]
    return last.syncs - first.syncs, (last.launches - first.launches + 1) / it.n_updates


@pytest.mark.parametrize("algo", ALGORITHMS)
@pytest.mark.parametrize("overlap", ["off", "on"])
def test_updates_are_a_launch_each_and_learning_waits_once(
    algo: str, overlap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    act_on(monkeypatch, "cpu")
    it = seen(ALGORITHMS[algo] | {"overlap": overlap}, Walk, monkeypatch)
    assert it.n_updates >= 4
    if algo in REPLAYS:
        assert it.all.replays == REPLAYS[algo] + it.n_updates
    else:  # the samples, what begins an iteration, all updates, the metrics
        assert it.all.replays == 4
    assert it.waits["learner.py"] == 1
    # The next rollout waits for the parameters; the pinned memory may be refilled once its copies are done.
    assert set(it.waits) <= {"learner.py", "params.py", "rollout.py"}
    assert it.waits["params.py"] == 1
    assert it.waits["rollout.py"] <= 1
    if overlap == "off":  # else the collecting thread launches and waits meanwhile
        waits, launches = waits_and_launches_of_updates(it)
        assert waits == 0
        assert launches <= 2


def test_normalizing_adds_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    act_on(monkeypatch, "cpu")
    it = seen(PPO, Walk, monkeypatch, normalize_obs=True, normalize_reward=True)
    assert it.waits == {"learner.py": 1, "params.py": 1}


@pytest.mark.parametrize(("n_envs", "n_acts"), [(8, N_STEPS), (16, 2 * N_STEPS)])
def test_acting_on_the_card_is_one_launch_and_one_wait(
    n_envs: int, n_acts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    act_on(monkeypatch, "sim:0")
    it = seen(PPO | {"n_envs": n_envs}, Walk, monkeypatch, n_iterations=12)
    assert it.waits == {"actor.py": n_acts, "learner.py": 1}
    assert it.all.replays == n_acts + 4


def test_a_whole_iteration_of_learning_is_a_handful_of_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    act_on(monkeypatch, "cpu")
    it = seen(PPO, Walk, monkeypatch)
    assert it.all.launches <= 10


@pytest.mark.parametrize("algo", ALGORITHMS)
@pytest.mark.parametrize("n_steps", [16, 32])
def test_snake_is_one_launch_and_no_wait_per_time_step(
    algo: str, n_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ALGORITHMS[algo] | {"executor": "auto", "n_steps": n_steps}
    it = seen(settings, "snake", monkeypatch, n_iterations=12)
    others = REPLAYS[algo] + len(it.updates) if algo in REPLAYS else 4
    assert it.all.replays == n_steps + 1 + others
    assert it.waits == {"tensors.py": 1, "learner.py": 1}  # the ended episodes, once per rollout
    waits, launches = waits_and_launches_of_updates(it)
    assert waits == 0
    assert launches <= 2


@pytest.mark.parametrize("env", [Walk, "snake"])
def test_more_time_steps_and_more_updates_are_no_other_launches_than_replays(
    env: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    act_on(monkeypatch, "cpu")
    few, many = (
        seen(PPO | {"executor": "auto", "n_steps": n, "n_epochs": 1}, env, monkeypatch, n_iterations=24)
        for n in (24, 32)  # the scan over time doubles its reach in both as often
    )
    more = many.all.launches - few.all.launches
    assert more == many.all.replays - few.all.replays
