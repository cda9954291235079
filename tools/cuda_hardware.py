"""Runs the tests of devices, or the benchmark of steps, on a CUDA device of this machine.

    python3 tools/cuda_hardware.py test [--wheels DIR] [--junit-dir DIR] [--minutes N]
    python3 tools/cuda_hardware.py bench [--wheels DIR] [--minutes N]

It needs no network. With wheels in build/wheelhouse, which `tools/wheelhouse.py` makes elsewhere,
they are unpacked into build/cuda, beside the torch that this Python has; else .venv is used, with
the CUDA build of torch in it. The tests are those of tables on torch's device "npu", on "cuda" with
a rank for each device; those that need more ranks are skipped. Those of pipelines follow.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import run_tests
import set_up

WHEELS = set_up.BUILD / "wheelhouse"
SITE = set_up.BUILD / "cuda"
PACKAGES = set_up.ROOT / "packages"
SUITES: Mapping[str, tuple[str, ...]] = {
    "recsdk-sharding": (
        "device/test_fused_kernels.py",
        "device/test_not_compiled.py",
        "device/test_kernel_choice.py",
        "device/test_device*.py",
        "device/test_default_device.py",
        "device/test_drift.py",
        "training/test_outcomes.py",
    ),
    "recsdk-pipeline": (
        "pipelines/test_one_device.py",
        "programs/test_scripts.py::test_seven_steps_learn_on_a_cuda_device",
    ),
}
"""By package, in this order: a run that is cut off has tried the kernels."""
SECONDS_PER_TEST = 240
"""Such a machine is often lent for minutes: one that hangs leaves some to the others."""
KINDS_OF_DEPRECATION = ("DeprecationWarning", "FutureWarning", "PendingDeprecationWarning")


@dataclass(frozen=True)
class Interpreter:
    """A Python, and where it finds the packages."""

    python: str
    environment: Mapping[str, str]

    def run(self, *args: str, cwd: Path = set_up.ROOT, **variables: str) -> int:
        """Runs it in a folder; returns the exit status."""
        environment = {**os.environ, **self.environment, **variables}
        command = [self.python, *args]
        return subprocess.run(command, cwd=cwd, env=environment, check=False).returncode


def interpreter(folder: Path) -> Interpreter:
    """This Python with the wheels of a folder, if there are some, else that of .venv.

    Raises SystemExit for wheels that are for another Python.
    """
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        own = set_up.VENV / "bin" / "python"
        return Interpreter(str(own) if own.exists() else sys.executable, {})
    _unpack(folder, wheels)
    path = os.pathsep.join(filter(None, (str(SITE), os.environ.get("PYTHONPATH"))))
    return Interpreter(sys.executable, {"PYTHONPATH": path})


def _unpack(folder: Path, wheels: Sequence[Path]) -> None:
    """Makes SITE of the wheels, unless it is: with fbgemm's CUDA build they are gigabytes."""
    made_of, stamp = platform.python_version(), SITE / "made_of.txt"
    for wheel in wheels:
        made_of += f"\n{wheel.name} {wheel.stat().st_size} {wheel.stat().st_mtime_ns}"
    if stamp.exists() and stamp.read_text() == made_of:
        return
    shutil.rmtree(SITE, ignore_errors=True)
    SITE.mkdir(parents=True)
    flags = ["--quiet", "--no-index", "--no-deps", "--target", str(SITE)]
    command = [sys.executable, "-m", "pip", "install", *flags, *map(str, wheels)]
    if subprocess.run(command, check=False).returncode:
        raise SystemExit(
            f"the wheels in {folder} cannot be installed for Python {platform.python_version()}, "
            f"see above: run this with the Python that they are for, or make others by "
            f"`make wheelhouse`, or move them away"
        )
    stamp.write_text(made_of)


def tests_of(package: str) -> list[str]:
    """The files of a package's suites, or tests of files."""
    tests, found = PACKAGES / package / "tests", []
    for suite in SUITES[package]:
        pattern, *name = suite.split("::")
        found += ["::".join((str(path), *name)) for path in sorted(tests.glob(pattern))]
    return found


def run_tests_on(found: Interpreter, junit_dir: Path | None, minutes: float | None) -> int:
    folder = (junit_dir or set_up.BUILD / "junit").resolve()
    flags = ["-v", "-rs", f"--timeout={SECONDS_PER_TEST}"]
    # The releases that are there are not those that are pinned, of which such a call is an error.
    flags += [f"-Wdefault::{kind}" for kind in KINDS_OF_DEPRECATION]
    begin, failed, counts = time.monotonic(), False, run_tests.Counts()
    for package in SUITES:
        junit = folder / f"cuda-{package}.xml"
        junit.unlink(missing_ok=True)
        own = [*flags, f"--junit-xml={junit}"]
        if minutes is not None:
            left = 60 * minutes - (time.monotonic() - begin)
            own.append(f"--session-timeout={max(1, left):.0f}")
        command = ["-m", "pytest", *own, *tests_of(package)]
        status = found.run(*command, cwd=PACKAGES / package, RECSDK_TEST_CUDA_HARDWARE="1")
        failed |= status != 0
        counts += run_tests.counts_of_junit(junit)
    print(f"{counts.passed} passed, {counts.failed} failed, {counts.skipped} skipped", flush=True)
    return int(failed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("test", "bench"))
    parser.add_argument("--junit-dir", type=Path, help="where the results of tests go, as XML")
    parser.add_argument("--minutes", type=float, help="after which no other test or case begins")
    parser.add_argument("--wheels", type=Path, default=WHEELS, help="(default: build/wheelhouse)")
    args = parser.parse_args()
    found = interpreter(args.wheels)
    if found.run("-c", "import sys, torch; sys.exit(not torch.cuda.is_available())"):
        print(
            "torch sees no CUDA device: run this with a Python that has a CUDA build of torch, or "
            "make .venv with one: `make setup` takes plain pip's torch, or that of TORCH_INDEX"
        )
        return 1
    if args.what == "test":
        return run_tests_on(found, args.junit_dir, args.minutes)
    minutes = "" if args.minutes is None else str(args.minutes)
    return found.run(str(set_up.ROOT / "tools" / "bench.py"), "cuda", MINUTES=minutes)


if __name__ == "__main__":
    sys.exit(main())
