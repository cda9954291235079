"""Runs the tests of devices on an Ascend NPU of this machine, instead of on the stand-in.

    .venv/bin/python tools/npu_hardware.py [--no-build] [--junit-dir DIR]

The same suites that `make test` runs on the host and on a stand-in for Ascend's runtime: the
contract of a device (cpp/tests/device_conformance_test.cc), tables in its memory, from several
threads, and through the C interface. Source CANN's set_env.sh first.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import cpp_tests

SUITES = (
    "device_conformance_test",
    "device_table_test",
    "device_threads_test",
    "c_api_device_test",
)
NPU_ONLY = "--gtest_filter=*/npu"


def build() -> int:
    """Builds the suites; returns the exit status."""
    variant = cpp_tests.Variant()
    return cpp_tests.call(cpp_tests.configure(variant)) or cpp_tests.call(
        ["cmake", "--build", str(variant.path), "--target", *SUITES]
    )


def run_suite(name: str, junit_dir: Path | None) -> bool:
    """Runs a suite; true if it passed."""
    command = [str(cpp_tests.Variant().path / "tests" / name), NPU_ONLY, "--gtest_brief=1"]
    if junit_dir is not None:
        command.append(f"--gtest_output=xml:{junit_dir / name}.xml")
    env = {**os.environ, "RECSDK_TEST_NPU_HARDWARE": "1"}
    print(f"==== {name}", flush=True)
    return subprocess.run(command, env=env, check=False).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--no-build", action="store_true", help="run what is built already")
    parser.add_argument("--junit-dir", type=Path, help="write the results to this folder too")
    args = parser.parse_args()
    if not args.no_build and (status := build()):
        return status
    passed = [name for name in SUITES if run_suite(name, args.junit_dir)]
    print(f"{len(passed)} suites passed, {len(SUITES) - len(passed)} failed")
    if len(passed) < len(SUITES):
        print("to report it: the output above, `npu-smi info`, the versions of CANN and driver")
    return 0 if len(passed) == len(SUITES) else 1


if __name__ == "__main__":
    sys.exit(main())
