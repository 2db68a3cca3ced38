"""The pages of generated sites: a pure function of config, seed and path. Standard library only.

The sections of a site lead to articles, goods, people or an endless calendar; one of them leads, several clicks down and under
particular words, to the targets. Every kind of page has its own structure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from random import Random

from flatout.workloads.crawl.site.site_config import SiteConfig

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
PHRASES = "a quiet morning|what we learned|looking back|an open letter|the long road|five questions|notes from the field".split(
    "|"
)
TEXT = (
    "The year began with a change that few had seen coming and many had hoped for. "
    "In the following months the work went on, slowly at first and then with more care. "
    "Those who took part remember the long evenings, the talks, and the many small steps."
)


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
    nav = "".join(
        f'<li class="{prefix}-nav-item"><a href="{root}{word}/">{word.title()}</a></li>' for word in sections
    )
    head = (
        f'<body><header class="{prefix}-top"><a class="{prefix}-logo" href="{root}">Home</a>'
        f'<nav class="{prefix}-nav"><ul>{nav}</ul></nav></header><main class="{prefix}-main">'
    )
    foot = (
        f'</main><footer class="{prefix}-foot"><a href="{root}about">About</a> <a href="{root}terms">Terms</a> '
        f'<a href="{root}search?q=all">Search</a> <a href="{root}private/area">Members</a> '
        f'<a href="{root}account/logout">Log out</a></footer></body></html>'
    )
    return Plan(
        root,
        prefix,
        sections,
        next(word for word, kind in sections.items() if kind == "research"),
        draw.choice(DATA),
        draw.choice(RECORDS),
        tuple(draw.sample(TOPICS, max(4, config.size // 2))),
        head,
        foot,
    )


class _Writer:
    """Writes one page."""

    def __init__(self, config: SiteConfig, plan: Plan, path: str) -> None:
        self.config, self.plan, self.path = config, plan, path
        self.draw = Random(f"page {path}")

    def page(self, parts: list[str]) -> Answer:
        if not parts:
            return self._html("Home", self._home())
        kind = self.plan.sections.get(parts[0])
        if parts[0] in ("about", "terms", "search", "private", "account", "tags"):
            return self._html(parts[0].title(), self._plain(parts[0]))
        if kind is None:
            return Answer(404, b"<html><body><h1>No such page</h1></body></html>")
        if kind == "research":
            return self._research(parts)
        makers: dict[str, Callable[[list[str]], str]] = {
            "shop": self._shop,
            "events": self._events,
            "people": self._people,
            "help": self._help,
            "photos": self._photos,
        }
        return self._html(parts[-1].title(), makers.get(kind, self._articles)(parts))

    def _html(self, title: str, body: str) -> Answer:
        plan = self.plan
        text = f"<!doctype html><html><head><title>{title}</title></head>{plan.head}<h1>{title}</h1>{body}{plan.foot}"
        return Answer(200, text.encode())

    def link(self, to: str, text: str) -> str:
        """A link to a path below the root of the site; some go through a redirect."""
        via = "go/" if chance(self.config.redirect_rate, "redirect", self.path, to) else ""
        return f'<a href="{self.plan.root}{via}{to}">{text}</a>'

    def items(self, name: str, links: list[str], tag: str = "li") -> str:
        """A list of links in elements of class `name`."""
        p = self.plan.prefix
        rows = "".join(f'<{tag} class="{p}-{name}">{link}</{tag}>' for link in links)
        return f'<div class="{p}-{name}-list">{rows}</div>'

    def number(self) -> int:
        """The page number of a list."""
        page = self.path.rpartition("?page=")[2]
        return int(page) if page.isdigit() and len(page) < 6 else 1

    def target(self) -> str:
        """A link to a target from another section."""
        plan, draw = self.plan, self.draw
        middle = "/".join(draw.choice(plan.topics) for _ in range(self.config.depth - 3))
        base = "/".join(part for part in (plan.research, middle, plan.data) if part)
        subject = draw.choice(SUBJECTS)
        return self.link(
            f"{base}/{subject}-{draw.randrange(1, self.config.size)}", f"{subject} {plan.record}"
        )

    def _home(self) -> str:
        plan, draw = self.plan, self.draw
        links = [self.link(f"{word}/", f"More {word}") for word in plan.sections if draw.random() < 0.5]
        news = [word for word, kind in plan.sections.items() if kind in ("news", "press", "projects")]
        for word in news:
            links += [self.link(f"{word}/{n}", draw.choice(PHRASES)) for n in draw.sample(range(1, 90), 3)]
        draw.shuffle(links)
        featured = self.target() if draw.random() < 0.3 else ""
        return self.items("card", links, "section") + featured

    def _research(self, parts: list[str]) -> Answer:
        plan, draw, size, p = self.plan, self.draw, self.config.size, self.plan.prefix
        here, level = "/".join(parts), len(parts)
        if plan.data in parts[1:]:
            if parts[-1] != plan.data:
                return self._html(parts[-1].title(), self._record(parts))
            page = self.number()
            subjects = [draw.choice(SUBJECTS) for _ in range(size)]
            start = (page - 1) * size + 1
            rows = [
                self.link(f"{here}/{s}-{start + n}", f"{s} {plan.record} {1900 + 7 * n}")
                for n, s in enumerate(subjects)
            ]
            more = [self.link(f"{here}/?page={page + 1}", "next page")] if page < 3 else []
            return self._html(
                plan.data.title(), self.items("row", rows, "p") + self.items("pager", more, "span")
            )
        if level > 1 and parts[-1] in BESIDES:
            rows = [self.link(f"{here}/{n}", f"{draw.choice(PHRASES)}") for n in range(1, size)]
            return self._html(parts[-1].title(), self.items("entry", rows, "dd"))
        if parts[-1].isdigit():
            return self._html("Essay", f'<blockquote class="{p}-essay">{TEXT}</blockquote>')
        if level == self.config.depth - 2:
            beside = draw.sample(BESIDES, 4)
            links = [self.link(f"{here}/{word}/", f"{parts[-1]} {word}") for word in [plan.data, *beside]]
            draw.shuffle(links)
            return self._html(parts[-1].title(), self.items("facet", links, "h3") + f"<p>{TEXT}</p>")
        links = [self.link(f"{here}/{topic}/", topic.title()) for topic in plan.topics]
        links += [self.link(f"{here}/{word}/", word) for word in draw.sample(BESIDES, 3)]
        return self._html(parts[-1].title(), self.items("topic", links, "article"))

    def _record(self, parts: list[str]) -> str:
        p, draw = self.plan.prefix, self.draw
        cells = "".join(f"<tr><td>{2000 + n}</td><td>{draw.randrange(999)}</td></tr>" for n in range(8))
        others = [self.link("/".join(parts[:-1]) + "/", "all of them")]
        return f'<section {TARGET_MARK}><table class="{p}-values">{cells}</table></section>{self.items("up", others, "p")}'

    def _articles(self, parts: list[str]) -> str:
        draw, size, p, here = self.draw, self.config.size, self.plan.prefix, parts[0]
        if parts[-1].isdigit():
            links = [self.link(f"{here}/{n}", draw.choice(PHRASES)) for n in draw.sample(range(1, 900), 5)]
            links += [self.link(f"tags/{draw.choice(TOPICS)}", draw.choice(TOPICS)) for _ in range(3)]
            extra = self.target() if draw.random() < 0.12 else ""
            kind = self.plan.sections[here]
            return (
                f'<article class="{p}-{kind}"><p>{TEXT} {extra}</p></article>{self.items("related", links)}'
            )
        page = self.number()
        rows = [
            self.link(f"{here}/{(page - 1) * size + n}", draw.choice(PHRASES)) for n in range(1, size + 1)
        ]
        more = [self.link(f"{here}/?page={page + 1}", "older")]
        return self.items("teaser", rows, "h2") + self.items("pager", more, "span")

    def _shop(self, parts: list[str]) -> str:
        draw, size, p, here = self.draw, self.config.size, self.plan.prefix, "/".join(parts)
        if len(parts) == 1:
            return self.items("aisle", [self.link(f"{here}/{thing}s/", f"{thing}s") for thing in THINGS])
        if len(parts) == 2:
            rows = [self.link(f"{here}/{n}", f"{parts[1][:-1]} no. {n}") for n in range(1, size)]
            if self.config.traps:
                rows += [
                    self.link(f"{here}/?sort={key}&view={n}", f"sort by {key}")
                    for n, key in enumerate(("price", "name", "new"))
                ]
            return self.items("good", rows, "figure")
        remove = self.link(f"account/delete?id={parts[-1]}", "remove")
        return f'<div class="{p}-price">{draw.randrange(5, 99)}.00</div><form class="{p}-buy"></form>{remove}'

    def _events(self, parts: list[str]) -> str:
        draw, here, p = self.draw, parts[0], self.plan.prefix
        numbers = [int(part) for part in parts[1:] if part.isdigit()]
        year, month = (*numbers, *(2024, 5)[len(numbers) :])[:2]
        if len(numbers) >= 3:
            return f'<time class="{p}-when">{"-".join(map(str, numbers))}</time><p>{TEXT}</p>'
        after, before = (year + month // 12, month % 12 + 1), (year - (month == 1), (month - 2) % 12 + 1)
        links = [
            self.link(f"{here}/{y}/{m}/", name)
            for (y, m), name in ((before, "previous month"), (after, "next month"))
        ]
        links += [
            self.link(f"{here}/{year}/{month}/{day}", f"day {day}")
            for day in sorted(draw.sample(range(1, 29), 8))
        ]
        return self.items("day", links, "span")

    def _people(self, parts: list[str]) -> str:
        draw, size, p, here = self.draw, self.config.size, self.plan.prefix, parts[0]
        if len(parts) > 1:
            links = [self.link(f"{here}/{name}", name.title()) for name in draw.sample(NAMES, 4)]
            return f'<address class="{p}-card">{TEXT[:80]}</address>{self.items("peer", links)}'
        names = NAMES[:size]
        return self.items("person", [self.link(f"{here}/{name}", name.title()) for name in names], "dt")

    def _help(self, parts: list[str]) -> str:
        draw, here, p = self.draw, "/".join(parts), self.plan.prefix
        if len(parts) > 4:
            return f'<details class="{p}-answer"><p>{TEXT}</p></details>'
        topics = draw.sample(THINGS, 5)
        return self.items(
            "question", [self.link(f"{here}/{topic}", f"how to use a {topic}") for topic in topics], "summary"
        )

    def _photos(self, parts: list[str]) -> str:
        draw, p, here = self.draw, self.plan.prefix, parts[0]
        if len(parts) > 1:
            return f'<img class="{p}-photo" src="/static/{parts[-1]}.jpg" alt="">'
        links = [self.link(f"{here}/{n}", f"photo {n}") for n in draw.sample(range(1, 500), self.config.size)]
        return self.items("thumb", links, "picture")

    def _plain(self, word: str) -> str:
        return f'<p class="{self.plan.prefix}-{word}">{TEXT}</p>'
