"""The Crawl env: Gymnasium's contract, rewards, determinism, recording, rendering, and bad input."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import networkx as nx
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import flatout
from flatout.envs.make import env_factory, is_async
from flatout.errors import FlatoutError
from flatout.workloads.crawl import AsyncCrawl, Crawl
from flatout.workloads.crawl.crawl import BACK, REPEAT, REQUEST, TARGET, TEMPLATE
from flatout.workloads.crawl.observation import code
from tests.workloads.misbehaving_site import misbehaving, page, reply

ENV_ID = "flatout/Crawl-v0"


def walk(env: gym.Env[Any, Any], seed: int, n_steps: int = 60) -> list[Any]:
    """What a random walk gives, step by step, without anything that a port is in."""
    rng = np.random.default_rng(seed)
    obs, _ = env.reset(seed=seed)
    out: list[Any] = [obs]
    for _ in range(n_steps):
        action = int(rng.choice(np.flatnonzero(obs["action_mask"])))
        obs, reward, terminated, truncated, info = env.step(action)
        out += [obs, reward, terminated, truncated, info["targets"], info["fault"].partition(":")[0]]
        if terminated or truncated:
            obs, _ = env.reset()
    return out


def same(a: list[Any], b: list[Any]) -> bool:
    pairs = zip(a, b, strict=True)
    return all(
        all(np.array_equal(x[k], y[k]) for k in x) if isinstance(x, dict) else x == y for x, y in pairs
    )


@pytest.mark.parametrize("render_mode", [None, "ansi", "rgb_array"])
def test_the_env_passes_gymnasiums_checker(render_mode: str | None) -> None:
    env = gym.make(ENV_ID, render_mode=render_mode)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env.unwrapped)
    env.close()


def test_gymnasium_makes_the_blocking_env_and_flatout_the_async_one() -> None:
    assert not is_async(gym.make(ENV_ID))
    assert is_async(env_factory("crawl")())
    envs = flatout.make_vec("crawl", n_envs=3, executor="auto")
    assert envs.kind == "async"
    obs, _ = envs.reset(seed=1)
    assert obs["links"].shape == (3, *AsyncCrawl().observation_space["links"].shape)  # type: ignore[index]
    envs.close()


def test_the_same_seed_gives_the_same_episode_on_any_loop() -> None:
    config = {"error_rate": 0.2, "redirect_rate": 0.2}
    one, other = Crawl(site=config), Crawl(site=config)
    first = walk(one, 3)
    assert same(first, walk(other, 3))
    assert same(first, walk(one, 3))
    assert not same(first, walk(one, 4))
    assert "status" in first
    one.close()
    other.close()


def test_rewards_match_a_calculation_by_hand() -> None:
    mark = '<i itemtype="https://schema.org/Dataset"></i>'
    with misbehaving() as (site, url):
        site.pages |= {
            "/": reply(page("/list", "/via")),
            "/list": reply(page("/t1", "/t2", "/", extra="<ul></ul>")),
            "/t1": reply(page(extra=mark)),
            "/t2": reply(page(extra=mark)),
            "/via": reply(b"", "302 Found", "", "Location: /t2"),
        }
        env = Crawl(url=f"{url}/", budget=6, n_links=4)
        obs, info = env.reset(seed=0)
        back = 4
        assert obs["action_mask"].tolist() == [1, 1, 0, 0, 0]
        assert (info["requests"], info["templates"]) == (1, 1)
        script = [
            (0, REQUEST + TEMPLATE, 2),  # /list, another kind of page
            (0, REQUEST + TEMPLATE + TARGET, 3),  # /t1, a target
            (back, BACK, 3),
            (0, REQUEST + TARGET, 4),  # /t2: visited ones come last, so it has slot 0 now
            (back, BACK, 4),
            (2, REPEAT, 4),  # / was had before
            (1, REPEAT, 4),  # so was /list
            (back, BACK, 4),
            (0, 2 * REQUEST + REPEAT, 6),  # /via leads to /t2 in two requests
        ]
        for k, (action, reward, requests) in enumerate(script):
            obs, got, terminated, truncated, info = env.step(action)
            assert got == pytest.approx(reward), k
            assert info["requests"] == requests, k
            assert terminated == (k == len(script) - 1)
            assert not truncated
        assert info["targets"] == 2
        assert obs["budget"][0] == 0
        env.close()


def test_a_reset_option_picks_the_site() -> None:
    env = Crawl()
    assert env.reset(options={"site": 77})[1]["url"].endswith("/77/")
    env.close()


def test_disallowed_links_get_no_slot() -> None:
    env = Crawl(site={"error_rate": 0, "redirect_rate": 0})
    env.reset(seed=1)
    shown = [link.url for link in env.exploration.links.values()]
    assert len(shown) > 8
    assert not any(word in url for url in shown for word in ("logout", "private", "search"))
    env.close()


def test_the_number_of_urls_that_differ_only_in_their_query_is_limited() -> None:
    with misbehaving() as (site, url):
        site.pages["/"] = reply(page(*(f"/list?sort={n}" for n in range(100)), "/fine"))
        env = Crawl(url=f"{url}/", n_links=64)
        obs, _ = env.reset(seed=0)
        assert obs["action_mask"].sum() == 21
        env.close()


def test_a_page_reached_by_a_redirect_is_recognised_under_its_own_url() -> None:
    many = [f"/list?sort={n}" for n in range(25)]  # of which the last five are too many
    with misbehaving() as (site, url):
        site.pages |= {
            "/": reply(page(*many, "/via")),
            "/via": reply(b"", "302 Found", "", f"Location: {many[-1]}"),
            many[-1]: reply(page("/third")),
            "/third": reply(page(*many)),
        }
        env = Crawl(url=f"{url}/", n_links=64)
        env.reset(seed=0)
        counts = []
        for wanted in ("/via", "/third"):
            slot = next(k for k, link in enumerate(env._slots) if link.url.endswith(wanted))
            counts.append(env.step(slot)[0]["action_mask"][:-1].sum())
        assert counts == [1, 21]
        assert env._slots[-1].url == f"{url}{many[-1]}"  # visited ones come last
        env.close()


def test_a_recorded_crawl_is_repeated_without_the_network(tmp_path: Path) -> None:
    config = {"error_rate": 0.2}
    env = Crawl(site=config, record=str(tmp_path / "crawl"))
    live = walk(env, 5, 80)
    env.close()
    code_ = (
        "import socket, sys\n"
        "def refuse(*a, **k): raise SystemExit('the network was used')\n"
        "from tests.workloads.test_crawl import Crawl, walk, same\n"
        "import pickle\n"
        "socket.socket.connect = refuse\n"
        f"env = Crawl(replay={str(tmp_path / 'crawl')!r})\n"
        f"live = pickle.loads(open({str(tmp_path / 'live')!r}, 'rb').read())\n"
        "print(same(walk(env, 5, 80), live)); env.close()"
    )
    import pickle

    (tmp_path / "live").write_bytes(pickle.dumps(live))
    done = subprocess.run([sys.executable, "-c", code_], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "True", done.stderr


def test_an_unrecorded_page_is_a_fault_and_a_damaged_recording_an_error(tmp_path: Path) -> None:
    env = Crawl(record=str(tmp_path))
    env.reset(seed=5)
    env.close()
    env = Crawl(replay=str(tmp_path))
    env.reset(seed=5)
    _, reward, _, _, info = env.step(0)
    assert info["fault"].startswith("connection: ")
    assert "is not in the recording" in info["fault"]
    assert reward < 0
    env.close()
    for file in tmp_path.glob("*/*"):
        file.write_bytes(b"broken")
    env = Crawl(replay=str(tmp_path))
    with pytest.raises(FlatoutError, match=r"^recording .* is damaged"):
        env.reset(seed=5)
    env.close()


def test_the_graph_is_exported_to_networkx_and_graphml(tmp_path: Path) -> None:
    env = Crawl()
    walk(env, 2, 20)
    graph = env.graph.to_networkx()
    visited = [url for url, data in graph.nodes(data=True) if data["visited"]]
    assert len(visited) == sum(link.visited is not None for link in env.graph.requested.values())
    assert set(graph.successors(env.exploration.start_url)) <= set(graph)
    env.graph.write_graphml(tmp_path / "site.graphml")
    again = nx.read_graphml(tmp_path / "site.graphml")
    assert set(again) == set(graph)
    assert again.number_of_edges() == graph.number_of_edges()
    env.close()


def test_the_crawl_is_rendered_as_an_image_and_as_text() -> None:
    env = Crawl(render_mode="rgb_array")
    env.reset(seed=1)
    first = env.render()
    walk(env, 1, 30)
    later = env.render()
    assert isinstance(first, np.ndarray)
    assert isinstance(later, np.ndarray)
    assert first.shape == later.shape == (480, 640, 3)
    assert first.dtype == np.uint8
    assert (first != later).mean() > 0.005
    env.close()
    env = Crawl(render_mode="ansi", budget=9)
    env.reset(seed=1)
    text = env.render()
    assert isinstance(text, str)
    assert "requests 1/9" in text
    assert len(text.splitlines()) > 8
    env.close()


def test_a_word_always_has_the_same_code() -> None:
    assert np.array_equal(code("Statistics"), code("statistics 2024"))
    assert not np.array_equal(code("statistics"), code("shop"))
    assert not code("2024").any()
    assert np.abs(code("many different words in one long text")).max() <= 1


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"url": "https://example.com/"}, "'https://example.com/' is not on this machine"),
        ({"url": "example.com"}, "'example.com' is not an http or https URL"),
        (
            {"url": "http://127.0.0.1:1/", "hosts": ["http://127.0.0.1:2"]},
            "'http://127.0.0.1:1/' is not on the list",
        ),
        ({"target": "[[["}, "target '[[[' is not a CSS selector"),
        ({"budget": 0}, "budget is 0"),
        ({"timeout": "soon"}, "timeout is 'soon'"),
        ({"sites": [5, 5]}, "sites is [5, 5]"),
        ({"site": "no-such.json"}, "site config no-such.json: No such file"),
        ({"record": "a", "replay": "b"}, "give only one of them"),
        ({"replay": "no-such-folder"}, "replay folder no-such-folder does not exist"),
        ({"render_mode": "human"}, "render_mode is 'human'"),
    ],
)
def test_bad_input_is_refused_in_one_line(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(FlatoutError) as caught:
        AsyncCrawl(**kwargs)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_command_line_refuses_a_url_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "flatout", "train", "crawl", "--runs-dir", str(tmp_path)]
    command += ["--env-kwargs", '{"url": "http://example.com/"}']
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "'http://example.com/' is not on this machine" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_an_agent_learns_a_site_with_a_known_best_policy() -> None:
    """Three links, one of which leads to targets: the agent learns which word it is."""
    mark = '<i itemtype="https://schema.org/Dataset"></i>'
    with misbehaving() as (site, url):
        site.pages |= {
            "/": reply(page("/shop", "/data", "/news")),
            "/shop": reply(page()),
            "/news": reply(page()),
            "/data": reply(page(extra=mark)),
        }
        options = {"url": f"{url}/", "budget": 2, "n_links": 4}
        agent = flatout.PPO(
            "crawl", env_kwargs=options, n_envs=16, n_steps=16, batch_size=64, learning_rate=3e-3, seed=1
        )
        agent.learn(total_timesteps=2_048)
        assert agent.evaluate(10).return_mean > 0.9 * (TARGET + TEMPLATE + REQUEST)
