"""Bad input: exit code 2, one line with what is wrong and the nearest valid choice, nothing written."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.command import flatout

ENVS = '''
import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Base(gym.Env):
    observation_space = spaces.Box(-1, 1, (2,))
    action_space = spaces.Discrete(2)
    n = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.n += 1
        return np.zeros(2, np.float32), 1.0, self.n % 50 == 0, False, {}


class OldApi(Base):
    def step(self, action):
        return np.zeros(2, np.float32), 1.0, False, {}


class WrongShape(Base):
    def step(self, action):
        return np.zeros(3, np.float32), 1.0, False, False, {}


class NanReward(Base):
    def step(self, action):
        obs, reward, *rest = super().step(action)
        return obs, float("nan") if self.n == 5 else reward, *rest


class NanObservation(Base):
    """Late enough that only the first rollout meets it, not the check before the run."""

    def step(self, action):
        obs, reward, *rest = super().step(action)
        return obs * (np.nan if self.n == 240 else 1), reward, *rest


class Raises(Base):
    def step(self, action):
        raise ZeroDivisionError("boom")
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my_envs.py").write_text(ENVS)
    (tmp_path / "bad.json").write_text('{"n_env": 3}')
    (tmp_path / "nested.json").write_text('{"ppo": {"gama": 0.9}}')
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "a_file").write_text("x")
    return tmp_path


def assert_refused(
    done: subprocess.CompletedProcess[str], folder: Path, before: set[Path], words: str
) -> None:
    assert done.returncode == 2, done.stderr
    lines = done.stderr.strip().splitlines()
    assert lines[-1].startswith("flatout: ")
    assert words in lines[-1]
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    after = {p for p in folder.rglob("*") if "__pycache__" not in p.parts}
    assert after == before


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("train CartPol-v1", "unknown env 'CartPol-v1'; did you mean 'CartPole-v1'"),
        ("train CartPole-v9", "'CartPole-v1'"),
        ("train no_such_module:Env-v0", "no_such_module"),
        ("train nowhere.py:make", "nowhere.py"),
        ("train my_envs.py:Bas", "did you mean 'Base'"),
        ("train", "no env given"),
        ("trian CartPole-v1", "unknown command 'trian'; did you mean 'train'"),
        ("bench CartPole-v1", "not in this version yet"),
        ("sweep CartPol-v1", "did you mean 'CartPole-v1'"),
        ("sweep CartPole-v1 --trials 0", "--trials is 0; it must be at least 1"),
        (
            "sweep CartPole-v1 --objective retrun",
            "--objective is 'retrun'; it must be one of return, time-to-target",
        ),
        ("sweep CartPole-v1 --objective time-to-target", "needs --target-return"),
        (
            "sweep CartPole-v1 --sampler tpee",
            "--sampler is 'tpee'; it must be one of tpe, random, gp, qmc; did you",
        ),
        ("sweep CartPole-v1 --space none.toml", "--space none.toml: No such file"),
        ("sweep CartPole-v1 --space elegant", "did you mean 'elegantrl'"),
        ("sweep CartPole-v1 --config my.json", "my.json"),
        ("jobs", "there are no jobs in runs/"),
        ("jobs no.toml", "no.toml: No such file"),
        ("jobs --at-once 0", "--at-once is 0; it must be at least 1"),
        ("jobs stop a", "there is no job 'a'"),
        ("jobs add CartPole-v1", "name is None"),
        ("jobs add CartPole-v1 --n-evns 3 --name a", "did you mean '--n-envs'"),
        ("doctor", "no env given"),
        ("doctor CartPol-v1", "did you mean 'CartPole-v1'"),
        ("doctor CartPole-v1 --what-if core=4", "did you mean 'cores'"),
        ("doctor CartPole-v1 --what-if cores=none", "--what-if cores=none: it must be a number above 0"),
        ("doctor CartPole-v1 --what-if gpu=rtx4080x", "unknown card; did you mean 'rtx"),
        ("tune CartPole-v1 --budget 1", "--budget is 1"),
        ("tune CartPole-v1 --out nowhere/x.json", "there is no folder nowhere"),
        ("tune CartPol-v1", "did you mean 'CartPole-v1'"),
        (
            "train CartPole-v1 --executor thread --n-collectors 2",
            "--n-collectors 2 needs --executor auto",
        ),
        ("train CartPole-v1 --n-workers -1", "--n-workers is -1; it must be at least 0"),
        ("train CartPole-v1 --n-evns 3", "unknown flag --n-evns; did you mean '--n-envs'"),
        ("train CartPole-v1 --preset fats", "did you mean 'fast'"),
        ("train CartPole-v1 --executor proces", "did you mean 'process'"),
        ("train CartPole-v1 --ray-address auto", "--ray-address auto needs --executor ray"),
        ("train CartPole-v1 --executor async", "--executor async is for envs with async def"),
        ("train CartPole-v1 --executor batched", "--executor batched is for envs that step N at once"),
        ("train Pendulum-v1 --algo dqn", "choose among Discrete actions"),
        ("train Pendulum-v1 --algo dqn --preset cpu", "use PPO (--algo ppo)"),
        (
            "train CartPole-v1 --algo dqn --clip-range 0.1",
            "--clip-range is a setting of PPO and RECURRENT-PPO, not of DQN",
        ),
        ("train CartPole-v1 --algo dqn --buffer-size 900TB", "use at most"),
        ("train CartPole-v1 --algo sac", "SAC chooses continuous actions"),
        ("train Pendulum-v1 --algo sac --dropout 1", "--dropout is 1.0; it must be at least 0 and below 1"),
        (
            "train Pendulum-v1 --algo sac --clip-range 0.1",
            "--clip-range is a setting of PPO and RECURRENT-PPO, not of SAC",
        ),
        ("train CartPole-v1 --algo dqm", "did you mean 'dqn'"),
        ("train CartPole-v1 --overlap yes", "--overlap is 'yes'; it must be one of auto, on, off"),
        ("train CartPole-v1 --precision tf32", "--precision tf32 is for CUDA devices, this is cpu"),
        ("train CartPole-v1 --compile now", "--compile is 'now'; it must be one of auto, on, off"),
        ("train CartPole-v1 --batch-size 100", "nearest that do are 64 or 128"),
        ("train CartPole-v1 --batch-size 0", "--batch-size is 0"),
        ("train CartPole-v1 --n-envs 0", "--n-envs is 0; it must be at least 1"),
        ("train CartPole-v1 --n-envs two", "--n-envs is 'two'; it must be a whole number"),
        ("train CartPole-v1 --n-envs", "--n-envs"),
        ("train CartPole-v1 --gamma 1.5", "--gamma is 1.5; it must be between 0 and 1"),
        ("train CartPole-v1 --learning-rate nan", "--learning-rate is 'nan'; it must be a number"),
        ("train CartPole-v1 --network-arch 64,x", "--network-arch is '64,x'"),
        ("train CartPole-v1 --network-arch 0", "--network-arch"),
        ("train CartPole-v1 --env-kwargs {", "--env-kwargs is not JSON"),
        ('train CartPole-v1 --env-kwargs {"sped":1}', "'sped'"),
        ("evaluate nowhere --env-kwargs [1]", "--env-kwargs is [1]; it must be a JSON object"),
        ("train CartPole-v1 --device cuda", "--device cuda"),
        ("train CartPole-v1 --device tpu", "tpu"),
        ("train CartPole-v1 --config bad.json", "'n_env'; did you mean 'n_envs'"),
        ("train CartPole-v1 --config nested.json", "'ppo.gama'; did you mean 'gamma'"),
        ("train CartPole-v1 --config broken.json", "is not JSON"),
        ("train CartPole-v1 --config missing.json", "No such file"),
        ("train CartPole-v1 --runs-dir a_file", "a_file"),
        ("train CartPole-v1 --runs-dir /proc/none", "/proc/none"),
        ("train CartPole-v1 --run-name a/b", "--run-name"),
        ("train CartPole-v1 --resume", "--run-name"),
        ("train my_envs.py:OldApi", "step() returned 4 values"),
        ("train my_envs.py:WrongShape", "(3,)"),
        ("train my_envs.py:Raises", "ZeroDivisionError: boom (my_envs.py:"),
        ("train my_envs.py:NanReward", "env 0 gave a NaN reward at step 5"),
        (
            "train my_envs.py:NanObservation --n-steps 256 --n-envs 2 --executor serial",
            "env 0 gave a NaN observation at step 240",
        ),
        ("resume nothing", "no run 'nothing'"),
        ("evaluate nothing", "nothing"),
        ("evaluate a_file", "a_file"),
    ],
)
def test_bad_input_is_refused_in_one_line(argv: str, words: str, folder: Path) -> None:
    before = set(folder.rglob("*"))
    assert_refused(flatout(*argv.split(), cwd=folder), folder, before, words)


TINY = "--timesteps 256 --n-envs 2 --n-steps 32 --batch-size 64 --n-epochs 1 --quiet"


def test_an_existing_run_is_kept_resumed_or_replaced_as_asked(folder: Path) -> None:
    train = ["train", "CartPole-v1", *TINY.split(), "--run-name", "a"]
    assert flatout(*train, cwd=folder).returncode == 0
    run = folder / "runs" / "a"
    summary = (run / "summary.json").read_text()
    before = set(folder.rglob("*"))
    assert_refused(flatout(*train, cwd=folder), folder, before, "pass --resume to continue it")
    assert_refused(flatout(*train, "--resume", cwd=folder), folder, before, "is finished: 256 of 256")
    assert (run / "summary.json").read_text() == summary

    longer = [word if word != "256" else "512" for word in train]
    assert flatout(*longer, "--resume", cwd=folder).returncode == 0
    assert json.loads((run / "summary.json").read_text())["env_steps"] == 512
    changed = [*longer, "--resume", "--gamma", "0.5"]
    assert_refused(flatout(*changed, cwd=folder), folder, set(folder.rglob("*")), "--gamma cannot change")
    assert flatout(*train, "--overwrite", cwd=folder).returncode == 0
    assert json.loads((run / "summary.json").read_text())["env_steps"] == 256


def test_corrupt_and_foreign_checkpoints_are_refused(folder: Path) -> None:
    train = ["train", "CartPole-v1", *TINY.split(), "--run-name", "a"]
    assert flatout(*train, cwd=folder).returncode == 0
    (checkpoint,) = (folder / "runs" / "a" / "checkpoints").glob("step-*.flatout")
    data = bytearray(checkpoint.read_bytes())
    data[-100] ^= 1
    checkpoint.write_bytes(bytes(data))
    before = set(folder.rglob("*"))
    assert_refused(flatout("resume", "a", "--timesteps", "999", cwd=folder), folder, before, "corrupt")
    assert_refused(flatout("evaluate", str(checkpoint), cwd=folder), folder, before, "corrupt")
    checkpoint.write_bytes(b"PK\x03\x04" + bytes(100))
    assert_refused(flatout("evaluate", str(checkpoint), cwd=folder), folder, before, checkpoint.name)


@pytest.mark.parametrize("executor", ["auto", "serial", "process"])
def test_a_nan_later_in_the_run_keeps_what_was_learned(executor: str, folder: Path) -> None:
    argv = "train my_envs.py:NanObservation --n-steps 64 --n-envs 2 --batch-size 64 --run-name late"
    done = flatout(*argv.split(), "--executor", executor, cwd=folder)
    assert done.returncode == 2
    assert re.search(r"env [01] gave a NaN observation at step 240", done.stderr.splitlines()[-1])
    summary = json.loads((folder / "runs" / "late" / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert summary["env_steps"] == 3 * 128
    assert list((folder / "runs" / "late" / "checkpoints").glob("step-000000000384.flatout"))
