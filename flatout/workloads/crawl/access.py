"""Which URLs may ever be asked for: everything below the agent's actions passes through here.

Exact origins only, addresses checked as resolved, no URL that is too long, too deep, or looks as if following it changes
something. Only loopback, unless the user names other hosts.


robots.txt as RFC 9309 reads it: the group of our name or of all, the longest matching rule, `*` and `$`.

How often a host may be asked: one limit for all envs of all processes, kept in a small locked file.

The file holds the moment of the next free turn on the machine's monotonic clock. Without a limit, and until a host asks
for a pause, nothing is read or written.
"""

from __future__ import annotations

import fcntl
import hashlib
import ipaddress
import os
import re
import struct
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urljoin, urlsplit

from flatout.errors import FlatoutError

Kind = Literal[
    "refused", "robots", "busy", "timeout", "connection", "garbage", "size", "type", "redirects", "status"
]


class Fault(Exception):
    """A page that was not got, and why."""

    def __init__(self, kind: Kind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


MAX_URL = 2000
MAX_DEPTH = 12
MAX_VARIANTS = 20
"""URLs of one path that differ in their query only."""
PORTS = {"http": 80, "https": 443}
CHANGES = re.compile(
    r"(?:^|[^a-z])(?:log[-_]?(?:out|off)|sign[-_]?(?:out|off)|delete|remove|destroy|unsubscribe|deactivate|"
    r"cancel|checkout|add[-_]to[-_]cart|buy[-_]?now|reset[-_]password)(?:$|[^a-z])"
)
NOT_PAGES = re.compile(
    r"\.(?:jpe?g|png|gif|svg|webp|ico|css|js|json|xml|pdf|zip|gz|tar|exe|dmg|mp[034]|avi|mov|woff[02]?|docx?|xlsx?|pptx?|csv)$"
)
"""Digits are looked for as 0 too: links that differ in digits only are looked at once."""
UNSAFE = re.compile(r"""[^!-~]|[\\<>"{}|^`]""")
SAME_DIGITS = {ord(digit): "0" for digit in "123456789"}
PLAIN = re.compile(r"/(?!/)[A-Za-z0-9_\-./?=&%~+,:@!;*]*")
"""A link that needs no resolving."""


def origin_of(url: str) -> str:
    """`http://host:port` of a URL, or a FlatoutError of one line that names it."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise FlatoutError(f"'{url}' is not a URL: {error}") from error
    if parts.scheme not in PORTS or not parts.hostname:
        raise FlatoutError(f"'{url}' is not a http or https URL with a host, such as http://127.0.0.1:8000/")
    if parts.username is not None or parts.password is not None:
        raise FlatoutError(f"'{url}' holds a user name; crawl pages that need none")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}:{port or PORTS[parts.scheme]}"


@lru_cache(1024)
def is_loopback(host: str) -> bool:
    """Whether a URL's host can only be this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


@lru_cache(4096)
def address_refusal(host: str, address: str) -> str | None:
    """Why a host's resolved address may not be connected to; None if it may.

    A host given by its address is that address. A name must lead where names lead: `localhost` to this machine, any
    other one to the public net, so that nobody's DNS turns the crawler against the network that it runs in.
    """
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return f"{host} resolves to '{address}', which is no address"
    try:
        if ipaddress.ip_address(host.strip("[]")) == ip:
            return None
        return f"{host} resolves to {address}"
    except ValueError:
        pass
    if host == "localhost":
        return None if ip.is_loopback else f"localhost resolves to {address}, which is not this machine"
    mapped = getattr(ip, "ipv4_mapped", None) or ip
    if not mapped.is_global or mapped.is_multicast:
        return f"{host} resolves to {address}, which is not on the public net; to crawl it, name the address itself"
    return None


class Rules:
    """What one env may ask for: the origins that the user named, or loopback alone."""

    def __init__(self, start: str, hosts: Iterable[str] = ()) -> None:
        self.origin = origin_of(start)
        named = frozenset(origin_of(host) for host in hosts)
        if not named and not is_loopback(urlsplit(start).hostname or ""):
            raise FlatoutError(
                f"'{start}' is not on this machine; to crawl it, name its host: "
                f'--env-kwargs \'{{"url": "{start}", "hosts": ["{self.origin}"]}}\''
            )
        if named and self.origin not in named:
            raise FlatoutError(f"'{start}' is not on the list of hosts {', '.join(sorted(named))}")
        self.origins = named or frozenset({self.origin})

    def check(self, url: str) -> str:
        """The origin of a URL that may be asked for; a Fault for any other."""
        reason = _shape_refusal(url)
        if reason is not None:
            raise Fault("refused", reason)
        for origin in self.origins:
            if url.startswith(f"{origin}/"):
                return origin
        try:
            origin = origin_of(url)
        except FlatoutError as error:
            raise Fault("refused", str(error)) from error
        if origin not in self.origins:
            raise Fault("refused", f"{url} is outside {', '.join(sorted(self.origins))}")
        return origin

    def follow(self, base: str, href: str) -> str | None:
        """The URL of a link, without its fragment, if it may be followed; quick, because every page has dozens."""
        href = href.partition("#")[0].strip()
        if not href or len(href) > MAX_URL:
            return None
        if href[0] == "/" and _is_plain(href.translate(SAME_DIGITS)):
            return f"{_origin(base)}{href}"
        try:
            url = urljoin(base, href)
            self.check(url)
        except (Fault, ValueError):
            return None
        return url


@lru_cache(65_536)
def _is_plain(href: str) -> bool:
    """Whether a link, its digits all made alike, needs no resolving and has nothing that is refused."""
    plain = PLAIN.fullmatch(href) is not None and "/." not in href and len(href) < MAX_URL // 2
    return plain and _shape_refusal(f"http://host{href}") is None


@lru_cache(64)
def _origin(url: str) -> str:
    return url[: url.find("/", 8)] if url.find("/", 8) > 0 else url


def _shape_refusal(url: str) -> str | None:
    if len(url) > MAX_URL:
        return f"{url[:60]}… is longer than {MAX_URL} characters"
    if UNSAFE.search(url):
        return f"{url[:60]!r} holds characters that a URL has to escape"
    path = url.partition("?")[0]
    if path.count("/") - 2 > MAX_DEPTH:
        return f"{url[:60]}… is deeper than {MAX_DEPTH} folders"
    if CHANGES.search(url.lower(), 8):
        return f"{url} looks as if following it changes something"
    if "." in path[-6:] and NOT_PAGES.search(path.lower(), 8):
        return f"{url} is not a page"
    return None


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


MAX_PAUSE = 3600.0
"""The longest Retry-After that is believed."""


class Pace:
    """One host's turns."""

    def __init__(self, origin: str, rate: float | None) -> None:
        self._interval = 1.0 / rate if rate else 0.0
        self._held = False
        folder = Path(tempfile.gettempdir()) / f"flatout-pace-{os.getuid()}"
        self._path = folder / hashlib.sha256(origin.encode()).hexdigest()[:24]

    def slow_down(self, interval: float) -> None:
        """Leave at least so many seconds between two requests."""
        self._interval = max(self._interval, min(interval, MAX_PAUSE))

    def turn(self, max_wait: float) -> float | None:
        """Seconds to wait for a turn, which is then taken; None, and no turn, if that is longer than `max_wait`."""
        if not self._interval and not self._held:
            return 0.0
        now = time.monotonic()
        at = self._change(lambda free: max(free, now) + self._interval if free - now <= max_wait else free)
        return max(at - now, 0.0) if at - now <= max_wait else None

    def hold(self, seconds: float) -> None:
        """No turns for so long: the host has asked for it."""
        until = time.monotonic() + min(seconds, MAX_PAUSE)
        self._held = True
        self._change(lambda free: max(free, until))

    def _change(self, new: Callable[[float], float]) -> float:
        """Replace the moment of the next free turn; returns what it was."""
        self._path.parent.mkdir(mode=0o700, exist_ok=True)
        file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            data = os.pread(file, 8, 0)
            free = struct.unpack("d", data)[0] if len(data) == 8 else 0.0
            # A moment that no pause explains is left over from before the machine was started anew.
            if not free <= time.monotonic() + 2 * MAX_PAUSE:
                free = 0.0
            os.pwrite(file, struct.pack("d", new(free)), 0)
            return float(free)
        finally:
            os.close(file)
