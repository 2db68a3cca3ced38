"""`flatout sweep`: spaces whose settings are always valid, objectives, a real sweep that is killed and goes on, its page."""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from flatout.algorithms import base as algorithms
from flatout.algorithms.space import ELEGANTRL, NAMED, Choice, Space, between, bounded, one_of
from flatout.cli.sweep import points
from flatout.config.run_config import resolve
from flatout.errors import FlatoutError
from flatout.runlog.folder import RunFolder
from flatout.scale.runner import Job
from flatout.scale.spaces import read_space, settings_of, space_for, suggest
from flatout.scale.sweep import (
    RUNGS,
    UNREACHED,
    SweepPlan,
    Trials,
    open_study,
    quiet_optuna,
    returns_at_rungs,
    value_of,
)
from flatout.views.sweep import SweepPage, TrialPoint, sweep_page
from tests.cli.test_runs import TINY
from tests.command import command, flatout

ENVS = {"sac": "Pendulum-v1"}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with quiet_optuna():
        yield


def draws(space: Space, n: int = 40) -> Iterator[dict[str, Any]]:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    for _ in range(n):
        yield suggest(study.ask(), space)


@pytest.mark.parametrize("algo", algorithms.BUILT_IN)
def test_every_draw_from_an_algorithms_space_is_a_valid_config(algo: str) -> None:
    env, given = ENVS.get(algo, "CartPole-v1"), {"algo": algo, "timesteps": 10_000}
    space = space_for(algorithms.get(algo), None, given)
    for values in draws(space):
        settings = settings_of(values, env, given)
        config = resolve(env, {**given, **settings}, device="cpu", n_cores=2)  # checks that the batch divides
        for name, value in values.items():
            if name in settings and name not in ("batch_size", "network_arch"):
                part = config if hasattr(config, name) else config.algorithm
                assert getattr(part if hasattr(part, name) else config.network, name) == value
        if "n_minibatches" in values and algo != "recurrent-ppo":
            n = min(values["n_minibatches"], config.total_batch)
            assert config.total_batch // config.algorithm.batch_size == n


def test_the_elegantrl_space_keeps_its_bounds() -> None:
    seen = set()
    for values in draws(ELEGANTRL):
        settings = settings_of(values, "Pendulum-v1", {"algo": "ppo"})
        config = resolve("Pendulum-v1", {"algo": "ppo", **settings}, device="cpu", n_cores=2)
        assert config.n_envs in (16, 24, 32, 40)
        assert 4 <= config.algorithm.epochs <= 32
        assert values["total_batch"] - config.n_envs < config.total_batch <= values["total_batch"] <= 196_608
        assert (values["total_batch"] - 32_768) % 16_384 == 0
        seen.add(values["total_batch"])
    assert len(seen) > 6
    small = bounded(ELEGANTRL, most_transitions=70_000)["total_batch"]
    assert (small.low, small.high) == (32_768, 65_536)  # type: ignore[union-attr]
    assert "elegantrl" in NAMED


@pytest.mark.parametrize("algo", algorithms.BUILT_IN)
def test_the_first_trial_is_what_a_run_without_a_search_uses(algo: str, tmp_path: Path) -> None:
    env, given = ENVS.get(algo, "CartPole-v1"), {"algo": algo}
    plan = plan_in(tmp_path, env=env, algo=algo, given=given, space=algorithms.get(algo).space)
    (job,) = Trials(plan).waiting()
    default = resolve(env, given, device="cpu", n_cores=2)
    found = resolve(env, {**job.settings, "timesteps": default.timesteps}, device="cpu", n_cores=2)
    within = {"gamma", "n_steps", "n_envs", "learning_rate", "network_arch", "activation", "tau"}
    for name in within & plan.space.keys():
        kind, parts = plan.space[name], (default, default.algorithm, default.network)
        value = next(getattr(part, name) for part in parts if hasattr(part, name))
        shown: Any = ",".join(map(str, value)) if name == "network_arch" else value
        if shown in kind.values if isinstance(kind, Choice) else kind.low <= shown <= kind.high:
            assert value in [getattr(it, name, None) for it in (found, found.algorithm, found.network)], name


