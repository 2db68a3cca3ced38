"""What may be requested, and when: URL rules, robots.txt and a rate limit per host. No action of an agent gets around them.

Only the origins that the user names, or this machine; host names are checked as resolved; no URL that is too long or too deep,
or that looks as if following it changes something.
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
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Literal, TypeAlias
from urllib.parse import unquote, urljoin, urlsplit

from flatout.errors import FlatoutError
from flatout.workloads.crawl.page import tidy

Kind = Literal[
    "refused", "robots", "busy", "timeout", "connection", "garbage", "size", "type", "redirects", "status"
]


class Fault(Exception):
    """Why a page could not be fetched. Never ends a run: the env turns it into a penalty."""

    def __init__(self, kind: Kind, message: str) -> None:
        super().__init__(tidy(message, 300))
        self.kind = kind


MAX_URL, MAX_DEPTH = 2000, 12
MAX_VARIANTS = 20
"""Largest number of URLs with the same path and different queries."""
PORTS = {"http": 80, "https": 443}
CHANGES = re.compile(
    r"(?:^|[^a-z])(?:log[-_]?(?:out|off)|sign[-_]?(?:out|off)|delete|remove|destroy|unsubscribe|deactivate|"
    r"cancel|checkout|add[-_]to[-_]cart|buy[-_]?now|reset[-_]password)(?:$|[^a-z])"
)
NOT_PAGES = re.compile(
    r"\.(?:jpe?g|png|gif|svg|webp|ico|css|js|json|xml|pdf|zip|gz|tar|exe|dmg|mp[034]|avi|mov|woff[02]?|docx?|xlsx?|pptx?|csv)$"
)
"""Matches with all digits replaced by 0, too: `follow` caches links by that form."""
UNSAFE = re.compile(r"""[^!-~]|[\\<>"{}|^`]""")
DOTS = re.compile(r"/(?:\.|%[02][eE]){1,2}(?:[/?]|$)")
"""Segments such as `/../`, which robots.txt and the server may read differently."""
SAME_DIGITS = {ord(digit): "0" for digit in "123456789"}
PLAIN = re.compile(r"/(?!/)[A-Za-z0-9_\-./?=&%~+,:@!;*]*")
"""A link that needs no urljoin."""


