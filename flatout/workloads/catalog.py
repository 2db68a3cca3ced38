"""The envs that come with flatout, known to Gymnasium as soon as both are imported, in whichever order.

Nothing here imports Gymnasium or an env: `flatout --help` must not wait for them.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


@dataclass(frozen=True, slots=True)
class Workload:
    """One env: what it is registered as and where it lives."""

    env_id: str
    entry_point: str
    """Makes one env, for anyone."""
    batched: str | None = None
    """Makes `num_envs` of them at once, which is how they are trained; None: only one at a time."""
    awaitable: str | None = None
    """Makes one that awaits, with `async def reset` and `step`, which is how it is trained; None: there is none."""


WORKLOADS = {
    "snake": Workload(
        "flatout/Snake-v0", "flatout.workloads.snake:Snake", "flatout.workloads.snake:SnakeGames"
    ),
    "crawl": Workload(
        "flatout/Crawl-v0", "flatout.workloads.crawl:Crawl", awaitable="flatout.workloads.crawl:AsyncCrawl"
    ),
    "mission": Workload("flatout/Mission-v0", "flatout.workloads.mission:Mission"),
    "market": Workload(
        "flatout/Market-v0", "flatout.workloads.market:Market", "flatout.workloads.market:MarketAccounts"
    ),
}
"""By short name."""
BATCHED = {workload.env_id: workload.batched for workload in WORKLOADS.values() if workload.batched}
AWAITABLE = {workload.env_id: workload.awaitable for workload in WORKLOADS.values() if workload.awaitable}


def register() -> None:
    """Tell Gymnasium of the envs: now, or when it is imported."""
    if "gymnasium" in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _WhenImported())


def _register() -> None:
    import gymnasium

    for workload in WORKLOADS.values():
        if workload.env_id not in gymnasium.registry:
            gymnasium.register(workload.env_id, workload.entry_point)


class _WhenImported:
    """A finder that finds nothing of its own: it sees Gymnasium being imported and registers the envs after it."""

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        """Gymnasium as the other finders find it, with the envs registered once it has run."""
        if name != "gymnasium":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loader = spec.loader if spec else None
        if loader is not None:
            execute = loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                _register()

            loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
