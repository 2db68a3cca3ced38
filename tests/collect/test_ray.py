"""Collectors on a Ray cluster: the same run as with local collectors, whatever happens to its nodes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch

import flatout
from flatout.errors import FlatoutError

pytest.importorskip("ray")
pytestmark = pytest.mark.filterwarnings("ignore")  # of Ray's own

SETTINGS: dict[str, Any] = {
    "seed": 3,
    "n_envs": 6,
    "n_steps": 32,
    "batch_size": 64,
    "n_collectors": 2,
    "compile": "off",
    "checkpoint_every": 0,
}
N_ITERATIONS = 8


def trained(callback: Callable[[Any], bool] | None = None, **how: Any) -> flatout.Agent:
    return flatout.PPO("CartPole-v1", **SETTINGS, **how).learn(6 * 32 * N_ITERATIONS, callback=callback)


def same(a: flatout.Agent, b: flatout.Agent) -> bool:
    ours, theirs = a.policy.model.state_dict(), b.policy.model.state_dict()
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture(scope="module")
def local() -> flatout.Agent:
    return trained(overlap="on")


def of_ray() -> list[psutil.Process]:
    return [
        p
        for p in psutil.process_iter(["name"])
        if "raylet" in p.info["name"] or "gcs_server" in p.info["name"]
    ]


def test_a_run_on_a_cluster_of_its_own_equals_a_local_one_and_leaves_nothing(local: flatout.Agent) -> None:
    before = {p.pid for p in of_ray()}
    agent = trained(overlap="on", executor="ray")
    assert same(agent, local)
    assert agent.summary["executor"]["kind"] == "ray"
    assert agent.summary["return_mean"] == local.summary["return_mean"]
    agent.close()
    until = time.monotonic() + 60
    while {p.pid for p in of_ray()} - before and time.monotonic() < until:
        time.sleep(0.2)
    assert not {p.pid for p in of_ray()} - before


def test_a_node_that_dies_in_mid_rollout_changes_nothing(cluster: Any, local: flatout.Agent) -> None:
    seen = 0

    def lose_a_node(_: Any) -> bool:
        nonlocal seen
        seen += 1
        if seen == 3:  # its envs are in the middle of the rollout after this one
            a_node_in_use = next(iter(cluster.worker_nodes))
            cluster.add_node(num_cpus=1)
            cluster.remove_node(a_node_in_use, allow_graceful=False)
        return True

    agent = trained(lose_a_node, overlap="on", executor="ray", ray_address=cluster.address)
    assert same(agent, local)
    assert agent.summary["restarts"] >= 1
    agent.close()


def test_a_cluster_that_is_not_there_is_named() -> None:
    with pytest.raises(FlatoutError, match=r"--ray-address 127\.0\.0\.1:1: .*refused"):
        trained(executor="ray", ray_address="127.0.0.1:1")


def test_an_address_needs_the_executor() -> None:
    with pytest.raises(FlatoutError, match="--ray-address auto needs --executor ray"):
        trained(ray_address="auto")
