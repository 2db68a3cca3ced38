"""docs/benchmarks.md holds a section per benchmark, between markers; each benchmark rewrites its own."""

from __future__ import annotations

import platform
from datetime import date
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"


def write_section(name: str, text: str) -> None:
    """Replace the section between `<!-- name -->` and `<!-- /name -->`, or add it at the end."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    page = PAGE.read_text() if PAGE.exists() else "# Benchmarks\n"
    block = f"{begin}\n{text.strip()}\n{end}"
    if begin in page:
        head, rest = page.split(begin, 1)
        page = head + block + rest.split(end, 1)[1]
    else:
        page = f"{page.rstrip()}\n\n{block}\n"
    PAGE.write_text(page)
    print(text)


def conditions() -> str:
    """One line on where and when the figures were measured."""
    from flatout.device.machine import machine

    here = machine()
    versions = here.to_json()["versions"]
    return (
        f"Measured {date.today():%B %Y} on {here.cores} cores ({here.cpu}), "
        f"{'no GPU' if not here.gpus else here.gpus[0].name}, Python {platform.python_version()}, "
        f"torch {versions['torch']}, Gymnasium {versions['gymnasium']}."
    )


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
