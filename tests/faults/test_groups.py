"""Every process group that the project makes has a timeout by which it notices a lost rank."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGES = Path(__file__).resolve().parents[2] / "packages"
SOURCES = sorted(
    path for part in ("src", "examples") for path in PACKAGES.glob(f"recsdk-*/{part}/**/*.py")
)
MAKERS = {"new_group", "new_subgroups", "new_subgroups_by_enumeration", "split_group"}


def calls_of(path: Path) -> list[ast.Call]:
    """The calls that make a group."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {ast.Attribute: "attr", ast.Name: "id"}
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and getattr(node.func, names.get(type(node.func), ""), None) in MAKERS
    ]


def test_the_sources_that_make_groups_are_found() -> None:
    found = {path.name for path in SOURCES if calls_of(path)}
    assert {"groups.py", "running.py", "spreading.py"} <= found


@pytest.mark.parametrize("path", [p for p in SOURCES if calls_of(p)], ids=lambda path: path.name)
def test_a_group_is_given_a_timeout(path: Path) -> None:
    for call in calls_of(path):
        given = {keyword.arg for keyword in call.keywords}
        assert "timeout" in given, f"{path.name}:{call.lineno} would wait for 30 minutes"
