"""The simulation against closed-form answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flatout.perf.costs import Costs, Network, Settings, UpdateCost, at
from flatout.perf.simulate import (
    FEW_ENV_STEPS,
    MAX_ENV_STEPS,
    Activity,
    Compute,
    Cores,
    Signal,
    Wait,
    collect_seconds,
    iteration_seconds,
    lockstep_seconds,
    simulate,
)

UPDATE = UpdateCost(python=1e-3, points=((64, 2e-3),))
PLAIN = Costs(
    wait=(0.0,),
    compute=(100e-6,),
    act=((1, 50e-6),),
    update=UPDATE,
    store=0.0,
    iteration=0.0,
    learn_overhead=1.0,
    busy=1.0,
    crowded=1.0,
)
SETTINGS = Settings(n_envs=8, n_steps=32, batch_size=64, n_epochs=4, executor="serial", n_cores=2)
COLLECT = 32 * (8 * 100e-6 + 50e-6 * 8)
"""Acting is linear beyond its only point."""
LEARN = 16 * 2e-3


def costs(**changes: Any) -> Costs:
    return replace(PLAIN, **changes)


def settings(**changes: Any) -> Settings:
    return replace(SETTINGS, **changes)


def test_lines_through_points() -> None:
    points = ((1, 10.0), (11, 20.0))
    assert [at(points, n) for n in (1, 6, 11, 21)] == [10.0, 15.0, 20.0, 30.0]
    assert at(points, 0) == 10.0


def test_lockstep_is_the_sum() -> None:
    got = simulate(PLAIN, SETTINGS)
    assert got.collect_rate == pytest.approx(256 / COLLECT)
    assert got.learn_rate == pytest.approx(256 / LEARN)
    assert got.steps_per_second == pytest.approx(256 / (COLLECT + LEARN))
    assert got.learner_busy == pytest.approx(LEARN / (COLLECT + LEARN))


def test_overlap_on_separate_cores_takes_as_long_as_the_slower_part() -> None:
    beside = settings(in_subprocesses=True, overlap=True)
    got = simulate(costs(handover=0.0), beside)
    assert got.steps_per_second == pytest.approx(256 / max(COLLECT, LEARN), rel=1e-3)
    alone = simulate(costs(handover=0.0), replace(beside, n_cores=1))
    assert alone.steps_per_second == pytest.approx(
        256 / (COLLECT + LEARN), rel=1e-3
    )  # one core: nothing gained


def test_overlap_in_one_process_shares_pythons_lock() -> None:
    got = simulate(PLAIN, settings(overlap=True))
    locked = COLLECT + LEARN / 2  # half of an update only computes
    assert got.steps_per_second == pytest.approx(256 / locked, rel=0.05)


def test_collectors_on_two_cores_take_half_as_long() -> None:
    got = simulate(costs(handover=0.0), settings(in_subprocesses=True, n_collectors=2))
    assert got.collect_rate == pytest.approx(2 * 256 / COLLECT, rel=1e-3)


def test_envs_that_wait_do_so_at_the_same_time() -> None:
    waiting = costs(wait=(10e-3,), compute=(0.0,), act=((1, 1e-6),), passing=0.0, hold=0.0)
    threads = simulate(waiting, settings(executor="thread", n_workers=8))
    assert threads.collect_rate == pytest.approx(8 / 10e-3, rel=0.01)
    in_turn = simulate(waiting, SETTINGS)
    assert in_turn.collect_rate == pytest.approx(1 / 10e-3, rel=0.01)


def test_a_rollout_waits_for_its_slowest_env() -> None:
    waiting = costs(wait=(1e-3,), compute=(0.0,), act=((1, 1e-6),), passing=0.0, hold=0.0)
    slow = replace(waiting, slowness=(1.0,) * 7 + (20.0,))
    got = simulate(slow, settings(executor="thread", n_workers=8))
    assert got.collect_rate == pytest.approx(8 / 20e-3, rel=0.01)


def test_worker_processes_pay_for_every_message() -> None:
    workers = settings(executor="process", n_workers=2)
    got = simulate(costs(handover=1e-3), workers)
    step = 4 * 100e-6 + 0.5e-3 + 8 * 50e-6 + 2 * 0.5e-3
    assert got.collect_rate == pytest.approx(8 / step)


def test_a_network_delays_every_rollout_and_overlap_hides_it_behind_learning() -> None:
    network = Network(latency=10e-3, bandwidth=1e6, cores=4, param_bytes=2000, step_bytes=100)
    remote = settings(executor="ray", in_subprocesses=True, n_collectors=8, network=network, on_device=True)
    own = costs(act=((1, 0.0),), ray_call=1e-3)
    collect = 32 * 100e-6 + 3 * 10e-3 + 2 * 2000 / 1e6 + 256 * 100 / 1e6 + 8 * 1e-3  # two machines, one link
    got = simulate(own, remote)
    assert got.collect_rate == pytest.approx(256 / collect)
    assert got.steps_per_second == pytest.approx(256 / (collect + LEARN))
    beside = simulate(own, replace(remote, overlap=True))
    assert beside.steps_per_second == pytest.approx(256 / collect, rel=0.02)


def test_long_rollouts_are_scaled_not_cut() -> None:
    got = simulate(PLAIN, settings(n_steps=3200))
    assert got.steps_per_second == pytest.approx(simulate(PLAIN, SETTINGS).steps_per_second, rel=0.01)


def test_the_same_seed_gives_the_same_forecast() -> None:
    noisy = costs(wait=(1e-3, 5e-3, 9e-3), compute=(0.0,) * 3)
    threads = settings(executor="thread", overlap=True)
    assert simulate(noisy, threads) == simulate(noisy, threads)


def test_cores_are_shared_and_signals_wake_activities() -> None:
    cores, log = Cores(1), []
    signal = Signal()

    def worker(name: str) -> Activity:
        yield Compute(1.0)
        log.append((name, cores.now))
        cores.fire(signal)

    def waiter() -> Activity:
        yield signal
        yield Wait(0.5)
        log.append(("waiter", cores.now))

    cores.start(worker("a"))
    cores.start(worker("b"))
    cores.start(waiter())
    cores.run()
    assert [name for name, _ in log] == ["a", "b", "waiter"]
    assert [at for _, at in log] == pytest.approx([2.0, 2.0, 2.5])


def test_beside_learning_envs_that_wait_do_not_wait_for_each_other() -> None:
    uneven = costs(wait=(5e-3, 15e-3), compute=(0.0, 0.0), act=((1, 1e-6),), passing=0.0, hold=0.0)
    quick = UpdateCost(python=1e-5, points=((64, 1e-5),))
    threads = settings(executor="thread", n_workers=8, n_steps=8)
    in_turn = simulate(replace(uneven, update=quick), threads)
    assert in_turn.steps_per_second < 0.9 * 8 / 10e-3
    beside = simulate(replace(uneven, update=quick), replace(threads, overlap=True))
    assert beside.steps_per_second > 1.05 * in_turn.steps_per_second


def test_busy_and_crowded_cores_are_slower() -> None:
    two = settings(in_subprocesses=True, n_collectors=2)
    busy = simulate(costs(handover=0.0, busy=1.25), two)
    assert busy.collect_rate == pytest.approx(2 * 256 / COLLECT / 1.25, rel=1e-3)
    assert simulate(costs(busy=1.25), SETTINGS).collect_rate == pytest.approx(
        256 / COLLECT
    )  # nobody else works
    beside = replace(two, overlap=True)  # two collectors and a learner on two cores
    crowded = simulate(costs(handover=0.0, crowded=1.3), beside).steps_per_second
    assert crowded < 0.85 * simulate(costs(handover=0.0), beside).steps_per_second
    assert simulate(costs(handover=0.0, crowded=1.3), two).collect_rate == pytest.approx(
        2 * 256 / COLLECT, rel=1e-3
    )


def test_an_update_on_fewer_threads_beside_collectors_has_its_own_cost() -> None:
    slow = costs(handover=0.0, beside=UpdateCost(python=0.0, points=((64, 8e-3),)))
    beside = settings(in_subprocesses=True, overlap=True)
    assert simulate(slow, beside).steps_per_second == pytest.approx(256 / (16 * 8e-3), rel=1e-3)
    assert simulate(slow, SETTINGS) == simulate(PLAIN, SETTINGS)


WAYS: dict[str, dict[str, Any]] = {
    "serial": {},
    "two collectors": {"in_subprocesses": True, "n_collectors": 2},
    "workers": {"executor": "process", "n_workers": 4},
    "threads": {"executor": "thread", "n_workers": 8},
}


@pytest.mark.parametrize("way", WAYS)
def test_the_closed_form_of_lockstep_agrees_with_the_simulation(way: str) -> None:
    """`train` adds learning to a simulated rollout; within 2 % that is what simulating the whole iteration gives."""
    waits: dict[str, Any] = {"wait": (4e-3, 6e-3), "compute": (50e-6, 50e-6)} if way == "threads" else {}
    real, how = costs(busy=1.25, crowded=1.3, store=25e-6, iteration=1e-3, **waits), settings(**WAYS[way])
    whole, _ = iteration_seconds(real, how)
    assert lockstep_seconds(real, how, collect_seconds(real, how)) == pytest.approx(whole, rel=0.02)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_short_simulation_agrees_with_a_long_one(way: str, overlap: bool) -> None:
    """Decisions before a run simulate a few hundred env steps, predictions thousands: the same within 10 %."""
    uneven = costs(wait=(2e-3, 5e-3, 8e-3), compute=(1e-4, 2e-4, 3e-4))
    how = settings(n_envs=16, overlap=overlap, **WAYS[way])
    few, many = (simulate(uneven, how, n).steps_per_second for n in (FEW_ENV_STEPS, MAX_ENV_STEPS))
    assert few == pytest.approx(many, rel=0.1)
