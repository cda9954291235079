"""The site leaves nothing out: the navigation names every page, and a page every public header."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
ENTRY = re.compile(r"^ +- .+: (\S+\.md)$", re.M)


def test_the_navigation_has_every_page_once() -> None:
    _, _, navigation = (
        (ROOT / "tools" / "docs_site" / "mkdocs.yml").read_text().partition("\nnav:\n")
    )
    named = Counter(ENTRY.findall(navigation))
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert {"README.md", "design/architecture.md"} <= pages
    assert set(named) - pages == set(), "no such pages"
    assert pages - set(named) == set(), "add these pages to nav in tools/docs_site/mkdocs.yml"
    assert [page for page, times in named.items() if times > 1] == []


def test_the_page_of_headers_has_every_header() -> None:
    headers = ROOT / "cpp" / "include" / "recsdk"
    there = {header.relative_to(headers).as_posix() for header in headers.rglob("*.h")}
    text = (DOCS / "reference" / "c_api.md").read_text()
    named = re.findall(r"`([\w/]+\.h)`", text.partition("|---|---|\n")[2].partition("\n\n")[0])
    assert "table.h" in there
    assert set(named) == there


def test_raw_figures_are_lists_of_records() -> None:
    for path in sorted((ROOT / "docs" / "perf" / "raw").rglob("*.json")):
        records = json.loads(path.read_text())
        assert isinstance(records, list), path
        assert all(isinstance(record, dict) for record in records), path
