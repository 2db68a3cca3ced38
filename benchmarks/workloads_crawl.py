"""Crawl compared with 32 blocking processes; a trained agent compared with a random one and breadth-first search.

All ways ask the same kind of local site, whose server runs on the same cores. `run` gives the lines of a table.
"""

from __future__ import annotations

import asyncio
import statistics
from collections import deque
from collections.abc import Callable
from functools import partial
from html.parser import HTMLParser
from typing import Any
from urllib.parse import urljoin

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from benchmarks.page import table
from benchmarks.stepping import rate
from flatout.workloads.crawl import AsyncCrawl
from flatout.workloads.crawl.client import Response
from flatout.workloads.crawl.fetch import Network

N_BLOCKING = 32
N_ASYNC = 512
HOLD = 0.01
"""Seconds that envs wait for others to be acted on with: next to nothing while hundreds are on their way."""
UNSEEN = (2_000_000, 3_000_000)
"""Sites that no training has met."""
EPISODES = 100


class BlockingCrawl(gym.Env[Any, Any]):
    """The obvious implementation: a requests session, the standard library's parser, a NetworkX graph."""

    observation_space = spaces.Box(0, 1, (16,), np.float32)
    action_space = spaces.Discrete(17)

    def __init__(self, origin: str) -> None:
        import networkx as nx
        import requests

        self._session, self._graph_class = requests.Session(), nx.DiGraph
        self._origin = origin

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin at the start page of another site."""
        super().reset(seed=seed)
        self._graph, self._n = self._graph_class(), 0
        self._trail: list[str] = []
        self._go(f"{self._origin}/{self.np_random.integers(10**6)}/")
        return self._obs(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Follow a link, or go back."""
        self._n += 1
        if action < len(self._links):
            self._go(self._links[action])
        elif len(self._trail) > 1:
            self._trail.pop()
            self._go(self._trail.pop())
        return self._obs(), 0.0, self._n >= 40, False, {}

    def _go(self, url: str) -> None:
        response = self._session.get(url, timeout=10)
        links = _links(response.text) if response.status_code == 200 else []
        self._links = [urljoin(url, link) for link in links][:16]
        self._graph.add_node(url)
        self._graph.add_edges_from((url, link) for link in self._links)
        self._trail.append(url)

    def _obs(self) -> Any:
        obs = np.zeros(16, np.float32)
        obs[: len(self._links)] = 1
        return obs


class SameEnv(AsyncCrawl):
    """flatout's own env, observations and all, but with a requests session that blocks."""

    def __init__(self, origin: str) -> None:
        import requests

        super().__init__()
        self.origin, self._shared = origin, Network(_Requests(requests.Session()))
        self._loop = asyncio.new_event_loop()

    def reset(self, **kwargs: Any) -> Any:
        """Begin; nothing waits but the session."""
        return self._loop.run_until_complete(super().reset(**kwargs))

    def step(self, action: Any) -> Any:
        """Follow a link, or go back."""
        return self._loop.run_until_complete(super().step(action))

    def close(self) -> None:  # type: ignore[override]
        """End the loop."""
        self._loop.close()

    def _origin(self) -> str:
        return self.origin

    async def _join(self, origin: str) -> Network:
        return self._shared


class _Requests:
    """A client as the env wants it, which blocks."""

    def __init__(self, session: Any) -> None:
        self._session = session

    async def get(self, url: str, attempt: int, max_bytes: int) -> Response:
        got = self._session.get(url, allow_redirects=False, timeout=10)
        return Response(got.status_code, {key.lower(): got.headers[key] for key in got.headers}, got.content)

    async def close(self) -> None:
        self._session.close()


