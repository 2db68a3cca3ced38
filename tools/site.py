"""Pages of the documentation's site that are not files in docs/: a hook of MkDocs (`make site`).

The start page is README.md, the reference is made of docstrings, and files of the repository that pages link to are copied.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pygments.formatters import HtmlFormatter

import flatout
from flatout.algorithms import base as algorithms
from flatout.config.fields import Field, all_fields
from flatout.config.run_config import RunConfig

ROOT = Path(__file__).parent.parent
AGENT_METHODS = ("learn", "predict", "evaluate", "save", "report", "close")
OUTSIDE = re.compile(r"\]\(\.\./([\w/.-]+)\)")
"""A link from docs/ to another file of the repository."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, the style of code, and files that pages link to."""
    pages = {"api.md": api(), "settings.md": settings(), "code.css": code_style()}
    pages["index.md"] = (ROOT / "README.md").read_text().replace("](docs/", "](")
    for name in ("CONTRIBUTING.md", "CHANGELOG.md"):
        pages[name] = (ROOT / name).read_text().replace("](docs/", "](")
    # A heading that begins with a digit has an anchor that the theme's script cannot look up.
    pages["CHANGELOG.md"] = re.sub(r"^## (\d)", r"## Version \1", pages["CHANGELOG.md"], flags=re.MULTILINE)
    for page in (ROOT / "docs").glob("*.md"):
        for name in OUTSIDE.findall(page.read_text()):
            pages[f"files/{name}.txt"] = (ROOT / name).read_text()
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Links to other files of the repository lead to their copies."""
    return markdown if "/" in page.file.src_uri else OUTSIDE.sub(r"](files/\1.txt)", markdown)


def on_post_page(output: str, **_: Any) -> str:
    """Add what the theme's dark mode expects of highlight.js, which is not used: code.css has both modes."""
    return output.replace("</head>", '<style id="hljs-light"></style><style id="hljs-dark"></style></head>')


def on_post_build(config: MkDocsConfig) -> None:
    """Search for what was typed before the index was ready; MkDocs waits for one more key."""
    script = Path(config.site_dir, "search", "main.js")
    ready = 'search_input.addEventListener("keyup", doSearch);'
    script.write_text(script.read_text().replace(ready, f"{ready}\n    if (search_input.value) doSearch();"))


def code_style() -> str:
    """Colours of code, for light and dark pages."""
    light, dark = (HtmlFormatter(style=style) for style in ("default", "github-dark"))
    return (
        f"{light.get_style_defs('.codehilite')}\n{dark.get_style_defs('[data-bs-theme=dark] .codehilite')}\n"
    )


def api() -> str:
    """flatout's public names with signatures and docstrings."""
    parts = [
        "# Python\n\nWhat `import flatout` gives. [Settings](settings.md) are keyword arguments of the agents.\n"
    ]
    kinds = {"Agent": 0, "PPO": 1, "RecurrentPPO": 2, "DQN": 3, "PQN": 4, "SAC": 5, "load": 6, "make_vec": 7}
    for name in sorted(flatout.__all__, key=lambda name: (kinds.get(name, 9), name.lower())):
        thing = getattr(flatout, name)
        plain = inspect.isclass(thing) and issubclass(thing, Exception | flatout.Agent) and name != "Agent"
        parts.append(
            f"## {name}\n\n{'' if plain else _signature(name, thing)}{inspect.getdoc(thing) or ''}\n"
        )
        if name == "Agent":
            for method in AGENT_METHODS:
                function = getattr(thing, method)
                parts.append(f"### {method}\n\n{_signature(method, function)}{inspect.getdoc(function)}\n")
    return "\n".join(parts)


def _signature(name: str, thing: Any) -> str:
    text = str(inspect.signature(thing)).replace("'", "").removesuffix(" -> None")
    text = re.sub(r"<function (\w+) at \w+>", r"\1", text).replace("(self, ", "(").replace("(self)", "()")
    if len(text) > 80:
        text = text.replace("(", "(\n    ", 1).replace(", ", ",\n    ")
        text = re.sub(r"\[[^\[\]]*\]", lambda m: m[0].replace(",\n    ", ", "), text)
    return f"```python\n{name}{text}\n```\n\n"


def settings() -> str:
    """Every setting of `flatout train`, by algorithm."""
    parts = [
        "# Settings\n\nFlags of `flatout train`, and keyword arguments of the agents in [Python](api.md).\n"
    ]
    shared = [field for field in all_fields(RunConfig) if field.section not in algorithms.names()]
    groups: dict[str, Iterable[Field]] = {
        "Every algorithm": [field for field in shared if field.name != "env"]
    }
    groups |= {name: all_fields(algorithms.get(name).config) for name in algorithms.names()}
    return "\n".join([*parts, *(f"## {name}\n\n{_table(fields)}" for name, fields in groups.items())])


def _table(fields: Iterable[Field]) -> str:
    rows = [(field.flag, " ".join(field.help.split()).replace("|", r"\|")) for field in fields]
    return "\n".join(["| setting | |", "|---|---|", *(f"| `{flag}` | {text} |" for flag, text in rows), ""])
