"""The envs that come with flatout are registered with Gymnasium, and cheaply."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import gymnasium as gym
import pytest
from gymnasium.vector import VectorEnv

import flatout
from flatout.envs.make import env_factory, env_id
from flatout.errors import FlatoutError
from flatout.workloads.crawl import AsyncCrawl
from flatout.workloads.snake import SnakeGames

IDS = ["flatout/Crawl-v0", "flatout/Market-v0", "flatout/Mission-v0", "flatout/Snake-v0"]


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize("imports", ["gymnasium, flatout", "flatout, gymnasium"])
def test_importing_flatout_registers_its_envs(imports: str) -> None:
    code = f"import {imports}; print([i for i in sorted(gymnasium.registry) if i.startswith('flatout/')])"
    assert python(code) == str(IDS)


def test_gymnasium_makes_an_env_that_names_its_module() -> None:
    code = "import gymnasium; print(gymnasium.make('flatout:flatout/Snake-v0').action_space)"
    assert python(code) == "Discrete(4)"


def test_importing_flatout_imports_neither_libraries_nor_an_env() -> None:
    slow = ("gymnasium", "numpy", "torch", "aiohttp", "numba", "rich")
    code = f"import sys, flatout; print([m for m in sys.modules if m in {slow}"
    assert python(f"{code} or m.startswith('flatout.workloads.')])") == "[]"


@pytest.mark.parametrize("name", ["crawl", "market", "mission", "snake"])
def test_a_short_name_is_the_id_of_one_of_flatouts_envs(name: str) -> None:
    assert env_id(name) == f"flatout/{name.capitalize()}-v0"


@pytest.mark.parametrize("name", ["Snake", "cartpole", "CartPole-v1", "snake.py:make", "flatout/Snake-v0"])
def test_other_names_stay_as_they_are(name: str) -> None:
    assert env_id(name) == name


def test_flatout_makes_the_batched_form_where_it_asks_for_many() -> None:
    assert isinstance(env_factory("snake").make(3), SnakeGames)
    market = env_factory("market").make(3)
    assert isinstance(market, VectorEnv)
    assert market.num_envs == 3
    assert isinstance(env_factory("snake")(), gym.Env)


def test_flatout_makes_the_async_form() -> None:
    crawl: Any = env_factory("crawl")()
    assert isinstance(crawl.unwrapped, AsyncCrawl)


def test_a_keyword_that_the_batched_form_does_not_take_is_refused() -> None:
    with pytest.raises(FlatoutError, match=r"takes no .*'colour'"):
        flatout.make_vec("snake", n_envs=2, env_kwargs={"colour": 1})
    with pytest.raises(FlatoutError, match=r"takes no .*'colour'"):
        flatout.make_vec("crawl", n_envs=2, env_kwargs={"colour": 1})


def test_gymnasium_makes_the_market_as_a_vector_env() -> None:
    envs = gym.make_vec("flatout/Market-v0", num_envs=3)
    obs, _ = envs.reset(seed=1)
    assert obs.shape[0] == 3
    envs.close()
