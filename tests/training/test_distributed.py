"""Several ranks: they learn the same to the bit, and what one process learns; lost ranks, signals, mistakes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from flatout.training.checkpoint import CheckpointFolder
from tests import ranks
from tests.command import flatout

pytestmark = pytest.mark.timeout(
    900
)  # every run is several processes that import torch, and there may be one core
SECONDS = 400.0
ON_CARDS = ["ppo", "truncated", "overlap", "pqn", "prioritized"]
TRAIN = (
    "train CartPole-v1 --devices 2 --seed 1 --checkpoint-every 2000 --runs-dir runs --run-name run".split()
)
BROKEN = """
import os
import gymnasium as gym
import numpy as np
from gymnasium import spaces

class Broken(gym.Env):
    observation_space, action_space = spaces.Box(-1, 1, (2,)), spaces.Discrete(2)
    n = 0
    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}
    def step(self, action):
        self.n += 1
        if self.n > 300 and os.environ.get("RANK") == "1":
            raise OSError("the simulator is gone")
        return np.zeros(2, np.float32), 1.0, self.n % 10 == 0, False, {}
"""


@pytest.fixture(scope="module")
def one_process() -> dict[str, list[Any]]:
    return {case: ranks.learn(case, "cpu") for case in ranks.CASES}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory, one_process: Any) -> dict[str, list[Any]]:
    """After the runs in one process: these have compiled what all of them need."""
    return ranks.run(tmp_path_factory.mktemp("ranks"), list(ranks.CASES))


@pytest.mark.parametrize("case", ranks.CASES)
def test_parameters_are_the_same_on_all_ranks_after_every_iteration(case: str, two_ranks: Any) -> None:
    first, second = two_ranks[case]
    assert len(first) == len(second) == ranks.N_ITERATIONS
    for ours, theirs in zip(first, second, strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("case", ranks.CASES)
def test_two_ranks_learn_what_one_process_learns(case: str, one_process: Any, two_ranks: Any) -> None:
    alone, (together, _) = one_process[case], two_ranks[case]
    for name in alone[-1]:
        if name.startswith(("model.", "target", "obs_moments", "reward_scaler")):
            difference = (alone[-1][name] - together[-1][name]).abs()
            assert not difference.numel() or float(difference.max()) < 1e-5, name
    assert any((alone[-1][name] != alone[0][name]).any() for name in alone[0] if name.startswith("model."))


@pytest.mark.slow
def test_two_simulated_devices_learn_what_one_process_learns_on_the_cpu(
    tmp_path: Path, one_process: Any
) -> None:
    for case, (first, second) in ranks.run(tmp_path, ON_CARDS, "sim").items():
        for ours, theirs in zip(first, second, strict=True):
            assert all(torch.equal(ours[name], theirs[name]) for name in ours), case
        alone = one_process[case][-1]
        for name in (name for name in alone if name.startswith(("model.", "target", "obs_moments"))):
            assert torch.allclose(alone[name], first[-1][name], rtol=0, atol=1e-5), (case, name)


def test_a_run_whose_ranks_differ_in_one_bit_ends(tmp_path: Path) -> None:
    codes, said = ranks.start(tmp_path, ["damaged"])
    assert codes == [1, 1]
    assert "the ranks' parameters differ" in said


class Run:
    """A `flatout` command in a folder of its own."""

    def __init__(self, folder: Path, *words: str, program: tuple[str, ...] = ("-m", "flatout")) -> None:
        self.folder = folder
        # Initial weights are rounded by the number of threads, and torchrun would change it.
        env = os.environ | {"PYTHONPATH": str(ranks.ROOT), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, *program, *words],
            cwd=folder,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for_checkpoint(self) -> None:
        until = time.monotonic() + SECONDS
        while not list(self.folder.glob("runs/run/checkpoints/step-*")):
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < until
            time.sleep(0.05)

    @property
    def ranks(self) -> list[psutil.Process]:
        """The processes of the ranks, in order."""
        children = psutil.Process(self.process.pid).children()
        return sorted(children, key=lambda child: int(child.environ()["RANK"]))

    def end(self) -> tuple[int, str, str]:
        """Exit code, standard output and standard error."""
        out, err = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, out, err

    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "runs/run/summary.json").read_text())
        return found

    def parameters(self) -> dict[str, torch.Tensor]:
        _, checkpoint, _ = CheckpointFolder(self.folder / "runs/run/checkpoints").newest()
        return {name: x for name, x in checkpoint.tensors.items() if name.startswith("model.")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that nothing happened to."""
    run = Run(tmp_path_factory.mktemp("whole"), *TRAIN, "--timesteps", "20000", "--quiet")
    code, out, err = run.end()
    assert (code, out, err) == (0, "", "")
    return run


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_run_goes_on_after_a_rank_was_killed_and_learns_the_same(
    rank: int, whole: Run, tmp_path: Path
) -> None:
    run = Run(tmp_path, *TRAIN, "--timesteps", "20000")
    run.wait_for_checkpoint()
    run.ranks[rank].kill()
    code, _, err = run.end()
    assert code == 0, err
    assert f"note: rank {rank} was killed by SIGKILL; restart 1 of 3, from the newest checkpoint" in err
    assert err.count("devices: 2, each with 4 envs and 128 samples of a minibatch") == 2
    assert run.summary()["status"] == "finished"
    ours, theirs = run.parameters(), whole.parameters()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
