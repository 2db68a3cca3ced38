"""Overlap: lag 0 equals lockstep to the bit, lag 1 is deterministic, and no step is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import flatout
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
CHILDREN: dict[str, Any] = {"overlap": "on", "n_collectors": 1}


def params(agent: Any) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in agent.policy.model.parameters()])


def learned(env: Any = "CartPole-v1", steps: int = STEPS, **settings: Any) -> flatout.PPO:
    agent = flatout.PPO(env, **(SMALL | settings))
    agent.learn(steps)
    return agent


def with_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let even a short run overlap."""
    monkeypatch.setattr("flatout.perf.decide.MIN_UPDATES", 0)
    monkeypatch.setattr("flatout.perf.decide.MIN_GAIN", {"waits": 0.0, "computes": 0.0})
    monkeypatch.setattr("flatout.perf.decide.MIN_ITERATIONS", {"waits": 0, "computes": 0})


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
    children = learned(**CHILDREN)
    assert children.summary["executor"]["children"]
    assert children.summary["policy_lag_max"] == 0
    assert torch.equal(params(children), params(lockstep))


def test_lag_1_is_deterministic_in_one_process_and_with_subprocesses() -> None:
    runs = [learned(overlap="on", executor="serial") for _ in range(2)]
    runs += [learned(**CHILDREN) for _ in range(2)]
    assert runs[2].summary["executor"]["children"]
    for agent in runs[1:]:
        assert torch.equal(params(agent), params(runs[0]))
    assert not torch.equal(params(runs[0]), params(learned(overlap="off")))
    for agent in runs:
        assert agent.summary["policy_lag_max"] == 1
        assert agent.summary["policy_lag_mean"] == pytest.approx(
            5 / 6
        )  # only the first rollout is of its time
        assert agent.summary["env_steps"] == STEPS


def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path: Path) -> None:
    whole = learned(**CHILDREN)
    half = flatout.PPO("CartPole-v1", **(SMALL | CHILDREN))
    half.learn(STEPS, callback=lambda progress: progress.env_steps < STEPS // 2)
    half.save(tmp_path / "half.flatout")
    again = flatout.load(tmp_path / "half.flatout")
    again.learn(STEPS - STEPS // 2)
    assert torch.equal(params(again), params(whole))
    assert again.summary["env_steps"] == STEPS


def test_every_collected_step_is_learned_from(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = flatout.PPO("CartPole-v1", **SMALL, overlap="on", executor="serial")
    agent.learn(STEPS)
    assert agent._trainer is not None
    assert agent._trainer.collector.n_steps * 4 == STEPS


@pytest.mark.parametrize("vtrace", [False, True])
def test_lag_is_measured_and_vtrace_changes_the_update(vtrace: bool) -> None:
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


def test_a_policy_that_changes_too_fast_falls_back_to_lockstep() -> None:
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


def test_overlap_is_on_by_default_for_envs_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    with_overlap(monkeypatch)
    slow = Script(seconds=(0.001, 0.003))
    agent = learned(lambda: Counter(slow), steps=4 * 16 * 3)
    assert agent.summary["overlap"]["on"]
    assert agent.summary["overlap"]["reason"] == "the learner works while envs wait"
    assert agent.summary["policy_lag_max"] == 1


def test_an_env_that_fails_while_the_learner_works_ends_the_run_with_its_error() -> None:
    agent = flatout.PPO("CartPole-v1", **SMALL, overlap="on", executor="serial")
    trainer = agent.trainer()
    assert isinstance(trainer, Trainer)
    step, n = trainer.collector.collect, 0

    def collect(*args: Any) -> Any:
        nonlocal n
        n += 1
        if n == 3:
            raise RuntimeError("the site is gone")
        return step(*args)

    trainer.collector.collect = collect  # type: ignore[assignment,method-assign]
    with pytest.raises(RuntimeError, match="the site is gone"):
        agent.learn(STEPS)
