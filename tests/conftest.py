"""Tests do not depend on earlier runs, nor on how pytest was started: a cache folder of their own, no signal ignored."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

from .card_process import IN_CHILD, run_in_child

if "PYTEST_XDIST_WORKER" not in os.environ and IN_CHILD not in os.environ:  # one folder for all processes
    os.environ["FLATOUT_CACHE"] = tempfile.mkdtemp(prefix="flatout-tests-")
# As flatout does, if it is imported before torch; otherwise the threads of all the tests' processes would spin.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Hundreds of processes would each compile what they import.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# A shell's background job has SIGINT ignored, one under nohup SIGHUP, and the children of the tests would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Tests of the simulated card run in a child process."""
    if item.get_closest_marker("card") is None or IN_CHILD in os.environ:
        return None
    run_in_child(item)
    item.session._setupstate.teardown_exact(
        nextitem
    )  # what a test of the same file before it has left set up
    return True


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A Ray cluster of two machines with a core each, beside the head, all of them processes here."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    yield cluster
    import ray

    ray.shutdown()
    cluster.shutdown()  # type: ignore[no-untyped-call]
