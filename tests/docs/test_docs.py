"""The Python in README.md and docs/ runs as it is printed, page by page, from top to bottom."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from pages import python_of
from warm_scripts import start_scripts, statuses_of

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "packages").glob("*/README.md")),
]
SECONDS_TO_END = 600
NEEDS = {"docs/howto/use_other_readers.md": "datasets"}
"""Packages of others that a page is about."""
LINK = re.compile(r"\[[^\]]*\]\(([^)#:]+)(?:#[^)]*)?\)")
ANCHOR = re.compile(r"\[[^\]]*\]\(([^)#:]*)#([^)]+)\)")
CODE = re.compile(r"^```.*?^```$", re.M | re.S)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


PAGES_WITH_SESSIONS = [page for page in PAGES if ">>> " in page.read_text()]
PAGES_WITH_PYTHON = [
    page for page in PAGES if python_of(page).strip() and page not in PAGES_WITH_SESSIONS
]


@pytest.mark.parametrize("page", PAGES_WITH_PYTHON, ids=name_of)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    if needed := NEEDS.get(name_of(page)):
        pytest.importorskip(needed, reason=f"{needed} is not installed")
    script = tmp_path / f"{page.stem}.py"
    script.write_text(python_of(page))
    run_python(page, [str(script)], tmp_path)


@pytest.mark.parametrize("page", PAGES_WITH_SESSIONS, ids=name_of)
def test_the_sessions_of_a_page_print_what_it_says(page: Path, tmp_path: Path) -> None:
    run_python(page, ["-m", "doctest", str(page)], tmp_path)


def run_python(page: Path, arguments: Sequence[str], folder: Path) -> None:
    output = folder / "printed"
    [status] = statuses_of(start_scripts(arguments, output, [{}], folder=folder), SECONDS_TO_END)
    text = output.read_text(errors="replace")
    assert status == 0, f"{name_of(page)}, same line numbers:\n{text}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    targets = [target for target in LINK.findall(page.read_text()) if target]
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_the_first_screen_has_the_two_commands_and_a_short_example() -> None:
    first_screen = (ROOT / "README.md").read_text().splitlines()[:60]
    example = [line for line in python_of(ROOT / "README.md").splitlines()[:60] if line.strip()]
    assert 8 <= len(example) <= 12
    assert any(line.startswith("$ make demo") for line in first_screen)
    assert any(line.startswith("$ make test") for line in first_screen)


def anchors_of(page: Path) -> set[str]:
    """Of its headings, as they are made where the repository is browsed and in the site."""
    headings = re.findall(r"^#+ (.*)$", CODE.sub("", page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_anchors_are_headings(page: Path) -> None:
    for target, anchor in ANCHOR.findall(CODE.sub("", page.read_text())):
        place = page.parent / target if target else page
        if place.suffix == ".md":
            assert anchor in anchors_of(place), f"{target}#{anchor}"
