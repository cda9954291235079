"""Runs tests of modules, sharding and pipelines with older releases of torch and torchrec.

    python3 tools/older_versions.py [--only 2.11 ...]

A sample of the tests of sharding and pipelines; with RECSDK_TEST_PROFILE=full all of them.

Each pair has a venv in build/versions/, made once and kept. $TORCH_INDEX is where torch comes from,
as in set_up.py; plain pip brings its CUDA build, 3 GB each. The compiled part of recsdk-core is one
wheel for all: it knows nothing of torch. The simulated NPU is built for each. Ends with one line,
`N passed, M failed`. Standard library only.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import run_tests
import set_up

FOLDER = set_up.BUILD / "versions"
WHEELS = FOLDER / "wheels"
PINS_OF_PAIR = ("torch", "torchrec", "fbgemm-gpu-cpu", "torch_npu", "triton")


def lines_of(requirements: str) -> list[str]:
    """What a file in requirements/ names, but for what belongs to a pair."""
    lines = (set_up.ROOT / "requirements" / f"{requirements}.txt").read_text().splitlines()
    named = [line for line in lines if line and not line.startswith("#")]
    return [line for line in named if line.partition(";")[0] not in PINS_OF_PAIR]


NEEDS = (
    *("numpy", "tensordict", "torchmetrics==1.0.3", "tqdm", "pyre-extensions", "iopath"),
    *("typing-extensions", "click", "rich", "packaging", "nanobind-backend"),
    *lines_of("build"),
    *lines_of("test"),
)
"""What torchrec, the packages, their tests and their build need besides torch."""
IS_FULL = os.environ.get("RECSDK_TEST_PROFILE") == "full"
SAMPLES = {
    "recsdk-core": ("nn",),
    "recsdk-sharding": (
        *("torchrec/test_versions.py", "planning/test_planning.py", "policies/test_upstream.py"),
        *("device/test_device.py", "device/test_device_steps.py"),
        *("device/test_fused_kernels.py", "device/test_not_compiled.py"),
        *(
            f"training/test_{name}.py"
            for name in ("sharding", "types", "training", "modules", "pipelines", "tensor_parallel")
        ),
    ),
    "recsdk-pipeline": ("data/test_plain_state.py", "pipelines/test_pipeline_on_ranks.py"),
}
"""Tests by package: of the core all that need torch, for compilers differ most."""
WHOLE_IN_FULL = ("recsdk-sharding", "recsdk-pipeline")


def tests_of(package: str) -> list[Path]:
    """The sample of a package, or in the full profile all tests of sharding and pipelines."""
    folder = set_up.ROOT / "packages" / package / "tests"
    is_whole = IS_FULL and package in WHOLE_IN_FULL
    return [folder] if is_whole else [folder / name for name in SAMPLES[package]]


@dataclass(frozen=True)
class Pair:
    """Releases that fit each other."""

    torch: str
    torchrec: str
    fbgemm: str
    needs: tuple[str, ...] = ()
    """What these want of other packages, besides NEEDS."""

    @property
    def venv(self) -> Path:
        return FOLDER / f"torch-{self.torch}-torchrec-{self.torchrec}"

    @property
    def python(self) -> str:
        return str(self.venv / "bin" / "python")

    def pip(self, *args: str) -> None:
        set_up.run([self.python, "-m", "pip", "install", *args])


# numpy 2.4 makes no scalar of an array of one number, as the interpreter of Triton 3.6 does.
PAIRS = (Pair("2.11.0", "1.6.1", "1.6.0", ("numpy<2.4",)), Pair("2.12.0", "1.7.0", "1.7.0"))


def constraints() -> Path:
    """The pins of the repository but for those of a pair."""
    path = FOLDER / "constraints.txt"
    lines = (set_up.ROOT / set_up.CONSTRAINTS).read_text().splitlines()
    path.write_text("\n".join(line for line in lines if line.split("==")[0] not in PINS_OF_PAIR))
    return path


def build_core() -> None:
    """The one wheel of recsdk-core."""
    flags = ["--no-build-isolation", "--no-deps", "--wheel-dir", str(WHEELS)]
    settings = [f"build-dir={FOLDER / 'core'}", f"cmake.define.recsdk_DIR={set_up.ENGINE}"]
    given = [f"--config-settings={setting}" for setting in settings]
    command = [str(set_up.VENV / "bin" / "python"), "-m", "pip", "wheel", *flags, *given]
    set_up.run([*command, "packages/recsdk-core"])


def make(pair: Pair) -> None:
    """Makes the venv of a pair, unless it is there as wanted; brings our packages up to date."""
    stamp, wanted = pair.venv / "made_of.txt", "\n".join((str(pair), *NEEDS))
    made_of = stamp.read_text() if stamp.exists() else ""
    torch = f"torch=={pair.torch}"
    if not made_of.startswith(f"{pair}\n"):
        set_up.say(f"making {pair.venv.relative_to(set_up.ROOT)}")
        set_up.run([sys.executable, "-m", "venv", "--clear", str(pair.venv)])
        index = os.environ.get("TORCH_INDEX", "")
        source = ["--index-url", index] if index else []
        pair.pip(set_up.pinned("pip"))
        pair.pip(*source, torch)
        releases = (f"torchrec=={pair.torchrec}", f"fbgemm-gpu-cpu=={pair.fbgemm}")
        pair.pip("--no-deps", *releases)
    if made_of != wanted:
        # Unless torch is named, pip takes a later one when a pin is not what this one needs.
        pair.pip("--constraint", str(constraints()), torch, *pair.needs, *NEEDS)
        stamp.write_text(wanted)
    own = ["--no-deps", "--no-build-isolation"]
    pair.pip(*own, "--force-reinstall", *map(str, WHEELS.glob("recsdk_core-*.whl")))
    pair.pip(*own, "-e", "packages/recsdk-sharding", "-e", "packages/recsdk-pipeline")
    build = f"--config-settings=build-dir={pair.venv / 'npusim'}"
    pair.pip(*own, "--force-reinstall", build, "tools/npusim")


def run(pair: Pair, package: str) -> run_tests.Counts:
    """Runs a package's tests with a pair; each draws as few cases as in `make test`."""
    junit = FOLDER / f"{pair.venv.name}-{package}.xml"
    junit.unlink(missing_ok=True)
    print(f"==== {package}: torch {pair.torch}, torchrec {pair.torchrec}", flush=True)
    flags = ["-q", "-ra", f"--timeout={run_tests.SECONDS_PER_TEST}", f"--junitxml={junit}"]
    folder = set_up.ROOT / "packages" / package
    command = [pair.python, "-m", "pytest", *flags, *map(str, tests_of(package))]
    env = {**os.environ, "RECSDK_TEST_PROFILE": "ci"}
    status = subprocess.run(command, cwd=folder, env=env, check=False).returncode
    counts = run_tests.counts_of_junit(junit)
    is_silent = counts.failed == 0 and (status != 0 or counts.passed == 0)  # it crashed, say
    return counts + run_tests.Counts(failed=1) if is_silent else counts


def run_pairs(pairs: list[Pair]) -> run_tests.Counts:
    """Makes the venvs and runs the tests."""
    WHEELS.mkdir(parents=True, exist_ok=True)
    build_core()
    total = run_tests.Counts()
    for pair in pairs:
        make(pair)
        for package in set_up.PACKAGES:
            total += run(pair, package)
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    releases = [pair.torch.rpartition(".")[0] for pair in PAIRS]
    parser.add_argument("--only", nargs="+", choices=releases, default=releases, help="of torch")
    only = parser.parse_args().only
    found: list[run_tests.Counts] = []

    def act() -> None:
        set_up.set_up("test")
        chosen = [p for p in PAIRS if p.torch.rpartition(".")[0] in only]
        found.append(run_pairs(chosen))

    status = set_up.report_errors(act)
    total = found[0] if found else run_tests.Counts(failed=1)
    print(f"{total.passed} passed, {total.failed} failed")
    return status or int(total.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
