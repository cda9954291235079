"""What no formatter checks: paths and hosts of one machine, large files, non-ASCII sources,
prefetches that the compiler may drop, crowded folders, and tests that import other tests.

python3 tools/check_tree.py        exits with 1 and names each finding, path:line: what
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_BYTES = 1_000_000
MAX_FILES = 24
SOURCES = {".py", ".pyi", ".h", ".cc", ".c", ".inc", ".cmake", ".toml", ".txt", ".md", ".yml", ""}

# Patterns that would find themselves are written in pieces.
_PATHS = "|".join(["root", "home/\\w+", "Users/", "work/"])
_HOSTS = "|".join(["pypi", "pythonhosted", "debian", "npmjs", "anaconda"])
MACHINE_PATH = re.compile(rf"(?<![\w.$}}/-])/(?:{_PATHS})")
REGISTRY = re.compile(rf"\b(?:[\w-]+\.)*(?:{_HOSTS})\.(?:org|com)\b")
TORCH_INDEX = re.compile(r"download\.pytorch" + r"\.org")
TORCH_INDEX_MAY_STAND_IN = {"README.md", "tools/torch_wheel.py"}
# A function that only prefetches must be put in line, or have an effect that the compiler knows of.
PREFETCH = re.compile(r"\b__builtin_prefetch\b")
PREFETCH_MAY_STAND_IN = re.compile(
    r"cpp/src/util/prefetch\.h|cpp/src/(kernels/kernels|serving/serving)_\w+\.inc|"
    r"cpp/bench/|tools/"
)
IMPORTED_TEST = re.compile(r"(?:from|import) test_\w+")
SYMLINKS = {"packages/recsdk-core/cpp": "../../cpp"}


def tracked() -> list[str]:
    """Files that git tracks, and new ones that it does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    return [name for name in done.stdout.decode().split("\0") if name]


def findings_of_line(name: str, line: str) -> Iterator[str]:
    if match := MACHINE_PATH.search(line):
        yield f"absolute path of one machine: {match.group()}"
    if match := REGISTRY.search(line):
        yield f"host of a package registry: {match.group()}"
    if TORCH_INDEX.search(line) and name not in TORCH_INDEX_MAY_STAND_IN:
        yield "the torch index may stand only in " + ", ".join(sorted(TORCH_INDEX_MAY_STAND_IN))
    if PREFETCH.search(line) and not PREFETCH_MAY_STAND_IN.match(name):
        yield "call prefetch_line of util/prefetch.h: the compiler may drop this"
    if Path(name).name.startswith("test_") and (match := IMPORTED_TEST.match(line)):
        yield f"a test imports another: {match.group()}; what they share lies in support"
    if not line.isascii():
        odd = next(character for character in line if not character.isascii())
        yield f"not ASCII: {odd!r}"
    if line != line.rstrip():
        yield "white space at the end of the line"


def findings_of_file(name: str) -> Iterator[str]:
    path = ROOT / name
    if path.is_symlink() or not path.is_file():
        return
    if (size := path.stat().st_size) > MAX_BYTES:
        yield f"{name}: {size} bytes; at most {MAX_BYTES} are kept in the repository"
        return
    if path.suffix not in SOURCES or path.name == "LICENSE":
        return
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        yield f"{name}: not text"
        return
    for number, line in enumerate(text.splitlines(), 1):
        for finding in findings_of_line(name, line):
            yield f"{name}:{number}: {finding}"


def findings_of_folders(names: Iterable[str]) -> Iterator[str]:
    present = (Path(name) for name in names if os.path.lexists(ROOT / name))
    for folder, number in sorted(Counter(path.parent.as_posix() for path in present).items()):
        if number > MAX_FILES:
            yield f"{folder}: {number} files; a folder has at most {MAX_FILES} of its own: split it"


def findings_of_symlinks() -> Iterator[str]:
    for name, target in SYMLINKS.items():
        path = ROOT / name
        if not path.is_symlink() or path.readlink() != Path(target):
            yield f"{name}: must be a symbolic link to {target}"


def main() -> int:
    findings = list(findings_of_symlinks())
    names = tracked()
    findings += findings_of_folders(names)
    for name in names:
        findings += findings_of_file(name)
    print("\n".join(findings), end="\n" if findings else "")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
