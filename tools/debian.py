"""What must come from Debian: looked for by what it gives, named by its package.

Standard library only: this runs before anything is installed.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

MIN_GCC = 12


class MissingPackagesError(Exception):
    """Something must be installed by the administrator; the message names the packages."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """A thing the set-up cannot make itself."""

    package: str
    """Debian package that brings it."""
    purpose: str
    """Why it is needed, for the message."""
    is_present: Callable[[], bool]


def compiler() -> str:
    """The C++ compiler in use: $CXX, else g++."""
    return os.environ.get("CXX") or "g++"


def has_program(name: str) -> bool:
    return shutil.which(name) is not None


def has_compiler() -> bool:
    return has_program(compiler().split()[0])


def has_header(name: str) -> bool:
    """Whether the C++ compiler finds <name>."""
    if not has_compiler():
        return False
    probe = f"#if !__has_include(<{name}>)\n#error missing\n#endif\n"
    command = [*compiler().split(), "-x", "c++", "-std=c++20", "-E", "-o", os.devnull, "-"]
    done = subprocess.run(command, input=probe.encode(), capture_output=True, check=False)
    return done.returncode == 0


def has_venv() -> bool:
    importlib.invalidate_caches()
    return all(importlib.util.find_spec(name) is not None for name in ("venv", "ensurepip"))


def has_python_headers() -> bool:
    return (Path(sysconfig.get_path("include")) / "Python.h").is_file()


HEADERS = {
    "xxhash.h": ("libxxhash-dev", "checksums of checkpoints"),
    "zstd.h": ("libzstd-dev", "compression of checkpoints"),
    "gtest/gtest.h": ("libgtest-dev", "GoogleTest"),
    "absl/container/flat_hash_map.h": ("libabsl-dev", "a hash map to race with"),
    "boost/json/src.hpp": ("libboost1.81-dev", "reads the manifests of frozen tables"),
    "boost/unordered/unordered_flat_map.hpp": ("libboost1.81-dev", "a hash map to race with"),
}
ENGINE_HEADERS = ("xxhash.h", "zstd.h")
TEST_HEADERS = ("gtest/gtest.h",)
FULL_TEST_HEADERS = (*TEST_HEADERS, "boost/json/src.hpp")
BENCH_HEADERS = ("absl/container/flat_hash_map.h", "boost/unordered/unordered_flat_map.hpp")


def program(name: str, *, purpose: str, package: str | None = None) -> Need:
    """A program that a Debian package brings, by default the one of its name."""
    is_present = functools.partial(has_program, name)
    return Need(package=package or name, purpose=purpose, is_present=is_present)


def header(name: str) -> Need:
    """A header of HEADERS."""
    package, purpose = HEADERS[name]
    is_present = functools.partial(has_header, name)
    return Need(package=package, purpose=purpose, is_present=is_present)


def cross_needs() -> list[Need]:
    """What it takes to build for 64-bit Arm and to run what was built."""
    cross = program(
        "aarch64-linux-gnu-g++", purpose="cross compiler", package="g++-aarch64-linux-gnu"
    )
    sources = Path("/usr/src/googletest/CMakeLists.txt")
    return [
        cross,
        program("qemu-aarch64", purpose="emulator", package="qemu-user"),
        Need(package="googletest", purpose="its sources", is_present=sources.is_file),
    ]


def needs(headers: Sequence[str], programs: Sequence[Need] = ()) -> list[Need]:
    """What every profile of the set-up needs from the operating system, and what this one does."""
    found = [
        Need(package="g++", purpose="C++20 compiler", is_present=has_compiler),
        Need(package="python3-venv", purpose="virtual environments", is_present=has_venv),
        Need(package="python3-dev", purpose="Python.h", is_present=has_python_headers),
    ]
    return [*found, *map(header, (*ENGINE_HEADERS, *headers)), *programs]


def apt_install(packages: Sequence[str]) -> None:
    """Installs Debian packages; needs root."""
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run(["apt-get", "update", "-q"], check=True, env=env)
    command = ["apt-get", "install", "-q", "-y", "--no-install-recommends", *packages]
    subprocess.run(command, check=True, env=env)


def advice(missing: Sequence[Need]) -> str:
    lines = [f"  {need.package:18} {need.purpose}" for need in missing]
    packages = " ".join(need.package for need in missing)
    return "\n".join(
        [
            "these Debian packages are missing:",
            *lines,
            f"install them as root and run this again:  apt-get install {packages}",
        ]
    )


def ensure(
    wanted: Sequence[Need],
    *,
    is_root: bool,
    install: Callable[[Sequence[str]], None] | None,
    say: Callable[[str], None],
) -> None:
    """Installs what is missing as root, else raises MissingPackagesError that names it all.

    `install` is None where there is no apt-get.
    """
    missing = [need for need in wanted if not need.is_present()]
    if not missing:
        return
    if not is_root or install is None:
        raise MissingPackagesError(advice(missing))
    packages = [need.package for need in missing]
    say(f"installing from Debian: {' '.join(packages)}")
    try:
        install(packages)
    except (OSError, subprocess.CalledProcessError) as error:
        raise MissingPackagesError(f"{error}\n{advice(missing)}") from error
    missing = [need for need in missing if not need.is_present()]
    if missing:
        raise MissingPackagesError(
            f"still missing after installing, for the interpreter {sys.executable}:\n"
            + advice(missing)
        )


def check_compiler() -> None:
    """Raises MissingPackagesError if the compiler is a GCC that is too old."""
    command = [*compiler().split(), "-dumpversion"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    major = done.stdout.strip().split(".")[0]
    is_gcc = "clang" not in Path(command[0]).name
    if is_gcc and major.isdigit() and int(major) < MIN_GCC:
        raise MissingPackagesError(
            f"{compiler()} is version {major}; GCC {MIN_GCC} or later is needed: name one with CXX="
        )


def ensure_here(wanted: Sequence[Need], *, say: Callable[[str], None]) -> None:
    """Installs what is missing if this user may, else raises MissingPackagesError."""
    install = apt_install if shutil.which("apt-get") else None
    ensure(wanted, is_root=os.geteuid() == 0, install=install, say=say)


def ensure_system(
    headers: Sequence[str], programs: Sequence[Need] = (), *, say: Callable[[str], None]
) -> None:
    """Brings the operating system to what a profile needs, or raises MissingPackagesError."""
    ensure_here(needs(headers, programs), say=say)
    check_compiler()
