"""What mkdocs calls while it builds: adds the pages that are made, and mends links to sources.

Pages in docs/ link to each other and to files of the repository by relative paths, so that they
work where the repository is browsed. Here a link to a source file leads to a page that shows it.
"""

from __future__ import annotations

import functools
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

from docs_site import cpp_pages, python_pages
from docs_site.measured_pages import measured_pages

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(\[[^\]]*\]\()([^)#:\s]+)(#[^)]*)?\)")
SHOWN_AS = {".h": "cpp", ".cc": "cpp", ".c": "c", ".py": "python", ".txt": "cmake", ".json": "json"}
CODE = re.compile(r"^```.*?^```$", re.M | re.S)


@functools.cache
def made() -> dict[str, str | bytes]:
    """What is made, by path in the site."""
    return {**python_pages.pages(), **cpp_pages.pages(), **measured_pages(), **source_pages()}


# ---- sources that pages link to ----------------------------------------------------------------


def repository_path(page: str, target: str) -> str:
    """Where a link of a page leads, from the repository's root; `page` from there too."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), target))


def site_path(path: str) -> str:
    """The page that shows a file or folder of the repository."""
    if path.startswith("docs/") and path.endswith(".md"):
        return path.removeprefix("docs/")
    if path == cpp_pages.HEADERS:
        return "reference/c_api.md"
    if path.startswith(f"{cpp_pages.HEADERS}/"):
        return cpp_pages.page_of(path.removeprefix(f"{cpp_pages.HEADERS}/"))
    return f"source/{path.removesuffix('.md')}.md"


def source_pages() -> dict[str, str | bytes]:
    """Pages of all that is linked to, and of what these pages link to in turn."""
    todo = [path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")]
    pages: dict[str, str | bytes] = {}
    seen = set(todo)
    while todo:
        path = todo.pop()
        targets = set(targets_of(path))
        todo += sorted(targets - seen)
        seen |= targets
        if site_path(path).startswith("source/"):
            pages[site_path(path)] = source_page(path)
    return pages


def targets_of(path: str) -> Iterator[str]:
    if path.endswith(".md"):
        for found in LINK.finditer(CODE.sub("", (ROOT / path).read_text())):
            target = repository_path(path, found[2])
            if (ROOT / target).exists():
                yield target


def source_page(path: str) -> str:
    """A Markdown file as it is; another as code; of a folder all its files."""
    if path.endswith(".md"):
        return rewritten((ROOT / path).read_text(), path, site_path(path))
    files = [ROOT / path] if (ROOT / path).is_file() else sorted((ROOT / path).rglob("*.*"))
    parts = [f"# {posixpath.basename(path)}\n\n`{path}` in the repository."]
    for file in files:
        if file.is_file() and file.suffix in SHOWN_AS:
            name = file.relative_to(ROOT).as_posix()
            parts += [f"## {name.removeprefix(f'{path}/')}"] if name != path else []
            parts.append(f"````{SHOWN_AS[file.suffix]}\n{file.read_text().rstrip()}\n````")
    return "\n\n".join(parts) + "\n"


def rewritten(markdown: str, path: str, place: str) -> str:
    """Markdown of a file of the repository, with links as from `place` in the site."""

    def link(found: re.Match[str]) -> str:
        target = repository_path(path, found[2])
        if path.startswith("docs/") and target.startswith("docs/"):
            return found.group()
        if not (ROOT / target).exists():
            return found.group()
        to = posixpath.relpath(site_path(target), posixpath.dirname(place))
        return f"{found[1]}{to}{found[3] or ''})"

    return outside_code(markdown, lambda text: LINK.sub(link, text))


def outside_code(markdown: str, change: Callable[[str], str]) -> str:
    """The text with `change` made outside of blocks of code."""
    parts, end = [], 0
    for block in CODE.finditer(markdown):
        parts += [change(markdown[end : block.start()]), block.group()]
        end = block.end()
    return "".join([*parts, change(markdown[end:])])


# ---- what mkdocs calls -------------------------------------------------------------------------


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Puts the made pages of modules, headers and measurements into the navigation."""
    add(config.nav, "Python", "reference/recsdk")
    add(config.nav, "C and C++", "reference/cpp/")
    add(config.nav, "Benchmarks", "perf/drawn")
    return config


def add(nav: Any, section: str, prefix: str) -> None:
    """Puts the made pages whose paths begin so at the end of a section, at any depth."""
    for title, content in [pair for entry in nav for pair in entry.items()]:
        if isinstance(content, list) and title == section:
            paths = [p for p in made() if p.startswith(prefix) and p.endswith(".md")]
            content += [{title_of(path): path} for path in paths]
        elif isinstance(content, list):
            add(content, section, prefix)


def title_of(path: str) -> str:
    return str(made()[path]).partition("\n")[0].lstrip("# ")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds what is made."""
    for path, content in made().items():
        file = File.generated(config, path, content=content)
        if path.startswith("source/"):
            file.inclusion = InclusionLevel.NOT_IN_NAV  # reached by links only
        files.append(file)
    css = (Path(__file__).parent / "site.css").read_text()
    files.append(File.generated(config, "site.css", content=css))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to sources lead to the pages that show them."""
    path = page.file.src_uri
    if path in made():
        return markdown
    if path == "reference/python.md":
        markdown = python_pages.linked(markdown)
    return rewritten(markdown, f"docs/{path}", path)
