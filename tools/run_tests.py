"""Sets up and runs every test: C++, the C++ library in use outside the tree, Python, packaging.

    python3 tools/run_tests.py [--only NAME ...] [--list]

Ends with one line, `N passed, M failed`, over everything. Standard library only.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

import set_up

RESULTS = set_up.BUILD / "results"
SECONDS_PER_TEST = 600


@dataclass(frozen=True)
class Counts:
    """How many tests ended how."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.passed + other.passed, self.failed + other.failed, self.skipped + other.skipped
        )

    def __str__(self) -> str:
        skipped = f", {self.skipped} skipped" if self.skipped else ""
        return f"{self.passed} passed, {self.failed} failed{skipped}"


@dataclass(frozen=True)
class Suite:
    """A command that runs tests and leaves a JUnit file, or else counts as one test itself."""

    name: str
    command: tuple[str, ...]
    writes_junit: bool = True

    @property
    def junit(self) -> Path:
        return RESULTS / f"{self.name}.xml"


def script(name: str, path: str, *args: str, writes_junit: bool = True) -> Suite:
    python = str(set_up.VENV / "bin" / "python")
    junit = ("--junit", str(RESULTS / f"{name}.xml")) if writes_junit else ()
    return Suite(name, (python, path, *junit, *args), writes_junit)


def pytest(name: str, folder: str) -> Suite:
    python = str(set_up.VENV / "bin" / "python")
    flags = ("-q", "-ra", f"--timeout={SECONDS_PER_TEST}", f"--junitxml={RESULTS / name}.xml")
    return Suite(name, (python, "-m", "pytest", folder, *flags))


SUITES = (
    script("cpp", "tools/cpp_tests.py"),
    script("consumer", "tools/test_cpp_consumer.py", writes_junit=False),
    pytest("core", "packages/recsdk-core/tests"),
    pytest("sharding", "packages/recsdk-sharding/tests"),
    pytest("pipeline", "packages/recsdk-pipeline/tests"),
    pytest("across", "tests"),
)


def counts_of_junit(path: Path) -> Counts:
    """Reads the totals of pytest's or ctest's JUnit file; nothing if there is none."""
    if not path.exists():
        return Counts()
    root = ET.parse(path).getroot()
    suites = [root] if root.tag == "testsuite" else list(root.iter("testsuite"))
    total = Counts()
    for suite in suites:
        number = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
        failed = number["failures"] + number["errors"]
        skipped = number["skipped"] + int(suite.get("disabled", 0))
        total += Counts(number["tests"] - failed - skipped, failed, skipped)
    return total


def counts_of(suite: Suite, status: int) -> Counts:
    """A suite that fails without a failed test, or that runs none, has failed."""
    if not suite.writes_junit:
        return Counts(failed=1) if status else Counts(passed=1)
    counts = counts_of_junit(suite.junit)
    if counts.failed == 0 and (status or counts.passed == 0):
        return counts + Counts(failed=1)
    return counts


def run_suite(suite: Suite) -> Counts:
    print(f"\n==== {suite.name}: {' '.join(suite.command)}", flush=True)
    suite.junit.unlink(missing_ok=True)
    start = time.monotonic()
    env = set_up.environment()
    status = subprocess.run(suite.command, cwd=set_up.ROOT, env=env, check=False).returncode
    counts = counts_of(suite, status)
    print(f"==== {suite.name}: {counts} in {time.monotonic() - start:.0f} s", flush=True)
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    names = [suite.name for suite in SUITES]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="run only these")
    parser.add_argument("--list", action="store_true", help="print the suites and their commands")
    args = parser.parse_args()
    if args.list:
        print("\n".join(f"{suite.name:10} {' '.join(suite.command)}" for suite in SUITES))
        return 0
    if status := set_up.report_errors(lambda: set_up.set_up("test")):
        return status
    RESULTS.mkdir(parents=True, exist_ok=True)
    print(f"profile: {os.environ.get('RECSDK_TEST_PROFILE', 'ci')}", flush=True)
    results = {suite.name: run_suite(suite) for suite in SUITES if suite.name in args.only}
    total = sum(results.values(), Counts())
    print()
    for name, counts in results.items():
        print(f"{name:10} {counts}")
    print(total)
    return 1 if total.failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
