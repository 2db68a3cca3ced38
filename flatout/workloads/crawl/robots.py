"""robots.txt as RFC 9309 reads it: the group of our name or of all, the longest matching rule, `*` and `$`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import unquote

MAX_BYTES = 500_000


class Robots:
    """What one host lets a crawler of this name ask for."""

    def __init__(self, text: str, agent: str) -> None:
        rules, delay = _group(text[:MAX_BYTES], agent.lower())
        self.delay = delay
        """Seconds between requests that the host asks for; 0: none."""
        self._rules = sorted(
            ((len(pattern), allows, _compiled(pattern)) for pattern, allows in rules if pattern),
            key=lambda rule: (-rule[0], not rule[1]),
        )
        # One look that is enough for nearly all links; without rules it matches nothing.
        self._any = re.compile("|".join(rule.pattern for _, _, rule in self._rules) or r"(?!)", re.DOTALL)

    def allows(self, path: str) -> bool:
        """Whether a path with its query may be asked for."""
        if "%" in path:
            path = unquote(path)
        if not self._any.match(path):
            return True
        return next((allows for _, allows, pattern in self._rules if pattern.match(path)), True)


def _group(text: str, agent: str) -> tuple[Sequence[tuple[str, bool]], float]:
    """The rules and the delay for the agent: of the groups that name it, else of those for all."""
    groups: dict[str, tuple[list[tuple[str, bool]], list[float]]] = {}
    names: list[str] = []
    in_rules = False
    for line in text.splitlines():
        key, colon, value = line.partition("#")[0].partition(":")
        key, value = key.strip().lower(), value.strip()
        if not colon:
            continue
        if key == "user-agent":
            names = [] if in_rules else names
            in_rules = False
            names.append(value.lower())
            groups.setdefault(value.lower(), ([], []))
            continue
        in_rules = True
        for name in names:
            if key in ("allow", "disallow"):
                groups[name][0].append((value, key == "allow"))
            elif key == "crawl-delay" and re.fullmatch(r"\d{1,6}(\.\d*)?", value):
                groups[name][1].append(float(value))
    rules, delays = groups.get(agent) or groups.get("*") or ([], [])
    return rules, max(delays, default=0.0)


def _compiled(pattern: str) -> re.Pattern[str]:
    ends = pattern.endswith("$")
    parts = unquote(pattern.removesuffix("$")).split("*")
    return re.compile(".*?".join(map(re.escape, parts)) + (r"\Z" if ends else ""), re.DOTALL)


EVERYTHING = Robots("", "")
NOTHING = Robots("User-agent: *\nDisallow: /", "")
