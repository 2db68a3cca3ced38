"""Overlap: lag 0 is lockstep to the bit, lag 1 is the same run after run, and nothing is lost on the way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import flatout
from flatout.executors.base import Plan
from flatout.perf.choose import Probe
from flatout.perf.overlap import MIN_UPDATES, Work, decide_overlap
from flatout.training.pipeline import KL_BOUND, Pipeline
from flatout.training.trainer import Trainer
from tests.executors.slow import Counter, Script

SMALL: dict[str, Any] = {
    "preset": "auto",
    "n_envs": 4,
    "n_steps": 16,
    "batch_size": 32,
    "n_epochs": 2,
    "seed": 3,
}
STEPS = 4 * 16 * 6


def params(agent: Any) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in agent.policy.model.parameters()])


def learned(env: Any = "CartPole-v1", steps: int = STEPS, **settings: Any) -> flatout.PPO:
    agent = flatout.PPO(env, **(SMALL | settings))
    agent.learn(steps)
    return agent


def with_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let even a short run overlap with collectors in processes of their own."""
    monkeypatch.setattr("flatout.perf.overlap.MIN_UPDATES", 0)
    monkeypatch.setattr("flatout.perf.overlap.MIN_GAIN", {"waits": 0.0, "computes": 0.0})
    monkeypatch.setattr("flatout.perf.overlap.MIN_ITERATIONS", {"waits": 0, "computes": 0})


def with_lag(monkeypatch: pytest.MonkeyPatch, lag: int) -> None:
    init = Pipeline.__init__

    def changed(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **(options | {"lag": lag}))

    monkeypatch.setattr(Pipeline, "__init__", changed)


def test_lag_forced_to_0_is_lockstep_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    lockstep = learned(overlap="off")
    with_lag(monkeypatch, 0)
    forced = learned(overlap="on", executor="serial")
    assert torch.equal(params(forced), params(lockstep))
    with_children(monkeypatch)
    children = learned()
    assert children.summary["overlap"]["on"]
    assert children.summary["policy_lag_max"] == 0
    assert torch.equal(params(children), params(lockstep))


def test_lag_1_is_the_same_however_and_however_often_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [learned(overlap="on", executor="serial") for _ in range(2)]
    with_children(monkeypatch)
    runs += [learned() for _ in range(2)]
    assert runs[2].summary["executor"]["reason"].startswith("1 collector beside the learner")
    for agent in runs[1:]:
        assert torch.equal(params(agent), params(runs[0]))
    assert not torch.equal(params(runs[0]), params(learned(overlap="off")))
    for agent in runs:
        assert agent.summary["policy_lag_max"] == 1
        assert agent.summary["policy_lag_mean"] == pytest.approx(
            5 / 6
        )  # only the first rollout is of its time
        assert agent.summary["env_steps"] == STEPS


