"""doctor and tune on envs with a known fault, in short real runs."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import flatout
from flatout.advice import doctor, tune
from flatout.config.run_config import resolve
from flatout.errors import FlatoutError
from flatout.perf.costs import Costs, Network, Settings, UpdateCost
from flatout.perf.decide import describe
from tests import command
from tests.executors.slow import Counter, Script

SMALL: dict[str, Any] = {
    "preset": "auto",
    "n_steps": 32,
    "batch_size": 64,
    "n_epochs": 2,
    "network_arch": (32, 32),
}


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "BENCHMARK_SECONDS", 0.5)
    monkeypatch.setattr(tune, "TRIAL_SECONDS", 0.5)
    monkeypatch.setattr("flatout.advice.short_benchmark.ENV_SECONDS", 0.5)


def waiting() -> Counter:
    return Counter(Script(seconds=(0.02, 0.03)))  # much longer than a busy machine takes for the rest


@pytest.mark.slow
def test_envs_that_wait_in_turn_get_the_advice_to_use_threads() -> None:
    found = flatout.doctor(waiting, **(SMALL | {"n_steps": 8}), n_envs=8, executor="serial", overlap="off")
    first = found.findings[0]
    assert first.kind == "envs wait in turn"
    assert first.flags == ("--executor", "thread")
    assert first.gain is not None
    assert first.gain > 3  # eight that wait at the same time
    assert found.waits
    text = str(found)
    assert "1. the envs wait, one after the other" in text
    assert "pipeline limit" in text
    assert found.command.startswith("flatout train ")
    assert "--executor thread" in found.command
    assert json.loads(json.dumps(found.to_json()))["findings"][0]["kind"] == first.kind


def test_checkpoints_at_every_iteration_are_a_finding() -> None:
    found = flatout.doctor("CartPole-v1", **SMALL, n_envs=4, checkpoint_every=1, overlap="off", compile="off")
    assert "checkpoints too often" in [finding.kind for finding in found.findings]


@pytest.mark.slow
def test_what_if_predicts_other_machines() -> None:
    here = flatout.doctor(waiting, **(SMALL | {"n_steps": 8}), n_envs=8, overlap="off", what_if="n_envs=64")
    assert here.what_if is not None
    assert here.what_if["steps_per_second"] > 1.2 * here.steps_per_second
    assert "what if n_envs 64" in str(here)
    card = flatout.doctor(
        "CartPole-v1", **(SMALL | {"network_arch": (512, 512)}), n_envs=8, what_if="gpu=a100,cores=16"
    )
    assert card.what_if is not None
    assert card.what_if["learn_rate"] > card.forecast.learn_rate
    assert "from its data sheet, not measured" in str(card)
    assert card.what_if["memory_share"] < 0.01
    small = "n_envs=20000,n_steps=30000,gpu=rtx3070"
    big = flatout.doctor("CartPole-v1", **SMALL, n_envs=4, what_if=small)
    assert "× the card's memory: fewer envs or shorter rollouts" in str(big)


def test_the_command_line_prints_json(tmp_path: Path) -> None:
    argv = "doctor CartPole-v1 --preset auto --n-envs 4 --n-steps 32 --batch-size 64 --json".split()
    done = command.flatout(*argv, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["steps_per_second"] > 0
    assert 0 < found["learner_busy"] <= 1
    assert list(tmp_path.iterdir()) == []  # it leaves nothing behind


@pytest.mark.slow
def test_tune_finds_faster_settings_and_preset_auto_uses_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path))
    settings = SMALL | {"n_steps": 16, "n_envs": 4}
    found = flatout.tune(waiting, budget=20, executor="serial", overlap="off", **settings)
    assert found.best is not found.before
    assert found.best.measured > 1.5 * found.before.measured
    config = found.config
    assert config.executor != "serial"
    assert config.total_batch == 4 * 16  # what is learned from stays
    assert config.algorithm.batch_size == 64
    path = tmp_path / "tuned.json"
    tune.save(found, path)
    assert resolve(None, {}, device="cpu", n_cores=2, file=path) == config
    cores = flatout.PPO("CartPole-v1").machine.cores
    auto = resolve(config.env, {"preset": "auto"}, device="cpu", n_cores=cores)
    assert (auto.n_envs, auto.executor, auto.overlap) == (config.n_envs, config.executor, config.overlap)
    own = resolve(config.env, {"preset": "auto", "n_envs": 3}, device="cpu", n_cores=cores)
    assert (own.n_envs, own.executor) == (3, "auto")  # who says how many envs decides


def test_tune_corrects_its_predictions_by_its_measurements() -> None:
    base = Settings(n_envs=8, n_steps=32, batch_size=64, n_epochs=4, executor="serial")

    def trial(executor: str, n_envs: int, predicted: float, measured: float = 0.0) -> tune.Trial:
        way = replace(base, executor=executor, n_envs=n_envs)
        return tune.Trial(settings=way, config={}, predicted=predicted, measured=measured)

    before = trial("serial", 8, 100, 100)
    reckoned = [trial("thread", 8, 300), trial("thread", 16, 290), trial("process", 8, 200)]
    first = tune._most_promising(reckoned, [before])
    assert first is reckoned[0]
    disappointing = replace(first, measured=150)
    assert tune._most_promising(reckoned, [before, disappointing]) is reckoned[2]
    rest = [before, disappointing, replace(reckoned[2], measured=170)]
    assert tune._most_promising(reckoned, rest) is None  # threads with 16 envs would give 145


def test_tune_repeats_trials_close_to_the_best() -> None:
    base = Settings(n_envs=8, n_steps=32, batch_size=64, n_epochs=4, executor="serial")

    def trial(n_envs: int, measured: float) -> tune.Trial:
        return tune.Trial(settings=replace(base, n_envs=n_envs), config={}, predicted=100, measured=measured)

    before, slow, near, fast, nearer = trials = [trial(n, x) for n, x in enumerate((90, 60, 91, 100, 95), 1)]
    assert tune._contenders(trials) == [fast, before, nearer]  # not near: three are enough
    assert tune._contenders([slow, near, fast]) == [fast, near]
    assert tune._contenders([before]) == [before]


def test_an_agent_with_changed_settings_does_not_check_the_env_again() -> None:
    made = []

    def env() -> Counter:
        made.append(1)
        return Counter(Script())

    agent = flatout.PPO(env, **SMALL, n_envs=4, executor="serial", overlap="off", seed=3)
    n_made = len(made)
    other = agent.changed({"n_envs": 2, "n_steps": 64})
    assert len(made) == n_made
    assert (other.config.n_envs, other.config.total_batch) == (2, agent.config.total_batch)
    assert other.policy.model is not agent.policy.model
    assert other.learn(256).summary["env_steps"] == 256
    assert agent.summary == {}
    other.close()


def test_n_collectors_sets_the_number_of_collectors() -> None:
    agent = flatout.PPO("CartPole-v1", **SMALL, n_envs=4, n_collectors=2, overlap="off")
    agent.learn(4 * 32 * 2)
    assert agent.summary["executor"]["collectors"] == 2
    assert agent.summary["executor"]["reason"] == "asked for with --n-collectors 2"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("latency=3", "latency=3: it must be a number above 0, such as 10us or 10ms or 10s"),
        ("bandwidth=0Gbit", "bandwidth=0Gbit: it must be a number above 0, such as 10Mbit or 10Gbit"),
        ("colectors=4", "did you mean 'collectors'"),
    ],
)
def test_a_network_is_wished_for_in_units(text: str, words: str) -> None:
    with pytest.raises(FlatoutError, match=re.escape(words)):
        doctor.parse_what_if(text)


def test_a_network_is_answered_with_as_few_collectors_as_feed_the_learner() -> None:
    update = UpdateCost(python=0.0, points=((64, 1e-3),))
    costs = Costs(wait=(0.0,), compute=(1e-3,), store=0.0, update=update, busy=1.0, ray_call=1e-4)
    network = Network(latency=1e-3, bandwidth=1e9, cores=4)
    settings = Settings(n_envs=64, n_steps=32, batch_size=64, n_epochs=4, on_device=True, network=network)
    fed = doctor.across(costs, settings, 1e9)
    assert fed.n_collectors == 16  # 128 ms of stepping beside 166 ms of learning; 8 take 256 ms
    assert "16 Ray actors on 4 other machines with 4 cores" in describe(fed)
    assert doctor.across(costs, settings, 1e9, 3).n_collectors == 3
