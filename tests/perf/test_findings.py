"""Each bottleneck is found from its figures, and nothing is found where all is well."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flatout.perf.case import Case
from flatout.perf.costs import Costs, Settings, UpdateCost
from flatout.perf.findings import UNFILLED_CARD, diagnose, findings_of_run
from flatout.perf.simulate import simulate
from flatout.runlog.samples import Samples, read_samples

FAST = UpdateCost(python=0.05e-3, points=((256, 0.5e-3),))
EAGER = UpdateCost(python=2e-3, points=((8, 2e-3), (256, 2.4e-3)))
CARTPOLE = Costs(wait=(0.0,), compute=(10e-6,), act=((1, 20e-6), (32, 40e-6)), update=EAGER, compiled=FAST)
WAITS = replace(CARTPOLE, wait=(10e-3,), compute=(0.1e-3,))
BURNS = replace(CARTPOLE, compute=(300e-6,))
SETTINGS = Settings(
    n_envs=32, n_steps=32, batch_size=256, n_epochs=4, executor="serial", n_cores=2, compiled=True
)
THREADS = replace(SETTINGS, executor="thread", n_workers=32, overlap=True)
IN_TURN = replace(THREADS, overlap=False, compiled=False)
CHILD = replace(SETTINGS, in_subprocesses=True, overlap=True)


def case(costs: Costs, settings: Settings, **facts: Any) -> Case:
    now = simulate(costs, settings)
    reached = {"steps_per_second": now.steps_per_second, "learner_busy": now.learner_busy}
    return Case(costs=costs, settings=settings, **(reached | facts))


CASES: list[tuple[str, Case, tuple[str, ...]]] = [
    ("envs wait in turn", case(WAITS, SETTINGS), ("--executor", "thread")),
    ("envs wait", case(WAITS, replace(THREADS, n_envs=8, n_steps=128)), ("--n-envs", "128")),
    ("slow env", case(replace(WAITS, slowness=(1.0,) * 31 + (10.0,)), THREADS), ()),
    ("env computes", case(BURNS, SETTINGS), ("--executor", "auto")),
    (
        "too many processes",
        case(BURNS, replace(SETTINGS, executor="process", n_workers=32)),
        ("--executor", "auto"),
    ),
    (
        "big network",
        case(
            replace(CARTPOLE, update=UpdateCost(python=2e-3, points=((256, 0.1),)), compiled=None),
            replace(CHILD, compiled=False),
            network_arch=(1024, 1024),
            smaller=((256, 256), UpdateCost(python=2e-3, points=((256, 5e-3),))),
        ),
        ("--network-arch", "256,256"),
    ),
    (
        "tiny batches",
        case(replace(CARTPOLE, compiled=None), replace(CHILD, batch_size=8, compiled=False)),
        ("--batch-size", "256"),
    ),
    ("update overhead", case(CARTPOLE, replace(CHILD, compiled=False)), ("--compile", "on")),
    (
        "useless epochs",
        case(
            CARTPOLE,
            replace(CHILD, n_epochs=30),
            metrics={"train/clip_fraction": 0.4, "train/approx_kl": 0.05},
        ),
        ("--n-epochs", "10"),
    ),
    (
        "checkpoints too often",
        case(CARTPOLE, CHILD, phases={"checkpoint": 0.5}, checkpoint_every=1),
        ("--checkpoint-every", "200000"),
    ),
    (
        "evaluation too often",
        case(CARTPOLE, CHILD, phases={"evaluate": 0.3}, eval_every=1024),
        ("--eval-every", "50000"),
    ),
    (
        "learns in turn",
        case(
            replace(WAITS, update=UpdateCost(python=0.05e-3, points=((256, 20e-3),)), compiled=None), IN_TURN
        ),
        ("--overlap", "on"),
    ),
    ("memory near the limit", case(CARTPOLE, CHILD, memory_share=0.95), ("--n-steps", "16")),
    (
        "memory near the limit",
        case(CARTPOLE, replace(CHILD, on_device=True), memory_share=0.95),
        ("--accumulate", "2"),
    ),
    ("throttled", case(CARTPOLE, CHILD, throttled=("power cap",)), ()),
    ("copies", case(CARTPOLE, replace(SETTINGS, on_device=True), phases={"stage": 0.2}), ("--overlap", "on")),
    (
        "GPU slower than CPU",
        case(
            replace(CARTPOLE, update=UpdateCost(python=2e-3, points=((256, 5e-3),))),
            replace(CHILD, on_device=True, compiled=False),
            on_cpu=FAST,
        ),
        ("--device", "cpu"),
    ),
    (
        "small network on a big GPU",
        case(BURNS, replace(CHILD, on_device=True, n_collectors=2), device_utilization=0.1),
        (),
    ),
]


@pytest.mark.parametrize(("kind", "of", "flags"), CASES, ids=[kind for kind, _, _ in CASES])
def test_each_bottleneck_is_found(kind: str, of: Case, flags: tuple[str, ...]) -> None:
    found = diagnose(of)
    finding = next(f for f in found if f.kind == kind)
    assert finding.flags[: len(flags)] == flags
    assert finding.evidence
    if flags and finding.gain is not None:
        assert finding.gain > 1.05
        assert finding.steps_per_second == pytest.approx(finding.gain * of.steps_per_second)
        assert found[0] == max(found, key=lambda f: f.gain or 0.0)


def test_a_card_that_one_run_cannot_fill_is_left_to_several() -> None:
    """Without NVML the device's own clock tells."""
    waiting = replace(THREADS, on_device=True)
    (finding,) = [f for f in diagnose(case(WAITS, waiting)) if f.kind == UNFILLED_CARD]
    share = float(finding.what.removeprefix("the work of one run is ").removesuffix(" % of this GPU"))
    assert 0 < share < 10
    n_runs = float(finding.change.partition("about ")[2].partition(" ")[0])
    assert n_runs * share == pytest.approx(100, abs=max(share, n_runs))
    assert "more runs side by side" in finding.change
    assert "or a larger network" in finding.change
    assert "more epochs do not count" in finding.change
    assert finding.flags == ()
    turns = replace(
        WAITS, wait=(0.2e-3,), compute=(0.05e-3,)
    )  # busy, if only the envs waited at the same time
    in_turn = case(turns, replace(SETTINGS, on_device=True, n_epochs=20))
    assert in_turn.learner_busy < 0.3 < in_turn.predict(in_turn.decision("auto").ways[0])[1]
    assert UNFILLED_CARD not in [f.kind for f in diagnose(in_turn)]
    assert UNFILLED_CARD not in [f.kind for f in diagnose(case(WAITS, THREADS))]  # on the CPU


