"""What runs programs of GoogleTest names each failure, and loses no test to one that crashes."""

from __future__ import annotations

import os
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

import gtest_programs
import run_tests

# As GoogleTest's main: of its tests one may fail, one may end the process, one may hang.
FAKE = """
import os, sys, time
flags = dict(word[2:].partition("=")[::2] for word in sys.argv[1:])
names = ["First.passes", "First.fails", "Of/Many.crashes/0", "Of/Many.hangs/1"]
names = [name for name in names if name.rpartition(".")[2].partition("/")[0] in os.environ["HAS"]]
if "gtest_list_tests" in flags:
    for suite in dict.fromkeys(name.partition(".")[0] for name in names):
        print(f"{suite}.  # TypeParam = int")
        for name in names:
            if name.startswith(f"{suite}."):
                print(f"  {name.partition('.')[2]}  # GetParam() = 4-byte object <A B>")
    sys.exit()
chosen = [name for name in names if flags.get("gtest_filter", name) == name]
cases = ""
if "gtest_filter" not in flags and "crowded" in os.environ["HAS"]:
    os.abort()
for name in chosen:
    if "crashes" in name:
        print(f"{name} says \x01", flush=True)
        os.abort()
    if "hangs" in name:
        time.sleep(60)
    failure = '<failure message="1 is not 2"/>' if "fails" in name else ""
    suite, _, test = name.partition(".")
    cases += f'<testcase classname="{suite}" name="{test}" time="0.1">{failure}</testcase>'
failed = cases.count("<failure")
with open(flags["gtest_output"].partition(":")[2], "w") as file:
    file.write(
        f'<testsuites><testsuite name="all" tests="{len(chosen)}" failures="{failed}" '
        f'disabled="0" skipped="0" errors="0">{cases}</testsuite></testsuites>'
    )
sys.exit("at_end" in os.environ["HAS"] or failed > 0)
"""


def run(folder: Path, has: str) -> list[ET.Element]:
    script = folder / "fake.py"
    script.write_text(FAKE)
    program = gtest_programs.Program("some_tests", (sys.executable, str(script)))
    limits = gtest_programs.Limits(program=3, test=3)
    return gtest_programs.run([program], {**os.environ, "HAS": has}, limits)


def counts(folder: Path, suites: list[ET.Element]) -> run_tests.Counts:
    """As the run of all suites counts them in the file."""
    root = ET.Element("testsuites")
    root.extend(suites)
    ET.ElementTree(root).write(folder / "report.xml", encoding="utf-8")
    return run_tests.counts_of_junit(folder / "report.xml")


def failed_names(suites: list[ET.Element]) -> list[str]:
    cases = (case for suite in suites for case in suite.iter("testcase"))
    return [f"{c.get('classname')}.{c.get('name')}" for c in cases if c.find("failure") is not None]


def test_what_comes_to_its_end_is_run_once(tmp_path: Path) -> None:
    suites = run(tmp_path, "passes")
    assert counts(tmp_path, suites) == run_tests.Counts(passed=1)
    assert len(suites) == 1


def test_a_failure_is_that_of_its_test(tmp_path: Path) -> None:
    suites = run(tmp_path, "passes fails")
    assert counts(tmp_path, suites) == run_tests.Counts(passed=1, failed=1)
    assert failed_names(suites) == ["First.fails"]


@pytest.mark.parametrize("how", ["crashes", "hangs"])
def test_a_test_that_does_not_end_is_named_and_hides_no_other(
    tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    suites = run(tmp_path, f"passes fails {how}")
    assert counts(tmp_path, suites) == run_tests.Counts(passed=1, failed=2)
    name = {"crashes": "Of/Many.crashes/0", "hangs": "Of/Many.hangs/1"}[how]
    assert failed_names(suites) == ["First.fails", name]
    printed = capsys.readouterr().out
    assert name in printed
    assert "FAIL some_tests: 3 tests" in printed


def test_a_program_whose_tests_pass_one_by_one_only_has_failed(tmp_path: Path) -> None:
    suites = run(tmp_path, "passes crowded")
    assert counts(tmp_path, suites) == run_tests.Counts(passed=1, failed=1)
    assert failed_names(suites) == ["some_tests.InOneProcess"]


def test_a_program_that_fails_after_its_tests_has_failed(tmp_path: Path) -> None:
    suites = run(tmp_path, "passes at_end")
    assert counts(tmp_path, suites) == run_tests.Counts(passed=1, failed=1)
    assert failed_names(suites) == ["some_tests.Ending"]
