"""Builds the fuzzers and runs each for some minutes: what runs every night.

.venv/bin/python tools/fuzz.py [--seconds N] [--only NAME ...]

The C++ fuzzers, with the address and undefined-behaviour sanitizers, then readers in Python with
atheris. Those that read their input as calls begin with random bytes, others with files. New inputs
are kept in build/fuzz-inputs and used again; what made one fail is left in build/fuzz-findings.
Exit status 1 if one failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import cpp_tests
import debian
import set_up

CPP = ("table", "cut", "row_file", "frozen", "c_api", "serving", "frozen_place")
PYTHON = ("manifest", "files")
OF_CALLS = ("table", "cut", "c_api", "serving")
"""Any bytes are calls to them: 64 random inputs reach more than minutes of theirs from none."""
NUM_RANDOM, MOST_BYTES = 64, 4096
CORPUS = set_up.ROOT / "cpp" / "tests" / "fuzz" / "corpus"
"""Has a folder for some of the C++ fuzzers; those in Python know theirs."""
BUILD = set_up.BUILD / "fuzz"
INPUTS = set_up.BUILD / "fuzz-inputs"
FINDINGS = set_up.BUILD / "fuzz-findings"
MOST_SECONDS_OF_AN_INPUT = 60


def clang() -> str | None:
    """clang++, the newest that Debian's names tell."""
    names = ["clang++", *(f"clang++-{version}" for version in range(30, 13, -1))]
    return next((name for name in names if shutil.which(name) is not None), None)


def links_fuzzers() -> bool:
    """Whether clang has the runtimes of libFuzzer and the sanitizers, a package of their own."""
    compiler = clang()
    if compiler is None:
        return False
    source = 'extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }'
    with tempfile.TemporaryDirectory() as folder:
        flags = ["-fsanitize=fuzzer,address,undefined", "-x", "c++", "-o", f"{folder}/fuzzer", "-"]
        done = subprocess.run(
            [compiler, *flags], input=source.encode(), capture_output=True, check=False
        )
    return done.returncode == 0


def needs() -> list[debian.Need]:
    """What the C++ fuzzers are built with."""
    return [
        debian.Need(package="clang", purpose="libFuzzer", is_present=lambda: clang() is not None),
        debian.Need(package="libclang-rt-dev", purpose="its runtimes", is_present=links_fuzzers),
    ]


def build(names: Sequence[str]) -> int:
    """Builds C++ fuzzers; returns the exit status."""
    if not names:
        return 0
    headers = [debian.header("boost/json/src.hpp")]
    debian.ensure_here([*needs(), *headers], say=set_up.say)
    targets = [f"{name}_fuzzer" for name in names]
    configure = [
        *("cmake", "-S", str(set_up.ROOT / "cpp"), "-B", str(BUILD), "-G", "Ninja"),
        *("--log-level=WARNING", "-DCMAKE_BUILD_TYPE=RelWithDebInfo"),
        *(f"-DCMAKE_CXX_COMPILER={clang()}", f"-DCMAKE_C_COMPILER={c_clang()}"),
        *("-DRECSDK_BUILD_FUZZERS=ON", "-DRECSDK_SANITIZE=address,undefined"),
    ]
    command = ["cmake", "--build", str(BUILD), "--target", *targets]
    return cpp_tests.call(configure) or cpp_tests.call(command)


def c_clang() -> str:
    """The C compiler beside clang()."""
    return (clang() or "clang++").replace("clang++", "clang")


def command_of(name: str) -> list[str]:
    """Runs a fuzzer, but for libFuzzer's arguments."""
    if name in PYTHON:
        python = str(set_up.VENV / "bin" / "python")
        return [python, str(set_up.ROOT / "tests" / "fuzz" / f"fuzz_{name}.py")]
    return [str(BUILD / "tests" / "fuzz" / f"{name}_fuzzer")]


def corpus_of(name: str, folder: Path) -> list[Path]:
    """The folder that a C++ fuzzer begins with, if it has one; this one for random inputs."""
    if name not in OF_CALLS:
        return [CORPUS / name] if (CORPUS / name).is_dir() else []
    for number in range(NUM_RANDOM):
        length = random.randrange(1, MOST_BYTES + 1)
        (folder / str(number)).write_bytes(random.randbytes(length))
    return [folder]


def run(name: str, seconds: int) -> int:
    """Runs a fuzzer; returns the exit status."""
    inputs, findings = INPUTS / name, FINDINGS / name
    for folder in (inputs, findings):
        folder.mkdir(parents=True, exist_ok=True)
    options = [
        f"-max_total_time={seconds}",
        "-len_control=0",  # else inputs are of a few dozen bytes for most of the time
        f"-timeout={MOST_SECONDS_OF_AN_INPUT}",
        f"-artifact_prefix={findings}/",
        "-print_final_stats=1",
    ]
    print(f"\n==== {name} for {seconds} s", flush=True)
    with tempfile.TemporaryDirectory(prefix="recsdk-fuzz-") as scratch:
        folders = map(str, (inputs, *corpus_of(name, Path(scratch))))
        command = [*command_of(name), *folders, *options]
        return cpp_tests.call(command, **cpp_tests.SANITIZER_OPTIONS)


def has_atheris() -> bool:
    return importlib.util.find_spec("atheris") is not None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    names = [*CPP, *(PYTHON if has_atheris() else ())]
    parser.add_argument("--seconds", type=int, default=300, help="for each fuzzer (default 300)")
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="run only these")
    args = parser.parse_args()
    if status := build([name for name in args.only if name in CPP]):
        return status
    failed = [name for name in args.only if run(name, args.seconds)]
    if not has_atheris():
        print(f"{' and '.join(PYTHON)} were left out: atheris is not installed")
    print(f"\n{len(args.only) - len(failed)} of {len(args.only)} fuzzers found nothing", flush=True)
    for name in failed:
        print(f"  {name} failed: see {Path(FINDINGS / name).relative_to(set_up.ROOT)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
