"""Mission as a Gymnasium env: contract, seeds, rewards, rendering, generated missions."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import flatout  # noqa: F401  # registers the env
from flatout.envs.validate import sample_action
from flatout.workloads.mission import Mission
from flatout.workloads.mission.game import Game
from flatout.workloads.mission.grid import breaches
from flatout.workloads.mission.mission import N_UNIT, SOLVED
from flatout.workloads.mission.scenario import LEVELS, generate, parse, solvable

YARD = ["#########", "#S......#", "#B......#", "#C.....O#", "#########"]


def scenario(folder: Path, **data: Any) -> str:
    file = folder / "yard.json"
    file.write_text(json.dumps({"map": YARD, **data}))
    return str(file)


def walk_in(env: Mission, n_steps: int) -> tuple[float, bool, bool, dict[str, Any]]:
    """The carrier walks east for some steps; the return and how the last step ended."""
    total = 0.0
    for _ in range(n_steps):
        _, reward, terminated, truncated, info = env.step(np.array([0, 0, 2]))
        total += float(reward)
    return total, terminated, truncated, info


@pytest.mark.parametrize("level", LEVELS)
def test_the_env_passes_gymnasiums_checker(level: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for mode in (None, "rgb_array", "ansi"):
            env = gym.make("flatout/Mission-v0", level=level, render_mode=mode)
            check_env(env.unwrapped, skip_render_check=mode is None)


@pytest.mark.parametrize("level", LEVELS)
def test_the_same_seed_gives_the_same_episodes(level: int) -> None:
    def episodes(seed: int) -> list[Any]:
        env = Mission(level=level)
        env.action_space.seed(seed)
        obs, _ = env.reset(seed=seed)
        record: list[Any] = []
        for _ in range(150):
            action = sample_action(env.action_space, obs["action_mask"], 0)
            obs, reward, terminated, truncated, info = env.step(action)
            record += [obs["squad"].tobytes(), reward, info["outcome"]]
            if terminated or truncated:
                obs, _ = env.reset()
        return record

    assert episodes(5) == episodes(5)
    assert episodes(5) != episodes(6)


def test_success_terminates_and_only_its_return_is_high(tmp_path: Path) -> None:
    env = Mission(scenario=scenario(tmp_path, hold=2, time_limit=40))
    env.reset()
    total, terminated, truncated, info = walk_in(env, 12)
    assert (terminated, truncated, info["success"], info["outcome"]) == (True, False, True, "success")
    assert total == pytest.approx(10 + 2 - 12 / 40)
    assert total > SOLVED


def test_the_time_limit_truncates(tmp_path: Path) -> None:
    env = Mission(scenario=scenario(tmp_path, hold=2, time_limit=11))
    env.reset()
    total, terminated, truncated, info = walk_in(env, 11)
    assert (terminated, truncated, info["success"], info["outcome"]) == (False, True, False, "")
    assert total == pytest.approx(2 - 1)


def test_success_in_the_last_step_is_not_truncated(tmp_path: Path) -> None:
    env = Mission(scenario=scenario(tmp_path, hold=1, time_limit=11))
    env.reset()
    _, terminated, truncated, info = walk_in(env, 11)
    assert (terminated, truncated, info["success"]) == (True, False, True)


def test_a_captured_carrier_terminates(tmp_path: Path) -> None:
    env = Mission(scenario=scenario(tmp_path, patrols=[{"route": [[3, 4]], "facing": "W"}], time_limit=10))
    env.reset()
    total, terminated, truncated, info = walk_in(env, 2)
    assert (terminated, truncated, info["outcome"]) == (True, False, "captured")
    assert total == pytest.approx(2 / 6 - 2 / 10 - 0.5 - 2)


@pytest.mark.parametrize("level", LEVELS)
def test_random_play_never_succeeds_by_return_alone(level: int) -> None:
    env = Mission(level=level)
    env.action_space.seed(0)
    obs, _ = env.reset(seed=0)
    total, n = 0.0, 0
    for _ in range(600):
        obs, reward, terminated, truncated, info = env.step(
            sample_action(env.action_space, obs["action_mask"], 0)
        )
        total += float(reward)
        assert env.observation_space.contains(obs)
        if terminated or truncated:
            assert (total > SOLVED) == info["success"]
            total, n = 0.0, n + 1
            obs, _ = env.reset()
    assert n > 3


@pytest.mark.parametrize(("level", "n_seeds"), [(1, 60), (2, 40), (3, 20)])
def test_generated_missions_are_solvable_and_differ(level: int, n_seeds: int) -> None:
    made = [generate(level, np.random.default_rng(seed)) for seed in range(n_seeds)]
    assert len({mission.walls.tobytes() for mission in made}) == n_seeds
    for mission in made:
        assert solvable(mission)
        needed = breaches(mission.walls, mission.objective, mission.units[2])
        assert needed == int(LEVELS[level].sealed)
        assert len(mission.routes) == LEVELS[level].n_patrols
        stands = [
            *mission.units,
            mission.objective,
            *(cell for route in mission.routes for cell in route.cells),
        ]
        assert not any(mission.walls[cell] for cell in stands)
        steps = [
            abs(a[0] - b[0]) + abs(a[1] - b[1])
            for route in mission.routes
            for a, b in zip(route.cells, route.cells[1:], strict=False)
        ]
        assert set(steps) == {1}


def test_unsolvable_missions_are_recognised() -> None:
    def of(rows: list[str], **data: Any) -> bool:
        return solvable(parse({"map": rows, **data}))

    assert of(YARD, hold=3, time_limit=13)
    assert not of(YARD, hold=3, time_limit=12)
    assert not of(YARD, patrols=[{"route": [[3, 5]], "facing": "N"}])
    assert of(YARD, patrols=[{"route": [[1, 3]], "facing": "E"}], patrol_sight=1)
    sealed = ["#######", "#S..#.#", "#B..#O#", "#C..#.#", "#######"]
    assert of(sealed, hold=1, time_limit=9)
    assert not of(sealed, hold=1, time_limit=4)


def test_the_observation_contains_only_what_the_squad_knows() -> None:
    rows = ["###############", "#S............#", "#B####.########", "#C...........O#", "###############"]
    env = Mission()
    env.start(parse({"map": rows, "known_map": False, "patrols": [{"route": [[1, 12]], "facing": "E"}]}))
    env.game = Game(env.game.scenario)
    seen = env.game.known.copy()
    before = env._observation()["squad"]
    hidden = [row[:9] + "#" * 5 + row[14:] if i == 1 else row for i, row in enumerate(rows)]
    other = Mission()
    other.start(parse({"map": hidden, "known_map": False}))
    assert not seen[1, 9:14].any()
    assert np.array_equal(other._observation()["squad"], before)
    assert before[2 * N_UNIT :].any()


def test_the_map_is_rendered_as_an_image_and_as_text(tmp_path: Path) -> None:
    data: dict[str, Any] = {"patrols": [{"route": [[1, 6]], "facing": "W"}], "patrol_sight": 2, "charges": 0}
    env = Mission(scenario=scenario(tmp_path, **data), render_mode="ansi")
    env.reset()
    assert env.render() == (
        "#########\n#S..!!<.#\n#B..!!..#\n#C.....O#\n#########\nstep 0/100  held 0/3  charges 0\n"
    )
    env.render_mode = "rgb_array"
    first = env.render()
    assert isinstance(first, np.ndarray)
    assert first.dtype == np.uint8
    assert first.shape == (5 * 28 + 12, 9 * 28, 3)
    env.step(np.array([6, 0, 0]))
    second = env.render()
    assert isinstance(second, np.ndarray)
    assert not np.array_equal(first, second)