def test_a_run_that_was_stopped_goes_on_as_if_it_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_children(monkeypatch)
    whole = learned()
    half = flatout.PPO("CartPole-v1", **SMALL)
    half.learn(STEPS, callback=lambda progress: progress.env_steps < STEPS // 2)
    half.save(tmp_path / "half.flatout")
    again = flatout.load(tmp_path / "half.flatout")
    again.learn(STEPS - STEPS // 2)
    assert torch.equal(params(again), params(whole))
    assert again.summary["env_steps"] == STEPS


def test_no_step_is_taken_that_nobody_learns_from(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = flatout.PPO("CartPole-v1", **SMALL, overlap="on", executor="serial")
    agent.learn(STEPS)
    assert agent._trainer is not None
    assert agent._trainer._collector.n_steps * 4 == STEPS


@pytest.mark.parametrize("vtrace", [False, True])
def test_an_old_policys_data_is_measured_and_weighed(vtrace: bool) -> None:
    rows: list[dict[str, float]] = []
    agent = flatout.PPO("CartPole-v1", **SMALL, overlap="on", vtrace=vtrace, learning_rate=3e-3)
    agent.learn(STEPS, callback=lambda progress: rows.append(dict(progress.metrics)))
    assert "train/lag_kl" not in rows[0]
    for row in rows[1:]:
        assert 0 < row["train/lag_kl"] < 1
        assert row["train/lag_ratio_max"] > 1
        assert 0 < row["train/lag_effective_share"] <= 1
    plain = learned(overlap="on", learning_rate=3e-3)
    assert torch.equal(params(agent), params(plain)) is not vtrace


def test_a_policy_that_moves_too_fast_falls_back_to_lockstep() -> None:
    rows: list[dict[str, float]] = []
    agent = flatout.PPO(
        "CartPole-v1",
        **(SMALL | {"n_epochs": 20}),
        overlap="on",
        learning_rate=0.02,
        clip_range=5.0,
        ent_coef=0.5,  # keeps it from settling on one action for good
    )
    agent.learn(STEPS * 3, callback=lambda progress: rows.append(dict(progress.metrics)))
    assert agent.summary["overlap"]["fell_back"]
    far = [row.get("train/lag_kl", 0.0) > KL_BOUND for row in rows]
    assert any(all(far[i : i + 3]) for i in range(len(far)))
    assert "train/lag_kl" not in rows[-1]  # the last rollouts were collected by the policy of their time


def test_waiting_envs_overlap_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    with_children(monkeypatch)
    slow = Script(seconds=(0.001, 0.003))
    agent = learned(lambda: Counter(slow), steps=4 * 16 * 3)
    assert agent.summary["overlap"]["on"]
    assert agent.summary["overlap"]["reason"] == "the learner works while envs wait"
    assert agent.summary["policy_lag_max"] == 1


@pytest.mark.parametrize(
    ("facts", "want"),
    [
        ({"batched": True}, False),
        ({"waits": True, "n_updates": 1}, True),
        ({"n_updates": MIN_UPDATES - 1, "can_have_children": True}, False),
        ({"can_have_children": True}, True),
        ({"can_have_children": True, "gain": lambda: 1.4}, False),
        ({"can_have_children": True, "n_iterations": 61}, False),
        ({"waits": True, "n_iterations": 61}, True),
        ({"waits": True, "n_iterations": 10}, False),
        ({"waits": True, "gain": lambda: 1.1}, False),
        ({"on_gpu": True}, True),
        ({}, False),
    ],
)
def test_overlap_is_decided_by_facts(facts: dict[str, Any], want: bool) -> None:
    plain: dict[str, Any] = {"batched": False, "waits": False, "on_gpu": False, "can_have_children": False}
    plain |= {"gain": lambda: 1.6, "n_iterations": 1000}
    on, reason = decide_overlap("auto", **(plain | {"n_updates": 10**6} | facts))
    assert on is want
    assert reason
    assert decide_overlap("off", **(plain | {"n_updates": 1}))[0] is False


def test_an_env_that_fails_while_the_learner_works_ends_the_run_with_its_error() -> None:
    agent = flatout.PPO("CartPole-v1", **SMALL, overlap="on", executor="serial")
    trainer = agent._started()
    assert isinstance(trainer, Trainer)
    step, n = trainer._collector.collect, 0

    def collect(*args: Any) -> Any:
        nonlocal n
        n += 1
        if n == 3:
            raise RuntimeError("the site is gone")
        return step(*args)

    trainer._collector.collect = collect  # type: ignore[assignment,method-assign]
    with pytest.raises(RuntimeError, match="the site is gone"):
        agent.learn(STEPS)


@pytest.mark.parametrize(
    ("alone", "beside", "threads", "gain"),
    [
        # One of 2 cores collects for 1 s; learning takes as long on either number of threads. Busy cores are slower.
        (1.0, 1.0, 1, 2.0 / 1.25),
        # On both cores learning would take half as long: taking turns loses nothing.
        (4.0, 8.0, 1, 5.0 / (1.25 * 8.0)),
        # On both cores also beside the collector: then they are shared, which costs something by itself.
        (4.0, 4.0, 2, 5.0 / (1.25 * 1.3 * 4.5)),
    ],
)
def test_the_gain_of_overlap_counts_the_cores_that_learning_loses(
    alone: float, beside: float, threads: int, gain: float
) -> None:
    step = 0.97 / 64  # of which child collectors lose 3 %
    measured = Probe(
        step_seconds=step,
        step_spread=0.0,
        cpu_share=1.0,
        reset_seconds=0.0,
        obs_bytes=4,
        picklable=True,
        act_seconds=lambda n: 0.0,
    )
    work = Work(
        measured=measured,
        n_envs=8,
        n_steps=8,
        n_cores=2,
        learn_seconds=beside,
        learn_threads=threads,
        alone_seconds=alone,
    )
    lockstep = Plan(kind="serial", steps_per_second=64.0)
    assert (lockstep.steps_per_second, work.best()) == (64.0, 1)
    assert work.gain(lockstep) == pytest.approx(gain)


def test_envs_on_threads_and_updates_take_turns_with_the_lock() -> None:
    measured = Probe(
        step_seconds=10e-3,
        step_spread=0.0,
        cpu_share=0.0,
        reset_seconds=0.0,
        obs_bytes=4,
        picklable=True,
        act_seconds=lambda n: 0.0,
    )
    work = Work(
        measured=measured,
        n_envs=8,
        n_steps=100,
        n_cores=2,
        learn_seconds=1.0,
        learn_threads=1,
        alone_seconds=0.8,
        lock_seconds=0.2,
    )
    on_threads = Plan(kind="thread", steps_per_second=800.0)
    assert work.gain(on_threads) == pytest.approx(1.8 / 1.2)
    slower = replace(work, learn_seconds=2.0, alone_seconds=2.0)
    assert slower.gain(on_threads) == pytest.approx(3.0 / 2.0)
    workers = Plan(kind="process", n_workers=8, steps_per_second=800.0)
    assert work.gain(workers) == work.gain(on_threads)
    light = replace(work, learn_seconds=0.1, alone_seconds=0.1, lock_seconds=0.1)
    assert light.gain(on_threads) == pytest.approx(1.0)
