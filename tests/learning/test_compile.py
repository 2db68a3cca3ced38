"""The compiled update: a real compilation, the same results, the cache between runs, and failures."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
import pytest
import torch
from gymnasium import spaces

import flatout
from flatout.algorithms import ppo
from flatout.algorithms.base import LearnerSpec
from flatout.algorithms.ppo.config import PPOConfig
from flatout.envs.spaces import ActionLayout, ObsLayout
from flatout.errors import FlatoutError
from flatout.learning.compile import Compilation, Recipe, cached_path, check_same, compiled_here
from flatout.learning.learner import Learner
from flatout.models.config import NetworkConfig

SETTINGS: dict[str, Any] = {
    "preset": "auto",
    "n_envs": 4,
    "n_steps": 16,
    "batch_size": 32,
    "n_epochs": 2,
    "network_arch": (16, 16),
    "activation": "silu",  # has no fused update
    "normalize_obs": True,
    "seed": 3,
    "executor": "serial",
    "overlap": "off",
}


SPEC = LearnerSpec(
    algorithm=ppo.ALGORITHM,
    config=PPOConfig(batch_size=32),
    network=NetworkConfig(network_arch=(16, 16)),
    obs=ObsLayout(spaces.Box(-1, 1, (4,))),
    action=ActionLayout(spaces.Discrete(2)),
    seed=0,
    n_envs=1,
)


def make_recipe(precision: str = "fp32", n_threads: int = 1, **changes: Any) -> Recipe:
    return Recipe(spec=replace(SPEC, **changes), device="cpu", precision=precision, n_threads=n_threads)


def make_learner(recipe: Recipe) -> Learner[Any]:
    learner = recipe.spec.make_learner("cpu", "fp32")
    learner.update.begin(1e-3, 0.2)
    return learner


def learned(compile: str) -> tuple[torch.Tensor, flatout.PPO]:
    agent = flatout.PPO("CartPole-v1", **SETTINGS, compile=compile)
    agent.learn(4 * 16 * 5)
    return torch.cat([p.detach().reshape(-1) for p in agent.policy.model.parameters()]), agent


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.slow
def test_an_update_is_compiled_once_and_then_reused(cache: Path) -> None:
    eager, agent = learned("auto")  # nothing is kept yet, and a short run does not compile
    assert not agent.summary["compiled"]
    assert agent.summary["backend"] == "eager"
    compiled, agent = learned("on")
    assert agent.summary["compiled"]
    assert agent.summary["backend"] == "compiled"
    assert agent.summary["phases"]["compile"] > 1
    torch.testing.assert_close(compiled, eager, rtol=1e-3, atol=1e-4)
    assert [path.suffix for path in (cache / "updates").iterdir()] == [".so"]  # no working files left behind
    again, agent = learned("auto")
    assert agent.summary["compiled"]  # the kept one, at once
    assert agent.summary["phases"]["compile"] < 1
    assert torch.equal(again, compiled)
    assert torch.equal(learned("on")[0], compiled)
    assert torch.equal(learned("off")[0], eager)


def test_a_fused_update_is_not_compiled_and_off_means_eager(cache: Path) -> None:
    agent = flatout.PPO("CartPole-v1", **SETTINGS | {"activation": "tanh"}, compile="auto")
    agent.learn(4 * 16 * 5)
    assert agent.summary["compiled"]  # from the first update on
    assert "compile" not in agent.summary["phases"]
    assert agent.summary["backend"] == "fused"
    assert not (cache / "updates").exists()
    agent = flatout.PPO("CartPole-v1", **SETTINGS | {"activation": "tanh"}, compile="off")
    agent.learn(4 * 16)
    assert agent.summary["backend"] == "eager"


class Pictures(gym.Env[Any, Any]):
    observation_space = spaces.Box(0, 255, (3, 8, 8), np.uint8)
    action_space = spaces.Discrete(2)

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.observation_space.sample(), 1.0, bool(self.np_random.random() < 0.1), False, {}


@pytest.mark.parametrize(("env", "compiles"), [("CartPole-v1", True), (Pictures, False)])
def test_on_one_core_images_are_not_compiled_unless_the_user_says_so(
    env: Any, compiles: bool, cache: Path
) -> None:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        agent = flatout.PPO(env, **SETTINGS | {"normalize_obs": False}, compile="auto").learn(4 * 16 * 2)
    finally:
        os.sched_setaffinity(0, cores)
    assert (agent.trainer().learner.compilation is not None) == compiles


def test_learning_continues_while_the_update_is_compiled(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flatout.learning.compile.WORTH_SECONDS", 0.0)
    recipe = make_recipe()
    learner = make_learner(recipe)
    compilation = Compilation(recipe, wait=False)
    batch, update = learner.example_batch(32), learner.update
    n, deadline = 0, monotonic() + 240
    while update.backend == "eager" and monotonic() < deadline:
        update.step(batch)
        n += 1
        sleep(0.02)  # leaves the compiler a core
        compilation.visit(update, batch, seconds_left=1.0)
    assert compilation.notes == [
        "compiling the update in the background",
        "the update is compiled from here on",
    ]
    assert n > 100
    before = update.n_taken.clone()
    update.step(batch)
    assert update.n_taken == before + 1


def test_a_compilation_ends_with_its_run(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flatout.learning.compile.WORTH_SECONDS", 0.0)
    recipe = make_recipe(network=NetworkConfig(network_arch=(16, 16, 16)))
    learner, compilation = make_learner(recipe), Compilation(recipe, wait=False)
    batch = learner.example_batch(32)
    compilation.visit(learner.update, batch, seconds_left=1.0)
    assert compilation._compiler is not None
    pid = compilation._compiler.pid
    compilation.close()
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie"


def test_a_step_that_computes_something_else_is_refused() -> None:
    learner = make_learner(make_recipe())
    batch, update = learner.example_batch(32), learner.update
    pure = update.pure(batch)
    check_same(update, pure, batch)

    def wrong(state: Any, settings: Any, buffers: Any, tensors: Any) -> Any:
        new = list(pure(state, settings, buffers, tensors))
        return [new[0] + 0.01, *new[1:]]

    with pytest.raises(FlatoutError, match="differs from the eager one"):
        check_same(update, wrong, batch)


def test_a_library_is_checked_at_the_learning_rate_and_clip_range_of_the_run() -> None:
    """At a clip range of 0 rounding decides which samples have a gradient, so equal code could seem different."""
    seen: list[tuple[float, float]] = []

    class Watch:
        only_cached = False
        wait = False
        notes: list[str] = []  # noqa: RUF012

        def visit(self, update: Any, batch: Any, *, seconds_left: float) -> None:
            seen.append((float(update.learning_rate), float(update.coefficient)))

        def close(self) -> None: ...

    agent = flatout.PPO("CartPole-v1", **SETTINGS, learning_rate=0.5, clip_range=0.25, compile="off")
    agent.trainer().learner.compilation = Watch()
    agent.learn(64)
    assert seen == [(0.5, 0.25)]


def test_the_pure_step_equals_the_update_to_the_bit() -> None:
    learner = make_learner(make_recipe(config=PPOConfig(batch_size=32, target_kl=0.01, clip_range_vf=0.2)))
    batch, update = learner.example_batch(32), learner.update
    for _ in range(5):
        new = update.pure(batch)(*update.inputs(batch))
        for a, b in zip(new, update.next_state(batch), strict=True):
            assert torch.equal(a, b)
        update.commit(new)


@pytest.mark.parametrize(
    "changes",
    [
        {"obs": ObsLayout(spaces.Box(-1, 1, (5,)))},
        {"action": ActionLayout(spaces.Discrete(3))},
        {"network": NetworkConfig(network_arch=(16, 17))},
        {"config": PPOConfig(batch_size=64)},
        {"config": PPOConfig(batch_size=32, vf_coef=0.4)},
        {"precision": "bf16"},
        {"n_threads": 2},
    ],
)
def test_everything_that_the_code_depends_on_changes_its_cache_key(changes: dict[str, Any]) -> None:
    assert make_recipe(**changes).key() != make_recipe().key()


def test_arguments_of_the_step_do_not_change_its_cache_key() -> None:
    other = PPOConfig(batch_size=32, learning_rate=1e-2, n_epochs=9, n_steps=77, clip_range=0.1, gamma=0.5)
    assert make_recipe(config=other).key() == make_recipe().key()


def test_a_cut_library_is_removed_and_not_loaded(cache: Path) -> None:
    recipe = make_recipe()
    learner, path = make_learner(recipe), cached_path(recipe)
    path.parent.mkdir(mode=0o700)
    library = next(Path(torch.__file__).parent.glob("lib/libc10*.so")).read_bytes()
    path.write_bytes(library[: len(library) // 2])  # loading it is a bus error
    compilation = Compilation(recipe, wait=False)
    compilation.only_cached = True
    compilation.visit(learner.update, learner.example_batch(32), seconds_left=1e6)
    assert learner.update.backend == "eager"
    assert compilation.notes == []
    assert not path.exists()


def test_a_cache_folder_that_others_can_write_to_is_not_used(cache: Path) -> None:
    recipe = make_recipe()
    learner = make_learner(recipe)
    for mode, uid in ((0o777, -1), (0o770, -1), *([(0o700, 12345)] if os.geteuid() == 0 else [])):
        folder = cached_path(recipe).parent
        folder.mkdir()
        folder.chmod(mode)
        os.chown(folder, uid, -1)
        compilation = Compilation(recipe, wait=True)
        compilation.visit(learner.update, learner.example_batch(32), seconds_left=1e6)
        assert learner.update.backend == "eager"
        assert f"others can write to {folder}" in compilation.notes[0]
        folder.rmdir()


def test_a_step_compiled_for_a_graph_is_the_updates(cache: Path) -> None:
    """On a card a graph captures it; here it is called."""
    learner, plain = (make_learner(make_recipe()) for _ in range(2))
    for it in (learner, plain):
        it.update.begin(1e-3, 0.2)  # at a clip range of 0 rounding would decide about gradients
    example = learner.example_batch(32)
    # Gradients that are zero but for rounding would be enlarged by Adam: every one must have a direction.
    noise = torch.Generator().manual_seed(1)
    obs = tuple(torch.randn(x.shape, generator=noise) for x in example.obs)
    batch = replace(example, obs=obs, returns=torch.randn(32, generator=noise) + 1)
    learner.update.compiled_step = compiled_here(learner.update, batch)
    for _ in range(3):
        learner.update.captured_step(batch)
        plain.update.captured_step(batch)
    torch.testing.assert_close(learner.params.flat, plain.params.flat, atol=1e-5, rtol=1e-4)
    assert float(learner.update.n_steps) == 3
