"""Plots how busy a card is, flatout beside its peers: what `benchmarks.accelerator` measured, as docs/images/card_busy.svg.

`python -m benchmarks.card_plot [--card rtx4070]`. The picture has its own background and follows the reader's colour scheme.
"""

from __future__ import annotations

import argparse
import json
from html import escape
from typing import Any

from benchmarks.accelerator import CASES, NAMES, ROOT
from benchmarks.page import PAGE

WIDTH, LEFT, BAR, GAP, TOP = 760, 130, 14, 16, 92
FULL = 430
"""The length of a bar for a card that is always busy."""
LIBRARIES = ("flatout", "sb3", "loop")
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328 } .small { font-size: 12px; fill: #59636e }
.title { font-size: 16px; font-weight: 600 } .page { fill: #ffffff; stroke: #d1d9e0 } .rule { stroke: #d1d9e0 }
.flatout { fill: #0969da } .sb3 { fill: #bc4c00 } .loop { fill: #8c959f }
@media (prefers-color-scheme: dark) {
text { fill: #f0f6fc } .small { fill: #9198a1 } .page { fill: #0d1117; stroke: #3d444d } .rule { stroke: #3d444d }
.flatout { fill: #4493f8 } .sb3 { fill: #db6d28 } .loop { fill: #768390 } }
"""


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """Words at a place."""
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def bar(y: float, library: str, share: float, times: float | None) -> str:
    """A bar with its share; `times`: flatout's steps/s ÷ this library's."""
    length = max(FULL * min(share, 1.0), 1.5)
    words = f"{100 * share:.1f} %" + ("" if times is None else f"; flatout: {times:.1f} × its steps/s")
    return (
        f'<rect x="{LEFT}" y="{y:g}" width="{length:.1f}" height="{BAR}" rx="2" class="{library}"/>'
        + text(LEFT + length + 6, y + BAR - 3, words, "small")
    )


def case(y: float, name: str, medians: dict[str, dict[str, Any]]) -> tuple[str, float]:
    """A case's bars, and where the next case begins."""
    there = [library for library in LIBRARIES if library in medians]
    ours = medians["flatout"]["steps_per_second"]
    parts = [text(LEFT - 12, y + len(there) * BAR / 2 + 4, name, anchor="end")]
    for library in there:
        it = medians[library]
        times = None if library == "flatout" else ours / it["steps_per_second"]
        parts.append(bar(y, library, it["busy"], times))
        y += BAR + 1
    return "\n".join(parts), y + GAP


def legend(libraries: list[str]) -> str:
    """Names of the colours."""
    parts, x = [], LEFT
    for library in libraries:
        parts.append(f'<rect x="{x}" y="52" width="12" height="12" rx="2" class="{library}"/>')
        parts.append(text(x + 18, 63, NAMES[library]))
        x += 44 + 8 * len(NAMES[library])
    return "\n".join(parts)


def picture(results: dict[str, Any], card: str) -> str:
    """The whole picture."""
    parts, y = [], float(TOP)
    names = [name for name in CASES if name in results]
    for name in names:
        part, y = case(y, name, results[name])
        parts.append(part)
    bottom = y - GAP + 6
    for percent in (0, 25, 50, 75, 100):
        x = LEFT + FULL * percent / 100
        parts.insert(0, f'<line x1="{x:g}" y1="{TOP - 8}" x2="{x:g}" y2="{bottom:g}" class="rule"/>')
        parts.append(text(x, bottom + 18, f"{percent} %", "small", "middle"))
    libraries = [it for it in LIBRARIES if any(it in results[name] for name in names)]
    title = text(20, 30, f"Time in which the card is busy: simulated {card}, same settings", "title")
    height = bottom + 34
    page = f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1:g}" rx="8" class="page"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" height="{height:g}">'
    return "\n".join([head, f"<style>{STYLE}</style>", page, title, legend(libraries), *parts, "</svg>", ""])


def main() -> None:
    """Read the results, write the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--card", default="rtx4070")
    card = parser.parse_args().card
    results = json.loads((ROOT / "benchmarks" / "results" / f"accelerator_{card}.json").read_text())
    (PAGE.parent / "images" / "card_busy.svg").write_text(picture(results, card))


if __name__ == "__main__":
    main()
