"""`flatout play RUN`."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING, Any

from flatout.cli import parser as cli
from flatout.cli.settings import given_settings
from flatout.errors import FlatoutError
from flatout.runlog.files import plural, write_text

if TYPE_CHECKING:
    import gymnasium as gym

    from flatout.agent import Agent
    from flatout.training.play import Player
    from flatout.views.film import Picture, Shot

MOST_EPISODES = 16
GIF_FPS = 25.0
PLAY_SEED = 20_000
"""Seeds of the episodes that are shown come after those of training and evaluation."""


def play(argv: Sequence[str]) -> int:
    """Show a trained agent at play; returns the exit code."""
    parser = cli.run_parser(
        "play",
        "A GIF or MP4 of a trained agent: several episodes side by side, with return, step and the probabilities or values "
        "of its actions.",
        "a run's folder, its name in --runs-dir, or a .flatout file",
    )
    parser.flag(
        "--out", "a .gif, .mp4, .png (the last frame) or .txt file (RUN/agent.gif)", type=Path, metavar="FILE"
    )
    parser.flag("--episodes", "number of episodes, side by side (4; 1 for text)", type=int, metavar="N")
    parser.flag("--max-steps", "cut longer episodes (500)", type=int, default=500, metavar="N")
    parser.flag("--every", "show every N-th step (as many as keep the env's pace)", type=int, metavar="N")
    parser.flag("--seed", "seed of the first episode", type=int, default=PLAY_SEED, metavar="N")
    text = "keywords for the env that differ from training"
    parser.flag("--env-kwargs", text, metavar="JSON", default=argparse.SUPPRESS)
    parser.flag("--newest", "load the newest checkpoint, not the best")
    parser.flag("--stochastic", "sample actions instead of taking the most likely one")
    parser.flag("--live", "show a window instead of writing a file, or text in the terminal")
    parser.flag("--network", "where its own network is now, if elsewhere", metavar="FILE.py:NAME")
    cli.add_trust(parser)
    args = parser.parse(argv)
    for name in ("episodes", "max_steps", "every"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            flag = name.replace("_", "-")
            raise FlatoutError(f"--{flag} is {getattr(args, name)}; it must be at least 1")
    if args.episodes is not None and args.episodes > MOST_EPISODES:
        raise FlatoutError(f"--episodes is {args.episodes}; {MOST_EPISODES} fit side by side")
    path = cli.run_path(args.run, args.runs_dir)
    best = path / "checkpoints" / "best.flatout"
    cli.check_exists(path)

    from flatout.agent import load

    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: print(f"note: {message}", file=sys.stderr)
        code = {"network": args.network} if args.network is not None else {}
        shows_best = best.exists() and not args.newest
        agent = load(best if shows_best else path, trust=args.trust, **code)
        if args.live:
            return _live(agent, args)
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame draws into memory and looks for no screen
        if sys.platform == "linux" and "DISPLAY" not in os.environ:
            os.environ.setdefault("MUJOCO_GL", "egl")
        out = args.out or (path if path.is_dir() else Path()) / "agent.gif"
        if out.suffix == ".txt":
            return _write_text(agent, args, out)
        return _write_film(agent, args, out, "another checkpoint: --newest; " if shows_best else "")


def _shots(
    agent: Agent, args: argparse.Namespace, n: int, modes: tuple[str, ...]
) -> tuple[list[Iterator[Shot]], float, int]:
    """Episodes, each in an env of its own, the envs' frames per second, and the steps from one frame to the next."""
    from flatout.training.play import played, rendered

    factory = agent.playable(given_settings(args).get("env_kwargs"))
    episodes, fps, every = [], 0.0, 1
    for nth in range(n):
        env, fps = rendered(factory, modes)
        every = args.every or max(1, round(fps / GIF_FPS))
        player = _player(agent, env, args)
        player.every = every
        episodes.append(played(player, args.seed + nth, args.max_steps))
    return episodes, fps, every


def _write_film(agent: Agent, args: argparse.Namespace, out: Path, other: str) -> int:
    from flatout.training.play import CUT, together
    from flatout.views.figures import mean_and_std
    from flatout.views.film import Grid, amount, write_film

    n = args.episodes or 4
    episodes, fps, every = _shots(agent, args, n, ("rgb_array", "ansi"))
    grid = Grid()
    last: list[Shot] = []

    def frames() -> Iterator[Picture]:
        for step, shots in enumerate(together(episodes)):
            last[:] = shots
            if step % every == 0:
                yield grid.frame(shots)
        if step % every:
            yield grid.frame(last)

    n_frames = write_film(out, frames(), fps / every)
    returns = ", ".join(amount(shot.total_reward) for shot in last)
    n_bytes = out.stat().st_size
    size = f"{n_bytes / 1e6:.1f} MB" if n_bytes >= 1e6 else f"{n_bytes / 1e3:.0f} kB"
    print(f"{out}: {plural(n, 'episode')}, {plural(n_frames, 'frame')}, {size}; returns {returns}")
    mean, std = agent.training_returns.mean, agent.training_returns.std
    whole = not args.stochastic and not any(shot.over == CUT for shot in last)
    if whole and mean is not None and std is not None and sum(s.total_reward for s in last) / n < mean - std:
        text = f"the return was {mean_and_std(mean, std)}; --stochastic shows that policy"
        print(f"note: in training, where actions are sampled, {text}")
    if args.out is None:
        print(f"{other}a video: --out {out.with_suffix('.mp4')}")
    return 0


def _write_text(agent: Agent, args: argparse.Namespace, out: Path) -> int:
    from flatout.views.film import without_codes

    args.every = args.every or 1
    episodes, _, _ = _shots(agent, args, args.episodes or 1, ("ansi",))
    texts = [without_codes(_told(shot)) for episode in episodes for shot in episode]
    write_text(out, "\n\n".join(texts) + "\n")
    print(f"{out}: {plural(len(episodes), 'episode')}, {plural(len(texts), 'step')}")
    return 0


def _told(shot: Shot) -> str:
    from flatout.views.film import amount

    end = f" · {shot.over}" if shot.over else ""
    return f"step {shot.step} · return {amount(shot.total_reward)}{end}\n{shot.image}"


def _player(agent: Agent, env: gym.Env[Any, Any], args: argparse.Namespace) -> Player:
    from flatout.training.play import Player

    scale = agent.reward_scale()
    return Player(env, agent.policy, agent.predict, not args.stochastic, reward_scale=scale)


def _live(agent: Agent, args: argparse.Namespace) -> int:
    """Episodes one after another in the env's own window, or as text."""
    from flatout.training.play import rendered
    from flatout.views.film import amount

    env, fps = rendered(agent.playable(given_settings(args).get("env_kwargs")), ("human", "ansi"))
    is_text = env.render_mode == "ansi"
    screens = ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER")
    if not is_text and sys.platform == "linux" and not any(name in os.environ for name in screens):
        raise FlatoutError(
            "--live opens a window, and this machine has no screen; write a file instead: --out agent.gif"
        )
    player = _player(agent, env, args)
    player.shows = not is_text
    for nth in range(args.episodes or 1):
        for shot in player.episode(args.seed + nth, args.max_steps):
            if is_text:
                print(_told(shot), end="\n\n", flush=True)
                sleep(1 / fps)
        print(f"episode {nth + 1}: return {amount(shot.total_reward)} in {plural(shot.step, 'step')}")
    env.close()
    return 0