def test_a_rank_that_hangs_is_given_up_in_time_and_without_restarts_left_the_run_ends(tmp_path: Path) -> None:
    run = Run(tmp_path, *TRAIN, "--timesteps", "500000", "--max-restarts", "0", "--rank-timeout", "5")
    run.wait_for_checkpoint()
    processes = run.ranks
    processes[1].suspend()
    code, _, err = run.end()
    assert code == 75
    assert "flatout: rank 0 of 2 lost the others" in err
    assert not any(process.is_running() for process in processes)
    assert run.summary()["status"] == "failed"


@pytest.fixture
def stopped(tmp_path: Path) -> Run:
    """A run that Ctrl-C has stopped."""
    run = Run(tmp_path, *TRAIN, "--timesteps", "500000", "--json")
    run.wait_for_checkpoint()
    processes = run.ranks
    run.process.send_signal(signal.SIGINT)
    code, out, err = run.end()
    assert code == 130, err
    assert json.loads(out.splitlines()[-1])["status"] == "stopped"
    assert not any(process.is_running() for process in processes)
    return run


def test_all_ranks_stop_after_ctrl_c_and_the_run_goes_on_with_any_number_of_ranks(stopped: Run) -> None:
    n_steps = stopped.summary()["env_steps"]
    for more, devices in ((2000, "2"), (4000, "1")):
        until = n_steps + more
        words = "resume runs/run --quiet --timesteps".split()
        code, _, err = Run(stopped.folder, *words, str(until), "--devices", devices).end()
        assert (code, err) == (0, "")
        summary = stopped.summary()
        assert summary["status"] == "finished"
        assert until <= summary["env_steps"] < until + 256


def test_ranks_end_when_the_process_that_watches_them_is_killed(tmp_path: Path) -> None:
    run = Run(tmp_path, *TRAIN, "--timesteps", "500000")
    run.wait_for_checkpoint()
    processes = run.ranks
    run.process.kill()
    _, alive = psutil.wait_procs(processes, timeout=200)
    assert not alive
    run.end()


@pytest.mark.slow
def test_torchrun_starts_ranks_too(whole: Run, tmp_path: Path) -> None:
    words = [word for word in TRAIN if word not in ("--devices", "2")]
    program = "-m torch.distributed.run --standalone --nproc-per-node 2 -m flatout".split()
    run = Run(tmp_path, *words, "--timesteps", "20000", "--json", program=tuple(program))
    code, out, err = run.end()
    assert code == 0, err
    assert err.count("run folder: ") == 1
    assert json.loads(out.splitlines()[-1])["devices"] == 2
    ours, theirs = run.parameters(), whole.parameters()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        ("--n-envs 9 --batch-size 96", "--n-envs 9 cannot be split over 2 devices; 8 or 10 can"),
        (
            "--n-envs 2 --n-steps 35 --batch-size 35",
            "--batch-size 35 cannot be split over 2 devices; 34 or 36 can",
        ),
        ("--seeds 2", "--seeds and --devices exclude each other; pass one of them"),
        ("--rank-timeout 0", "--rank-timeout is 0; it must be a positive number of seconds"),
        ("--devices 0", "--devices is 0; it must be at least 1"),
    ],
)
def test_mistakes_are_refused_in_one_line(flags: str, what: str, tmp_path: Path) -> None:
    done = flatout(*TRAIN, *flags.split(), cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"flatout: {what}\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_an_error_of_another_rank_is_told_and_not_tried_again(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    words = [word if word != "CartPole-v1" else "broken.py:Broken" for word in TRAIN]
    run = Run(
        tmp_path, *words, *"--n-envs 4 --n-steps 16 --batch-size 32 --executor serial --overlap off".split()
    )
    code, _, err = run.end()
    assert code == 2
    assert "the simulator is gone" in err
    assert "note: rank 1: env 2 raised in step" in err
    assert "restart 1 of 3" not in err
