"""`flatout sweep --ray`: trials on the machines of a cluster; one that is lost is tried again, and nothing is left at the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from flatout.errors import FlatoutError
from flatout.runlog.folder import holder, is_locked
from flatout.scale.cluster import see
from tests.cli.test_runs import TINY
from tests.collect.test_ray import of_ray
from tests.command import command, flatout
from tests.scale.test_jobs import wait_until

pytest.importorskip("ray")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]
SWEEP = ["sweep", "CartPole-v1", *TINY[:4], *TINY[6:], "--checkpoint-every", "1024", "--name", "s", "--ray"]


def machine_of(run: Path, cluster: Any) -> Any:
    """The cluster's machine on which a run trains."""
    above = {it.pid for it in psutil.Process(holder(run)["pid"]).parents()}
    return next(it for it in cluster.worker_nodes if it.all_processes["raylet"][0].process.pid in above)


def processes_in(folder: Path) -> list[psutil.Process]:
    """Commands of flatout that work in a folder."""
    return [
        it for it in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(it.info["cmdline"] or [])
    ]


@pytest.mark.slow
def test_a_machine_that_dies_costs_only_its_trial_which_is_tried_again(tmp_path: Path, cluster: Any) -> None:
    argv = [*SWEEP, "--timesteps", "40960", "--trials", "1", "--candidates", "1", "--new-seeds", "1"]
    argv += ["--ray-address", cluster.address, "--json"]
    sweep = subprocess.Popen(command(*argv), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    first = tmp_path / "runs" / "s" / "trial-0000"
    wait_until(lambda: any(first.glob("checkpoints/*")) and is_locked(first), sweep)
    cluster.remove_node(machine_of(first, cluster), allow_graceful=False)
    out, errors = sweep.communicate()
    assert sweep.returncode == 0, errors.decode()
    assert "trial-0000: its process was killed; it starts again" in errors.decode()
    result = json.loads(out.splitlines()[-1])
    assert result["status"] == "finished"
    assert result["trials"]["done"] + result["trials"]["pruned"] == 1
    assert json.loads((first / "summary.json").read_text())["env_steps"] >= 1024
    assert not processes_in(tmp_path)


@pytest.mark.slow
def test_ctrl_c_stops_trials_that_go_on_later_and_ends_a_cluster_of_its_own(tmp_path: Path) -> None:
    before = {it.pid for it in of_ray()}
    argv = [*SWEEP, "--timesteps", "300000000", "--trials", "2", "--quiet"]
    sweep = subprocess.Popen(command(*argv), cwd=tmp_path, start_new_session=True)
    first = tmp_path / "runs" / "s" / "trial-0000"
    wait_until(lambda: (first / "progress.json").exists(), sweep)
    os.killpg(sweep.pid, signal.SIGINT)  # as a terminal does
    assert sweep.wait(200) == 130
    assert json.loads((first / "summary.json").read_text())["status"] == "stopped"
    assert any(first.glob("checkpoints/*.flatout"))
    assert not processes_in(tmp_path)
    assert not {it.pid for it in of_ray()} - before


def test_a_folder_that_is_not_shared_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mark").write_text("of another machine")
    with pytest.raises(FlatoutError, match=r"does not see .*; --runs-dir must be a folder that all machines"):
        see(str(tmp_path / "mark"), "of the driver")


def test_trials_do_not_have_collectors_on_the_cluster_too(tmp_path: Path) -> None:
    done = flatout(*SWEEP, "--executor", "ray", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "leave out --executor ray" in done.stderr
