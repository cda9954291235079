"""The page of public names is what the code says, and the names of C have tests."""

from __future__ import annotations

import importlib
import inspect
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import reference_page
from recsdk_core import _ext

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_current() -> None:
    text = reference_page.PAGE.read_text()
    assert text == reference_page.page(text), "run tools/reference_page.py"


def test_every_name_is_described() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| (.*) \|$", reference_page.page(reference_page.PAGE.read_text()), re.M
    )
    assert {name for name, text in rows if not text} == set()
    assert {"Table", "HashEmbeddingBagCollection", "HybridTrainPipelineSparseDist"} <= dict(
        rows
    ).keys()


def test_a_page_that_differs_is_told_and_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "python.md"
    page.write_text(
        reference_page.PAGE.read_text().replace("| `Table` | A growing", "| `Table` | A small")
    )
    monkeypatch.setattr(reference_page, "PAGE", page)
    monkeypatch.setattr("sys.argv", ["reference_page.py", "--check"])
    assert reference_page.main() == 1
    assert "run tools/reference_page.py" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["reference_page.py"])
    assert reference_page.main() == 0
    assert "| `Table` | A growing table of rows" in page.read_text()


# What frameworks pass from one call to the next, as torchrec does, and what reads a file's blocks.
INSIDE = {"Node", "RowBlock", "RowFile", "RowGradients", "ShardedTables", "StartedInputs", "Store"}
SEAM_OF_TORCHREC = re.compile(r"\.(input_dist|create_context)$")


def classes_in(kind: Any) -> Iterator[type]:
    if isinstance(kind, type) and kind.__module__.startswith("recsdk_"):
        yield kind
    for part in typing.get_args(kind):
        yield from classes_in(part)


def hints_of(value: Any) -> dict[str, Any]:
    """The types of a class's members or a function; none if some are for type checkers only."""
    try:
        return typing.get_type_hints(value)
    except NameError:
        return {}


def given_by(name: str, value: Any) -> Iterator[tuple[str, type]]:
    """The classes of what a function returns, and of what a class's members are."""
    if inspect.isfunction(value):
        yield from ((name, each) for each in classes_in(hints_of(value).get("return")))
    for base in value.__mro__ if isinstance(value, type) else ():
        if not base.__module__.startswith("recsdk_"):
            continue
        for member, kind in hints_of(base).items():
            if not member.startswith("_"):
                yield from ((f"{name}.{member}", each) for each in classes_in(kind))
        for member, own in vars(base).items():
            call = own.fget if isinstance(own, property) else getattr(own, "__func__", own)
            if not member.startswith("_") and inspect.isfunction(call):
                yield from given_by(f"{name}.{member}", call)


def test_what_public_calls_give_has_a_public_name() -> None:
    found = {
        (module, name): getattr(importlib.import_module(module), name)
        for module in reference_page.MODULES
        for name in importlib.import_module(module).__all__
    }
    public = [value for value in found.values() if isinstance(value, type)]
    given = [each for (_, name), value in found.items() for each in given_by(name, value)]
    assert len(given) > 100
    lacking = {
        place: kind
        for place, kind in given
        if kind not in public and kind.__name__ not in INSIDE and not SEAM_OF_TORCHREC.search(place)
    }
    assert lacking == {}


@pytest.mark.parametrize("header", ["c_api.h", "serving/c_api.h"])
def test_every_c_function_is_called_by_a_test(header: str) -> None:
    text = (ROOT / "cpp/include/recsdk" / header).read_text()
    declared = set(re.findall(r"^RECSDK_API [^(]*?\b(recsdk_\w+)\(", text, re.M))
    tests = "".join(path.read_text() for path in (ROOT / "cpp/tests").glob("*/*.cc"))
    assert len(declared) > 10
    assert declared - set(re.findall(r"\b(recsdk_\w+)\(", tests)) == set()


@pytest.mark.parametrize("name", ["recsdk_core", "recsdk_core.init", "recsdk_core.testing"])
def test_constants_and_aliases_have_the_text_below_them(name: str) -> None:
    module = importlib.import_module(name)
    constants = [
        each for each in module.__all__ if getattr(getattr(module, each), "__doc__", "") is None
    ]
    for constant in constants:
        assert reference_page.text_below(module, constant)
    assert reference_page.sentence(_ext.Lease, module, "Lease").startswith("A batch in flight")
