"""Learning on envs that step N at once: NumPy in every autoreset mode, tensors, Gymnasium's own, and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

import flatout
from flatout.cli.main import run as main
from flatout.errors import EnvError, FlatoutError
from tests.batched import MatchBatch, MatchTensors
from tests.known import LENGTH, Match
from tests.test_agent import same

FAST: dict[str, Any] = {"n_steps": 64, "batch_size": 128, "learning_rate": 3e-3, "device": "cpu"}
MODES = ["SameStep", "NextStep", "Disabled"]


@pytest.mark.parametrize("mode", MODES)
def test_a_batched_env_is_learned_in_each_autoreset_mode(mode: str) -> None:
    agent = flatout.PPO(partial(MatchBatch, mode=mode), n_envs=16, seed=1, **FAST).learn(20_000)
    assert agent.evaluate(20).return_mean >= 0.9 * LENGTH
    assert agent.summary["executor"]["kind"] == "batched"
    assert agent.summary["executor"]["reason"] == "the env steps 16 at once in NumPy"


@pytest.mark.parametrize("mode", MODES)
def test_a_batched_env_object_is_used_for_training_and_evaluation_and_never_closed(mode: str) -> None:
    envs = MatchBatch(6, mode)
    agent = flatout.PPO(envs, seed=1, eval_every=4_000, **FAST).learn(16_000)
    assert agent.config.n_envs == 6
    assert agent.evaluate(20).return_mean >= 0.9 * LENGTH
    agent.learn(1_000)
    assert agent.summary["return_mean"] >= 0.8 * LENGTH
    assert any("evaluation uses the training env, as there is only one" in line for line in agent.header())
    del agent
    assert envs.n_closes == 0


def test_tensor_envs_are_learned_from_a_class_and_from_an_object() -> None:
    agent = flatout.PPO(MatchTensors, n_envs=16, seed=1, **FAST).learn(20_000)
    assert agent.evaluate(20).return_mean >= 0.9 * LENGTH
    assert agent.summary["executor"]["reason"] == "the env steps 16 at once as tensors on cpu"
    envs = MatchTensors(6)
    agent = flatout.PPO(envs, seed=1, eval_every=4_000, **FAST).learn(16_000)
    assert agent.evaluate(20, deterministic=False).return_mean >= 0.8 * LENGTH
    agent.learn(1_000)
    assert agent.summary["return_mean"] >= 0.8 * LENGTH
    assert envs.n_closes == 0


@pytest.mark.parametrize("make", [MatchBatch, partial(MatchBatch, mode="NextStep"), MatchTensors])
def test_the_same_seed_gives_identical_parameters(make: Callable[..., Any]) -> None:
    a, b, c = (flatout.PPO(make, n_envs=5, seed=s, n_steps=32).learn(1_000) for s in (7, 7, 8))
    assert same(a, b)
    assert not same(a, c)
    assert a.summary["env_steps"] == 1_120


class Scarce(MatchTensors):
    """Runs out of memory before it changes anything, in some steps."""

    failing: tuple[int, ...] = ()
    n_tries = 0

    def step(self, actions: Any) -> Any:
        self.n_tries += 1
        if self.n_tries in self.failing:
            raise torch.OutOfMemoryError("out of memory. Tried to allocate 2.00 GiB")
        return super().step(actions)


def test_a_step_that_runs_out_of_memory_is_repeated_once() -> None:
    plain, scarce, hopeless = MatchTensors(6), Scarce(6), Scarce(6)
    scarce.failing, hopeless.failing = (40, 90), (40, 41)
    first, second = (flatout.PPO(envs, seed=2, **FAST).learn(2_000) for envs in (plain, scarce))
    assert same(first, second)
    assert scarce.n_tries > 90
    with pytest.raises(
        EnvError, match=r"^the batched env raised in step at step \d+: .*out of memory[^\n]*$"
    ):
        flatout.PPO(hopeless, seed=2, **FAST).learn(2_000)


def test_a_factory_without_num_envs_decides_the_number_of_envs() -> None:
    for make in (lambda: MatchBatch(5), partial(MatchBatch, num_envs=5)):
        assert flatout.PPO(make, n_steps=32).config.n_envs == 5
        with pytest.raises(FlatoutError, match=r"steps 5 envs at once, which --n-envs 6 cannot change$"):
            flatout.PPO(make, n_envs=6)
    for envs in (MatchBatch(5), MatchTensors(5)):
        assert flatout.PPO(envs, n_envs=5, n_steps=32).config.n_envs == 5
        with pytest.raises(FlatoutError, match=r"steps 5 envs at once, which --n-envs 6 cannot change$"):
            flatout.PPO(envs, n_envs=6)


def test_a_factory_that_takes_a_device_gets_the_learners_device(tmp_path: Path) -> None:
    def make(num_envs: int, device: str = "auto") -> MatchTensors:
        with (tmp_path / "told").open("a") as file:  # also by the process in which it is tried
            file.write(f"{device} ")
        return MatchTensors(num_envs)

    flatout.PPO(make, n_envs=4, n_steps=32, device="cpu").learn(100)
    flatout.PPO(partial(make, device="mine"), n_envs=4, n_steps=32, device="cpu")
    flatout.PPO(make, n_envs=4, n_steps=32, device="cpu", env_kwargs={"device": "his"})
    assert (tmp_path / "told").read_text().split() == ["cpu", "cpu", "mine", "his"]


def test_gymnasiums_own_batched_cartpole_learns() -> None:
    envs = gym.make_vec("CartPole-v1", num_envs=8, vectorization_mode="vector_entry_point")
    agent = flatout.PPO(envs, seed=1, n_steps=128, batch_size=256, learning_rate=1e-3).learn(30_000)
    assert agent.summary["return_mean"] > 60, "a random policy lasts about 22 steps"


def test_an_id_with_a_vector_entry_point_only_is_made_with_make_vec() -> None:
    gym.register("BatchOnly-v0", vector_entry_point="tests.batched:MatchBatch")
    try:
        agent = flatout.PPO("BatchOnly-v0", n_envs=4, n_steps=32, env_kwargs={"mode": "NextStep"}).learn(256)
        assert agent.summary["executor"]["kind"] == "batched"
        assert agent.summary["env_steps"] == 256
        assert flatout.PPO("BatchOnly-v0", n_envs=3, n_steps=32).config.n_envs == 3
    finally:
        gym.registry.pop("BatchOnly-v0")


@pytest.mark.parametrize("make", [MatchBatch, MatchTensors])
def test_a_saved_agent_of_a_batched_env_continues_with_new_episodes_and_says_so(
    make: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "agent.flatout"
    before = flatout.PPO(make, n_envs=6, seed=1, **FAST).learn(16_000)
    before.save(path)
    envs = make(6)
    agent = flatout.load(path, envs)
    agent.learn(1_000)
    assert agent.summary["env_steps"] == before.summary["env_steps"] + 3 * 384
    assert agent.summary["return_mean"] >= 0.8 * LENGTH
    assert any("all its envs started new episodes" in line for line in agent.header())
    assert envs.seeds[-1] not in make(6).seeds + envs.seeds[:-1], "not the episodes it began with"
    by_name = flatout.load(path)
    assert by_name.evaluate(10).return_mean >= 0.9 * LENGTH
    with pytest.raises(FlatoutError, match="steps 7 envs at once"):
        flatout.load(path, make(7)).learn(100)


def test_other_executors_are_refused_for_batched_envs_and_batched_for_others() -> None:
    with pytest.raises(FlatoutError, match=r"^--executor process cannot run a batched env; use auto$"):
        flatout.PPO(MatchBatch(4), executor="process", n_steps=32).learn(100)
    with pytest.raises(FlatoutError, match=r"^--executor batched is for envs that step N at once; this"):
        flatout.PPO("CartPole-v1", executor="batched").learn(100)
    assert flatout.PPO(MatchBatch(4), executor="batched", n_steps=32).learn(100).summary["env_steps"] == 128
    with pytest.raises(FlatoutError, match="an env that is made already"):
        flatout.PPO(MatchBatch(4), env_kwargs={"mode": "NextStep"})


@pytest.mark.parametrize(
    ("make", "fault", "message"),
    [
        (MatchBatch, "four", "step() returned 4 values; Gymnasium's step returns 5"),
        (MatchBatch, "nan", "env 1 gave a NaN observation at step 1"),
        (MatchBatch, "obs", "observation at step 1 has shape (3, 4); for 4 envs it must be (4, 4)"),
        (MatchBatch, "reward", "reward at step 1 has shape (4, 1); for 4 envs it must be (4,)"),
        (MatchBatch, "flags", "terminated at step 1 is not an array of bools"),
        (MatchBatch, "raise", "raised in step 1: ValueError: no more"),
        (MatchBatch, "space", "single_action_space is a Text; supported are"),
        (MatchTensors, "final", "step() gave no info['final_obs']"),
        (MatchTensors, "numpy", "observation at step 1 is a ndarray, not a torch tensor"),
    ],
)
def test_a_broken_batched_env_is_refused_in_one_line(
    make: Callable[..., Any], fault: str, message: str
) -> None:
    with pytest.raises(FlatoutError) as error:
        flatout.PPO(make(4, fault=fault))
    assert message in str(error.value)
    assert str(error.value).startswith(f"tests.batched:{make.__name__}: ")
    assert "\n" not in str(error.value)


def test_make_vec_refuses_batched_envs() -> None:
    for source in (MatchBatch, MatchBatch(4), lambda: MatchTensors(4)):
        with pytest.raises(
            FlatoutError, match=r"made a batched Match(Batch|Tensors); a single env is needed"
        ):
            flatout.make_vec(source, n_envs=2)


def test_harmless_deviations_are_reported_and_accepted() -> None:
    envs = MatchBatch(4, "NextStep")
    envs.metadata = {}
    assert any("metadata['autoreset_mode'] is missing" in line for line in flatout.PPO(envs).header())


def test_the_check_leaves_a_batched_env_in_new_episodes() -> None:
    envs = MatchBatch(4)
    flatout.PPO(envs, n_steps=32)
    assert len(envs.seeds) == 2
    assert (envs._count <= 0).all()


FILE = """
from tests.batched import MatchBatch

def make(num_envs):
    return MatchBatch(num_envs, mode="NextStep")
"""


def test_the_command_trains_resumes_and_evaluates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.py").write_text(FILE)
    flags = "--n-envs 4 --n-steps 32 --run-name r --quiet --json"
    assert main(f"train my.py:make --timesteps 512 --eval-every 256 {flags}".split()) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["executor"]["kind"] == "batched"
    assert main("resume r --timesteps 1024 --quiet --json".split()) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["env_steps"] == 1024
    assert main("evaluate r --episodes 5 --json".split()) == 0
    assert np.isfinite(json.loads(capsys.readouterr().out.splitlines()[-1])["return_mean"])


def test_an_agent_of_a_batched_env_continues_in_single_envs(tmp_path: Path) -> None:
    path = tmp_path / "agent.flatout"
    flatout.PPO(MatchBatch, n_envs=6, seed=1, **FAST).learn(16_000).save(path)
    agent = flatout.load(path, Match).learn(1_000)
    assert agent.summary["executor"]["kind"] != "batched"
    assert agent.summary["return_mean"] >= 0.8 * LENGTH
