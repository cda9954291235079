"""Tables of a page whose every row is held by a test.

A table takes part if its second column is called "here": each name in the first column (each piece
of `code` in a cell that begins with one, or the cell as it is) claims what the second column says
in a word or two. A test
says by `holds` which claims it shows, word for word, and `assert_all_are_held` compares the two, so
that a row without a test fails, and so does a test whose row is gone or says something else.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import recsdk_core
from pages import module_at
from recsdk_sharding.exchange import PeerError

__all__ = ["Claim", "Page", "assert_all_are_held", "assert_ten_things_are_explained", "holds"]

_CODE = re.compile(r"`([^`]+)`")
_CELLS = re.compile(r"(?<!\\)\|")
_HELD = "_claims_held"

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, order=True)
class Claim:
    """What a page says of one name."""

    table: str
    """The heading above its table: the first `code` in it, or its text."""
    name: str
    here: str


class Page:
    """The claims of a page."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._cells: dict[Claim, list[str]] = {}
        self.repeated: list[Claim] = []
        self._read(path.read_text().splitlines())

    @property
    def claims(self) -> set[Claim]:
        return set(self._cells)

    def names(self, table: str) -> set[str]:
        """The names in the tables under a heading."""
        return {claim.name for claim in self._cells if claim.table == table}

    def text(self, table: str, name: str) -> str:
        """All that the page says of a name, after the first column."""
        [claim] = [c for c in self._cells if (c.table, c.name) == (table, name)]
        return " ".join(self._cells[claim])

    def error(self, table: str, name: str) -> type[Exception]:
        """The first error that the page says a name raises."""
        text = self.text(table, name)
        found = re.search(r"`(\w+Error)`", text)
        assert found is not None, f"{table} {name} names no error: {text}"
        made = getattr(builtins, found[1], None) or getattr(recsdk_core, found[1], None)
        if made is None and found[1] == PeerError.__name__:
            made = PeerError
        assert isinstance(made, type), f"{found[1]} is no error that tests know"
        assert issubclass(made, Exception)
        return made

    def _read(self, lines: list[str]) -> None:
        heading, is_claiming = "", False
        for line in lines:
            if line.startswith("#"):
                heading = _name_of(line.lstrip("#").strip())
            cells = [cell.strip() for cell in _CELLS.split(line)[1:-1]]
            if not cells:
                is_claiming = False
            elif len(cells) > 1 and cells[1] == "here":
                is_claiming = True
            elif is_claiming and set(line) - set("|-: "):
                self._add(heading, cells)

    def _add(self, heading: str, cells: list[str]) -> None:
        for name in _names_of(cells[0]):
            claim = Claim(heading, name, cells[1])
            if any((c.table, c.name) == (heading, name) for c in self._cells):
                self.repeated.append(claim)
            self._cells[claim] = cells[1:]


def _names_of(cell: str) -> list[str]:
    """What a first cell names: the pieces of code that it begins with, or all of it."""
    return _CODE.findall(cell) if cell.startswith("`") else [cell]


def _name_of(heading: str) -> str:
    found = _CODE.search(heading)
    return found[1] if found else heading


def holds(table: str, here: str, *names: str) -> Callable[[F], F]:
    """Says that a test shows what the page claims of some names of a table."""

    def marked(test: F) -> F:
        held = getattr(test, _HELD, ())
        setattr(test, _HELD, (*held, *(Claim(table, name, here) for name in names)))
        return test

    return marked


def assert_ten_things_are_explained(page: Page) -> None:
    """The first section of a page has ten rows, and names nothing that the rest does not have."""
    before, section, *after = re.split(r"^## ", page.path.read_text(), flags=re.MULTILINE)
    assert section.startswith("Ten things")
    lines = section.splitlines()
    rows = [line for line in lines if line.startswith("| ")][1:]
    assert len(rows) == 10
    rest = "".join([before, *after])
    assert [name for name in _CODE.findall(section) if name not in rest] == []


def assert_all_are_held(page: Page, modules: Iterable[Path]) -> None:
    """The claims of a page are those that the tests of some files hold."""
    held: set[Claim] = set()
    for path in modules:
        for name, test in vars(module_at(path)).items():
            if name.startswith("test_"):
                held.update(getattr(test, _HELD, ()))
    assert page.repeated == [], "a name that is twice in one table"
    assert sorted(page.claims - held) == [], "rows without a test"
    assert sorted(held - page.claims) == [], "tests without a row"
