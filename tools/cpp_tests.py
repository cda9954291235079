"""Builds the C++ library with its tests incrementally and runs them.

.venv/bin/python tools/cpp_tests.py [--sanitize address,undefined | --aarch64] [--junit FILE]
    [--only ROOM_tests ...]

With --only it builds and runs these programs of tests alone, and no examples. With --aarch64 it is
cross-compiled for 64-bit Arm and run under qemu-user: the rooms whose instructions are those of the
machine with a sample of their tests, or with RECSDK_TEST_PROFILE=full all, with all tests that an
emulator can run.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.sax import saxutils

import debian
import gtest_programs
import set_up

# A finding ends the test with an exit status of its own, so that none is overlooked.
SANITIZER_OPTIONS = {
    "ASAN_OPTIONS": "detect_stack_use_after_return=1:strict_string_checks=1",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
}


# Tests draw few cases there whatever the profile: damaged row files take 0.7 GB for 4,000 draws of
# each under the emulator, and more for more, where 200,000 take 6 MB on the machine itself.
EMULATED = {"RECSDK_TEST_PROFILE": "ci"}

# Where instructions of a machine's own compute: kernels and their arithmetic, hashes, sums. What
# stands on those rooms is the same C++ for every machine; the full profile builds and tests it too.
ARCHITECTURE_ROOMS = ("util", "io", "keymap", "kernels", "bags", "rows")
ARCHITECTURE_TESTS = (
    "kernels_test",
    "run_sum_test",
    "half_test",
    "initializer_test",
    "key_map_test",
    "optimizer_test",
    "random_test",
)
NUM_ALWAYS, NUM_SAMPLED = 2, 2


def tests_for_aarch64() -> tuple[str, ...]:
    """The first of those, and a sample of the others that RECSDK_TEST_SEED (default 0) chooses."""
    seed = int(os.environ.get("RECSDK_TEST_SEED", "0"))
    always, others = ARCHITECTURE_TESTS[:NUM_ALWAYS], ARCHITECTURE_TESTS[NUM_ALWAYS:]
    return (*always, *sorted(random.Random(seed).sample(others, NUM_SAMPLED)))


@dataclass(frozen=True)
class Variant:
    """One way to build the library and its tests."""

    folder: str = set_up.ENGINE.name
    build_type: str = "Release"
    options: tuple[str, ...] = ()
    limits: gtest_programs.Limits = field(default_factory=gtest_programs.Limits)

    @property
    def path(self) -> Path:
        return set_up.BUILD / self.folder


def sanitized(sanitizers: str) -> Variant:
    name = f"cpp-{sanitizers.replace(',', '-')}"
    # The longest tests take minutes there.
    limits = gtest_programs.Limits(program=3 * 3600, test=1500)
    return Variant(name, "RelWithDebInfo", (f"-DRECSDK_SANITIZE={sanitizers}",), limits)


def for_aarch64() -> Variant:
    toolchain = set_up.ROOT / "cpp" / "cmake" / "aarch64.cmake"
    is_full = os.environ.get("RECSDK_TEST_PROFILE", "ci") == "full"
    rooms = "" if is_full else ";".join(ARCHITECTURE_ROOMS)
    chosen = "" if is_full else ";".join(tests_for_aarch64())
    # Compiled as it is released only for all tests. The kernels are optimized either way.
    flags = () if is_full else ("-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG",)
    print(f"64-bit Arm: {chosen or 'all tests'}; RECSDK_TEST_SEED draws others", flush=True)
    options = (
        f"-DCMAKE_TOOLCHAIN_FILE={toolchain}",
        "-DRECSDK_ZSTD=OFF",
        f"-DRECSDK_ONLY_ROOMS={rooms}",
        f"-DRECSDK_ONLY_TESTS={chosen}",
        *flags,
    )
    return Variant("cpp-aarch64", options=options)


def configure(variant: Variant) -> list[str]:
    """The command that configures a build; harmless to repeat."""
    return [
        *("cmake", "-S", str(set_up.ROOT / "cpp"), "-B", str(variant.path), "-G", "Ninja"),
        *("--log-level=WARNING", f"-DCMAKE_BUILD_TYPE={variant.build_type}"),
        *("-DBUILD_SHARED_LIBS=OFF", "-DRECSDK_BUILD_TESTS=ON", "-DRECSDK_WERROR=ON"),
        *variant.options,
    ]


def call(command: list[str], **extra: str) -> int:
    env = {**set_up.environment(), **extra}
    return subprocess.run(command, cwd=set_up.ROOT, env=env, check=False).returncode


def build(variant: Variant, only: Sequence[str] = ()) -> int:
    """Configures and builds, with `only` these programs; returns the exit status."""
    if status := call(configure(variant)):
        return status
    names = gtest_programs.commands_of(variant.path, set_up.environment())
    if unknown := [name for name in only if name not in names]:
        print(f"{unknown[0]} is no program of tests; there are {', '.join(names)}")
        return 2
    targets = ["--target", *only] if only else []
    return call(["cmake", "--build", str(variant.path), *targets])


def run_others(folder: Path, junit: Path, **settings: str) -> int:
    """Runs what is no program of GoogleTest; returns the exit status."""
    jobs = str(len(os.sched_getaffinity(0)))
    command = ["ctest", "--test-dir", str(folder), "-LE", gtest_programs.LABEL, "-j", jobs]
    command += ["--output-on-failure", "--no-tests=error", "--output-junit", str(junit)]
    return call(command, **SANITIZER_OPTIONS, **settings)


def run_tests(
    variant: Variant, junit: Path | None, only: Sequence[str] = (), **settings: str
) -> int:
    """Runs the tests of a build, with `only` those of these programs; returns the exit status."""
    env = {**set_up.environment(), **SANITIZER_OPTIONS, **settings}
    programs = gtest_programs.programs_of(variant.path, env, only)
    suites = gtest_programs.run(programs, env, variant.limits)
    has_failed = not programs or any(map(gtest_programs.is_failed, suites))
    if not only:
        report = variant.path / "others.xml"
        has_failed |= run_others(variant.path, report, **settings) != 0
        suites.append(ET.parse(report).getroot())
    if junit is not None:
        root = ET.Element("testsuites")
        root.extend(suites)
        ET.ElementTree(root).write(junit, encoding="utf-8")
    return int(has_failed)


def lacks_cross_compiler() -> str:
    """Installs what --aarch64 needs if this user may; else the advice what to install."""
    try:
        debian.ensure_here(debian.cross_needs(), say=set_up.say)
    except debian.MissingPackagesError as error:
        return str(error)
    return ""


def report_skipped(reason: str, junit: Path | None) -> int:
    """Says why nothing was run, in the JUnit file too."""
    print(f"skipped: {reason}")
    if junit is not None:
        text = saxutils.escape(reason)
        junit.write_text(
            '<testsuite tests="1" failures="0" errors="0" skipped="1">'
            f'<testcase name="aarch64"><skipped>{text}</skipped></testcase></testsuite>\n'
        )
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--sanitize", default="", help="sanitizers, separated by commas")
    kind.add_argument("--aarch64", action="store_true", help="cross-compile, run under qemu-user")
    parser.add_argument("--junit", type=Path, help="write the results to this file too")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="PROGRAM", help="these programs of tests alone"
    )
    args = parser.parse_args()
    if args.aarch64 and (advice := lacks_cross_compiler()):
        return report_skipped(advice, args.junit)
    variant = for_aarch64() if args.aarch64 else Variant()
    variant = sanitized(args.sanitize) if args.sanitize else variant
    settings = EMULATED if args.aarch64 else {}
    return build(variant, args.only) or run_tests(variant, args.junit, args.only, **settings)


if __name__ == "__main__":
    sys.exit(main())
