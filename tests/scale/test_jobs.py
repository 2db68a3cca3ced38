"""`flatout jobs`: real queues, signals and kills; what a queue refuses, and what it keeps on disk."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from flatout.errors import FlatoutError
from flatout.runlog.files import read_json
from flatout.runlog.folder import is_locked
from flatout.scale.jobs import Queue, make_jobs, read_jobs
from flatout.scale.processes import as_flags, find, identity
from flatout.scale.runner import Runner
from flatout.views.jobs import JobRow, console_for, job_row, job_table
from flatout.views.stream import SafeStream
from tests.cli.test_runs import TINY, assert_same, summary_of
from tests.command import command, flatout

SHARED = "n_envs = 4\nn_steps = 32\nbatch_size = 64\nn_epochs = 2\n"
BROKEN = """
import gymnasium as gym
class Broken(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Discrete(2)
    n = 0
    def reset(self, seed=None, options=None):
        return self.observation_space.low, {}
    def step(self, action):
        raise ValueError("broken for good")
"""


def write_queue(folder: Path, *jobs: str, timesteps: int = 2048, more: str = "") -> None:
    tables = "".join(f"[[job]]\n{job}\n" for job in jobs)
    (folder / "jobs.toml").write_text(f"timesteps = {timesteps}\n{SHARED}{more}\n{tables}")


def job(name: str, env: str = "CartPole-v1", **settings: Any) -> str:
    rest = "".join(f"\n{key} = {json.dumps(value)}" for key, value in settings.items())
    return f'name = "{name}"\nenv = "{env}"{rest}'


def states(folder: Path) -> dict[str, str]:
    return {job.name: job.state for job in Queue(folder / "runs").jobs()}


def train_alone(folder: Path, name: str, *argv: str) -> None:
    """A single run on one core, as jobs side by side have: initial weights are rounded by the number of threads."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        words = command("train", "CartPole-v1", *TINY, "--run-name", name, "--quiet", *argv)
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    finally:
        os.sched_setaffinity(0, cores)
    assert done.returncode == 0, done.stderr


def wait_until(happens: Callable[[], object], process: subprocess.Popen[bytes] | None = None) -> None:
    deadline = time.monotonic() + 400
    while not happens():
        assert time.monotonic() < deadline
        assert process is None or process.poll() is None
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_one_failing_job_harms_no_other_and_the_rest_are_as_single_runs(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    write_queue(tmp_path, job("good", seed=5), job("bad", "broken.py:Broken"))
    refused = flatout("jobs", "jobs.toml", cwd=tmp_path)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "job 2 'bad'" in refused.stderr
    assert "pass --trust" in refused.stderr
    assert not (tmp_path / "runs").exists()

    done = flatout("jobs", "jobs.toml", "--trust", "--json", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout.splitlines()[-1])}
    assert {name: row["state"] for name, row in rows.items()} == states(tmp_path)
    assert states(tmp_path) == {"good": "finished", "bad": "failed"}
    assert "broken for good" in rows["bad"]["error"]
    assert "bad: failed: " in done.stderr
    assert "1 job of 2 finished, 1 failed" in done.stderr
    train_alone(tmp_path, "alone", "--timesteps", "2048", "--seed", "5")
    assert_same(tmp_path / "runs" / "good", tmp_path / "runs" / "alone")

    before = (tmp_path / "runs" / "good" / "summary.json").stat().st_mtime_ns
    (tmp_path / "broken.py").write_text(
        BROKEN.replace("raise ValueError", "self.n += 1 #").replace(
            'for good")', '")\n        return self.observation_space.low, 1.0, self.n % 9 == 0, False, {}'
        )
    )
    again = flatout("jobs", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert set(states(tmp_path).values()) == {"finished"}
    assert (tmp_path / "runs" / "good" / "summary.json").stat().st_mtime_ns == before
    assert "finished" in flatout("jobs", "status", cwd=tmp_path).stdout


@pytest.mark.timeout(900)
def test_kills_of_the_queue_and_of_a_job_lose_nothing(tmp_path: Path) -> None:
    write_queue(tmp_path, job("a"), job("b", seed=1), timesteps=40_960, more="checkpoint_every = 1024")
    queue = subprocess.Popen(command("jobs", "jobs.toml", "--at-once", "2"), cwd=tmp_path)
    runs = tmp_path / "runs"
    wait_until(lambda: all(list((runs / name / "checkpoints").glob("*")) for name in "ab"), queue)
    pids = {name: read_json(runs / ".jobs" / f"{name}.json")["process"]["pid"] for name in "ab"}
    os.kill(pids["a"], signal.SIGKILL)  # the queue starts it again, from its checkpoint
    wait_until(lambda: read_json(runs / ".jobs" / "a.json")["process"]["pid"] != pids["a"], queue)
    wait_until(lambda: is_locked(runs / "a"), queue)
    queue.kill()
    queue.wait()
    assert is_locked(runs / ".jobs") is False
    again = read_json(runs / ".jobs" / "a.json")["process"]["pid"]
    assert psutil.pid_exists(again), "jobs go on without the queue"  # b may be done by now
    done = flatout("jobs", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert states(tmp_path) == {"a": "finished", "b": "finished"}
    for name in "ab":
        assert summary_of(runs / name)["env_steps"] == 40_960
    train_alone(tmp_path, "whole", "--timesteps", "40960")
    assert_same(runs / "a", runs / "whole")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ctrl_c_stops_all_and_the_next_start_goes_on(tmp_path: Path) -> None:
    write_queue(tmp_path, job("a"), job("b", seed=1), job("c", seed=2), timesteps=61_440)
    queue = subprocess.Popen(command("jobs", "jobs.toml", "--at-once", "2", "--quiet"), cwd=tmp_path)
    runs = tmp_path / "runs"
    wait_until(lambda: sum((runs / name / "progress.json").exists() for name in "abc") == 2, queue)
    begun = [read_json(path)["process"].get("pid") for path in (runs / ".jobs").glob("?.json")]
    for pid in filter(None, begun):
        os.kill(pid, signal.SIGSTOP)  # they wait, so that they have not finished when all are stopped
    second = flatout("jobs", cwd=tmp_path)
    assert second.returncode == 2
    assert f"are run by process {queue.pid}; 'flatout jobs add' adds to them" in second.stderr
    added = flatout("jobs", "add", "CartPole-v1", *TINY, "--timesteps", "2048", "--name", "d", cwd=tmp_path)
    assert "1 job added" in added.stdout, added.stderr
    for pid in filter(None, begun):
        os.kill(pid, signal.SIGCONT)
    queue.send_signal(signal.SIGINT)
    assert queue.wait(100) == 130
    assert set(states(tmp_path).values()) <= {"stopped", "waiting", "finished"}
    assert "stopped" in states(tmp_path).values()
    assert not any(is_locked(runs / name) for name in "abc")
    done = flatout("jobs", "--quiet", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert states(tmp_path) == dict.fromkeys("abcd", "finished")


@pytest.mark.timeout(900)
def test_stop_ends_one_job_or_all(tmp_path: Path) -> None:
    write_queue(tmp_path, job("a"), job("b", seed=1), job("c", seed=2), timesteps=100_000_000)
    queue = subprocess.Popen(command("jobs", "jobs.toml", "--at-once", "1", "--quiet"), cwd=tmp_path)
    runs = tmp_path / "runs"
    wait_until(lambda: (runs / "a" / "progress.json").exists(), queue)
    assert "there is no job 'x'" in flatout("jobs", "stop", "x", cwd=tmp_path).stderr
    assert flatout("jobs", "stop", "c", "a", cwd=tmp_path).stdout == "stopped: c, a\n"
    wait_until(lambda: (runs / "b" / "progress.json").exists(), queue)
    assert states(tmp_path) == {"a": "stopped", "b": "running", "c": "stopped"}
    assert flatout("jobs", "stop", cwd=tmp_path).stdout == "stopped: the queue\n"
    assert queue.wait(100) == 143
    assert states(tmp_path)["b"] == "stopped"
    assert flatout("jobs", "stop", cwd=tmp_path).stdout == "nothing was running\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[job", "is not TOML"),
        ("[[jobs]]\nname='a'", "there are no [[job]] tables; did you mean 'jobs'?"),
        ("[[job]]\nenv='CartPole-v1'", "job 1: name is None; it must be letters"),
        ("[[job]]\nname='a/b'\nenv='CartPole-v1'", "job 1: name is 'a/b'"),
        ("[[job]]\nname='a'", "job 1 'a': no env given"),
        ("[[job]]\nname='a'\nenv='CartPol-v1'", "did you mean 'CartPole-v1'"),
        ("[[job]]\nname='a'\nenv='CartPole-v1'\nn_evns=3", "unknown setting 'n_evns'; did you mean 'n_envs'"),
        ("[[job]]\nname='a'\nenv='CartPole-v1'\ngamma=2", "--gamma is 2.0; it must be between 0 and 1"),
        (
            "[[job]]\nname='a'\nenv='CartPole-v1'\nseeds=0",
            "seeds is 0; it must be a whole number of at least 1",
        ),
        ("[[job]]\nname='a'\nenv='CartPole-v1'\nconfig='no.json'", "config 'no.json': there is no such file"),
        ("[[job]]\nname='a'\nenv='CartPole-v1'\n" * 2, "two jobs are called 'a'"),
        ("[[job]]\nname='a'\nenv='CartPole-v1'\noptimizer='x.py:Opt'", "x.py:Opt' is not there"),
        ("[[job]]\nname='a'\nenv='CartPole-v1'\noptimizer='os:system'", "pass --trust"),
    ],
)
def test_a_mistake_in_a_file_is_one_line_with_its_place(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "jobs.toml"
    file.write_text(text)
    with pytest.raises(FlatoutError) as caught:
        read_jobs(file, tmp_path / "runs", trust=False)
    assert words in str(caught.value)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_name_is_used_once(tmp_path: Path) -> None:
    def made(**settings: Any) -> Any:
        table = {"name": "a", "env": "CartPole-v1", **settings}
        return make_jobs(table, "here", tmp_path, trust=False)

    queue = Queue(tmp_path)
    assert queue.add(made(seed=1), "here") == (1, 0)
    assert queue.add(made(seed=1), "here") == (0, 1)
    assert queue.add(made(seed=2), "here") == (1, 0), "a job that waits can be changed"
    (it,) = queue.jobs()
    it.state = "finished"
    queue.save(it)
    assert queue.add(made(seed=2), "here") == (0, 1)
    with pytest.raises(FlatoutError, match="job 'a' is finished with other settings; give it another name"):
        queue.add(made(seed=3), "here")
    (tmp_path / "b").mkdir()
    with pytest.raises(FlatoutError, match="run 'b' exists"):
        queue.add(made(name="b"), "here")


def test_a_queue_of_a_stranger_runs_no_code(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(BROKEN)
    table = {"name": "a", "env": f"{tmp_path}/own.py:Broken", "memory": "lstm:8"}
    queue = Queue(tmp_path / "runs")
    queue.add(make_jobs(table, "here", tmp_path / "runs", trust=False, typed=True), "here")
    expected = {key: value for key, value in table.items() if key != "name"}
    assert [it.settings for it in queue.waiting()] == [expected]
    file = tmp_path / "runs" / ".jobs" / "a.json"
    data = json.loads(file.read_text())
    data["settings"]["signature"] = "0" * 64
    (tmp_path / "runs" / ".jobs" / "b.json").write_text(json.dumps(data | {"name": "b"}))
    assert [it.name for it in queue.waiting()] == ["a"]
    assert "no run of yours wrote this file" in {it.name: it.error for it in queue.jobs()}["b"]
    for more in ({"state": "running"}, {"trust": True}, {"config": str(file), "trust": True}):
        (tmp_path / "runs" / ".jobs" / "c.json").write_text(json.dumps(data | {"name": "c"} | more))
        assert [it.name for it in Queue(tmp_path / "runs").waiting()] == ["a"]
    harmless = {"env": "CartPole-v1", "settings": {"trust": True}}
    (tmp_path / "runs" / ".jobs" / "c.json").write_text(
        json.dumps(data | {"name": "c", "settings": harmless})
    )
    assert [it.name for it in Queue(tmp_path / "runs").waiting()] == ["a"], "settings are no other flags"
    assert {it.name for it in Queue(tmp_path / "runs", trust=True).waiting()} == {"a"}


def test_a_job_that_finished_without_its_queue_is_not_run_again(tmp_path: Path) -> None:
    queue = Queue(tmp_path)
    table = {"name": "a", "env": "CartPole-v1"}
    queue.add(make_jobs(table, "here", tmp_path, trust=False), "here")
    (it,) = queue.jobs()
    child = subprocess.Popen(["true"])
    it.state, it.process = "running", identity(child.pid)
    child.wait()
    Queue(tmp_path).save(it)
    it.run.mkdir()
    (it.run / "summary.json").write_text('{"status": "finished"}')
    with queue.held():
        Runner(queue, queue.path).run()
    assert [job.state for job in queue.jobs()] == ["finished"]
    assert not (queue.path / "a.log").exists(), "nothing was started"


def test_a_table_of_long_names_still_shows_states_and_errors() -> None:
    env = "/a/folder/" * 20 + "my_envs.py:MyEnv"
    rows = [
        JobRow(name=f"job-{state}" * 5, state=state, env=env, error="why") for state in ("running", "failed")
    ]
    stream = io.StringIO()
    console_for(SafeStream(stream)).print(job_table(rows, "title"))
    for word in ("running", "failed", "my_envs.py:MyEnv", ": why"):
        assert word in stream.getvalue()


def test_a_stopped_job_keeps_its_share_of_the_steps(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"timesteps": 1000}')
    (tmp_path / "summary.json").write_text('{"status": "stopped", "env_steps": 250}')
    assert job_row("a", "stopped", "CartPole-v1", tmp_path).share == 0.25


def test_seeds_become_jobs(tmp_path: Path) -> None:
    table = {"name": "a", "env": "CartPole-v1", "seed": 3, "seeds": 2}
    made = make_jobs(table, "here", tmp_path, trust=False)
    assert [(it.name, it.settings["seed"]) for it in made] == [("a-seed3", 3), ("a-seed4", 4)]


def test_settings_become_flags() -> None:
    settings = {
        "gamma": 0.9,
        "double": True,
        "dueling": False,
        "network_arch": [8, 4],
        "env_kwargs": {"a": [1]},
    }
    assert as_flags(settings) == [
        "--gamma=0.9",
        "--double",
        "--no-dueling",
        "--network-arch=8,4",
        '--env-kwargs={"a": [1]}',
    ]


def test_a_process_is_known_by_its_id_and_its_birth() -> None:
    me = identity(os.getpid())
    assert find(me) is not None
    assert find({**me, "created": me["created"] - 100}) is None
    child = subprocess.Popen(["true"])
    known = identity(child.pid)
    child.wait()
    assert find(known) is None
    assert find({}) is None
