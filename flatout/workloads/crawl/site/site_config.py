"""What the generated sites are like: size, depth, and how well or badly they behave. Standard library only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from flatout.errors import FlatoutError, did_you_mean


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteConfig:
    """One kind of site; each seed gives another site of that kind."""

    size: int = 12
    """Entries of a list page; everything else grows with it."""
    depth: int = 4
    """Clicks from the home page to the nearest list of targets and one of them."""
    latency: float = 0.0
    """Median seconds until a page is sent."""
    latency_spread: float = 0.3
    """Deviation of the latency's logarithm; 0: always the same."""
    error_rate: float = 0.01
    """Share of answers that are a server error; trying again may help."""
    redirect_rate: float = 0.05
    """Share of links that lead through a redirect."""
    traps: bool = True
    """A calendar without end, and links that differ in their query only."""
    robots: bool = True
    """A robots.txt that closes a part of each site."""

    def __post_init__(self) -> None:
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
                raise FlatoutError(
                    f"site config: {name} is {value!r}; it must be a number from {low} to {high}"
                )
        for name in ("size", "depth"):
            if not isinstance(getattr(self, name), int):
                raise FlatoutError(
                    f"site config: {name} is {getattr(self, name)!r}; it must be a whole number"
                )
        for name in ("traps", "robots"):
            if not isinstance(getattr(self, name), bool):
                raise FlatoutError(
                    f"site config: {name} is {getattr(self, name)!r}; it must be true or false"
                )

    def to_json(self) -> str:
        """One line that `read_site` takes back."""
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
    """The config in a mapping or a JSON file; a FlatoutError that names the file and the key when it is malformed."""
    if source is None:
        return SiteConfig()
    if isinstance(source, Mapping):
        return _from_mapping(source, "site config")
    path = Path(source)
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise FlatoutError(f"site config {path}: {error.strerror}") from error
    except ValueError as error:
        raise FlatoutError(f"site config {path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise FlatoutError(
            f"site config {path} holds a {type(data).__name__}; it must be an object of settings"
        )
    return _from_mapping(data, f"site config {path}")


def _from_mapping(data: Mapping[str, Any], name: str) -> SiteConfig:
    known = [field.name for field in fields(SiteConfig)]
    for key in data:
        if key not in known:
            hint = did_you_mean(str(key), known, n=1) or f"; it has {', '.join(known)}"
            raise FlatoutError(f"{name} has the unknown key '{key}'{hint}")
    try:
        return SiteConfig(**data)
    except FlatoutError as error:
        raise FlatoutError(str(error).replace("site config", name, 1)) from error
