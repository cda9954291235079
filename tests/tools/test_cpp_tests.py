"""Chosen programs of C++ tests are built and run, and no others."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import cpp_tests
import run_tests
import set_up

PROJECT = """
cmake_minimum_required(VERSION 3.22)
project(some NONE)
enable_testing()
foreach(name IN ITEMS first_tests second_tests)
  set(script ${CMAKE_BINARY_DIR}/${name}.py)
  add_custom_target(${name} ALL
    COMMAND ${CMAKE_COMMAND} -E copy ${CMAKE_SOURCE_DIR}/fake.py ${script})
  add_test(NAME ${name} COMMAND ${PYTHON} ${script})
  set_tests_properties(${name} PROPERTIES LABELS gtest)
endforeach()
add_test(NAME other COMMAND ${CMAKE_COMMAND} -E false)
"""
# As GoogleTest's main.
FAKE = """
import sys
flags = dict(word[2:].partition("=")[::2] for word in sys.argv[1:])
with open(flags["gtest_output"].partition(":")[2], "w") as file:
    file.write('<testsuites><testsuite name="all" tests="3" failures="0"/></testsuites>')
"""


@pytest.fixture
def variant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> cpp_tests.Variant:
    (tmp_path / "CMakeLists.txt").write_text(PROJECT)
    (tmp_path / "fake.py").write_text(FAKE)
    monkeypatch.setattr(set_up, "BUILD", tmp_path)
    variant = cpp_tests.Variant("built")
    command = ["cmake", "-S", str(tmp_path), "-B", str(variant.path), f"-DPYTHON={sys.executable}"]
    monkeypatch.setattr(cpp_tests, "configure", lambda _: [*command, "-G", "Ninja"])
    return variant


def test_only_what_is_named_is_built_and_run(variant: cpp_tests.Variant, tmp_path: Path) -> None:
    only, junit = ["second_tests"], tmp_path / "junit.xml"
    assert cpp_tests.build(variant, only) == 0
    assert not (variant.path / "first_tests.py").exists()
    assert cpp_tests.run_tests(variant, junit, only) == 0
    assert run_tests.counts_of_junit(junit) == run_tests.Counts(passed=3)
    assert cpp_tests.run_tests(variant, junit, only * 2) == 0
    assert run_tests.counts_of_junit(junit) == run_tests.Counts(passed=3)


def test_all_is_built_and_run_without_names(variant: cpp_tests.Variant, tmp_path: Path) -> None:
    junit = tmp_path / "junit.xml"
    assert cpp_tests.build(variant) == 0
    assert cpp_tests.run_tests(variant, junit) == 1
    assert run_tests.counts_of_junit(junit) == run_tests.Counts(passed=6, failed=1)


def test_a_name_of_no_program_is_refused(
    variant: cpp_tests.Variant, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cpp_tests.build(variant, ["first_tests", "other"]) == 2
    printed = capfd.readouterr().out
    assert "other is no program of tests; there are first_tests, second_tests" in printed
    assert not (variant.path / "first_tests.py").exists()