def origin_of(url: str) -> str:
    """`http://host:port` of a URL; raises a FlatoutError if it is not an http(s) URL."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise FlatoutError(f"'{url}' is not a URL: {error}") from error
    if parts.scheme not in PORTS or not parts.hostname:
        raise FlatoutError(f"'{url}' is not an http or https URL with a host, such as http://127.0.0.1:8000/")
    if parts.username is not None or parts.password is not None:
        raise FlatoutError(f"'{url}' contains a user name, which is not supported")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}:{port or PORTS[parts.scheme]}"


Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
GLOBAL_IPV6, NAT64 = ipaddress.IPv6Network("2000::/3"), ipaddress.IPv6Network("64:ff9b::/96")


@lru_cache(1024)
def is_loopback(host: str) -> bool:
    """Whether a host is this machine."""
    ip = _ip(host)
    return host == "localhost" if ip is None else ip.is_loopback


def _ip(text: str) -> Address | None:
    try:
        return ipaddress.ip_address(text.strip("[]"))
    except ValueError:
        return None


def _is_public(ip: Address) -> bool:
    """Whether an address is on the internet; if an IPv4 address is embedded in it, whether that one is too."""
    if isinstance(ip, ipaddress.IPv6Address):
        in_nat64 = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF) if ip in NAT64 else None
        inner = in_nat64 or ip.ipv4_mapped or ip.sixtofour
        if inner is not None:
            return _is_public(inner)
        return ip in GLOBAL_IPV6 and ip.is_global
    return ip.is_global and not ip.is_multicast


@lru_cache(4096)
def address_refusal(host: str, address: str) -> str | None:
    """Why the resolved address of a host is refused; None if it is allowed.

    `localhost` must resolve to this machine and any other name to a public address, so that DNS cannot point the crawler
    at the private network it runs in. A host given as an address is allowed.
    """
    ip, given = _ip(address.partition("%")[0]), _ip(host)
    if ip is None:
        return f"{host} resolves to '{address}', which is not an address"
    if given is not None:
        return None if given == ip else f"{host} resolves to {address}"
    if host == "localhost":
        return None if ip.is_loopback else f"localhost resolves to {address}, which is not this machine"
    if _is_public(ip):
        return None
    return f"{host} resolves to {address}, not a public address; to crawl it, give the address itself"


class Rules:
    """Which URLs an env may request: those of the origins that the user named, or of loopback only."""

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
        self._origins: dict[str, str] = {}
        """By both ways to write them, with and without the default port."""
        for origin in named or {self.origin}:
            port = f":{PORTS[origin.partition(':')[0]]}"
            self._origins |= {origin: origin, origin.removesuffix(port): origin}

    def check(self, url: str) -> str:
        """The origin of an allowed URL; raises a Fault for any other."""
        if reason := _shape_refusal(url):
            raise Fault("refused", reason)
        end = url.find("/", 8)
        start = url[:end] if end > 0 else url
        origin = self._origins.get(start) or self._origins.get(start.lower())
        if origin is None:
            raise Fault("refused", f"{url} is outside {', '.join(sorted(set(self._origins.values())))}")
        return origin

    def follow(self, base: str, href: str) -> str | None:
        """The URL of a link without its fragment, None if it must not be followed. Fast: a page has dozens of links."""
        href = href.partition("#")[0].strip()
        if not href or len(href) > MAX_URL:
            return None
        if href[0] == "/" and _is_plain(href.translate(SAME_DIGITS)):
            end = base.find("/", 8)
            return base[:end] + href if end > 0 else base + href
        try:
            url = urljoin(base, href)
            self.check(url)
        except (Fault, ValueError):
            return None
        return url


@lru_cache(65_536)
def _is_plain(href: str) -> bool:
    """Whether a link, with all digits replaced by 0, needs no urljoin and is allowed."""
    plain = PLAIN.fullmatch(href) is not None and "/." not in href and len(href) < MAX_URL // 2
    return plain and _shape_refusal(f"http://host{href}") is None


def _shape_refusal(url: str) -> str | None:
    if len(url) > MAX_URL:
        return f"{url[:60]}… is longer than {MAX_URL} characters"
    if UNSAFE.search(url) or (("/." in url or "%" in url) and DOTS.search(url)):
        return f"{url[:60]!r} contains characters that a URL must escape, or dot segments"
    path = url.partition("?")[0]
    if path.count("/") - 2 > MAX_DEPTH:
        return f"{url[:60]}… is deeper than {MAX_DEPTH} folders"
    if CHANGES.search(url.lower(), 8):
        return f"{url} looks as if following it changes something"
    if "." in path[-6:] and NOT_PAGES.search(path.lower(), 8):
        return f"{url} is not a page"
    return None


MAX_ROBOTS_BYTES = 500 * 1024
"""What RFC 9309 asks a crawler to read."""
MAX_RULES, MAX_WILDCARDS = 5000, 20_000
"""Rules in our group, and characters of those with a `*`: at most 0.1 ms a link, whatever the rules are."""
END = "\ud800"
"""Ends a path, and a rule that ends with `$`. No URL decodes to it."""


class Robots:
    """A host's robots.txt as RFC 9309 reads it: our group or `*`, the longest matching rule, `*` and `$`."""

    def __init__(self, text: str, agent: str) -> None:
        group = _group(text, agent.lower())
        delays = [value for key, value in group if key == "crawl-delay"]
        self.delay = max(
            (float(d) for d in delays if re.fullmatch(r"[0-9]{1,6}(\.[0-9]{0,6})?", d)), default=0.0
        )
        """Crawl-delay in seconds; 0: none."""
        rules = [(value, key == "allow") for key, value in group if key in ("allow", "disallow") and value]
        if len(rules) > MAX_RULES or sum(len(rule) for rule, _ in rules if "*" in rule) > MAX_WILDCARDS:
            rules = [("/", False)]  # too many to obey
        rules.sort(key=lambda rule: (-len(rule[0]), not rule[1]))
        self._rules = [(*_parts(pattern), allows) for pattern, allows in rules]
        self._heads = tuple({head for head, _, _ in self._rules})

    @staticmethod
    def of(status: int, body: bytes, agent: str) -> Robots:
        """What a response to the request for robots.txt means: none allows everything, an error of the server nothing."""
        if 200 <= status < 300:
            return Robots(body.decode("utf-8", "replace"), agent)
        is_missing = 400 <= status < 500 and status != 429
        return Robots("" if is_missing else "User-agent: *\nDisallow: /", agent)

    def allows(self, path: str) -> bool:
        """Whether a path, with its query, may be requested."""
        if "%" in path:
            path = unquote(path)
        path += END
        if not path.startswith(self._heads):
            return True
        for head, rest, allows in self._rules:
            if path.startswith(head):
                at = len(head)
                for part in rest:  # each where it first occurs, so nothing is tried twice
                    at = path.find(part, at) + len(part)
                    if at < len(part):  # not found
                        break
                else:
                    return allows
        return True


