from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import run_tests
from run_tests import Counts

PYTEST = """<?xml version="1.0"?><testsuites><testsuite name="pytest" errors="1" failures="2"
 skipped="3" tests="10" time="1"><testcase/></testsuite></testsuites>"""
CTEST = '<?xml version="1.0"?><testsuite name="L" tests="7" failures="1" disabled="1" skipped="2"/>'
GREEN = '<testsuite tests="4" failures="0" errors="0" skipped="0"/>'
EMPTY = '<testsuite tests="0" failures="0" errors="0" skipped="0"/>'


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> run_tests.Suite:
    monkeypatch.setattr(run_tests, "RESULTS", tmp_path)
    return run_tests.Suite("some", ("true",))


@pytest.mark.parametrize(
    ("text", "counts"), [(PYTEST, Counts(4, 3, 3)), (CTEST, Counts(3, 1, 3)), (GREEN, Counts(4))]
)
def test_both_runners_files_are_read(tmp_path: Path, text: str, counts: Counts) -> None:
    path = tmp_path / "junit.xml"
    path.write_text(text)
    assert run_tests.counts_of_junit(path) == counts


@pytest.mark.parametrize(
    ("text", "status", "counts"),
    [
        (GREEN, 0, Counts(4, 0)),
        (GREEN, 3, Counts(4, 1)),
        (EMPTY, 0, Counts(0, 1)),
        (None, 0, Counts(0, 1)),
        (None, 2, Counts(0, 1)),
        (PYTEST, 1, Counts(4, 3, 3)),
    ],
)
def test_a_suite_that_failed_or_ran_nothing_counts_as_failed(
    suite: run_tests.Suite, text: str | None, status: int, counts: Counts
) -> None:
    if text is not None:
        suite.junit.write_text(text)
    assert run_tests.counts_of(suite, status, "") == counts


def test_the_slowest_tests_of_all_suites_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.xml").write_text(
        '<testsuites><testsuite><testcase classname="m" name="x" time="2.5"/>'
        '<testcase classname="m" name="y" time="0.5"/></testsuite></testsuites>'
    )
    (tmp_path / "b.xml").write_text('<testsuite><testcase name="z" time="1.5"/></testsuite>')
    paths = [tmp_path / name for name in ("a.xml", "b.xml", "missing.xml")]
    assert run_tests.slowest(paths, 2) == [(2.5, "a: m::x"), (1.5, "b: ::z")]


def test_a_script_is_counted_by_its_last_line() -> None:
    script = run_tests.Suite("some", ("true",), writes_junit=False)
    assert run_tests.counts_of(script, 0, "9 passed, 0 failed\n") == Counts(9, 0)
    assert run_tests.counts_of(script, 1, "8 passed, 1 failed\n") == Counts(8, 1)
    assert run_tests.counts_of(script, 1, "Killed\n") == Counts(0, 1)
    assert run_tests.counts_of(script, 0, "nothing to do\n") == Counts(0, 1)


def test_the_last_line_is_kept_and_all_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    ended = run_tests.run_command("some", ["printf", "a\\nb"])
    assert (ended.status, ended.last_line) == (0, "b")
    assert capfd.readouterr().out == "some     | a\nsome     | b\n"


def test_a_suite_has_the_processors_time_of_its_processes_too() -> None:
    loop = f"{sys.executable} -c 'sum(range(3_000_000))'"
    idle = run_tests.run_command("some", ["sh", "-c", "exit 3"])
    busy = run_tests.run_command("some", ["sh", "-c", f"{loop}; exit 3"])
    assert (idle.status, busy.status) == (3, 3)
    assert busy.processor_seconds > idle.processor_seconds


def printing(name: str, line: str, after: str = "") -> run_tests.Suite:
    return run_tests.Suite(name, ("echo", line), writes_junit=False, after=after)


@pytest.mark.parametrize("at_once", [1, 2, 8])
def test_every_suite_runs_and_counts_under_its_own_name(
    at_once: int, suite: run_tests.Suite
) -> None:
    suites = [printing(f"suite_{n}", f"{n} passed, {n % 2} failed") for n in range(1, 9)]
    expected = {f"suite_{n}": Counts(n, n % 2) for n in range(1, 9)}
    assert run_tests.run_suites(suites, at_once) == expected


@pytest.mark.usefixtures("suite")
def test_a_suite_waits_for_the_one_whose_build_it_uses(tmp_path: Path) -> None:
    build = tmp_path / "built"
    slow = ("sh", "-c", f"sleep 0.5; touch {build}; echo 1 passed, 0 failed")
    first = run_tests.Suite("first", slow, writes_junit=False)
    uses = ("sh", "-c", f"test -e {build} && echo 2 passed, 0 failed")
    second = run_tests.Suite("second", uses, writes_junit=False, after="first")
    both = {"first": Counts(1), "second": Counts(2)}
    assert run_tests.run_suites([first, second], at_once=2) == both
    assert run_tests.run_suites([second], at_once=2) == {"second": Counts(2)}


IN_BACKGROUND = """
import signal, sys, run_tests
assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
asks = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
run_tests.run_suites([run_tests.Suite("some", (sys.executable, "-c", asks), False)], 1)
"""


def test_suites_can_be_interrupted_also_in_the_background() -> None:
    ignoring = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh"]
    command = [*ignoring, sys.executable, "-c", IN_BACKGROUND]
    path = {**os.environ, "PYTHONPATH": str(Path(run_tests.__file__).parent)}
    done = subprocess.run(command, env=path, capture_output=True, text=True, check=True)
    assert "some     | True\n" in done.stdout


@pytest.mark.usefixtures("suite")
def test_a_suite_that_waits_takes_no_place(tmp_path: Path) -> None:
    other = tmp_path / "other"
    until_other = f"while ! test -e {other}; do sleep 0.05; done; echo 1 passed, 0 failed"
    first = run_tests.Suite("first", ("timeout", "60", "sh", "-c", until_other), writes_junit=False)
    waits = printing("waits", "2 passed, 0 failed", after="first")
    frees = ("sh", "-c", f"touch {other}; echo 3 passed, 0 failed")
    last = run_tests.Suite("last", frees, writes_junit=False)
    counts = {"first": Counts(1), "waits": Counts(2), "last": Counts(3)}
    assert run_tests.run_suites([first, waits, last], at_once=2) == counts


def test_a_suite_is_listed_behind_the_one_that_it_waits_for() -> None:
    names = [suite.name for suite in run_tests.SUITES]
    for index, suite in enumerate(run_tests.SUITES):
        assert suite.after == "" or suite.after in names[:index]


def test_the_closing_line() -> None:
    assert str(Counts(3, 0)) == "3 passed, 0 failed"
    assert str(Counts(3, 1) + Counts(1, 0, 2)) == "4 passed, 1 failed, 2 skipped"
