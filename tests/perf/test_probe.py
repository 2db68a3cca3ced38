"""Measuring an env's steps: waiting and computing are distinguished, also on a busy machine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

import flatout
from benchmarks.envs import Burn, Wait
from flatout.envs.make import env_factory
from flatout.envs.spaces import ActionLayout
from flatout.perf.costs import Costs
from flatout.perf.probe import time_steps
from tests.known import OnlyTheMaskTells


@pytest.fixture
def crowd() -> Iterator[None]:
    """Four processes that keep every core busy."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    yield
    for process in busy:
        process.kill()
        process.wait()


def probed(env: type[Burn] | type[Wait], max_steps: int) -> Costs:
    return time_steps(env_factory(env), ActionLayout(env.action_space), seed=0, max_steps=max_steps)


@pytest.mark.usefixtures("crowd")
def test_an_env_that_has_to_share_its_core_is_not_taken_for_one_that_waits() -> None:
    found = probed(Burn, 200)
    assert not found.waits
    assert found.compute_share > 0.9


@pytest.mark.usefixtures("crowd")
def test_an_env_that_waits_is_recognised() -> None:
    found = probed(Wait, 30)
    assert found.waits
    assert found.step_seconds > 5e-3


class Strict(OnlyTheMaskTells):
    """Raises on an action that its mask does not allow."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert action == self._target
        return super().step(action)


@pytest.mark.parametrize("where", ["obs", "info"])
def test_an_env_that_raises_on_masked_actions_is_timed_with_allowed_ones(where: str) -> None:
    agent = flatout.PPO(Strict, env_kwargs={"where": where}, n_envs=4, n_steps=32, batch_size=64)
    trainer = agent.trainer(512)
    agent.close()
    assert "could not be timed" not in trainer.plan_reason
    envs = flatout.make_vec(partial(Strict, where), 2)
    envs.close()
    assert "could not be" not in " ".join(envs.notes)
