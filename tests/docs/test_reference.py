"""The page of public names is what the code says, and the names of C have tests."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

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
