"""Snake: kernel and tensors equal a plain game; food is uniform; all endings of a game; bad settings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env

import flatout
from flatout.cli.main import run as main
from flatout.errors import FlatoutError
from flatout.workloads.snake import Snake, SnakeGames
from tests.workloads.plain_snake import PlainSnake

UP, RIGHT, DOWN, LEFT = range(4)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors are not worth a second thread."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


BOARDS: list[dict[str, Any]] = [
    {"height": 10, "width": 10},
    {"height": 6, "width": 9, "wrap": True, "starve_after": 15, "death_reward": -1.0},
    {"height": 3, "width": 3, "starve_after": 9},
    {"height": 2, "width": 2},
    {"height": 2, "width": 3, "wrap": True},
]


def plain_games(n: int, seed: int, **kwargs: Any) -> list[PlainSnake]:
    settings = {
        "wrap": False,
        "starve_after": kwargs["height"] * kwargs["width"],
        "death_reward": 0.0,
    } | kwargs
    return [PlainSnake(**settings, seed=seed, n=i) for i in range(n)]


def sensible(game: PlainSnake, rng: np.random.Generator) -> int:
    """Mostly a way that does not crash, nearer to the food if there is one; else any."""
    ways = rng.permutation(4).tolist()
    if rng.random() < 0.05:
        return int(ways[0])
    open_ = [
        w for w in ways if game.mask()[w] and game.ahead(w) and game.ahead(w) not in game.body[1:]
    ] or ways
    places = {w: game.ahead(w) for w in open_}
    far = {
        w: abs(p[0] - game.food[0]) + abs(p[1] - game.food[1]) if p and game.food else 0
        for w, p in places.items()
    }
    return int(min(open_, key=lambda w: far[w]) if rng.random() < 0.8 else open_[0])


@pytest.mark.parametrize("kwargs", BOARDS)
@pytest.mark.parametrize("obs", ["vector", "planes"])
def test_kernel_tensors_and_the_plain_game_give_the_same_games(kwargs: dict[str, Any], obs: str) -> None:
    n, n_steps = 40, 250
    games, tensors = (SnakeGames(n, "cpu", obs=obs, compiled=c, **kwargs) for c in (True, False))
    plain = plain_games(n, 7, **kwargs)
    rng = np.random.default_rng(1)
    first, _ = games.reset(seed=7)
    tensors.reset(seed=7)
    for game, row, mask in zip(plain, first["view"], first["action_mask"], strict=True):
        _same_view(game, obs, row)
        assert game.mask() == mask.tolist()
    most = n_ends = 0
    for t in range(n_steps):
        actions = torch.tensor([sensible(game, rng) for game in plain])
        now, twin = games.step(actions), tensors.step(actions)
        for a, b in zip(_leaves(now), _leaves(twin), strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)
        ended = [game.step(int(action)) for game, action in zip(plain, actions, strict=True)]
        rewards, ends = zip(*ended, strict=True)
        assert now[1].tolist() == list(rewards)
        assert now[2].tolist() == list(ends)
        assert not now[3].any()
        assert now[4]["food"].tolist() == [len(game.body) - 2 for game in plain]
        for i, game in enumerate(plain):
            if ends[i]:
                most, n_ends = max(most, len(game.body)), n_ends + 1
                _same_view(game, obs, now[4]["final_obs"]["view"][i])
                assert game.mask() == now[4]["final_obs"]["action_mask"][i].tolist()
                game.begin()
            if (t + i) % 5 == 0:
                _same_view(game, obs, now[0]["view"][i])
            assert game.mask() == now[0]["action_mask"][i].tolist()
    assert n_ends > n, "games were to end"
    assert most >= min(20, kwargs["height"] * kwargs["width"]), "long snakes were to be seen, and full boards"


def _leaves(step: Any) -> list[torch.Tensor]:
    obs, reward, terminated, truncated, info = step
    # Final observations are there to be read only where a game ended.
    finals = [info["final_obs"][key][terminated] for key in obs]
    return [*obs.values(), *finals, reward, terminated, truncated, info["food"]]


def _same_view(game: PlainSnake, obs: str, row: torch.Tensor) -> None:
    if obs == "planes":
        np.testing.assert_array_equal(game.planes(), row.numpy())
    else:
        np.testing.assert_allclose(game.vector(), row.numpy(), rtol=0, atol=1e-6)


def test_a_hundred_thousand_random_steps_end_like_the_plain_games() -> None:
    n, n_steps = 1000, 100
    games, tensors = (SnakeGames(n, "cpu", compiled=c) for c in (True, False))
    plain = plain_games(n, 3, height=10, width=10)
    games.reset(seed=3)
    tensors.reset(seed=3)
    actions = torch.randint(4, (n_steps, n), generator=torch.Generator().manual_seed(2))
    for row in actions:
        now, twin = games.step(row), tensors.step(row)
        for a, b in zip(_leaves(now), _leaves(twin), strict=True):
            assert torch.equal(a, b)
        ended = [game.step(action) for game, action in zip(plain, row.tolist(), strict=True)]
        assert list(zip(now[1].tolist(), now[2].tolist(), strict=True)) == ended
        for game, (_, end) in zip(plain, ended, strict=True):
            if end:
                game.begin()
    heads = [game.body[-1] for game in plain]
    assert [divmod(cell, 10) for cell in games.state.head.tolist()] == heads
    assert [divmod(cell, 10) for cell in games.state.food.tolist()] == [game.food for game in plain]


@pytest.mark.parametrize("compiled", [True, False])
def test_food_is_uniform_over_the_free_cells(compiled: bool) -> None:
    n, height, width = 20_000, 4, 5
    games = SnakeGames(n, "cpu", height=height, width=width, compiled=compiled)
    games.reset(seed=5)
    start = games.state.food.clone()
    head = height // 2 * width + width // 2
    _is_uniform(start, [c for c in range(20) if c not in (head - 1, head)])
    # Those whose food lies right ahead eat it: the next is drawn among what is left.
    games.step(torch.full((n,), RIGHT))
    eaters = start == head + 1
    _is_uniform(games.state.food[eaters], [c for c in range(20) if c not in (head - 1, head, head + 1)])
    assert torch.equal(games.state.food[~eaters], start[~eaters])


def _is_uniform(food: torch.Tensor, cells: list[int]) -> None:
    counts = np.bincount(food.numpy(), minlength=max(cells) + 1)
    assert counts.sum() == counts[cells].sum(), "never on the snake"
    expected = counts.sum() / len(cells)
    chi_square = ((counts[cells] - expected) ** 2 / expected).sum()
    degrees = len(cells) - 1
    assert abs(chi_square - degrees) < 4 * (2 * degrees) ** 0.5


def round_trip(height: int, width: int) -> dict[tuple[int, int], int]:
    """A way from every cell that visits all cells and comes back; `height` is even."""
    ways = {}
    for y in range(height):
        for x in range(width):
            if x == 0:
                ways[y, x] = UP if y else RIGHT
            elif y % 2 == 0:
                ways[y, x] = RIGHT if x < width - 1 else DOWN
            else:
                ways[y, x] = LEFT if x > 1 or y == height - 1 else DOWN
    return ways


@pytest.mark.parametrize("compiled", [True, False])
def test_a_snake_that_follows_a_cycle_fills_the_board(compiled: bool) -> None:
    games = SnakeGames(8, "cpu", height=4, width=6, death_reward=-1.0, compiled=compiled)
    ways = round_trip(4, 6)
    table = torch.tensor([ways[divmod(cell, 6)] for cell in range(24)])
    games.reset(seed=1)
    total, wins = torch.zeros(8), 0
    for _ in range(600):
        obs, reward, ended, _, info = games.step(table[games.state.head])
        total += reward
        wins += int(ended.sum())
        assert (total[ended] == 22).all(), "every cell but the two it began with was eaten, and nobody died"
        assert (info["food"][ended] == 22).all()
        # Nothing is free: no food to be seen in the last observation.
        assert (info["final_obs"]["view"][ended][:, 48:52] == 0).all()
        lengths = (obs["view"][ended, -2] * 24).round().tolist()
        assert lengths == [2] * len(lengths), "and the next game has begun"
        total[ended] = 0
    assert wins > 8


@pytest.mark.parametrize("compiled", [True, False])
def test_turning_in_a_circle_starves_exactly_at_the_limit(compiled: bool) -> None:
    games = SnakeGames(64, "cpu", starve_after=12, death_reward=-0.5, wrap=True, compiled=compiled)
    games.reset(seed=1)
    away = torch.tensor([divmod(c, 10)[0] not in (4, 5) for c in games.state.food.tolist()])
    assert away.any()
    for t in range(1, 25):
        _, reward, ended, _, _ = games.step(torch.full((64,), [UP, LEFT, DOWN, RIGHT][(t - 1) % 4]))
        if t <= 12:
            assert ended[away].tolist() == [t == 12] * int(away.sum())
            assert reward[away].tolist() == [-0.5 if t == 12 else 0.0] * int(away.sum())


def put(env: Snake, body: list[tuple[int, int]], facing: int, food: tuple[int, int]) -> None:
    """Lay a snake, from tail to head, onto the board."""
    state, width = env._games.state, env._games.rules.width
    state.board[0, :-1] = 0
    for i, (y, x) in enumerate(body):
        state.board[0, y * width + x] = i + 1
    state.length[0] = state.moves[0] = len(body)
    state.head[0], state.facing[0] = body[-1][0] * width + body[-1][1], facing
    state.food[0] = food[0] * width + food[1]


SQUARE = [(1, 1), (1, 2), (2, 2), (2, 1)]
HOOK = [(1, 0), (1, 1), (1, 2), (2, 2), (2, 1)]


@pytest.mark.parametrize(
    ("body", "facing", "food", "action", "ends", "eats"),
    [
        (SQUARE, LEFT, (0, 0), UP, False, False),  # into the cell that the tail leaves
        (HOOK, LEFT, (0, 0), UP, True, False),  # into the cell before it, which stays
        (HOOK, LEFT, (2, 0), LEFT, False, True),
        (HOOK, LEFT, (0, 0), RIGHT, False, False),  # turning back is going straight on
        ([(0, 1), (0, 0)], LEFT, (3, 3), LEFT, True, False),  # the wall
        ([(0, 1), (0, 0)], LEFT, (3, 3), UP, True, False),
    ],
)
def test_single_moves_give_the_expected_boards(
    body: list[tuple[int, int]], facing: int, food: tuple[int, int], action: int, ends: bool, eats: bool
) -> None:
    env = Snake(height=5, width=5)
    env.reset(seed=0)
    put(env, body, facing, food)
    _, reward, terminated, truncated, info = env.step(action)
    assert (terminated, truncated, reward) == (ends, False, float(eats))
    assert info["food"] == len(body) + eats - 2
    if not ends:
        assert int(env._games.state.head[0]) != body[-1][0] * 5 + body[-1][1]


def test_a_wrapping_board_is_entered_on_the_opposite_side() -> None:
    env = Snake(height=4, width=5, wrap=True, starve_after=1000)
    env.reset(seed=0)
    seen = []
    for _ in range(5):
        assert not env.step(RIGHT)[2]
        seen.append(int(env._games.state.head[0]) % 5)
    assert seen == [3, 4, 0, 1, 2]
    for _ in range(4):
        assert not env.step(UP)[2]
        seen.append(int(env._games.state.head[0]) // 5)
    assert seen[5:] == [1, 0, 3, 2]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kwargs", [{}, {"obs": "planes", "wrap": True, "height": 7, "width": 12}])
def test_the_env_passes_gymnasiums_checker(kwargs: dict[str, Any]) -> None:
    check_env(gym.make("flatout/Snake-v0", **kwargs).unwrapped)
    check_env(gym.make("flatout/Snake-v0", render_mode="rgb_array", **kwargs).unwrapped)


def test_the_single_env_plays_the_first_of_many_games() -> None:
    env, games = Snake(), SnakeGames(3, "cpu")
    first, _ = env.reset(seed=9)
    many, _ = games.reset(seed=9)
    np.testing.assert_array_equal(first["view"], many["view"][0])
    for action in (UP, UP, LEFT):
        obs, _, ended, _, _ = env.step(action)
        many, *_ = games.step(torch.full((3,), action))
        assert not ended
        np.testing.assert_array_equal(obs["view"], many["view"][0])
        np.testing.assert_array_equal(obs["action_mask"], many["action_mask"][0])
    foods = []
    for seed in (9, None, None, 9, 10):
        games.reset(seed)
        foods.append(tuple(games.state.food.tolist()))
    assert foods[0] == foods[3]
    assert len(set(foods)) == 4
    unseeded = SnakeGames(64, "cpu"), SnakeGames(64, "cpu")
    for one in unseeded:
        one.reset()
    assert unseeded[0].state.food.tolist() != unseeded[1].state.food.tolist()


def test_without_autoreset_an_ended_game_stays_until_reset() -> None:
    env = Snake(height=4, width=4, render_mode="ansi")
    env.reset(seed=1)
    while not env.step(RIGHT)[2]:
        last = env.render()
    assert env.render() == last, "the snake stands before the wall"
    assert env.render().count("▶") == 1
    assert env.reset()[0]["action_mask"].tolist() == [1, 1, 1, 0]


def test_results_of_a_step_stay_valid_for_one_more_step() -> None:
    games = SnakeGames(4, "cpu")
    games.reset(seed=1)
    obs, reward, *_ = games.step(torch.full((4,), UP))
    kept = obs["view"].clone(), reward.clone()
    games.step(torch.full((4,), LEFT))
    assert torch.equal(obs["view"], kept[0])
    assert torch.equal(reward, kept[1])


@pytest.mark.parametrize("obs", ["vector", "planes"])
def test_the_host_never_waits_for_the_device(obs: str) -> None:
    games = SnakeGames(16, "meta", obs=obs)
    games.reset(seed=1)
    for _ in range(3):
        now, reward, *_ = games.step(torch.zeros(16, dtype=torch.int64, device="meta"))
    assert now["view"].shape == (16, *games.single_observation_space["view"].shape)  # type: ignore[index]
    assert reward.device.type == "meta"


@pytest.mark.parametrize("obs", ["vector", "planes"])
@pytest.mark.parametrize("compiled", [True, False])
def test_observations_are_in_their_space(obs: str, compiled: bool) -> None:
    games = SnakeGames(32, "cpu", obs=obs, height=8, width=7, compiled=compiled)
    space = games.single_observation_space["view"]  # type: ignore[index]
    now, _ = games.reset(seed=1)
    for t in range(100):
        for row in now["view"].numpy():
            assert space.contains(row)
        now, *_ = games.step(torch.full((32,), [UP, LEFT, DOWN, RIGHT, RIGHT][t % 5]))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"height": 1}, "snake: height is 1; it must be a whole number from 2 to 64"),
        ({"width": 65}, "snake: width is 65; it must be a whole number from 2 to 64"),
        ({"width": 9.5}, "snake: width is 9.5; it must be a whole number from 2 to 64"),
        ({"obs": "plane"}, "snake: obs is 'plane'; it must be vector or planes; did you mean 'planes'?"),
        ({"starve_after": 0}, "snake: starve_after is 0; it must be a whole number from 1 to 1,000,000"),
        (
            {"starve_after": "soon"},
            "snake: starve_after is 'soon'; it must be a whole number from 1 to 1,000,000",
        ),
        ({"wrap": "no"}, "snake: wrap is 'no'; it must be true or false"),
        (
            {"death_reward": float("nan")},
            "--env-kwargs is {'death_reward': nan}; it must be a JSON object, with finite numbers",
        ),
        ({"colour": 1}, "snake takes no 'colour'; it takes height, width"),
    ],
)
def test_bad_settings_are_refused_in_one_line(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(FlatoutError) as error:
        flatout.PPO("snake", env_kwargs=kwargs)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_bad_actions_and_render_modes_are_refused() -> None:
    env = Snake()
    env.reset(seed=0)
    with pytest.raises(FlatoutError, match=r"^snake: action is 4; it must be 0 up"):
        env.step(4)
    with pytest.raises(
        FlatoutError, match=r"^snake: render_mode is 'human'; it must be one of None, rgb_array, ansi$"
    ):
        Snake(render_mode="human")
    with pytest.raises(FlatoutError, match=r"^snake: num_envs is 0; it must be a whole number from 1 "):
        SnakeGames(0)


def test_the_board_is_rendered_as_an_image_and_as_text() -> None:
    env = Snake(height=4, width=6, render_mode="rgb_array")
    env.reset(seed=1)
    picture = env.render()
    assert picture.shape == (128, 192, 3)
    assert picture.dtype == np.uint8
    y, x = divmod(int(env._games.state.food[0]), 6)
    red, green, _ = picture[y * 32 + 18, x * 32 + 18].tolist()
    assert red > 200 > green, "food is red"
    text = Snake(height=4, width=6, render_mode="ansi")
    text.reset(seed=1)
    lines = text.render().splitlines()
    assert len(lines) == 6
    assert lines[3].split()[3:5] == ["■", "▶"]
    assert lines[1 + y].split()[1 + x] == "●"
    assert Snake().render() is None


def test_the_command_line_trains_and_evaluates_and_shows_the_food_eaten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = "train snake --timesteps 163840 --eval-every 80000 --compile off --device cpu --run-name r --quiet --json"
    assert main(command.split()) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["env"] == "flatout/Snake-v0"
    assert summary["executor"]["reason"] == "the env steps 256 at once as tensors on cpu"
    assert summary["return_mean"] > 2, "a random snake eats about 0.3"
    assert main("evaluate r --episodes 20 --json".split()) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["episodes"] == 20
    assert result["return_mean"] > 2
    assert result["length_mean"] > 10


def test_an_agent_trained_on_many_games_plays_the_single_env(tmp_path: Path) -> None:
    agent = flatout.PPO("snake", n_envs=8, n_steps=16, seed=1, device="cpu").learn(1_000)
    agent.save(tmp_path / "snake.flatout")
    env = gym.make("flatout/Snake-v0")
    obs, _ = env.reset(seed=1)
    for _ in range(20):
        action, _ = flatout.load(tmp_path / "snake.flatout").predict(obs, deterministic=True)
        assert obs["action_mask"][action] == 1
        obs, _, terminated, _, _ = env.step(action)
        if terminated:
            obs, _ = env.reset()
