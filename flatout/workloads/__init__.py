"""Registers the envs that come with flatout. Their modules are imported when an env is made."""

from __future__ import annotations

import gymnasium

gymnasium.register("flatout/Crawl-v0", "flatout.workloads.crawl:Crawl")
gymnasium.register(
    "flatout/Market-v0",
    "flatout.workloads.market:Market",
    vector_entry_point="flatout.workloads.market:MarketAccounts",
)
gymnasium.register("flatout/Mission-v0", "flatout.workloads.mission:Mission")
gymnasium.register("flatout/Snake-v0", "flatout.workloads.snake:Snake")
