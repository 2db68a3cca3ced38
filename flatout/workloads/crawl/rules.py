"""Which URLs may ever be asked for: everything below the agent's actions passes through here.

Exact origins only, addresses checked as resolved, no URL that is too long, too deep, or looks as if following it changes
something. Only loopback, unless the user names other hosts.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from functools import lru_cache
from urllib.parse import urljoin, urlsplit

from flatout.errors import FlatoutError
from flatout.workloads.crawl.fault import Fault

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
