"""Builds the site of the documentation into build/site, and checks it.

    .venv/bin/python tools/build_docs.py

Fails if a link or an anchor leads nowhere, or if a public name is missing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import debian
from docs_site import python_pages

TOOLS = Path(__file__).resolve().parent
ROOT = TOOLS.parent
SITE = ROOT / "build" / "site"
SETTINGS = TOOLS / "docs_site" / "mkdocs.yml"
DOXYGEN = debian.program("doxygen", purpose="reads the C++ headers")


class Links(HTMLParser):
    """The ids and the links of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.ids.add(value)
            elif name in ("href", "src") and value:
                self.links.append(value)


def read(page: Path) -> Links:
    found = Links()
    found.feed(page.read_text())
    return found


def broken_links(site: Path) -> list[str]:
    """Links of the site's pages that lead nowhere within it, as `page: link`."""
    pages = {page.resolve(): read(page) for page in sorted(site.rglob("*.html"))}
    return [
        f"{page.relative_to(site.resolve())}: {link}"
        for page, found in pages.items()
        for link in found.links
        if not leads_somewhere(page, link, pages)
    ]


def leads_somewhere(page: Path, link: str, pages: Mapping[Path, Links]) -> bool:
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return True
    target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    if page.name == "404.html" and parts.path.startswith("/"):
        return True  # of a site at the root of its host
    if not target.exists():
        return False
    is_anchor_there = target not in pages or unquote(parts.fragment) in pages[target].ids
    return is_anchor_there or not parts.fragment or parts.fragment.startswith("__")


def findings() -> Iterator[str]:
    for link in broken_links(SITE):
        yield f"broken link: {link}"
    for name in python_pages.missing_names(SITE):
        yield f"missing name: {name}"


def main() -> int:
    try:
        debian.ensure_here([DOXYGEN], say=print)
    except debian.MissingPackagesError as error:
        print(error, file=sys.stderr)
        return 1
    command = [sys.executable, "-m", "mkdocs", "build", "-f", str(SETTINGS)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(TOOLS)}
    if subprocess.run(command, cwd=ROOT, env=env, check=False).returncode:
        return 1
    found = list(findings())
    pages = sum(1 for _ in SITE.rglob("*.html"))
    print("\n".join([*found, f"{pages} pages in {SITE.relative_to(ROOT)}/, {len(found)} findings"]))
    if found:
        return 1
    # A browser gives a page that is opened as a file no way to search.
    print(f"to read and search them: python3 -m http.server -d {SITE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
