"""W&B and MLflow without a network: what a run writes there, read back with their own classes, and loggers that fail."""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import flatout
from flatout.cli.main import run
from flatout.errors import FlatoutError
from flatout.integrations import loggers
from flatout.integrations.loggers import LoggerProcess
from flatout.runlog.folder import RunFolder
from flatout.runlog.recorder import Recorder, read_rows
from tests.runlog.progress_examples import progress

TINY: dict[str, Any] = {"n_envs": 4, "n_steps": 32, "batch_size": 64, "n_epochs": 2}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """W&B in files; MLflow in files, which are made in a tenth of the time that its database takes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")


def wandb_records(file: Path) -> Iterator[Any]:
    """The records of a .wandb file: W&B's own messages, in the blocks of a LevelDB log."""
    from wandb.proto import wandb_internal_pb2

    data, at, parts = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # the rest of a block
            at += 32768 - at % 32768
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            record: Any = getattr(wandb_internal_pb2, "Record")()  # noqa: B009
            record.ParseFromString(parts)
            parts = b""
            yield record


def items(updates: Any) -> dict[str, Any]:
    return {"/".join(it.nested_key) or it.key: json.loads(it.value_json) for it in updates}


def a_folder(path: Path) -> RunFolder:
    folder = RunFolder.create(path, "a")
    folder.config.write_text('{"env": "CartPole-v1", "ppo": {"gamma": 0.98}}')
    return folder


def test_a_run_is_in_wandb_and_mlflow(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    agent = flatout.PPO("CartPole-v1", **TINY, seed=3, run_name="a", log="wandb,mlflow")
    agent.learn(2000)
    folder = tmp_path / "runs" / "a"
    rows = list(read_rows(folder / "metrics.csv"))
    steps = [int(row["time/total_timesteps"]) for row in rows]
    returns = [float(row["rollout/ep_rew_mean"]) for row in rows if row["rollout/ep_rew_mean"]]
    assert agent.summary["records_lost"] == 0

    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    records = list(wandb_records(file))
    history = [items(record.history.item) for record in records if record.HasField("history")]
    assert [row["time/total_timesteps"] for row in history] == steps
    assert [row["rollout/ep_rew_mean"] for row in history if "rollout/ep_rew_mean" in row] == returns
    begun = next(record.run for record in records if record.HasField("run"))
    assert (begun.project, begun.display_name) == ("flatout", "a")
    config = items(begun.config.update)
    assert (config["env"], config["seed"], config["ppo"]["n_epochs"]) == ("CartPole-v1", 3, 2)
    summary: dict[str, Any] = {}
    for record in records:
        if record.HasField("summary"):
            summary |= items(record.summary.update)
    assert (summary["status"], summary["return_mean"]) == ("finished", agent.summary["return_mean"])

    client, known = MlflowClient(), json.loads((folder / "mlflow.json").read_text())
    seen = client.get_run(known["run_id"])
    assert (seen.info.run_name, seen.info.status) == ("a", "FINISHED")
    assert (seen.data.params["env"], seen.data.params["ppo/n_epochs"]) == ("CartPole-v1", "2")
    assert seen.data.metrics["summary/return_mean"] == agent.summary["return_mean"]
    assert seen.data.tags["summary/status"] == "finished"
    curve = client.get_metric_history(known["run_id"], "rollout/ep_rew_mean")
    assert [point.value for point in curve] == returns
    assert client.get_experiment(known["experiment_id"]).name == "flatout"


def test_a_logger_that_is_killed_is_started_again_and_sends_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    monkeypatch.setattr(loggers, "RETRY_SECONDS", 0.0)
    folder = a_folder(tmp_path)
    logger = LoggerProcess("mlflow", folder, resume_at=None)
    recorder = Recorder(folder, loggers=[logger])
    recorder.write(progress(env_steps=2000, seconds=2.0))
    while not logger._n_sent:
        time.sleep(0.1)
    assert logger._process is not None
    os.killpg(logger._process.pid, signal.SIGKILL)
    logger._listener.join()
    assert logger.problem is not None
    recorder.write(progress(env_steps=3000, seconds=3.0))
    recorder.close()
    assert recorder.end_loggers({"status": "stopped", "return_mean": float("nan")}) == []
    run_id = json.loads((folder.path / "mlflow.json").read_text())["run_id"]
    assert [point.step for point in MlflowClient().get_metric_history(run_id, "train/loss")] == [2000, 3000]
    assert MlflowClient().get_run(run_id).info.status == "KILLED"


def test_a_server_that_is_down_costs_the_records_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    folder = a_folder(tmp_path)
    recorder = Recorder(folder, loggers=[LoggerProcess("mlflow", folder, None)])
    recorder.write(progress())
    recorder.close()
    (note,) = recorder.end_loggers({"status": "finished"})
    assert note.startswith("cannot log to mlflow: ")
    assert "1 of 1 records are lost there; metrics.csv has them" in note
    assert recorder.figures()["records_lost"] == 1


def test_a_missing_package_is_named_before_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert run(["train", "CartPole-v1", "--log", "wandb"]) == 2
    assert capsys.readouterr().err == "flatout: --log wandb needs wandb: pip install 'flatout[wandb]'\n"
    with pytest.raises(FlatoutError, match="needs wandb"):
        flatout.PPO("CartPole-v1", log="wandb").learn(100)
    assert run(["train", "CartPole-v1", "--log", "wandbb"]) == 2
    assert "it must be one of wandb, mlflow, tensorboard; did you mean 'wandb'?" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_who_is_not_logged_in_to_wandb_is_told_before_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    with pytest.raises(FlatoutError, match=r"not logged in; run `wandb login`, or set WANDB_MODE=offline"):
        loggers.require_loggers(["wandb"])
