"""The command that runs the tests of devices on the hardware, here on the stand-in for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILT = ROOT / "build" / "cpp" / "tests"


def run(library: str) -> subprocess.CompletedProcess[str]:
    if not (BUILT / "c_api_tests").exists():
        pytest.skip("the C++ tests are not built; run tools/cpp_tests.py")
    return subprocess.run(
        [sys.executable, str(ROOT / "tools" / "npu_hardware.py"), "--no-build"],
        env={**os.environ, "RECSDK_ACL_LIBRARY": library},
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_suite_runs() -> None:
    done = run(str(BUILT / "libfake_acl.so"))
    assert done.returncode == 0, done.stdout
    assert "2 suites passed, 0 failed" in done.stdout
    assert "PASSED  ] 32 tests" in done.stdout  # of devices, on "npu" alone


def test_without_the_runtime_it_says_what_to_install() -> None:
    done = run("libno_such_ascendcl.so")
    assert done.returncode == 1
    assert "0 suites passed, 2 failed" in done.stdout
    assert "install Ascend's driver, the CANN toolkit" in done.stdout + done.stderr
