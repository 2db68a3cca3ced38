"""Links of the documentation lead somewhere, to headings too, every page is in the site's navigation, and the site builds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
GENERATED = {"index.md", "api.md", "settings.md", "CONTRIBUTING.md", "CHANGELOG.md"}
"""Pages that tools/site.py makes."""


def without_code(page: Path) -> str:
    return re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The headings of a page as GitHub and MkDocs write them in links."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.M)
    return {re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in headings}


def test_every_link_leads_to_a_file_and_a_heading() -> None:
    broken = []
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", without_code(page)):
            name, _, anchor = target.partition("#")
            file = (page.parent / name) if name else page
            if not file.exists() or (anchor and anchor not in anchors(file)):
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert broken == []


def test_every_page_is_in_the_navigation() -> None:
    named = set(re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M))
    docs = ROOT / "docs"
    assert named == {str(page.relative_to(docs)) for page in docs.rglob("*.md")} | GENERATED


def test_the_site_is_built_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="it builds the site")
    build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)]
    found = subprocess.run(
        build, cwd=ROOT, env={**os.environ, "PYTHONPATH": "."}, capture_output=True, text=True
    )
    assert (found.returncode, found.stderr) == (0, "")
    loaded = r"""<(?:script|img|iframe)[^>]+src="(https?:[^"]+)|<link rel="(?:stylesheet|icon|preload)[^>]+href="(https?:[^"]+)"""
    assert {
        page.name: urls for page in tmp_path.rglob("*.html") if (urls := re.findall(loaded, page.read_text()))
    } == {}