class _Anchors(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.links += [value for name, value in attrs if name == "href" and value]


def _links(html: str) -> list[str]:
    parser = _Anchors()
    parser.feed(html)
    return parser.links


def blocking(latency: float, make: Callable[[str], Any]) -> tuple[Callable[[], int], Callable[[], None]]:
    """32 processes, each with one env that blocks."""
    envs = gym.vector.AsyncVectorEnv([partial(make, _origin(latency))] * N_BLOCKING)
    obs, _ = envs.reset(seed=1)
    rng = np.random.default_rng(0)

    def step_all() -> int:
        nonlocal obs
        mask = obs["action_mask"] if isinstance(obs, dict) else np.ones((N_BLOCKING, 17))
        obs = envs.step(_random(mask, rng))[0]
        return N_BLOCKING

    return step_all, envs.close


def awaiting(latency: float, n_envs: int = N_ASYNC) -> tuple[Callable[[], int], Callable[[], None]]:
    """flatout's env as coroutines in this process: the policy acts on whichever are ready."""
    import flatout

    options = {"site": {"latency": latency}}
    envs = flatout.make_vec("crawl", n_envs=n_envs, executor="async", env_kwargs=options, batch_seconds=HOLD)
    obs, _ = envs.reset(seed=1)
    rng = np.random.default_rng(0)
    envs.send(_random(obs["action_mask"], rng))

    def step_all() -> int:
        got = envs.recv()
        envs.send(_random(got.obs["action_mask"], rng), got.rows)
        return len(got.rows)

    return step_all, envs.close


def _random(mask: Any, rng: np.random.Generator) -> Any:
    return (rng.random(mask.shape) * mask).argmax(1)


def _by_chance(rng: np.random.Generator, obs: Any) -> Any:
    return _random(obs["action_mask"], rng)


def _best(agent: Any, obs: Any) -> Any:
    return agent.predict(obs)[0]


def _origin(latency: float) -> str:
    from flatout.workloads.site.pages import SiteConfig
    from flatout.workloads.site.server import site_server

    return site_server(SiteConfig(latency=latency)).url


def speeds(latency: float, rounds: int, seconds: float) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Steps/s of each way, turn by turn, and the median ratio of flatout's to each."""
    ways = {
        "requests, html.parser, NetworkX: 32 processes": partial(blocking, latency, BlockingCrawl),
        "this env with requests: 32 processes": partial(blocking, latency, SameEnv),
        f"flatout async, {N_ASYNC} envs": partial(awaiting, latency),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            step_all, close = way()
            found[name].append(rate(step_all, seconds))
            close()
    own = found[f"flatout async, {N_ASYNC} envs"]
    ratios = {
        name: statistics.median(a / b for a, b in zip(own, rates, strict=True))
        for name, rates in found.items()
    }
    return found, ratios


def targets_by_search(seed: int, episodes: int) -> float:
    """Targets that breadth-first search finds on unseen sites with the env's budget of requests."""

    async def search() -> list[int]:
        env = AsyncCrawl(sites=UNSEEN)
        found = []
        for episode in range(episodes):
            await env.reset(seed=seed + episode)
            exploration = env.exploration
            queue, known = deque([exploration.start]), {exploration.start.url}
            while queue and exploration.n_requests < env.budget:
                link = queue.popleft()
                outcome = await exploration.follow(link)
                for each in outcome.visited.links if outcome.visited else ():
                    if each.url not in known:
                        known.add(each.url)
                        queue.append(each)
            found.append(exploration.n_targets)
        await env.close()
        return found

    return float(np.mean(asyncio.run(search())))


def targets_by_policy(choose: Callable[[Any], Any], seed: int, episodes: int) -> float:
    """Targets that a policy finds in whole episodes on unseen sites."""
    import flatout

    n_envs = min(episodes, 50)
    envs = flatout.make_vec("crawl", n_envs=n_envs, executor="async", env_kwargs={"sites": UNSEEN})
    obs, _ = envs.reset(seed=seed)
    found: list[int] = []
    quota = np.full(n_envs, episodes // n_envs)
    while quota.any():
        obs, _, terminated, truncated, infos = envs.step(choose(obs))
        for i in np.flatnonzero(terminated | truncated):
            if quota[i]:
                quota[i] -= 1
                found.append(int(infos["final_info"]["targets"][i]))
    envs.close()
    return float(np.mean(found))


def learned(seeds: list[int], timesteps: int | None, episodes: int) -> list[str]:
    """A table of targets found: the recipe's agent, a random one, and breadth-first search, by seed."""
    import flatout

    rows = []
    for seed in seeds:
        agent = flatout.PPO("crawl", seed=seed)
        agent.learn(timesteps)
        trained = targets_by_policy(partial(_best, agent), 10_000 + seed, episodes)
        by_chance = partial(_by_chance, np.random.default_rng(seed))
        chance = targets_by_policy(by_chance, 10_000 + seed, episodes)
        search = targets_by_search(10_000 + seed, episodes)
        row = [str(seed), f"**{trained:.1f}**", f"{chance:.2f}", f"{search:.2f}"]
        rows.append([*row, f"{agent.summary['wall_seconds']:.0f} s"])
    return table(["seed", "trained", "random", "breadth-first", "training took"], rows).splitlines()


def speed(quick: bool) -> list[str]:
    """The lines of the table of steps/s."""
    rounds, seconds = (1, 2.0) if quick else (3, 5.0)
    rows = []
    for latency in (0.02, 0.1):
        found, ratios = speeds(latency, rounds, seconds)
        for name, rates in found.items():
            median = f"{statistics.median(rates):,.0f}"
            rows.append([f"{latency * 1000:.0f} ms", name, median, f"{ratios[name]:.1f} ×"])
    return table(["latency", "way", "steps/s", "flatout is faster by"], rows).splitlines()


def run(quick: bool) -> list[str]:
    """The lines of both tables."""
    lines = [*speed(quick), "", f"Targets found with 40 requests on {EPISODES} unseen sites:", ""]
    return lines + learned([1], 20_000 if quick else 100_000, 20 if quick else EPISODES)


if __name__ == "__main__":
    import sys

    print("\n".join(run("--quick" in sys.argv)))
