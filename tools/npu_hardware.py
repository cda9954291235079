"""Runs the tests of devices on an Ascend NPU of this machine, instead of on the stand-in.

    .venv/bin/python tools/npu_hardware.py [--no-build] [--junit-dir DIR]

The same suites that `make test` runs on the host and on a stand-in for Ascend's runtime: the
contract of a device (cpp/tests/device/device_conformance_test.cc), tables in its memory, from
several threads, and through the C interface. Source CANN's set_env.sh first. If torch_npu is in
.venv, the tests of tables on torch's device "npu" run too, which `make test` runs on the simulated
one.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import cpp_tests
import set_up

SUITES = ("device_tests", "c_api_tests")
TORCH_TESTS = set_up.ROOT / "packages" / "recsdk-sharding" / "tests"
TORCH_SUITES = ("device/test_device*.py", "training/test_outcomes.py")
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
    return passes(name, command)


def passes(name: str, command: list[str]) -> bool:
    env = {**os.environ, "RECSDK_TEST_NPU_HARDWARE": "1"}
    print(f"==== {name}", flush=True)
    return subprocess.run(command, env=env, check=False).returncode == 0


def run_torch(junit_dir: Path | None) -> bool:
    """Runs the tests of torch's device, if torch_npu is there; true unless they failed."""
    if importlib.util.find_spec("torch_npu") is None:
        print(
            "torch's device was not tested: run `make setup`, then .venv/bin/python -m pip install "
            f"{set_up.pinned('torch_npu')}, and this again"
        )
        return True
    files = sorted(str(path) for glob in TORCH_SUITES for path in TORCH_TESTS.glob(glob))
    command = [sys.executable, "-m", "pytest", "-q", "-rs", *files]
    if junit_dir is not None:
        command.append(f"--junit-xml={junit_dir / 'torch.xml'}")
    return passes("torch's device", command)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--no-build", action="store_true", help="run what is built already")
    parser.add_argument("--junit-dir", type=Path, help="write the results to this folder too")
    args = parser.parse_args()
    if not args.no_build and (status := build()):
        return status
    passed = [name for name in SUITES if run_suite(name, args.junit_dir)]
    print(f"{len(passed)} suites passed, {len(SUITES) - len(passed)} failed")
    is_well = len(passed) == len(SUITES) and run_torch(args.junit_dir)
    if not is_well:
        print("to report it: the output above, `npu-smi info`, the versions of CANN and driver")
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
