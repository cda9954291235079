"""Sets up and runs every test: C++, the C++ library in use outside the tree, Python, packaging.

    python3 tools/run_tests.py [--only NAME ...] [--at-once N] [--list]

Suites run side by side, since most of them wait for a process much of the time; each line of output
begins with the name of its suite. Ends with one line, `N passed, M failed`, over everything.
Standard library only.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import set_up

RESULTS = set_up.BUILD / "results"
SECONDS_PER_TEST = 1500
# Not more on a machine with many cores: a suite may start ten processes of half a gigabyte each.
GIGABYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
AT_ONCE = max(2, min(4, int(GIGABYTES // 5)))
NUM_SLOWEST = 10


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
    """A command that runs tests and leaves a JUnit file, or else ends with `N passed, M failed`."""

    name: str
    command: tuple[str, ...]
    writes_junit: bool = True
    after: str = ""
    """The suite before it whose build it uses."""

    @property
    def junit(self) -> Path:
        return RESULTS / f"{self.name}.xml"


def script(name: str, path: str, *args: str, writes_junit: bool = True, after: str = "") -> Suite:
    python = str(set_up.VENV / "bin" / "python")
    junit = ("--junit", str(RESULTS / f"{name}.xml")) if writes_junit else ()
    return Suite(name, (python, path, *junit, *args), writes_junit, after)


def pytest(name: str, folder: str, *, after: str = "") -> Suite:
    python = str(set_up.VENV / "bin" / "python")
    flags = ("-q", "-ra", f"--timeout={SECONDS_PER_TEST}", f"--junitxml={RESULTS / name}.xml")
    return Suite(name, (python, "-m", "pytest", folder, *flags), after=after)


# The long ones first, so that none is left to run by itself at the end; and what others wait for.
SUITES: tuple[Suite, ...] = (
    script("cpp", "tools/cpp_tests.py"),
    pytest("sharding", "packages/recsdk-sharding/tests"),
    pytest("pipeline", "packages/recsdk-pipeline/tests"),
    pytest("across", "tests", after="cpp"),
    pytest("core", "packages/recsdk-core/tests"),
    script("aarch64", "tools/cpp_tests.py", "--aarch64"),
    pytest("npusim", "tools/npusim/tests"),
    script("consumer", "tools/test_cpp_consumer.py", writes_junit=False, after="cpp"),
)

IS_FULL = os.environ.get("RECSDK_TEST_PROFILE") == "full"
if IS_FULL:
    SUITES += (script("versions", "tools/older_versions.py", writes_junit=False, after="sharding"),)


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


def slowest(paths: Sequence[Path], most: int) -> list[tuple[float, str]]:
    """The tests of some JUnit files that took longest, longest first: seconds and name."""
    found = []
    for path in paths:
        if path.exists():
            for case in ET.parse(path).getroot().iter("testcase"):
                name = f"{path.stem}: {case.get('classname', '')}::{case.get('name', '')}"
                found.append((float(case.get("time", 0)), name))
    return sorted(found, reverse=True)[:most]


def counts_of_line(line: str) -> Counts:
    """Reads a closing line `N passed, M failed`; nothing if it is another line."""
    found = re.fullmatch(r"(\d+) passed, (\d+) failed", line.strip())
    return Counts(int(found[1]), int(found[2])) if found else Counts()


def counts_of(suite: Suite, status: int, last_line: str) -> Counts:
    """A suite that fails without a failed test, or that runs none, has failed."""
    counts = counts_of_junit(suite.junit) if suite.writes_junit else counts_of_line(last_line)
    if counts.failed == 0 and (status or counts.passed + counts.skipped == 0):
        return counts + Counts(failed=1)
    return counts


def say(name: str, line: bytes) -> None:
    """Prints a line of a suite's, whole: others print meanwhile."""
    sys.stdout.buffer.write(f"{name:9}| ".encode() + line.rstrip(b"\n") + b"\n")
    sys.stdout.flush()


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    status: int
    last_line: str
    processor_seconds: float
    """Of its own and of all the processes that it waited for."""


def run_command(name: str, command: Sequence[str]) -> Ended:
    """Runs a command, whose output goes to the terminal as it comes."""
    last = ""
    # Several suites share the processors: torch's threads, which spin while they wait for one
    # another, would take twice the time of one.
    env = {"OMP_NUM_THREADS": "1", **set_up.environment(), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, cwd=set_up.ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        for line in process.stdout or ():
            say(name, line)
            last = line.decode(errors="replace") or last
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    return Ended(process.returncode, last, usage.ru_utime + usage.ru_stime)


def run_suite(suite: Suite) -> Counts:
    say(suite.name, f"==== {' '.join(suite.command)}".encode())
    suite.junit.unlink(missing_ok=True)
    start = time.monotonic()
    ended = run_command(suite.name, suite.command)
    counts = counts_of(suite, ended.status, ended.last_line)
    took = f"{time.monotonic() - start:.0f} s, {ended.processor_seconds:.0f} s of processors"
    say(suite.name, f"==== {counts} in {took}".encode())
    return counts


def run_suites(suites: Sequence[Suite], at_once: int) -> dict[str, Counts]:
    """Runs them side by side, each one after the one whose build it uses.

    One that has to wait takes no place: the next that can run goes ahead of it. All of them can be
    interrupted, which a shell keeps from what it runs in the background: tests do that.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    waiting = list(suites)
    running: dict[Future[Counts], str] = {}
    results: dict[str, Counts] = {}
    names = {suite.name for suite in suites}
    with ThreadPoolExecutor(at_once) as pool:
        try:
            while waiting or running:
                ready = [s for s in waiting if s.after not in names or s.after in results]
                for suite in ready[: at_once - len(running)]:
                    waiting.remove(suite)
                    running[pool.submit(run_suite, suite)] = suite.name
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    results[running.pop(future)] = future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return {suite.name: results[suite.name] for suite in suites}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    names = [suite.name for suite in SUITES]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="run only these")
    parser.add_argument(
        "--at-once", type=int, default=AT_ONCE, help="suites (default: %(default)s)"
    )
    parser.add_argument("--list", action="store_true", help="print the suites and their commands")
    args = parser.parse_args()
    if args.list:
        print("\n".join(f"{suite.name:10} {' '.join(suite.command)}" for suite in SUITES))
        return 0
    if status := set_up.report_errors(lambda: set_up.set_up("test-full" if IS_FULL else "test")):
        return status
    RESULTS.mkdir(parents=True, exist_ok=True)
    print(f"profile: {os.environ.get('RECSDK_TEST_PROFILE', 'ci')}", flush=True)
    chosen = [suite for suite in SUITES if suite.name in args.only]
    results = run_suites(chosen, args.at_once)
    total = sum(results.values(), Counts())
    print("\nslowest:")
    for seconds, name in slowest([suite.junit for suite in chosen], NUM_SLOWEST):
        print(f"{seconds:8.1f} s  {name}")
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
