"""macOS and Windows: what they lack is taken away here before flatout is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WITHOUT = """
import asyncio, ctypes, getpass, os, pwd, select, signal, ssl, stat, subprocess, sys, tempfile, zipfile
import multiprocessing, multiprocessing.reduction, multiprocessing.context, multiprocessing.connection, multiprocessing.util
import aiohttp, cloudpickle, gymnasium, numba, numpy, psutil, pynvml, rich.live, safetensors.torch, tensorboard, torch
import torch.utils.tensorboard
from numba import njit
njit(lambda x: x + 1)(1)  # what Numba and torch import later is theirs

# SIGHUP and pthread_kill are left: flatout/training/stop.py needs them.
WINDOWS = {
    os: "memfd_create getuid geteuid getpgrp killpg setpgid register_at_fork pread pwrite O_NOFOLLOW O_DIRECTORY fork",
    select: "poll",
    signal: "SIGHUP pthread_kill pthread_sigmask sigwait SIGALRM setitimer ITIMER_REAL",
}
MACOS = {os: "memfd_create sched_getaffinity"}


def opens_no_folders(path, *args, _open=os.open, **kwargs):
    if isinstance(path, (str, os.PathLike)) and os.path.isdir(path):
        raise PermissionError(13, "Permission denied", str(path))
    return _open(path, *args, **kwargs)


platform, *arguments = sys.argv[1:]
if platform == "windows":
    sys.modules["fcntl"] = sys.modules["resource"] = None
    os.open = opens_no_folders
    del multiprocessing.context._concrete_contexts["forkserver"], multiprocessing.context._concrete_contexts["fork"]
    multiprocessing.context.DefaultContext.get_all_start_methods = lambda self: ["spawn"]
    multiprocessing.get_all_start_methods = lambda: ["spawn"]
else:
    import fcntl, resource
    del fcntl.F_SETSIG, resource.RUSAGE_THREAD
for module, names in (WINDOWS if platform == "windows" else MACOS).items():
    for name in names.split():
        delattr(module, name)
os.environ["FLATOUT_CACHE"] += "/" + platform

if arguments[:1] == ["python"]:
    exec(arguments[1])
    sys.exit()
from flatout.__main__ import main
sys.argv = ["flatout", *arguments]
sys.exit(main())
"""
PLATFORMS = ("macos", "windows")
LACKS = "worker processes need Linux"


def flatout(platform: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    script = folder / "without.py"
    script.write_text(WITHOUT)
    return subprocess.run(
        [sys.executable, str(script), platform, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=300,
    )


def train(platform: str, *flags: str, folder: Path) -> subprocess.CompletedProcess[str]:
    short = ("--timesteps", "2000", "--n-envs", "4", "--run-name", "here")
    return flatout(platform, "train", "CartPole-v1", *short, *flags, folder=folder)


@pytest.mark.parametrize("executor", ["serial", "thread", "auto"])
@pytest.mark.parametrize("platform", PLATFORMS)
def test_training_works_without_what_the_platform_lacks(platform: str, executor: str, tmp_path: Path) -> None:
    run = train(platform, "--executor", executor, folder=tmp_path)
    assert run.returncode == 0, run.stderr
    summary = json.loads((tmp_path / "runs/here/summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["env_steps"] >= 2000
    assert summary["executor"]["kind"] == (executor if executor != "auto" else "serial")
    lines = [line for line in run.stdout.splitlines() if LACKS in line]
    assert len(lines) == (executor == "auto"), run.stdout


@pytest.mark.parametrize("flags", [("--executor", "process"), ("--n-collectors", "2")])
@pytest.mark.parametrize("platform", PLATFORMS)
def test_worker_processes_are_refused_in_one_line(
    platform: str, flags: tuple[str, ...], tmp_path: Path
) -> None:
    run = train(platform, *flags, folder=tmp_path)
    assert run.returncode == 2
    (line,) = run.stderr.splitlines()
    assert flags[0] in line
    assert LACKS in line
    assert not (tmp_path / "runs").exists()


OWN_ENV = """
import gymnasium as gym
class Own(gym.Wrapper):
    def __init__(self):
        super().__init__(gym.make("CartPole-v1"))
"""


@pytest.mark.parametrize("platform", PLATFORMS)
def test_an_env_of_ones_own_is_tried_in_this_process_and_resumed(platform: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_ENV)
    begun = ("train", "own.py:Own", "--timesteps", "1000", "--n-envs", "2", "--run-name", "own")
    run = flatout(platform, *begun, folder=tmp_path)
    assert run.returncode == 0, run.stderr
    run = flatout(platform, "resume", "runs/own", "--timesteps", "2000", folder=tmp_path)
    assert run.returncode == 0, run.stderr
    assert json.loads((tmp_path / "runs/own/summary.json").read_text())["env_steps"] >= 2000


def test_make_vec_chooses_threads_or_one_process(tmp_path: Path) -> None:
    script = """
import flatout
envs = flatout.make_vec("CartPole-v1", n_envs=4)
envs.reset(seed=1)
print(envs.kind, envs.notes)
try:
    flatout.make_vec("CartPole-v1", n_envs=4, executor="process")
except flatout.FlatoutError as error:
    print("refused:", error)
"""
    run = flatout("windows", "python", script, folder=tmp_path)
    assert run.returncode == 0, run.stderr
    chosen, refused = run.stdout.splitlines()
    assert chosen.startswith("serial")
    assert refused.startswith(f"refused: {LACKS}")


def test_crawl_says_in_one_line_what_it_lacks(tmp_path: Path) -> None:
    run = flatout("windows", "train", "crawl", "--timesteps", "100", folder=tmp_path)
    assert run.returncode == 2
    (line,) = run.stderr.splitlines()
    assert "crawl does not run on this platform: Python has no fcntl here" in line
