"""Builds the C++ library with its tests incrementally and runs them.

.venv/bin/python tools/cpp_tests.py [--sanitize address,undefined] [--junit FILE]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import set_up

# A finding ends the test with an exit status of its own, so that none is overlooked.
SANITIZER_OPTIONS = {
    "ASAN_OPTIONS": "detect_stack_use_after_return=1:strict_string_checks=1",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
}


def build_folder(sanitize: str) -> Path:
    return set_up.BUILD / ("cpp" if not sanitize else f"cpp-{sanitize.replace(',', '-')}")


def configure(folder: Path, sanitize: str, *options: str) -> list[str]:
    """The command that configures a build in `folder`; harmless to repeat."""
    build_type = "RelWithDebInfo" if sanitize else "Release"
    return [
        *("cmake", "-S", str(set_up.ROOT / "cpp"), "-B", str(folder), "-G", "Ninja"),
        f"-DCMAKE_BUILD_TYPE={build_type}",
        f"-DRECSDK_SANITIZE={sanitize}",
        *options,
    ]


def call(command: list[str], **extra: str) -> int:
    env = {**set_up.environment(), **extra}
    return subprocess.run(command, cwd=set_up.ROOT, env=env, check=False).returncode


def build(folder: Path, sanitize: str, *options: str) -> int:
    """Configures and builds; returns the exit status."""
    quiet = "--log-level=WARNING"
    status = call([*configure(folder, sanitize, *options), quiet])
    return status or call(["cmake", "--build", str(folder)])


def run_tests(folder: Path, junit: Path | None) -> int:
    jobs = str(len(os.sched_getaffinity(0)))
    command = ["ctest", "--test-dir", str(folder), "--output-on-failure", "-j", jobs]
    command += ["--no-tests=error"]
    if junit is not None:
        command += ["--output-junit", str(junit.resolve())]
    return call(command, **SANITIZER_OPTIONS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sanitize", default="", help="sanitizers, separated by commas")
    parser.add_argument("--junit", type=Path, help="write the results to this file too")
    args = parser.parse_args()
    folder = build_folder(args.sanitize)
    status = build(folder, args.sanitize, "-DRECSDK_BUILD_TESTS=ON")
    return status or run_tests(folder, args.junit)


if __name__ == "__main__":
    sys.exit(main())