def test_a_setting_with_a_condition_is_drawn_only_where_it_holds() -> None:
    seen = set()
    for values in draws(algorithms.get("dqn").space, 200):
        assert ("target_update_interval" in values) == (values["tau"] == 1.0)
        assert ("priority_alpha" in values) == values["prioritized"]
        seen.add((values["tau"] == 1.0, values["prioritized"]))
    assert len(seen) == 4


def test_settings_that_the_user_gives_are_not_searched() -> None:
    ppo = algorithms.get("ppo")
    assert {"gamma", "n_minibatches"} <= space_for(ppo, None, {}).keys()
    given = space_for(ppo, None, {"gamma": 0.9, "batch_size": 64})
    assert not {"gamma", "n_minibatches"} & given.keys()
    with pytest.raises(FlatoutError, match="MINE has no search space; give one with --space"):
        space_for(replace(ppo, name="mine", space={}), None, {})
    own = replace(ppo, name="mine", space={"gamma": one_of(0.5)})
    assert list(draws(space_for(own, None, {}), 1)) == [{"gamma": 0.5}]


def test_a_users_space(tmp_path: Path) -> None:
    file = tmp_path / "space.toml"
    file.write_text(
        "gamma = [0.9, 0.99]\nn-epochs = {low = 2, high = 8, log = true}\n"
        "learning_rate = {low = 1e-4, high = 1e-2, log = true}\ntotal_batch = {low = 64, high = 256, step = 64}\n"
        "normalize_obs = [true, false]\nclip_range = {values = [0.1, 0.2], when = {normalize_obs = true}}\n"
    )
    space = read_space(file, algorithms.get("ppo"))
    for values in draws(space):
        assert values["gamma"] in (0.9, 0.99)
        assert values["n_epochs"] in range(2, 9)
        assert 1e-4 <= values["learning_rate"] <= 1e-2
        assert values["total_batch"] in (64, 128, 192, 256)
        assert ("clip_range" in values) == values["normalize_obs"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gama = [1]", "PPO has no setting 'gama'; did you mean 'gamma'"),
        ("tau = [1]", "PPO has no setting 'tau'"),
        ("gamma = 3", "gamma: it must be a list of values, or a table with low and high"),
        ("gamma = []", "gamma: a choice needs at least one value"),
        ("gamma = {low = 1}", "gamma: low and high must be numbers"),
        ("gamma = {low = 1, hihg = 2}", "unknown key 'hihg'; did you mean 'high'"),
        ("gamma = {low = 2, high = 1}", "a range from 2 to 1 is empty"),
        ("gamma = {low = 0, high = 1, log = true}", "must begin above 0"),
        ("gamma = {values = [1], when = {tau = 1}}", "when must name one setting that comes before it"),
        ("gamma = [", "is not TOML"),
        ("", "is empty"),
    ],
)
def test_a_mistake_in_a_space_is_one_line(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "space.toml"
    file.write_text(text)
    with pytest.raises(FlatoutError) as caught:
        read_space(file, algorithms.get("ppo"))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def plan_in(folder: Path, **changes: Any) -> SweepPlan:
    values: dict[str, Any] = {
        "env": "CartPole-v1",
        "given": {"algo": "ppo"},
        "space": {"learning_rate": between(1e-4, 1e-2, log=True)},
        "folder": folder,
        "storage": folder / "journal.log",
        "algo": "ppo",
        "n_trials": 4,
        "timesteps": 900,
    }
    return SweepPlan(**(values | changes))


def test_what_a_run_is_worth(tmp_path: Path) -> None:
    plan = plan_in(tmp_path)
    assert value_of({"return_mean": 3.0}, plan) == 3.0
    assert value_of({"return_mean": 3.0, "eval_return_mean": 5.0}, plan) == 5.0
    assert value_of({"return_mean": None}, plan) is None
    timed = plan_in(tmp_path, objective="time-to-target", given={"target_return": 100.0})
    reached = value_of({"return_mean": 101.0, "target_reached_seconds": 7.5}, timed)
    near, far = (value_of({"return_mean": mean}, timed) for mean in (90.0, 10.0))
    assert reached == 7.5
    assert near is not None
    assert far is not None
    assert UNREACHED <= near < far


@pytest.mark.parametrize(
    ("objective", "reported", "shown"), [("return", 50.0, 50.0), ("time-to-target", -50.0, None)]
)
def test_a_pruned_trial_is_told_with_its_return_and_never_with_a_time(
    objective: str, reported: float, shown: float | None, tmp_path: Path
) -> None:
    plan = plan_in(tmp_path, objective=objective, given={"target_return": 100.0})
    trials = Trials(plan)
    trial = trials.study.ask()
    trial.report(reported, 1)
    trials.study.tell(trial, state=TrialState.PRUNED)
    assert [(it.state, it.value) for it in points(trials)] == [("pruned", shown)]


def test_returns_are_told_at_equal_steps(tmp_path: Path) -> None:
    plan = plan_in(tmp_path)
    rows = "".join(f"{steps},{steps / 10},\n" for steps in (50, 100, 250, 280, 900))
    (tmp_path / "metrics.csv").write_text(
        "time/total_timesteps,rollout/ep_rew_mean,eval/mean_reward\n" + rows
    )
    folder = RunFolder(tmp_path)
    assert list(returns_at_rungs(folder, plan, 0)) == [(1, 10.0), (2, 25.0), (RUNGS, 90.0)]
    assert list(returns_at_rungs(folder, plan, 2)) == [(RUNGS, 90.0)]
    assert list(returns_at_rungs(folder, plan_in(tmp_path, given={"eval_every": 10}), 0)) == []
    assert list(returns_at_rungs(RunFolder(tmp_path / "none"), plan, 0)) == []


def test_a_journal_belongs_to_one_sweep_and_survives_a_cut_line(tmp_path: Path) -> None:
    plan = plan_in(tmp_path)
    study = open_study(plan)
    study.tell(study.ask(), 1.0)
    with plan.storage.open("ab") as file:
        file.write(b'{"op_code":4,"worker')
    again = open_study(plan)
    again.tell(again.ask(), 2.0)
    assert [it.values for it in open_study(plan).trials] == [[1.0], [2.0]]
    with pytest.raises(FlatoutError, match="holds a sweep with another timesteps; use another --storage"):
        open_study(plan_in(tmp_path, timesteps=901))


def test_a_trial_left_by_a_killed_process_goes_on_with_its_values(tmp_path: Path) -> None:
    space: Space = {"learning_rate": between(1e-4, 1e-2, log=True), "gamma": one_of(0.9, 0.99)}
    plan = plan_in(tmp_path, space=space, n_trials=3)
    gone = {"host": platform.node(), "pid": 2**22 + 1, "created": 1.0}
    study = open_study(plan)
    whole, cut = study.ask(), study.ask()
    values = suggest(whole, space)
    cut_value = cut.suggest_float(
        "learning_rate", 1e-4, 1e-2, log=True
    )  # killed before the second value was drawn
    for trial in (whole, cut):
        trial.set_user_attr("owner", gone)
    other, _killed_before_it_was_owned = study.ask(), study.ask()
    other.set_user_attr("owner", {**gone, "host": "elsewhere"})
    trials = Trials(plan)
    jobs: list[Job] = []
    for _ in range(3):
        (job,) = trials.waiting()
        assert job.state == "running"
        job.state = "finished"
        job.run.mkdir()
        (job.run / "summary.json").write_text(json.dumps({"return_mean": 5.0 + len(jobs)}))
        trials.save(job)
        jobs.append(job)
    assert trials.waiting() == [], "the trial of another machine counts"
    assert {name: jobs[0].settings[name] for name in values} == values
    assert jobs[1].settings["learning_rate"] == cut_value
    assert jobs[1].settings["gamma"] in (0.9, 0.99)
    assert [it.number for it in trials.finished()] == [3, 1, 0]
    assert [it.values for it in open_study(plan).trials] == [[5.0], [6.0], None, [7.0]]


def journal(folder: Path) -> list[optuna.trial.FrozenTrial]:
    backend = optuna.storages.journal.JournalFileBackend(str(folder / "journal.log"))
    study = optuna.load_study(study_name="flatout", storage=optuna.storages.JournalStorage(backend))
    return study.get_trials()


@pytest.mark.timeout(900)
def test_a_sweep_that_is_killed_goes_on_and_ends_with_a_config_and_a_page(tmp_path: Path) -> None:
    (tmp_path / "space.toml").write_text(
        "learning_rate = {low = 1e-4, high = 1e-2, log = true}\nn_minibatches = [1, 2, 4]\n"
    )
    fixed = [*TINY[:4], *TINY[6:]]
    argv = ["sweep", "CartPole-v1", *fixed, "--timesteps", "4096", "--trials", "4", "--space", "space.toml"]
    argv += ["--candidates", "1", "--new-seeds", "1", "--name", "s", "--at-once", "2"]
    process = subprocess.Popen(command(*argv), cwd=tmp_path)
    folder, deadline = tmp_path / "runs" / "s", time.monotonic() + 400
    while not (folder / "journal.log").exists() or sum(it.state.is_finished() for it in journal(folder)) < 1:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.2)
    process.kill()
    process.wait()
    assert ">running<" in (folder / "sweep.html").read_text(), "the page is there while the sweep runs"
    before = {it.number: it.values for it in journal(folder) if it.state == TrialState.COMPLETE}
    done = flatout(*argv, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    after = journal(folder)
    assert len(after) == 4, "no trial is lost or done twice"
    assert all(it.state in (TrialState.COMPLETE, TrialState.PRUNED) for it in after)
    assert {number: after[number].values for number in before} == before
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["status"] == "finished"
    assert result["trials"]["done"] + result["trials"]["pruned"] == 4
    assert result["verdict"] in done.stdout
    assert {it["name"].partition("-")[0] for it in result["candidates"]} == {"best", "defaults"}
    config = json.loads((folder / "best.json").read_text())
    assert (config["env"], config["timesteps"], config["n_envs"]) == ("CartPole-v1", 4096, 4)
    assert (folder / "sweep.html").read_text().count("<circle") >= 4
    again = flatout(*argv, "--quiet", "--json", cwd=tmp_path)
    assert json.loads(again.stdout)["candidates"] == result["candidates"]


class Elements(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.classes: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag != "meta":
            self.open.append(tag)
        self.classes.append(str(dict(attrs).get("class")))

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.classes.append(str(dict(attrs).get("class")))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_draws_every_trial_and_escapes_texts() -> None:
    trials = [
        TrialPoint(
            number=n,
            state="pruned" if n % 3 else "done",
            value=float(n),
            params={"lr": 0.1**n, "<b>": n % 2 == 0},
        )
        for n in range(9)
    ]
    trials.append(TrialPoint(number=9, state="failed", value=None, params={}))
    page = SweepPage(
        name="<s>",
        verdict="good & cheap",
        what="return",
        maximizes=True,
        trials=trials,
        importances={"lr": 0.7, "<b>": 0.3},
        candidates=[("a", "b", "c")],
        best=6,
        logs=frozenset({"lr"}),
        choices=frozenset({"<b>"}),
    )
    text = sweep_page(page)
    found = Elements(text)
    assert not found.open
    n_plots = 3  # history and two slices
    assert found.classes.count("pruned") == 6 * n_plots
    assert found.classes.count("done") == 2 * n_plots
    assert found.classes.count("best") == n_plots
    assert sum(it.startswith("line") for it in found.classes) == 3
    assert "9 trials say little about it" in text
    assert "&lt;s&gt;" in text
    assert not re.search(r"NaN|None|inf\b", text)
    assert "Too few trials to tell" in sweep_page(replace(page, importances={"lr": 0.5, "<b>": 0.5}))
    assert "No trial has a result yet" in sweep_page(replace(page, trials=[], importances={}))


@pytest.mark.timeout(900)
def test_ctrl_c_leaves_trials_that_go_on(tmp_path: Path) -> None:
    argv = ["sweep", "CartPole-v1", "--timesteps", "300000000", "--trials", "1", "--name", "s", "--quiet"]
    process = subprocess.Popen(command(*argv), cwd=tmp_path)
    folder, deadline = tmp_path / "runs" / "s", time.monotonic() + 400
    while not (folder / "trial-0000" / "progress.json").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(100) == 130
    assert [it.state for it in journal(folder)] == [TrialState.RUNNING]
    assert any((folder / "trial-0000" / "checkpoints").glob("*.flatout"))
    assert json.loads((folder / "sweep.json").read_text())["status"] == "stopped"
