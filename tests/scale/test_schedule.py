"""How many runs go side by side, on which cores, for given demands and measured speeds."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from flatout.perf.demand import Demand, predict
from flatout.scale.runner import Job, mps_runs
from flatout.scale.schedule import WINDOW_SECONDS, Running, Schedule

COMPUTES = Demand(steps_per_second=1000.0, cores=1.0)
WAITS = Demand(steps_per_second=1000.0, cores=0.1)
ON_CARD = Demand(steps_per_second=1000.0, cores=0.2, device=0.3)


def schedule_of(n_cores: int, at_once: int | None = None) -> Schedule:
    schedule = Schedule(at_once)
    schedule.n_cores, schedule._cores = n_cores, list(range(n_cores)) if n_cores > 1 else [0]
    return schedule


def running(n: int, demand: Demand, *, settled: bool = True, device: str = "cpu") -> list[Running]:
    made = [Running(str(i), Path("nowhere"), demand, device=device) for i in range(n)]
    for it in made:
        it.is_settled = settled
    return made


@pytest.mark.parametrize(
    ("n_cores", "n", "demand", "settled", "device", "expected"),
    [
        (2, 0, COMPUTES, False, "cpu", True),
        (2, 1, COMPUTES, False, "cpu", True),  # what only computes is certain before it is measured
        (2, 2, COMPUTES, True, "cpu", False),
        (4, 3, COMPUTES, True, "cpu", True),
        (2, 1, WAITS, False, "cpu", False),  # first see whether it really waits
        (2, 8, WAITS, True, "cpu", True),
        (2, 1, ON_CARD, False, "cuda:0", False),
        (2, 3, ON_CARD, True, "cuda:0", True),
        (2, 4, ON_CARD, True, "cuda:0", False),  # the card is full, the cores are not
    ],
)
def test_a_run_begins_if_cores_and_card_have_room(
    n_cores: int, n: int, demand: Demand, settled: bool, device: str, expected: bool
) -> None:
    runs = running(n, demand, settled=settled, device=device)
    assert schedule_of(n_cores).admits(runs, demand, device) is expected


def test_memory_and_the_users_number_are_limits() -> None:
    huge = replace(WAITS, memory=10**15)
    assert not schedule_of(2).admits(running(1, WAITS), huge)
    assert schedule_of(2).admits([], huge), "one run is always tried"
    assert schedule_of(2, at_once=3).admits(running(2, COMPUTES), COMPUTES)
    assert not schedule_of(2, at_once=3).admits(running(3, COMPUTES), COMPUTES)


def test_runs_share_the_cores() -> None:
    schedule = schedule_of(4)
    assert schedule.cores_for([], COMPUTES, 1) == ()  # all
    assert schedule.cores_for([], COMPUTES, 2) == (0, 1)
    assert schedule.cores_for([], COMPUTES, 9) == (0,)
    first = running(2, COMPUTES)
    first[0].cores, first[1].cores = (0,), (2,)
    assert schedule.cores_for(first, COMPUTES, 2) == (1,)
    assert schedule_of(1).cores_for([], COMPUTES, 3) == ()


def write_progress(run: Path, steps: float, updated: float) -> None:
    run.mkdir(exist_ok=True)
    known = {"env_steps": steps, "updated": updated, "wall_seconds": 60.0, "learner_busy": 0.2}
    (run / "progress.json").write_text(json.dumps(known))


def pass_time(schedule: Schedule, runs: list[Running], rate: float, at: float) -> float:
    """Let runs go on at this rate each, for as long as is measured; returns the new time."""
    for seconds in (0.0, WINDOW_SECONDS + 1):
        for it in runs:
            write_progress(it.run, 1e5 + rate * (at + seconds), at + seconds)
        schedule.measure({it.name: it for it in runs})
    return at + WINDOW_SECONDS + 2


@pytest.mark.parametrize(
    ("rate", "expected"), [(1000.0, True), (900.0, True), (505.0, False), (300.0, False)]
)
def test_a_second_run_that_brings_nothing_is_the_last(rate: float, expected: bool, tmp_path: Path) -> None:
    schedule = schedule_of(64)
    runs = [Running(name, tmp_path / name, COMPUTES) for name in "ab"]
    now = pass_time(schedule, runs[:1], 1000.0, time.time())
    assert schedule.admits(runs[:1], COMPUTES)
    pass_time(schedule, runs, rate, now)
    assert schedule.admits(runs[:1], COMPUTES) is expected
    if not expected:
        assert "a second run brought" in schedule.reason


def test_a_run_that_is_slower_than_predicted_still_counts(tmp_path: Path) -> None:
    schedule = schedule_of(64)
    first, second = (Running(name, tmp_path / name, COMPUTES) for name in "ab")
    now = pass_time(schedule, [first], 1000.0, time.time())
    second.predicted = replace(COMPUTES, steps_per_second=100_000.0)  # it does a hundredth of that
    pass_time(schedule, [first, second], 1000.0, now)
    assert schedule.admits([first], COMPUTES)


@pytest.mark.parametrize(("rate", "expected"), [(900.0, True), (700.0, False)])
def test_runs_that_wait_are_added_while_the_last_one_paid_though_cores_seem_full(
    rate: float, expected: bool, tmp_path: Path
) -> None:
    schedule, half = schedule_of(2), replace(WAITS, cores=0.6)
    runs = [Running(str(i), tmp_path / str(i), half) for i in range(3)]
    now = pass_time(schedule, runs[:2], 1000.0, time.time())
    assert schedule.admits(runs[:2], half)
    pass_time(schedule, runs, rate, now)
    assert schedule.admits(runs, half) is expected
    assert not schedule.admits(runs, COMPUTES), "what computes needs a core"
    if not expected:
        assert schedule.reason == "3 keep 2 cores busy"


def test_what_was_measured_replaces_what_was_predicted(tmp_path: Path) -> None:
    write_progress(tmp_path / "a", 100.0, time.time() + 1)
    samples = [
        {"t": float(i), "run_cpu": 30.0, "run_memory": 2e9, "memory": 3e9, "cores": [5.0]} for i in range(9)
    ]
    began = {"began": time.time(), "offset": 0.0}
    (tmp_path / "a" / "samples.jsonl").write_text("".join(json.dumps(it) + "\n" for it in [began, *samples]))
    for predicted, cores in ((WAITS, 0.3), (COMPUTES, 1.0)):  # a run that computes may be starved, not idle
        it = Running("a", tmp_path / "a", predicted)
        it.look()
        assert it.is_settled
        assert it.demand.cores == pytest.approx(cores)
        assert it.demand.memory == 2_000_000_000


def predicted(folder: Path, on_device: bool = False, **settings: object) -> Demand:
    return predict(
        Job("a", {"env": "CartPole-v1", **settings}, folder).resolved(), n_cores=1, on_device=on_device
    )


WAITING = """
import time, gymnasium as gym
class Waits(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Discrete(2)
    def reset(self, seed=None, options=None):
        return self.observation_space.low, {}
    def step(self, action):
        time.sleep(0.01)
        return self.observation_space.low, 1.0, False, False, {}
"""


def test_predictions_follow_the_settings(tmp_path: Path) -> None:
    plain = predicted(tmp_path)
    assert plain.cores == 1.0
    assert predicted(tmp_path, network_arch=(512, 512)).steps_per_second < plain.steps_per_second / 3
    assert predicted(tmp_path, n_epochs=200).steps_per_second < plain.steps_per_second / 3
    assert predicted(tmp_path, algo="dqn", buffer_size=10**7, timesteps=10**7).memory > plain.memory + 10**8
    card = predicted(tmp_path, on_device=True)
    assert 0 < card.device < 1
    (tmp_path / "own.py").write_text(WAITING)
    waits = predicted(tmp_path, env=f"{tmp_path}/own.py:Waits", n_envs=8)
    assert waits.cores < 0.7
    assert waits.steps_per_second < 800


def test_cuda_mps_is_found_by_its_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert not mps_runs()
    (tmp_path / "control").touch()
    assert mps_runs()
