"""Files that name code: a stranger's config or checkpoint runs nothing without the user's word."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import flatout
from flatout.cli.main import run as main
from flatout.config.trust import CODE, SIGNATURE, code_in, require_trust, signed
from flatout.errors import FlatoutError

FLAGS = "--n-envs 2 --n-steps 32 --batch-size 64 --executor serial --timesteps 64 --quiet".split()
ENV = """
from pathlib import Path
from tests.faults import Walk

Path("loaded").touch()

def make():
    return Walk()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with an env in my.py and a key of one's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "mine"))
    (tmp_path / "my.py").write_text(ENV)
    return tmp_path


@pytest.fixture
def stranger(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it: from then on this is another user, who has loaded nothing."""

    def become() -> None:
        monkeypatch.setenv("FLATOUT_CACHE", str(folder / "theirs"))
        (folder / "my.py").write_text(ENV + "\n")  # a new module
        (folder / "loaded").unlink()

    return become


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    capsys.readouterr()
    assert main(list(argv)) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    return line


def test_what_flatout_writes_needs_no_word_from_the_same_user(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["train", "my.py:make", *FLAGS, "--run-name", "a"]) == 0
    config = json.loads((folder / "runs/a/config.json").read_text())
    assert len(config[SIGNATURE]) == 64
    key = folder / "mine" / "signing.key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert main(["evaluate", "a", "--episodes", "1"]) == 0
    assert main(["resume", "a", "--timesteps", "128", "--quiet"]) == 0
    assert main(["train", "--config", "runs/a/config.json", "--run-name", "b", "--quiet"]) == 0
    (folder / "elsewhere").mkdir()
    (folder / "my.py").rename(folder / "elsewhere" / "my.py")
    monkeypatch.chdir(folder / "elsewhere")
    with pytest.raises(FlatoutError, match="pass --trust"):  # it may be another my.py
        flatout.load(folder / "runs/a").evaluate(1)


def test_a_strangers_run_needs_trust_and_nothing_is_imported_before(
    folder: Path, stranger: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "my.py:make", *FLAGS, "--run-name", "a"]) == 0
    stranger()
    for command in (
        ["evaluate", "a"],
        ["resume", "a", "--timesteps", "128"],
        ["train", "--config", "runs/a/config.json"],
        ["doctor", "--config", "runs/a/config.json"],
    ):
        line = refusal(capsys, *command)
        assert "the env 'my.py:make' is code, and no run of yours wrote this file; pass --trust" in line
    agent = flatout.load("runs/a")
    agent.predict(agent.policy.obs.space.sample())
    assert not (folder / "loaded").exists()
    with pytest.raises(FlatoutError, match="trust=True"):
        agent.evaluate(1)
    assert not (folder / "loaded").exists()
    assert agent.__class__.from_checkpoint(agent._checkpoint, env="CartPole-v1") is not None  # type: ignore[arg-type]
    assert flatout.load("runs/a", trust=True).evaluate(1).returns == (7.0,)
    assert main(["evaluate", "a", "--episodes", "1", "--trust"]) == 0
    typed = ["train", "my.py:make", "--resume", "--run-name", "a", "--timesteps", "128", "--quiet"]
    assert main(typed) == 0
    again = ["train", "my.py:make", "--config", "runs/a/config.json", "--run-name", "b", "--quiet"]
    assert main(again) == 0


def test_a_strangers_algorithm_is_never_loaded(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    agent = flatout.PPO("CartPole-v1", n_envs=2, n_steps=32, batch_size=64, seed=1)
    checkpoint = agent.trainer().checkpoint()
    agent.close()
    checkpoint.state["config"]["algo"] = "my.py:Own"
    with pytest.raises(FlatoutError, match=r"the algo 'my\.py:Own' is code"):
        flatout.Agent.from_checkpoint(checkpoint)
    (folder / "their.json").write_text(json.dumps({"algo": "my.py:Own"}))
    for flags in ((), ("--algo", "ppo")):
        line = refusal(capsys, "train", "CartPole-v1", "--config", "their.json", *flags)
        assert "the algo 'my.py:Own' is code" in line
    assert not (folder / "loaded").exists()


def test_registered_ids_need_no_trust(folder: Path) -> None:
    (folder / "their.json").write_text(
        '{"env": "CartPole-v1", "timesteps": 64, "n_envs": 2, "ppo": {"n_steps": 32}}'
    )
    assert main(["train", "--config", "their.json", "--quiet"]) == 0
    assert not (folder / "mine" / "signing.key").exists()


@pytest.mark.parametrize("name", ["os:system", "subprocess:Popen", "builtins:exec"])
def test_what_makes_no_env_is_never_called_whoever_names_it(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kwargs = {"command": "touch called", "args": ["touch", "called"]}
    (folder / "evil.json").write_text(json.dumps({"env": name, "env_kwargs": kwargs}))
    assert "pass --trust" in refusal(capsys, "train", "--config", "evil.json")
    assert "not a gym.Env class or a Python function" in refusal(
        capsys, "train", "--config", "evil.json", "--trust"
    )
    assert "not a gym.Env class or a Python function" in refusal(capsys, "train", name)
    assert not (folder / "called").exists()


@pytest.mark.parametrize("name", [*CODE, "env_kwargs"])
def test_a_signature_holds_for_these_names_and_arguments_only(name: str, folder: Path) -> None:
    values: dict[str, Any] = dict.fromkeys(CODE, "my.py:make") | {"env_kwargs": {"level": 1}}
    written = json.loads(json.dumps(signed(values)))
    require_trust(written, "file", trust=False)
    written[name] = {"level": 2} if name == "env_kwargs" else "my.py:other"
    with pytest.raises(FlatoutError, match="no run of yours wrote this file"):
        require_trust(written, "file", trust=False)


def test_without_a_private_key_nothing_is_signed(folder: Path) -> None:
    values = {"env": "my.py:make"}
    assert SIGNATURE in signed(values)
    (folder / "mine" / "signing.key").chmod(0o644)
    assert SIGNATURE not in signed(values)
    (folder / "mine" / "signing.key").unlink()
    (folder / "mine" / "signing.key").symlink_to(folder / "my.py")
    assert SIGNATURE not in signed(values)


def test_the_size_of_a_memory_is_no_code_and_anything_else_with_a_colon_is() -> None:
    assert code_in({"algo": "recurrent-ppo", "recurrent-ppo": {"memory": "lstm:128"}}) == {}
    for section, name, value in (
        ("recurrent-ppo", "memory", "theirs:make"),
        ("recurrent-ppo", "memory", "lstm:make"),
        ("own", "memory", "lstm:128"),
        ("network", "network", "lstm:128"),
    ):
        assert code_in({section: {name: value}}) == {name: value}