def _group(text: str, agent: str) -> list[tuple[str, str]]:
    """The lines (key, value) of the groups that name the agent, else of `*`."""
    groups: dict[str, list[tuple[str, str]]] = {}
    names: set[str] = set()
    in_rules = False
    for line in text.splitlines():
        key, colon, value = map(str.strip, line.partition("#")[0].partition(":"))
        if colon and key.lower() == "user-agent":
            names = set() if in_rules else names
            in_rules = False
            if value.lower() in (agent, "*"):
                names.add(value.lower())
                groups.setdefault(value.lower(), [])
        elif colon:
            in_rules = True
            for name in names:
                groups[name].append((key.lower(), value))
    return groups.get(agent, groups.get("*", []))


def _parts(pattern: str) -> tuple[str, list[str]]:
    """A rule as what a path starts with and what follows somewhere after each `*`."""
    ending = END if pattern.endswith("$") else ""
    head, *rest = map(unquote, f"{pattern.removesuffix('$')}{ending}".split("*"))
    return head, [part for part in rest if part]


MAX_PAUSE = 3600.0
"""Upper bound of Retry-After and Crawl-delay, in seconds."""


class RateLimiter:
    """The rate limit of one host for all envs of all processes, in a small locked file.

    The file holds the time of the next free slot on the machine's monotonic clock. Without a limit nothing is read or written
    until a host asks for a pause.
    """

    def __init__(self, origin: str, rate: float | None) -> None:
        self._interval = 1.0 / rate if rate else 0.0
        self._was_paused = False
        self._origin, self._free = origin, 0.0

    def set_min_interval(self, interval: float) -> None:
        """Leave at least `interval` seconds between two requests."""
        self._interval = max(self._interval, min(interval, MAX_PAUSE))

    def reserve(self, max_wait: float) -> float | None:
        """Reserve the next slot and return the seconds until then; None, without reserving, if more than `max_wait`."""
        if not self._interval and not self._was_paused:
            return 0.0
        now = time.monotonic()
        at = self._change(lambda free: max(free, now) + self._interval if free - now <= max_wait else free)
        return max(at - now, 0.0) if at - now <= max_wait else None

    def pause(self, seconds: float) -> None:
        """Give no slots for `seconds`, because the host asked for it."""
        until = time.monotonic() + min(seconds, MAX_PAUSE)
        self._was_paused = True
        self._change(lambda free: max(free, until))

    def _change(self, new: Callable[[float], float]) -> float:
        """Replace the time of the next free slot; returns the old one."""
        file = _open_private(hashlib.sha256(self._origin.encode()).hexdigest()[:24])
        if file is None:
            warnings.warn(
                f"{_folder()} is not private; the rate limit of {self._origin} is per process", stacklevel=3
            )
            free, self._free = self._free, new(self._free)
            return free
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            data = os.pread(file, 8, 0)
            free = struct.unpack("d", data)[0] if len(data) == 8 else 0.0
            # A time that no pause explains was written before the machine was rebooted.
            if not free <= time.monotonic() + 2 * MAX_PAUSE:
                free = 0.0
            os.pwrite(file, struct.pack("d", new(free)), 0)
            return float(free)
        finally:
            os.close(file)


def _folder() -> Path:
    return Path(tempfile.gettempdir()) / f"flatout-pace-{os.getuid()}"


def _open_private(name: str) -> int | None:
    """A file in a folder that only this user may enter; None if somebody else made the folder, or it cannot be made."""
    try:
        with suppress(FileExistsError):
            _folder().mkdir(mode=0o700)
        folder = os.open(_folder(), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            about = os.fstat(folder)
            if about.st_uid != os.getuid() or about.st_mode & 0o077:
                return None
            return os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=folder)
        finally:
            os.close(folder)
    except OSError:
        return None
