"""Generated sites: their settings, and their pages as a pure function of settings, seed and path. Standard library only.

The sections of a site lead to articles, goods, people or an endless calendar; one of them leads, several clicks down and under
particular words, to the targets. Every kind of page has its own structure.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any

from flatout.errors import FlatoutError
from flatout.workloads.validate import check_fields, from_settings, read_json, within

TARGET_MARK = 'itemscope itemtype="https://schema.org/Dataset"'

# All sites use the same words, so that what is learned on one is useful on others.
SECTIONS = {
    "research": ["research", "science", "library", "knowledge", "observatory"],
    "news": ["news", "blog", "journal", "stories"],
    "shop": ["shop", "store", "products", "catalogue"],
    "people": ["people", "team", "staff", "authors"],
    "events": ["events", "calendar", "agenda"],
    "help": ["help", "support", "guides", "answers"],
    "photos": ["photos", "gallery", "media"],
    "projects": ["projects", "programmes", "initiatives"],
    "press": ["press", "announcements", "statements"],
}
"""Names of a section, by its kind."""
DATA = ["data", "statistics", "figures", "indicators", "measurements"]
"""Names of the list of targets."""
RECORDS = ["series", "dataset", "table", "records"]
"""Names of a target."""
TOPICS = (
    "climate water energy soil traffic health housing forest ocean air trade schools farming crime".split()
)
SUBJECTS = "rainfall prices births harvest noise rivers wages output visitors storage density yields".split()
BESIDES = ["papers", "essays", "methods", "partners", "history", "glossary"]
"""What a topic has besides its data."""
THINGS = "lamp chair kettle blanket basket mirror clock bottle carpet candle".split()
NAMES = "anna boris clara david elena felix greta hugo irene jonas karin lukas".split()
PHRASES = (
    "a quiet morning|what we learned|looking back|an open letter|the long road|five questions|notes from the field"
).split("|")
TEXT = (
    "The year began with a change that few had seen coming and many had hoped for. "
    "In the following months the work went on, slowly at first and then with more care. "
    "Those who took part remember the long evenings, the talks, and the many small steps."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteConfig:
    """The settings of a family of sites; each seed gives one site."""

    size: int = within(12, 4, 40)
    """Entries per list page; the rest of the site scales with it."""
    depth: int = within(4, 3, 8)
    """Clicks from the home page to a target through the lists."""
    latency: float = within(0.0, 0, 60)
    """Median latency of a response in seconds."""
    latency_spread: float = within(0.3, 0, 3)
    """Standard deviation of the logarithm of the latency."""
    error_rate: float = within(0.01, 0, 1)
    """Share of responses that are server errors; a retry may succeed."""
    redirect_rate: float = within(0.05, 0, 1)
    """Share of links that go through a redirect."""
    traps: bool = True
    """An endless calendar, and links that differ only in their query."""
    robots: bool = True
    """A robots.txt that disallows a part of each site."""

    def __post_init__(self) -> None:
        check_fields(self, "site config: ")

    def to_json(self) -> str:
        """One line of JSON for `read_site`."""
        return json.dumps(asdict(self))


def read_site(source: Mapping[str, Any] | str | Path | None) -> SiteConfig:
    """The config in a mapping or a JSON file; errors name the file."""
    if source is None or isinstance(source, Mapping):
        return from_settings(SiteConfig, source or {}, "site config")
    data = read_json(source, "site config")
    if not isinstance(data, dict):
        expected = "it must be an object of settings"
        raise FlatoutError(f"site config {source} is a {type(data).__name__}; {expected}")
    try:
        return from_settings(SiteConfig, data, "site config")
    except FlatoutError as error:
        raise FlatoutError(str(error).replace("site config", f"site config {source}", 1)) from error


@dataclass(frozen=True, slots=True)
class Answer:
    """A response of the server."""

    status: int
    body: bytes = b""
    location: str = ""
    content_type: str = "text/html; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Plan:
    """What all pages of a site share."""

    root: str
    prefix: str
    """Prefix of its CSS classes."""
    sections: dict[str, str]
    """The kind of each section by its name, in the order of the navigation."""
    research: str
    data: str
    record: str
    topics: tuple[str, ...]
    head: str
    foot: str


def answer(config: SiteConfig, path: str, attempt: int = 0) -> Answer:
    """The response to a GET of `/<seed>/…`; `attempt` counts earlier tries of the client."""
    if path == "/robots.txt" and config.robots:
        text = "User-agent: *\nDisallow: /*/private/\nDisallow: /*/search\n"
        return Answer(200, text.encode(), content_type="text/plain")
    route, _, _ = path.partition("?")
    seed, *parts = route.strip("/").split("/")
    if not seed.isdigit() or len(seed) > 12:
        return Answer(404, b"<html><body><h1>No such site</h1></body></html>")
    if parts and chance(config.error_rate, "error", path, attempt):
        return Answer(500, b"<html><body><h1>Something broke</h1></body></html>")
    plan = site(config, int(seed))
    if parts[:1] == ["go"]:
        return Answer(302, location=path.replace("/go/", "/", 1))
    return _Writer(config, plan, path).page([part for part in parts if part])


def latency(config: SiteConfig, path: str, attempt: int = 0) -> float:
    """Seconds until the response is sent."""
    if not config.latency:
        return 0.0
    return config.latency * Random(f"wait {path} {attempt}").lognormvariate(0.0, config.latency_spread)


def chance(share: float, *what: object) -> bool:
    """True for a share of all cases; always the same for the same case."""
    return share > 0 and int.from_bytes(blake2b(repr(what).encode(), digest_size=4).digest()) < share * 2**32


@lru_cache(4096)
def site(config: SiteConfig, seed: int) -> Plan:
    """The plan of one site."""
    draw = Random(f"site {seed}")
    kinds = [kind for kind in SECTIONS if kind != "research" and (config.traps or kind != "events")]
    chosen = ["research", *draw.sample(kinds, 6)]
    draw.shuffle(chosen)
    sections = {draw.choice(SECTIONS[kind]): kind for kind in chosen}
    root, prefix = f"/{seed}/", draw.choice(["c", "ui", "site", "x", "mod", "wp"])
    item = f'<li class="{prefix}-nav-item"><a href="{root}'
    nav = "".join(f'{item}{word}/">{word.title()}</a></li>' for word in sections)
    head = (
        f'<body><header class="{prefix}-top"><a class="{prefix}-logo" href="{root}">Home</a>'
        f'<nav class="{prefix}-nav"><ul>{nav}</ul></nav></header><main class="{prefix}-main">'
    )
    foot = (
        f'</main><footer class="{prefix}-foot"><a href="{root}about">About</a> <a href="{root}terms">Terms</a> '
        f'<a href="{root}search?q=all">Search</a> <a href="{root}private/area">Members</a> '
        f'<a href="{root}account/logout">Log out</a></footer></body></html>'
    )
    research = next(word for word, kind in sections.items() if kind == "research")
    data, record = draw.choice(DATA), draw.choice(RECORDS)
    topics = tuple(draw.sample(TOPICS, min(max(4, config.size // 2), len(TOPICS))))
    return Plan(root, prefix, sections, research, data, record, topics, head, foot)


class _Writer:
    """Writes one page."""

    def __init__(self, config: SiteConfig, plan: Plan, path: str) -> None:
        self.config, self.plan, self.path = config, plan, path
        self.draw = Random(f"page {path}")

    def page(self, parts: list[str]) -> Answer:
        word = parts[0] if parts else ""
        self.title = parts[-1].title() if parts else "Home"
        if not parts:
            body = self._home()
        elif word in ("about", "terms", "search", "private", "account", "tags"):
            self.title, body = word.title(), self.element("p", word, TEXT)
        elif word in self.plan.sections:
            # Kinds of sections without pages of their own, such as news, have articles.
            body = getattr(self, f"_{self.plan.sections[word]}", self._articles)(parts)
        else:
            return Answer(404, b"<html><body><h1>No such page</h1></body></html>")
        head = f"<!doctype html><html><head><title>{self.title}</title></head>{self.plan.head}"
        return Answer(200, f"{head}<h1>{self.title}</h1>{body}{self.plan.foot}".encode())

    def link(self, to: str, text: str) -> str:
        """A link to a path below the root of the site; some go through a redirect."""
        via = "go/" if chance(self.config.redirect_rate, "redirect", self.path, to) else ""
        return f'<a href="{self.plan.root}{via}{to}">{text}</a>'

    def element(self, tag: str, name: str, content: str) -> str:
        return f'<{tag} class="{self.plan.prefix}-{name}">{content}</{tag}>'

    def items(self, name: str, links: Iterable[tuple[str, str]], tag: str = "li") -> str:
        """A list of links (path, text) in elements of class `name`."""
        rows = "".join([self.element(tag, name, self.link(*link)) for link in links])
        return self.element("div", f"{name}-list", rows)

    def number(self) -> int:
        """The page number of a list."""
        page = self.path.rpartition("?page=")[2]
        return int(page) if page.isdigit() and len(page) < 6 else 1

    def target(self) -> str:
        """A link to a target from another section."""
        plan, draw = self.plan, self.draw
        middle = [draw.choice(plan.topics) for _ in range(self.config.depth - 3)]
        subject = draw.choice(SUBJECTS)
        record = f"{subject}-{draw.randrange(1, self.config.size)}"
        return self.link("/".join([plan.research, *middle, plan.data, record]), f"{subject} {plan.record}")

    def _home(self) -> str:
        plan, draw = self.plan, self.draw
        links = [(f"{word}/", f"More {word}") for word in plan.sections if draw.random() < 0.5]
        for word, kind in plan.sections.items():
            if kind in ("news", "press", "projects"):
                links += [(f"{word}/{n}", draw.choice(PHRASES)) for n in draw.sample(range(1, 90), 3)]
        draw.shuffle(links)
        featured = self.target() if draw.random() < 0.3 else ""
        return self.items("card", links, "section") + featured

    def _research(self, parts: list[str]) -> str:
        plan, draw, size = self.plan, self.draw, self.config.size
        here, last = "/".join(parts), parts[-1]
        if plan.data in parts[1:]:
            return self._data(here) if last == plan.data else self._record(here)
        if len(parts) > 1 and last in BESIDES:
            return self.items("entry", [(f"{here}/{n}", draw.choice(PHRASES)) for n in range(1, size)], "dd")
        if last.isdigit():
            self.title = "Essay"
            return self.element("blockquote", "essay", TEXT)
        if len(parts) == self.config.depth - 2:
            words = [plan.data, *draw.sample(BESIDES, 4)]
            draw.shuffle(words)
            links = [(f"{here}/{word}/", f"{last} {word}") for word in words]
            return self.items("facet", links, "h3") + f"<p>{TEXT}</p>"
        links = [(f"{here}/{topic}/", topic.title()) for topic in plan.topics]
        links += [(f"{here}/{word}/", word) for word in draw.sample(BESIDES, 3)]
        return self.items("topic", links, "article")

    def _data(self, here: str) -> str:
        size, page = self.config.size, self.number()
        subjects = [self.draw.choice(SUBJECTS) for _ in range(size)]
        rows = [
            (f"{here}/{subject}-{(page - 1) * size + 1 + n}", f"{subject} {self.plan.record} {1900 + 7 * n}")
            for n, subject in enumerate(subjects)
        ]
        more = [(f"{here}/?page={page + 1}", "next page")] if page < 3 else []
        return self.items("row", rows, "p") + self.items("pager", more, "span")

    def _record(self, here: str) -> str:
        cells = [f"<tr><td>{2000 + n}</td><td>{self.draw.randrange(999)}</td></tr>" for n in range(8)]
        table = self.element("table", "values", "".join(cells))
        up = self.items("up", [(f"{here.rpartition('/')[0]}/", "all of them")], "p")
        return f"<section {TARGET_MARK}>{table}</section>{up}"

    def _articles(self, parts: list[str]) -> str:
        draw, size, here = self.draw, self.config.size, parts[0]
        if parts[-1].isdigit():
            links = [(f"{here}/{n}", draw.choice(PHRASES)) for n in draw.sample(range(1, 900), 5)]
            links += [(f"tags/{draw.choice(TOPICS)}", draw.choice(TOPICS)) for _ in range(3)]
            extra = self.target() if draw.random() < 0.12 else ""
            article = self.element("article", self.plan.sections[here], f"<p>{TEXT} {extra}</p>")
            return article + self.items("related", links)
        page = self.number()
        rows = [(f"{here}/{(page - 1) * size + n}", draw.choice(PHRASES)) for n in range(1, size + 1)]
        more = [(f"{here}/?page={page + 1}", "older")]
        return self.items("teaser", rows, "h2") + self.items("pager", more, "span")

    def _shop(self, parts: list[str]) -> str:
        here = "/".join(parts)
        if len(parts) == 1:
            return self.items("aisle", [(f"{here}/{thing}s/", f"{thing}s") for thing in THINGS])
        if len(parts) == 2:
            rows = [(f"{here}/{n}", f"{parts[1][:-1]} no. {n}") for n in range(1, self.config.size)]
            keys = ("price", "name", "new") if self.config.traps else ()
            rows += [(f"{here}/?sort={key}&view={n}", f"sort by {key}") for n, key in enumerate(keys)]
            return self.items("good", rows, "figure")
        price = self.element("div", "price", f"{self.draw.randrange(5, 99)}.00")
        return price + self.element("form", "buy", "") + self.link(f"account/delete?id={parts[-1]}", "remove")

    def _events(self, parts: list[str]) -> str:
        here = parts[0]
        numbers = [int(part) for part in parts[1:] if part.isdigit()]
        if len(numbers) >= 3:
            return self.element("time", "when", "-".join(map(str, numbers))) + f"<p>{TEXT}</p>"
        year, month = (*numbers, *(2024, 5)[len(numbers) :])
        links = [
            (f"{here}/{year - (month == 1)}/{(month - 2) % 12 + 1}/", "previous month"),
            (f"{here}/{year + month // 12}/{month % 12 + 1}/", "next month"),
        ]
        days = sorted(self.draw.sample(range(1, 29), 8))
        links += [(f"{here}/{year}/{month}/{day}", f"day {day}") for day in days]
        return self.items("day", links, "span")

    def _people(self, parts: list[str]) -> str:
        is_person = len(parts) > 1
        names = self.draw.sample(NAMES, 4) if is_person else NAMES[: self.config.size]
        links = [(f"{parts[0]}/{name}", name.title()) for name in names]
        if is_person:
            return self.element("address", "card", TEXT[:80]) + self.items("peer", links)
        return self.items("person", links, "dt")

    def _help(self, parts: list[str]) -> str:
        if len(parts) > 4:
            return self.element("details", "answer", f"<p>{TEXT}</p>")
        here, topics = "/".join(parts), self.draw.sample(THINGS, 5)
        links = [(f"{here}/{topic}", f"how to use a {topic}") for topic in topics]
        return self.items("question", links, "summary")

    def _photos(self, parts: list[str]) -> str:
        if len(parts) > 1:
            return f'<img class="{self.plan.prefix}-photo" src="/static/{parts[-1]}.jpg" alt="">'
        numbers = self.draw.sample(range(1, 500), self.config.size)
        return self.items("thumb", [(f"{parts[0]}/{n}", f"photo {n}") for n in numbers], "picture")
