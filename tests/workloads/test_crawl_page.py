"""The cached parser gives the same pages as the parser, and parses each outline once."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.workloads.crawl import page
from flatout.workloads.crawl.page import MAX_HTML, MAX_OUTLINES, TO_PARSE, parse, parse_cached
from flatout.workloads.site.pages import SiteConfig, answer

SELECTORS = ['[itemtype$="/Dataset"]', "table td.x", "a[href='/1']", "p:not(.x)", "nav a"]
NAMES = "p div table tr td ul li b i a nav header title script textarea select option svg template pre body form".split()
TAGS = [f"<{name}>" for name in NAMES] + [f"</{name}>" for name in NAMES]
ODD = [
    '<td class="x">',
    '<p class="x" itemtype="a/Dataset">',
    "<br/>",
    "<!-- ",
    " -->",
    "<",
    ">",
    "<a href=x>",
    "<a href='/y'>",
]
LINKS = ['<a href="{}">{}</a>', '<a class="b" href="{}" title="t">{}</a>', '<link href="{}">{}</a>']
START = st.sampled_from(
    ["", "<!doctype html>", "<html><head><title>{1}</title></head><body>", "<title>{1}</title>"]
)
HREFS = st.sampled_from(
    ["/1", "/a?b=1&c=2", "/a?b=1&amp;c=2", "x y", "&copy=1", "&copy;", "&lt", "", "é#f", "/%20"]
)
TEXTS = st.sampled_from(
    ["one", " two\n words ", "", " ", "a & b", "a &amp; b", "é\u00a0", "x" * 400, "1 > 0", "\r\n c", "\x02"]
)
PIECES = st.one_of(
    st.sampled_from(TAGS), st.sampled_from(ODD), st.sampled_from(LINKS), st.just("{1}"), st.just(" ")
)


@settings(max_examples=400, deadline=None)
@given(START, st.lists(PIECES, max_size=25), st.data(), st.sampled_from(SELECTORS))
def test_the_cached_parser_equals_the_parser(
    start: str, pieces: list[str], data: st.DataObject, target: str
) -> None:
    page._outlines.clear()
    for _ in range(3):  # the same outline, filled differently
        fill = [(data.draw(HREFS), data.draw(TEXTS)) for _ in range(len(pieces) + 1)]
        html = "".join(_filled(piece, *pair) for piece, pair in zip([start, *pieces], fill, strict=True))
        assert parse_cached(html, target) == parse(html, target), html


def _filled(piece: str, href: str, text: str) -> str:
    return piece.replace("{1}", "{}", 1).format(text) if "{1}" in piece else piece.format(href, text)


def test_pages_of_one_template_share_an_outline() -> None:
    page._outlines.clear()
    calm = SiteConfig(error_rate=0, redirect_rate=0.3)
    pages = [answer(calm, f"/{seed}/").body.decode() for seed in range(60)]
    pages += [answer(calm, href).body.decode() for html in pages for href, *_ in parse(html, "p").anchors]
    for html in pages:
        assert parse_cached(html, SELECTORS[0]) == parse(html, SELECTORS[0])
    assert len(page._outlines) < len(pages) / 4
    assert TO_PARSE not in page._outlines.values()


def test_the_cache_is_bounded() -> None:
    page._outlines.clear()
    for n in range(MAX_OUTLINES + 10):
        parse_cached(f'<p class="c{n}">', "p")
    assert len(page._outlines) == 10
    long = "<p>" * (MAX_HTML // 3 + 1)
    assert parse_cached(long, "p") == parse(long, "p")
    assert len(page._outlines) == 10


def test_html_that_is_not_plain_is_always_parsed() -> None:
    page._outlines.clear()
    for _ in range(2):
        assert parse_cached("<script>a > b</script><a href='x'>y</a>", "p").anchors == (("x", "y", False),)
    assert list(page._outlines.values()) == [TO_PARSE]
