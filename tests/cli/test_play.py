"""`flatout play`: pictures that open, with the frames and the size that the episodes give, and text."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

import flatout
from flatout.cli.main import run
from flatout.training.play import Player
from flatout.views.film import Palette, amount

TINY: dict[str, Any] = {
    "n_envs": 2,
    "n_steps": 16,
    "batch_size": 32,
    "n_epochs": 1,
    "executor": "serial",
    "device": "cpu",
}
COUNTER = """
import gymnasium as gym
import numpy as np

class Counter(gym.Env):
    metadata = {"render_modes": ["ansi"], "render_fps": 5}
    observation_space = gym.spaces.Box(0, 9, (1,))
    action_space = gym.spaces.MultiDiscrete([2, 3])

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        self.n = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.n += 1
        return np.full(1, self.n, np.float32), 0.1, self.n == 4, False, {}

    def render(self):
        return f"count \\x1b[41m{self.n}\\x1b[0m of 4"

class Blind(Counter):
    metadata = {"render_modes": []}

class Grey(Counter):
    metadata = {"render_modes": ["rgb_array"]}

    def render(self):
        return np.full((60, 80), 50 * self.n, np.uint8)

class Faint(Grey):
    def render(self):
        return np.full((60, 80, 3), 0.5)

class Alternate(Counter):
    before = None

    def step(self, action):
        self.n += 1
        reward = float(self.n > 1 and list(action) != self.before)
        self.before = list(action)
        return np.zeros(1, np.float32), reward, self.n == 8, False, {}

class Blank(Counter):
    metadata = {"render_modes": ["rgb_array"]}
    render = gym.Env.render
"""


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Agents that have hardly learned: of CartPole, and of envs of one's own."""
    folder = tmp_path_factory.mktemp("agents")
    (folder / "envs.py").write_text(COUNTER)
    for name, env in (
        ("cart", "CartPole-v1"),
        ("text", f"{folder}/envs.py:Counter"),
        ("blind", f"{folder}/envs.py:Blind"),
        ("grey", f"{folder}/envs.py:Grey"),
        ("faint", f"{folder}/envs.py:Faint"),
        ("blank", f"{folder}/envs.py:Blank"),
        ("alternate", f"{folder}/envs.py:Alternate"),
    ):
        agent = flatout.PPO(env, seed=1, **TINY)
        agent.learn(total_timesteps=32)
        agent.save(folder / f"{name}.flatout")
    return folder


def frames_of(path: Path) -> list[npt.NDArray[np.uint8]]:
    frames = []
    with Image.open(path) as image:
        for nth in range(getattr(image, "n_frames", 1)):
            image.seek(nth)
            frames.append(np.asarray(image.convert("RGB")))
    return frames