def test_nothing_is_found_where_all_is_well() -> None:
    """A compiled update beside a collector, evenly matched."""
    even = replace(CARTPOLE, compute=(12e-6,))
    assert diagnose(case(even, replace(CHILD, n_epochs=8))) == []


def test_records_that_say_too_little_give_no_finding() -> None:
    assert findings_of_run({}, {}, {}) == []
    assert findings_of_run({"wall_seconds": None, "phases": 3}, {"n_envs": "x"}, {"cores": 2}) == []


def test_a_short_run_is_not_told_to_start_processes() -> None:
    assert "env computes" in [f.kind for f in diagnose(case(BURNS, SETTINGS, timesteps=10_000_000))]
    assert "env computes" not in [f.kind for f in diagnose(case(BURNS, SETTINGS, timesteps=2_000))]


def test_a_cheaper_step_is_advised_only_if_steps_are_most_of_collecting() -> None:
    both = replace(SETTINGS, in_subprocesses=True, n_collectors=2)
    slow_policy = replace(CARTPOLE, act=((1, 5e-3), (32, 5e-3)))
    assert "make a step cheaper" in diagnose(case(BURNS, both))[0].change
    assert not any("make a step cheaper" in finding.change for finding in diagnose(case(slow_policy, both)))


def test_an_env_that_cannot_be_pickled_is_not_told_to_use_processes() -> None:
    assert "env computes" not in [f.kind for f in diagnose(case(replace(BURNS, picklable=False), SETTINGS))]


def test_the_records_of_a_run_on_a_gpu_show_its_load(tmp_path: Path) -> None:
    def samples(reasons: list[list[str]], memory: float) -> Samples:
        lines = [
            {"t": t, "gpu": {"memory": memory, "memory_total": 100.0, "throttled": why}}
            for t, why in enumerate(reasons)
        ]
        path = tmp_path / "samples.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in [{"began": 0}, *lines]))
        return read_samples(path)

    summary = {
        "wall_seconds": 10.0,
        "env_steps": 10_240,
        "updates": 40,
        "steps_per_second": 1_024.0,
        "learner_busy": 0.1,
        "device": "cuda",
        "device_utilization": 0.1,
        "compiled": True,
        "executor": {"kind": "serial", "collectors": 1, "children": False, "workers": 0},
        "overlap": {"on": False},
        "phases": {"update": 1.0, "wait": 9.0, "stage": 2.0},
        "lanes": {"collector 0": {"act": 1.0, "env": 8.0}},
        "measured": {"step_seconds": 800e-6, "compute_share": 1.0, "launch_seconds": None, "picklable": True},
    }
    config = {
        "algo": "ppo",
        "n_envs": 32,
        "network": {"network_arch": [64, 64]},
        "ppo": {"n_steps": 32, "batch_size": 256, "n_epochs": 1},
        "eval_every": 0,
        "checkpoint_every": 0,
    }
    system = {"cores": 2, "memory_bytes": 100}
    hot = samples([["power cap"]] * 3 + [[]] * 7 + [["thermal"]], memory=95.0)
    found = {f.kind: f for f in findings_of_run(summary, config, system, hot)}
    assert found.keys() >= {"throttled", "memory near the limit", "copies", "small network on a big GPU"}
    assert found["throttled"].evidence == "it gives as reason: power cap"  # not what one sample says
    on_its_clock = summary | {"phases": {"update": 1.0, "wait": 9.0, "stage": 0.001}}
    assert "copies" not in {f.kind for f in findings_of_run(on_its_clock, config, system, hot)}
    lanes = {"lanes": {"collector 0": {"act": 1.0, "env": 8.0}, "device": {"stage": 2.0, "update": 1.0}}}
    assert "copies" in {f.kind for f in findings_of_run(on_its_clock | lanes, config, system, hot)}
    quiet = {f.kind for f in findings_of_run(summary, config, system, samples([[]] * 10, memory=5.0))}
    assert quiet.isdisjoint({"throttled", "memory near the limit"})
