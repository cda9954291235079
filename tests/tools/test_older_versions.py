from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import older_versions
import set_up

THERE = {
    canonicalize_name(name)
    for name in (
        *(Requirement(each).name for each in older_versions.NEEDS),
        *set_up.PACKAGES,
        *older_versions.PINS_OF_PAIR,
    )
}
FULL = pytest.mark.parametrize("is_full", [False, True])


def imported_by(path: Path) -> Iterator[str]:
    """The packages that a module imports as it is imported."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (each.name.partition(".")[0] for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module).partition(".")[0]


def modules_of_all_packages() -> Iterator[Path]:
    for package in set_up.PACKAGES:
        for place in older_versions.tests_of(package):
            yield from place.rglob("*.py") if place.is_dir() else [place]


def test_venvs_of_older_releases_have_what_the_packages_need() -> None:
    for package in set_up.PACKAGES:
        needed = map(Requirement, metadata.requires(package) or ())
        assert {each.name for each in needed if each.marker is None} <= THERE


def test_venvs_of_older_releases_have_what_all_tests_import(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(older_versions, "IS_FULL", True)
    imported = {name for path in modules_of_all_packages() for name in imported_by(path)}
    homes = metadata.packages_distributions()
    missing = {
        name: homes[name]
        for name in imported - sys.stdlib_module_names
        if name in homes and THERE.isdisjoint(map(canonicalize_name, homes[name]))
    }
    assert {"torchdata", "torch"} <= imported
    assert missing == {}


@FULL
def test_all_tests_that_are_named_are_there(is_full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(older_versions, "IS_FULL", is_full)
    for package in set_up.PACKAGES:
        named = older_versions.tests_of(package)
        assert named
        assert [path for path in named if not path.exists()] == []


def test_the_full_profile_runs_all_tests_of_sharding_and_pipelines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sample = set(modules_of_all_packages())
    monkeypatch.setattr(older_versions, "IS_FULL", True)
    whole = set(modules_of_all_packages())
    folders = [set_up.ROOT / "packages" / name / "tests" for name in set_up.PACKAGES[1:]]
    assert sample < whole
    assert {path for folder in folders for path in folder.rglob("*.py")} <= whole