def test_a_gif_has_a_frame_for_every_second_step_and_a_cell_for_every_episode(
    agents: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "cart.gif"
    assert (
        run(["play", str(agents / "cart.flatout"), "--out", str(out), "--episodes", "2", "--max-steps", "6"])
        == 0
    )
    assert "2 episodes, 4 frames" in capsys.readouterr().out
    frames = frames_of(out)
    # Steps 0, 2, 4 and 6 at CartPole's 50 steps a second; two cells of 480 × 320 with captions.
    assert [frame.shape for frame in frames] == [(366, 966, 3)] * 4
    env = gym.make("CartPole-v1", render_mode="rgb_array")
    env.reset(seed=20_000)
    picture: Any = env.render()
    shown = np.asarray(Image.fromarray(picture).resize((480, 320), Image.Resampling.BILINEAR))
    off = np.abs(frames[0][:320, :480].astype(int) - shown).max(axis=-1)
    assert (off > 30).mean() < 0.005
    env.close()


def test_an_env_that_states_no_pace_is_shown_at_ten_steps_a_second_and_grey_is_grey(
    agents: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "grey.gif"
    assert run(["play", str(agents / "grey.flatout"), "--out", str(out), "--episodes", "1"]) == 0
    assert re.search(r"1 episode, 5 frames, \d+ kB", capsys.readouterr().out)
    with Image.open(out) as image:
        image.seek(1)
        assert image.info["duration"] == 100
    pictures = [frame[:180, :240] for frame in frames_of(out)]
    assert max(np.ptp(picture) for picture in pictures) <= 8  # the colours of a palette
    assert [int(picture.max()) for picture in pictures] == pytest.approx([0, 50, 100, 150, 200], abs=8)


def test_the_last_frame_of_a_text_env_as_a_picture_and_all_of_it_as_text(
    agents: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    agent, text, picture = str(agents / "text.flatout"), tmp_path / "a.txt", tmp_path / "a.png"
    assert run(["play", agent, "--out", str(text)]) == 0
    assert text.read_text().split("\n\n")[4].strip() == "step 4 · return 0.400 · terminated\ncount [4] of 4"
    assert run(["play", agent, "--out", str(picture), "--episodes", "1"]) == 0
    assert frames_of(picture)[0].std() > 10
    assert run(["play", agent, "--live", "--max-steps", "2"]) == 0
    assert "episode 1: return 0.200 in 2 steps" in capsys.readouterr().out


def test_an_agent_that_only_succeeds_with_sampled_actions_says_so(
    agents: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["play", str(agents / "alternate.flatout"), "--out", str(tmp_path / "a.gif")]
    note = r"note: in training, where actions are sampled, the return was .* ± .*; --stochastic shows that policy"
    assert run(argv) == 0
    assert re.search(note, capsys.readouterr().out)
    assert run([*argv, "--stochastic"]) == 0
    assert "note:" not in capsys.readouterr().out


def test_newest_is_offered_only_where_the_best_checkpoint_is_shown(
    agents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoints = tmp_path / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    (tmp_path / "run" / "config.json").write_text("{}")
    shutil.copy(agents / "cart.flatout", checkpoints / "step-000000000032.flatout")
    assert run(["play", "run", "--max-steps", "2", "--episodes", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "a video: --out run/agent.mp4"
    shutil.copy(agents / "cart.flatout", checkpoints / "best.flatout")
    assert run(["play", "run", "--max-steps", "2", "--episodes", "1"]) == 0
    assert "another checkpoint: --newest; a video" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("cart.flatout --out a.avi", "a.avi: name a .gif, .mp4, .png or .txt file"),
        ("cart.flatout --live", "this machine has no screen; write a file instead: --out agent.gif"),
        ("cart.flatout --episodes 0", "--episodes is 0; it must be at least 1"),
        (
            "blind.flatout",
            "metadata['render_modes'] has no rgb_array or ansi; name rgb_array there, take render_mode",
        ),
        (
            "blind.flatout --out a.txt",
            "has no ansi; name ansi there, take render_mode in __init__, and return a text",
        ),
        (
            "faint.flatout",
            "render() returned float64 of shape (60, 80, 3); it must return an RGB image, uint8",
        ),
        ("blank.flatout", "this env has no render(); write one that returns an RGB image or a text"),
        ("nothing.flatout", "nothing.flatout' does not exist"),
    ],
)
def test_what_cannot_be_shown_is_refused_in_one_line(
    words: str,
    message: str,
    agents: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(agents)
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)
    before = set(agents.iterdir())
    assert run(["play", *words.split()]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("loading ")]
    assert len(lines) == 1
    assert message in lines[0]
    assert {path for path in agents.iterdir() if path.name != "__pycache__"} == before - {
        agents / "__pycache__"
    }


def test_a_palette_is_kept_until_a_frame_has_other_colours() -> None:
    palette = Palette()
    red, blue = (Image.new("RGB", (60, 60), colour) for colour in ("#d02020", "#2040e0"))
    first, again, other = palette.apply(red), palette.apply(red), palette.apply(blue)
    assert first.getpalette() == again.getpalette() != other.getpalette()
    for image, reduced in ((red, again), (blue, other)):
        assert np.abs(np.asarray(image, int) - np.asarray(reduced.convert("RGB"))).max() < 8


def test_returns_are_short() -> None:
    assert [amount(x) for x in (-3e-16, 200.0, 11.6749, 0.777777, 12_345.6)] == [
        "0",
        "200",
        "11.7",
        "0.778",
        "12,346",
    ]


class Sign(gym.Env[Any, Any]):
    """One step: 50 or -50, as the observation says."""

    observation_space = gym.spaces.Box(-1, 1, (1,))
    action_space = gym.spaces.Discrete(2)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[npt.NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed)
        self.sign = 1 if self.np_random.random() < 0.5 else -1
        return np.full(1, self.sign, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.zeros(1, np.float32), 50.0 * self.sign, True, False, {}

    def render(self) -> Any:
        return np.zeros((8, 8, 3), np.uint8)


@pytest.mark.parametrize(("how", "expects"), [("normalize_reward", True), ("clip_reward", False)])
def test_what_an_agent_expects_is_told_in_the_rewards_of_its_env(
    how: str, expects: bool, tmp_path: Path
) -> None:
    file = tmp_path / "sign.flatout"
    settings: dict[str, Any] = {
        "n_envs": 8,
        "n_steps": 64,
        "batch_size": 64,
        "learning_rate": 1e-2,
        how: True,
    }
    flatout.PPO(Sign, executor="serial", device="cpu", seed=1, **settings).learn(8192).save(file)
    agent = flatout.load(str(file), trust=True)
    env = Sign()
    player = Player(env, agent.policy, agent.predict, deterministic=True, reward_scale=agent.reward_scale())
    first = list(player.episode(seed=3, max_steps=5))[1]
    if not expects:
        assert first.note == ""
        return
    told = re.fullmatch(r"expects (-?\d+\.?\d*)", first.note)
    assert told
    assert float(told[1]) == pytest.approx(50 * env.sign, rel=0.1)
