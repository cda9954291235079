"""Runs programs of GoogleTest, each in one process, and reports their tests one by one.

A program that does not come to its end, since a test crashes or hangs, is run again with a process
for each test: so the failure names the test, and hides no other.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

LABEL = "gtest"
"""By which ctest tells these programs from its other tests."""
MOST_SHOWN = 20000


@dataclass(frozen=True)
class Limits:
    """Seconds until a program, and a test by itself, counts as hung."""

    program: int = 1500
    test: int = 300


@dataclass(frozen=True)
class Program:
    """A program of tests and the words that start it: an emulator may stand before it."""

    name: str
    command: tuple[str, ...]


@dataclass(frozen=True)
class Ended:
    """How a process ended; without a report it did not come to its end."""

    status: int | None
    output: str
    suites: list[ET.Element] = field(default_factory=list)

    @property
    def how(self) -> str:
        return "took too long" if self.status is None else f"exit status {self.status}"


def commands_of(folder: Path, environment: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """The programs of a build folder by name; those that are not built have no words."""
    command = ["ctest", "--test-dir", str(folder), "-L", LABEL, "--show-only=json-v1"]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
    tests = json.loads(done.stdout)["tests"]
    return {test["name"]: tuple(test.get("command", ())) for test in tests}


def programs_of(
    folder: Path, environment: Mapping[str, str], only: Collection[str] = ()
) -> list[Program]:
    """The programs of a build folder, with `only` those of these names, each once."""
    commands = commands_of(folder, environment)
    return [Program(name, commands[name]) for name in dict.fromkeys(only or commands)]


def call(program: Program, environment: Mapping[str, str], seconds: int, *flags: str) -> Ended:
    """Runs a program once."""
    with tempfile.TemporaryDirectory(prefix="recsdk-gtest-") as folder:
        report = Path(folder) / "report.xml"
        command = [*program.command, "--gtest_brief=1", f"--gtest_output=xml:{report}", *flags]
        try:
            done = subprocess.run(
                command,
                cwd=Path(program.command[-1]).parent,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            return Ended(None, (error.output or b"").decode(errors="replace"))
        suites = list(ET.parse(report).getroot()) if report.exists() else []
        return Ended(done.returncode, done.stdout.decode(errors="replace"), suites)


def listed(text: str) -> Iterator[str]:
    """The names in what --gtest_list_tests prints."""
    suite = ""
    for line in text.splitlines():
        if found := re.match(r"(\S+\.)(\s+#.*)?$", line):
            suite = found[1]
        elif found := re.match(r"  (\S+)", line):
            yield suite + found[1]


def failure(name: str, how: str, output: str) -> ET.Element:
    """A report of one failed test, for one that wrote none itself."""
    suite, _, test = name.partition(".")
    element = ET.Element("testsuite", name=suite, tests="1", failures="1")
    case = ET.SubElement(element, "testcase", classname=suite, name=test, time="0")
    # What a crashed process printed may have what XML cannot hold.
    shown = re.sub(r"[^\t\n\x20-\ud7ff]", "?", output[-MOST_SHOWN:])
    ET.SubElement(case, "failure", message=how).text = shown
    return element


def is_failed(suite: ET.Element) -> bool:
    return int(suite.get("failures", 0)) + int(suite.get("errors", 0)) > 0


def run_singly(
    program: Program, environment: Mapping[str, str], limits: Limits, whole: Ended
) -> Ended:
    """Runs each test of a program that did not come to its end in a process of its own."""
    names = list(listed(call(program, environment, limits.test, "--gtest_list_tests").output))
    suites, output = [], [f"{program.name} ended early ({whole.how}); its tests one by one:\n"]
    for name in names:
        ended = call(program, environment, limits.test, f"--gtest_filter={name}")
        found = ended.suites or [failure(name, ended.how, ended.output)]
        suites += found
        if any(map(is_failed, found)):
            output.append(f"{name}: {ended.how}\n{ended.output[-MOST_SHOWN:]}")
    if not any(map(is_failed, suites)):
        suites.append(failure(f"{program.name}.InOneProcess", whole.how, whole.output))
        output.append(f"each passes alone; in one process:\n{whole.output[-MOST_SHOWN:]}")
    return Ended(1, "".join(output), suites)


def run_program(program: Program, environment: Mapping[str, str], limits: Limits) -> Ended:
    """Runs a program and prints how it ended."""
    ended = call(program, environment, limits.program)
    if not ended.suites:
        ended = run_singly(program, environment, limits, ended)
    elif ended.status and not any(map(is_failed, ended.suites)):
        ended.suites.append(failure(f"{program.name}.Ending", ended.how, ended.output))
    num_tests = sum(int(suite.get("tests", 0)) for suite in ended.suites)
    word = "FAIL" if any(map(is_failed, ended.suites)) else "ok  "
    shown = ended.output if ended.status else ""
    print(f"{shown}{word} {program.name}: {num_tests} tests", flush=True)
    return ended


def run(
    programs: Sequence[Program], environment: Mapping[str, str], limits: Limits
) -> list[ET.Element]:
    """Runs programs side by side; returns the reports of their suites."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        ended = pool.map(lambda program: run_program(program, environment, limits), programs)
        return [suite for each in ended for suite in each.suites]
