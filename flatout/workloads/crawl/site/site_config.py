"""The settings of generated sites. Standard library only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flatout.errors import FlatoutError
from flatout.workloads.validate import check_choice, check_number, from_settings, read_json


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteConfig:
    """The settings of a family of sites; each seed gives one site."""

    size: int = 12
    """Entries per list page; the rest of the site scales with it."""
    depth: int = 4
    """Clicks from the home page to a target through the lists."""
    latency: float = 0.0
    """Median latency of a response in seconds."""
    latency_spread: float = 0.3
    """Standard deviation of the logarithm of the latency."""
    error_rate: float = 0.01
    """Share of responses that are server errors; a retry may succeed."""
    redirect_rate: float = 0.05
    """Share of links that go through a redirect."""
    traps: bool = True
    """An endless calendar, and links that differ only in their query."""
    robots: bool = True
    """A robots.txt that disallows a part of each site."""

    def __post_init__(self) -> None:
        for name, low, high in _RANGES:
            check_number(
                f"site config: {name}", getattr(self, name), low, high, whole=name in ("size", "depth")
            )
        for name in ("traps", "robots"):
            check_choice(f"site config: {name}", getattr(self, name), (True, False))

    def to_json(self) -> str:
        """One line of JSON for `read_site`."""
        return json.dumps(asdict(self))


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("size", 4, 40),
    ("depth", 3, 8),
    ("latency", 0, 60),
    ("latency_spread", 0, 3),
    ("error_rate", 0, 1),
    ("redirect_rate", 0, 1),
)


def read_site(source: Mapping[str, Any] | str | Path | None) -> SiteConfig:
    """The config in a mapping or a JSON file; errors name the file."""
    if source is None:
        return SiteConfig()
    if isinstance(source, Mapping):
        return from_settings(SiteConfig, source, "site config")
    data = read_json(source, "site config")
    if not isinstance(data, dict):
        raise FlatoutError(
            f"site config {source} is a {type(data).__name__}; it must be an object of settings"
        )
    try:
        return from_settings(SiteConfig, data, "site config")
    except FlatoutError as error:
        raise FlatoutError(str(error).replace("site config", f"site config {source}", 1)) from error
