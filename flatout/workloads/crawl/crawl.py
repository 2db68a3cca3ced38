"""`flatout/Crawl-v0`: explore a website over HTTP and find new page templates and targets with few requests.

`AsyncCrawl` has `async def reset` and `step`, so that hundreds of requests wait in one thread; `Crawl` is the same env with
blocking calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from selectolax.lexbor import LexborHTMLParser, SelectolaxError

from flatout.envs.wrappers import LoopThread
from flatout.errors import EnvError, FlatoutError
from flatout.workloads.crawl import graph_image
from flatout.workloads.crawl.access import Rules
from flatout.workloads.crawl.explore import Exploration, Link, Outcome, Visited
from flatout.workloads.crawl.fetch import FETCH_SECONDS, Fetcher, Network, join_network, leave_network
from flatout.workloads.crawl.observation import N_LINK, N_PAGE, link_rows, page_row, slots
from flatout.workloads.site.pages import read_site
from flatout.workloads.site.server import site_server
from flatout.workloads.validate import Info, check_choice, check_number

TARGET = 1.0
TEMPLATE = 0.2
REQUEST = -0.02
REPEAT = -0.1
FAULT = -0.1
BACK = -0.01
MAX_FAULTS = 5
"""Consecutive faults after which an episode is truncated."""
RECORDED = "http://127.0.0.1:1"
"""Origin of generated sites in a replay."""

Obs: TypeAlias = dict[str, Any]
Stepped: TypeAlias = tuple[Obs, float, bool, bool, Info]

_reached: set[str] = set()
"""Origins that have answered in this process; only for others is a failed start page an error."""


class AsyncCrawl(gym.Env[Obs, Any]):
    """The env with coroutines; docs/crawl.md explains the keywords."""

    metadata = {"render_modes": ["rgb_array", "ansi"], "render_fps": 4}  # noqa: RUF012  # as Gymnasium has it

    def __init__(
        self,
        *,
        url: str | None = None,
        hosts: Sequence[str] = (),
        target: str = '[itemtype$="/Dataset"]',
        budget: int = 40,
        n_links: int = 16,
        site: Mapping[str, Any] | str | None = None,
        sites: Sequence[int] = (0, 1_000_000),
        rate: float | None = None,
        timeout: float = 10.0,
        max_bytes: int = 2_000_000,
        record: str | None = None,
        replay: str | None = None,
        render_mode: str | None = None,
    ) -> None:
        for name, value, low, high in (
            ("budget", budget, 1, 100_000),
            ("n_links", n_links, 1, 1000),
            ("rate", 1 if rate is None else rate, 1e-4, 1e6),
            ("timeout", timeout, 1e-3, FETCH_SECONDS),
            ("max_bytes", max_bytes, 1000, 100_000_000),
        ):
            check_number(name, value, low, high)
        try:
            LexborHTMLParser("<p></p>").css_first(target)
        except (SelectolaxError, TypeError, ValueError) as error:
            raise FlatoutError(f"target {target!r} is not a CSS selector: {error}") from error
        if record and replay:
            raise FlatoutError(f"record '{record}' and replay '{replay}': give only one of them")
        if len(sites) != 2 or not 0 <= sites[0] < sites[1] <= 10**12:
            raise FlatoutError(f"sites is {list(sites)}; it must be [first seed, last seed + 1]")
        self._url, self._target = url, target
        self._hosts = (hosts,) if isinstance(hosts, str) else tuple(hosts)
        self._site = read_site(site)
        if url is not None:
            Rules(url, self._hosts)  # raises now rather than at the first reset
        self._sites = int(sites[0]), int(sites[1])
        self.budget, self._n_links = int(budget), int(n_links)
        self._fetching = {"timeout": timeout, "max_bytes": int(max_bytes), "rate": rate}
        self._record, self._replay = Path(record) if record else None, Path(replay) if replay else None
        if self._replay is not None and not self._replay.is_dir():
            raise FlatoutError(f"replay folder {replay} does not exist; record a crawl into it first")
        check_choice("render_mode", render_mode, (None, *self.metadata["render_modes"]))
        self.render_mode = render_mode
        self.action_space = spaces.Discrete(self._n_links + 1)
        self.observation_space = spaces.Dict(
            {
                "page": spaces.Box(-1, 1, (N_PAGE,), np.float32),
                "links": spaces.Box(-1, 1, (self._n_links, N_LINK), np.float32),
                "budget": spaces.Box(0, 1, (2,), np.float32),
                "action_mask": spaces.MultiBinary(self._n_links + 1),
            }
        )
        self._network: Network | None = None
        self._joined = ""
        self._exploration: Exploration | None = None
        self._trail: list[Visited] = []
        self._slots: list[Link] = []

    @property
    def exploration(self) -> Exploration:
        """The exploration of this episode."""
        if self._exploration is None:
            raise EnvError("call reset() first")
        return self._exploration

    @property
    def graph(self) -> Exploration:
        """The explored link graph; `to_networkx()` and `write_graphml()` export it."""
        return self.exploration

    @property
    def here(self) -> Visited | None:
        """The current page; None until the start page is fetched."""
        return self._trail[-1] if self._trail else None

    async def reset(  # type: ignore[override]  # Gymnasium knows no async envs
        self, *, seed: int | None = None, options: Info | None = None
    ) -> tuple[Obs, Info]:
        """Go to the start page; of a random generated site unless a URL is given.

        `options={"site": 7}` picks the generated site by its seed.
        """
        super().reset(seed=seed)
        number = int((options or {}).get("site", self.np_random.integers(*self._sites)))
        url = self._url or f"{self._origin()}/{number}/"
        rules = Rules(url, self._hosts)
        network = await self._join(rules.origin)
        fetcher = Fetcher(rules, network, **self._fetching)  # type: ignore[arg-type]
        self._exploration = Exploration(url, fetcher, self._target)
        self._trail, self._n_steps, self._n_consecutive_faults = [], 0, 0
        outcome = await self.exploration.follow(self.exploration.start)
        self._arrive(outcome)
        if outcome.fault is None:
            _reached.add(rules.origin)
        elif rules.origin not in _reached:
            raise EnvError(f"the start page {url} cannot be fetched: {outcome.fault}")
        return self._obs(), self._info(outcome)

    async def step(self, action: Any) -> Stepped:  # type: ignore[override]
        """Follow the link in a slot, or go back. Until the start page is fetched, any action requests it again."""
        exploration, choice = self.exploration, int(action)
        self._n_steps += 1
        reward = 0.0
        outcome: Outcome | None = None
        if choice < len(self._slots):
            outcome = await exploration.follow(self._slots[choice])
        elif not self._trail:
            outcome = await exploration.follow(exploration.start)
        elif choice == self._n_links and len(self._trail) > 1:
            self._trail.pop()
            reward = BACK
        else:  # masked action: nothing happens
            reward = REPEAT
        if outcome is not None:
            reward = self._arrive(outcome)
        terminated = exploration.n_requests >= self.budget
        is_truncated = self._n_consecutive_faults >= MAX_FAULTS or self._n_steps >= 2 * self.budget
        return self._obs(), reward, terminated, is_truncated and not terminated, self._info(outcome)

    def render(self) -> Any:
        """The link graph as an image, or the page and its links as text."""
        if self.render_mode == "ansi":
            return graph_image.text(self.exploration, self._trail, self._slots, self.budget)
        if self.render_mode == "rgb_array":
            return graph_image.image(self.exploration, self._trail, self.budget)
        return None

    async def close(self) -> None:  # type: ignore[override]
        """Leave the shared network; the last env closes its connections."""
        network, self._network = self._network, None
        if network is not None:
            await leave_network(network)

    def _origin(self) -> str:
        return RECORDED if self._replay else site_server(self._site).url

    async def _join(self, origin: str) -> Network:
        if self._network is not None and (self._record or self._replay) and self._joined != origin:
            await AsyncCrawl.close(self)
        if self._network is None:
            self._network, self._joined = join_network(origin, self._record, self._replay), origin
        return self._network

    def _arrive(self, outcome: Outcome) -> float:
        """Move to the page of an outcome; returns the reward."""
        reward = REQUEST * outcome.n_requests
        if outcome.visited is None:
            self._n_consecutive_faults += 1
            return reward + FAULT
        self._n_consecutive_faults = 0
        if outcome.visited is not self.here:
            self._trail.append(outcome.visited)
        if outcome.is_repeat:
            return reward + REPEAT
        return reward + TEMPLATE * outcome.new_template + TARGET * outcome.new_target

    def _obs(self) -> Obs:
        exploration, here = self.exploration, self.here
        self._slots, n_new = slots(here, self._n_links) if here is not None else ([], 0)
        mask = np.zeros(self._n_links + 1, np.int8)
        mask[: len(self._slots)] = 1
        mask[-1] = len(self._trail) > 1 or not self._slots
        left = max(1 - exploration.n_requests / self.budget, 0), 1 - self._n_steps / (2 * self.budget)
        return {
            "page": page_row(exploration, here, n_new, len(self._trail), self._n_consecutive_faults),
            "links": link_rows(self._slots, n_new, here, self._n_links),
            "budget": np.array(left, np.float32),
            "action_mask": mask,
        }

    def _info(self, outcome: Outcome | None) -> Info:
        exploration, here = self.exploration, self.here
        fault = outcome.fault if outcome else None
        return {
            "url": here.link.url if here else exploration.start_url,
            "targets": exploration.n_targets,
            "templates": len(exploration.templates),
            "requests": exploration.n_requests,
            "fault": f"{fault.kind}: {fault}" if fault else "",
        }


class Crawl(AsyncCrawl):
    """The same env with blocking calls, which run the coroutines on an event loop of their own."""

    async_form = AsyncCrawl
    _loop_thread: LoopThread | None = None

    def reset(  # type: ignore[override]
        self, *, seed: int | None = None, options: Info | None = None
    ) -> tuple[Obs, Info]:
        if self._loop_thread is None:
            self._loop_thread = LoopThread("flatout-crawl")
        return self._loop_thread.run(super().reset(seed=seed, options=options))

    def step(self, action: Any) -> Stepped:  # type: ignore[override]
        if self._loop_thread is None:
            raise EnvError("call reset() first")
        return self._loop_thread.run(super().step(action))

    def close(self) -> None:  # type: ignore[override]
        if self._loop_thread is not None:
            try:
                self._loop_thread.run(super().close())
            finally:
                self._loop_thread.close()
                self._loop_thread = None
