"""Decisions for given costs: the executor, the number of collectors, and overlap."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import flatout
from flatout.errors import FlatoutError
from flatout.perf.case import Case
from flatout.perf.costs import START_SECONDS, WORTH, Costs, Settings, UpdateCost
from flatout.perf.decide import MIN_GAIN, MIN_UPDATES, Decision, Request, decide, decide_overlap
from flatout.perf.findings import diagnose
from flatout.perf.simulate import simulate

FUSED = UpdateCost(python=0.05e-3, points=((64, 0.16e-3),))
QUICK = Costs(wait=(0.0,), compute=(6e-6,), act=((8, 4e-6), (16, 6e-6)), update=FUSED)
"""CartPole."""
LANDER = replace(QUICK, compute=(31e-6,))
"""LunarLander, as measured on 2 cores of an AMD EPYC."""
HEAVY = replace(QUICK, compute=(1e-3,))
WAITS = replace(QUICK, wait=(5e-3, 10e-3, 15e-3), compute=(50e-6,) * 3)
SETTINGS = Settings(n_envs=16, n_steps=128, batch_size=64, n_epochs=4, n_cores=2)
LANDER_SETTINGS = Settings(n_envs=16, n_steps=1024, batch_size=64, n_epochs=4, n_cores=2)
LONG = 10_000_000


def decided(costs: Costs | None, settings: Settings = SETTINGS, **request: Any) -> Decision:
    return decide(Request(**({"timesteps": LONG} | request)), settings, costs)


def words(decision: Decision) -> str:
    way = decision.ways[0]
    who = f"{way.n_collectors} collectors" if way.in_subprocesses else way.executor
    who += f" {way.n_workers}" if way.executor in ("process", "thread") else ""
    return f"{who}, {'overlap' if decision.overlap else 'lockstep'}"


ONE_CORE = replace(SETTINGS, n_cores=1)
ON_GPU = replace(SETTINGS, on_device=True)
ONE_ENV = replace(SETTINGS, n_envs=1, n_steps=2048)
DECISIONS: dict[str, tuple[Costs | None, Settings, dict[str, Any], str]] = {
    "a quick env stays in one process": (QUICK, SETTINGS, {}, "serial, lockstep"),
    "a heavy env gets a collector per core": (HEAVY, SETTINGS, {}, "2 collectors, lockstep"),
    "a short run starts no processes": (HEAVY, SETTINGS, {"timesteps": 2048}, "serial, lockstep"),
    "an env that cannot be pickled stays here": (
        replace(HEAVY, picklable=False),
        SETTINGS,
        {},
        "serial, lockstep",
    ),
    "on one core nothing is to be gained": (HEAVY, ONE_CORE, {}, "serial, lockstep"),
    "one env is one process": (HEAVY, ONE_ENV, {}, "serial, lockstep"),
    "envs that wait get threads, beside learning": (
        replace(WAITS, update=UpdateCost(python=0.05e-3, points=((64, 2e-3),))),
        SETTINGS,
        {},
        "thread 16, overlap",
    ),
    "where learning is short beside waiting, it takes turns": (WAITS, SETTINGS, {}, "thread 16, lockstep"),
    "a few rollouts are collected in turn with learning": (
        replace(WAITS, update=UpdateCost(python=0.05e-3, points=((64, 2e-3),))),
        SETTINGS,
        {"timesteps": 19 * 2048},
        "thread 16, lockstep",
    ),
    "on one core waiting envs still wait at the same time": (WAITS, ONE_CORE, {}, "thread 16, lockstep"),
    "waiting envs that cannot be pickled get threads": (
        replace(WAITS, picklable=False),
        SETTINGS,
        {},
        "thread 16, lockstep",
    ),
    "an async env has one executor": (None, SETTINGS, {"env": "async"}, "async, overlap"),
    "an async env in a short run": (None, SETTINGS, {"env": "async", "timesteps": 2048}, "async, lockstep"),
    "a batched env has one executor": (None, SETTINGS, {"env": "batched"}, "batched, lockstep"),
    "a batched env may overlap if asked": (
        None,
        SETTINGS,
        {"env": "batched", "overlap": "on"},
        "batched, overlap",
    ),
    "the GPU learns while the CPU collects": (QUICK, ON_GPU, {}, "1 collectors, overlap"),
    "with a GPU a heavy env gets a collector on every core": (HEAVY, ON_GPU, {}, "2 collectors, overlap"),
    "a short run on a GPU": (QUICK, ON_GPU, {"timesteps": 2048}, "serial, lockstep"),
    "serial is asked for": (HEAVY, SETTINGS, {"executor": "serial"}, "serial, lockstep"),
    "serial is asked for and nothing was measured": (
        None,
        SETTINGS,
        {"executor": "serial", "overlap": "on"},
        "serial, overlap",
    ),
    "threads are asked for": (QUICK, SETTINGS, {"executor": "thread"}, "thread 16, lockstep"),
    "processes are asked for": (QUICK, SETTINGS, {"executor": "process"}, "process 4, lockstep"),
    "so many workers are asked for": (
        QUICK,
        SETTINGS,
        {"executor": "process", "n_workers": 3},
        "process 3, lockstep",
    ),
    "more workers than envs are asked for": (
        QUICK,
        SETTINGS,
        {"executor": "process", "n_workers": 99},
        "process 16, lockstep",
    ),
    "waiting envs get a worker each": (WAITS, SETTINGS, {"executor": "process"}, "process 16, lockstep"),
    "collectors are asked for": (QUICK, SETTINGS, {"n_collectors": 2}, "2 collectors, lockstep"),
    "one collector beside learning is asked for": (
        QUICK,
        SETTINGS,
        {"n_collectors": 1, "overlap": "on"},
        "1 collectors, overlap",
    ),
    "collectors are asked for on one core": (QUICK, ONE_CORE, {"n_collectors": 2}, "2 collectors, lockstep"),
    "overlap is asked for": (QUICK, SETTINGS, {"overlap": "on"}, "1 collectors, overlap"),
    "overlap is asked for on one core": (QUICK, ONE_CORE, {"overlap": "on"}, "serial, overlap"),
    "overlap is asked for without pickle": (
        replace(QUICK, picklable=False),
        SETTINGS,
        {"overlap": "on"},
        "serial, overlap",
    ),
    "overlap is refused": (WAITS, SETTINGS, {"overlap": "off"}, "thread 16, lockstep"),
    "a resumed run goes on as it began": (
        QUICK,
        SETTINGS,
        {"began_overlapped": True},
        "1 collectors, overlap",
    ),
    "a resumed run does as it is told": (
        QUICK,
        SETTINGS,
        {"began_overlapped": True, "overlap": "off"},
        "serial, lockstep",
    ),
    "an executor of the user's own": (
        QUICK,
        SETTINGS,
        {"executor": "my_file.py:Mine"},
        "my_file.py:Mine, lockstep",
    ),
}


@pytest.mark.parametrize("name", DECISIONS)
def test_the_expected_executor_and_overlap_are_chosen(name: str) -> None:
    costs, settings, request, expected = DECISIONS[name]
    decision = decided(costs, settings, **request)
    assert words(decision) == expected
    assert decision.overlap_reason
    assert all(decision.reasons[way] for way in decision.ways)


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        ({"env": "batched", "executor": "serial"}, "--executor serial cannot run a batched env; use auto"),
        ({"env": "async", "executor": "thread"}, "--executor thread cannot run an async env; use auto"),
        ({"executor": "batched"}, "for envs that step N at once"),
        ({"executor": "async"}, "for envs with async def reset and step"),
    ],
)
def test_what_cannot_run_is_refused(request_: dict[str, Any], error: str) -> None:
    with pytest.raises(FlatoutError, match=error):
        decided(None if "env" in request_ else QUICK, **request_)


@pytest.mark.parametrize("costs", [HEAVY, WAITS])
def test_an_env_that_cannot_be_pickled_has_no_way_with_processes(costs: Costs) -> None:
    assert decided(replace(costs, picklable=False), executor="process").ways == []


def test_other_ways_follow_in_case_the_first_cannot_start() -> None:
    ways = decided(HEAVY).ways
    assert [(way.executor, way.in_subprocesses) for way in ways] == [
        ("serial", True),
        ("process", False),
        ("serial", False),
    ]
    asked = decided(HEAVY, n_collectors=1)
    assert [way.n_collectors for way in asked.ways] == [1, 2, 1, 1]
    assert asked.reasons[asked.ways[0]] == "asked for with --n-collectors 1"
    assert decided(QUICK, overlap="on").ways[-1].executor == "serial"


def test_the_start_of_processes_has_to_pay_within_the_run() -> None:
    serial, two = (
        simulate(HEAVY, w) for w in (SETTINGS, replace(SETTINGS, in_subprocesses=True, n_collectors=2))
    )
    saved = 1 / serial.steps_per_second - 1 / two.steps_per_second
    even = START_SECONDS / saved  # here two collectors take as long as one process
    assert words(decided(HEAVY, timesteps=int(0.9 * even))) == "serial, lockstep"
    assert words(decided(HEAVY, timesteps=int(3 * even))) == "2 collectors, lockstep"


def test_a_gain_below_the_threshold_changes_nothing() -> None:
    """Learning takes so long that faster collecting hardly shortens the run."""
    learning = replace(HEAVY, update=UpdateCost(python=0.0, points=((64, 200e-3),)))
    serial, two = (
        simulate(learning, way).steps_per_second
        for way in (SETTINGS, replace(SETTINGS, in_subprocesses=True, n_collectors=2))
    )
    assert 1 < two / serial < WORTH
    assert words(decided(learning)) == "serial, lockstep"


def test_updates_are_measured_only_if_they_decide() -> None:
    n_measured = 0

    def measure() -> Costs:
        nonlocal n_measured
        n_measured += 1
        return HEAVY

    bare = replace(HEAVY, update=UpdateCost(python=0.0, points=((1, 0.0),)))
    short = decide(Request(timesteps=2048), SETTINGS, bare, with_updates=measure)
    assert (short.ways[0].executor, n_measured) == ("serial", 0)
    long = decide(Request(timesteps=LONG), SETTINGS, bare, with_updates=measure)
    assert (long.ways[0].n_collectors, n_measured) == (2, 1)


def test_a_remembered_gain_decides_on_overlap() -> None:
    for gain, expected in ((MIN_GAIN["computes"] + 0.01, True), (MIN_GAIN["computes"] - 0.01, False)):
        found = decide(
            Request(timesteps=LONG),
            SETTINGS,
            LANDER,
            remember=lambda _, gain=gain: gain,  # type: ignore[misc]
        )
        assert found.overlap is expected


def test_a_learner_that_takes_as_long_as_its_collectors_runs_beside_them() -> None:
    """Four cores, three of them collect: the gain is what collecting took in turn, less what busy cores lose."""
    even = replace(HEAVY, update=UpdateCost(python=0.05e-3, points=((64, 4.1e-3),)))
    four = replace(SETTINGS, n_cores=4)
    found = decided(replace(even, busy=1.0), four)
    assert words(found) == "3 collectors, overlap"
    assert "different cores" in found.overlap_reason
    assert words(decided(replace(even, busy=1.6), four)) == "4 collectors, lockstep"


@pytest.mark.parametrize(
    ("facts", "want"),
    [
        ({"env": "batched"}, False),
        ({"waits": True, "n_epochs": 1}, True),
        ({"n_iterations": MIN_UPDATES // 128 - 1, "spare": True}, False),
        ({"spare": True}, True),
        ({"spare": True, "gain": 1.4}, False),
        ({"spare": True, "n_iterations": 199}, False),
        ({"waits": True, "n_iterations": 61}, True),
        ({"waits": True, "n_iterations": 10}, False),
        ({"waits": True, "gain": 1.1}, False),
        ({"on_device": True}, True),
        ({}, False),
    ],
)
def test_overlap_is_decided_by_facts(facts: dict[str, Any], want: bool) -> None:
    known: dict[str, Any] = {
        "env": "",
        "waits": False,
        "spare": False,
        "on_device": False,
        "gain": 1.6,
    } | facts
    settings = replace(SETTINGS, on_device=known["on_device"], n_epochs=facts.get("n_epochs", 4))
    timesteps = facts.get("n_iterations", 1000) * settings.total_batch
    for wanted, expected in (("auto", want), ("off", False), ("on", True)):
        on, reason = decide_overlap(
            Request(timesteps=timesteps, overlap=wanted, env=known["env"]),
            settings,
            waits=known["waits"],
            cores_to_spare=known["spare"],
            gain=lambda: known["gain"],
        )
        assert on is expected
        assert reason
        assert wanted == "auto" or reason == f"asked for with --overlap {wanted}"


@pytest.mark.parametrize("timesteps", [40_000, 1_000_000, math.inf])
@pytest.mark.parametrize("costs", [LANDER, QUICK, HEAVY, WAITS])
def test_the_report_of_a_run_advises_no_other_way_than_the_one_that_was_chosen(
    costs: Costs, timesteps: float
) -> None:
    """The header of a run, `doctor` and the report of the finished run agree."""
    found = decided(costs, LANDER_SETTINGS, timesteps=timesteps)
    chosen = found.ways[0]
    reached = simulate(costs, chosen)
    case = Case(
        costs=costs,
        settings=chosen,
        timesteps=timesteps,
        steps_per_second=reached.steps_per_second,
        learner_busy=reached.learner_busy,
    )
    kinds = {finding.kind for finding in diagnose(case)}
    assert kinds.isdisjoint({"learns in turn", "too many processes", "envs wait in turn"})
    assert not any("--executor" in finding.flags for finding in diagnose(case))
    assert case.decision("auto").ways[0] == chosen  # what-if, asked about this very machine


def test_lunar_lander_on_two_cores_has_one_answer() -> None:
    short = decided(LANDER, LANDER_SETTINGS, timesteps=40_000)
    assert short.reasons[short.ways[0]].endswith("more processes would not pay")
    assert words(decided(LANDER, LANDER_SETTINGS, timesteps=1_000_000)) == "2 collectors, lockstep"


def test_a_real_run_says_what_was_measured(tmp_path: Path) -> None:
    agent = flatout.PPO(
        "CartPole-v1", preset="auto", n_envs=4, n_steps=16, batch_size=32, runs_dir=tmp_path, run_name="run"
    )
    agent.learn(128)
    measured = agent.summary["measured"]
    assert measured.keys() >= {"step_seconds", "compute_share", "launch_seconds"}
    assert 0 < measured["step_seconds"] < 1e-3
    assert measured["compute_share"] == 1.0
    assert measured["launch_seconds"] is None  # nothing depended on it
    assert "more processes would not pay" in agent.summary["executor"]["reason"]
