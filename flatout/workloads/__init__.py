"""Registers the envs that come with flatout. Their modules are imported when an env is made.

Importing Gymnasium takes longer than everything that `flatout --help` needs. So it is not imported here: the envs are
registered once somebody else has.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


def register() -> None:
    """Register the envs with Gymnasium."""
    import gymnasium

    gymnasium.register("flatout/Crawl-v0", "flatout.workloads.crawl:Crawl")
    gymnasium.register(
        "flatout/Market-v0",
        "flatout.workloads.market:Market",
        vector_entry_point="flatout.workloads.market:MarketAccounts",
    )
    gymnasium.register("flatout/Mission-v0", "flatout.workloads.mission:Mission")
    gymnasium.register("flatout/Snake-v0", "flatout.workloads.snake:Snake")


class _AfterGymnasium:
    """Finds Gymnasium as the other finders do, and registers the envs at the end of its import."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "gymnasium":
            return None
        others = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        found = next((spec for spec in others if spec is not None), None)
        if found is not None and found.loader is not None:
            execute = found.loader.exec_module

            def then_register(module: ModuleType) -> None:
                execute(module)
                sys.meta_path.remove(self)
                register()

            found.loader.exec_module = then_register  # type: ignore[method-assign]
        return found


if "gymnasium" in sys.modules:
    register()
else:
    sys.meta_path.insert(0, _AfterGymnasium())
