"""Runs every check of the sources, or formats them with --fix.

.venv/bin/python tools/lint.py [--fix] [--only NAME ...]
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import check_tree
import cpp_tests
import debian
import set_up

CPP_SUFFIXES = (".h", ".cc", ".c", ".inc")
SOURCE_FOLDERS = [f"packages/{package}/src" for package in set_up.PACKAGES]
EXAMPLES = "packages/recsdk-pipeline/examples"
JOINED = re.compile(r'^#include "(.+\.cc)"$', re.MULTILINE)
TIDY_CACHE = set_up.BUILD / "lint" / "clang_tidy.json"
OPERATORS = set_up.BUILD / "serving_torch"


@dataclass(frozen=True)
class Result:
    """What a check found: exit status and output."""

    status: int
    output: str


def call(*command: str) -> Result:
    env = set_up.environment()
    env["PYTHONPATH"] = os.pathsep.join(str(set_up.ROOT / folder) for folder in SOURCE_FOLDERS)
    done = subprocess.run(
        command,
        cwd=set_up.ROOT,
        env=env,
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return Result(done.returncode, done.stdout)


def cpp_files(*suffixes: str) -> list[str]:
    """Tracked C and C++ files, each once."""
    return [
        name
        for name in check_tree.tracked()
        if name.endswith(suffixes) and (set_up.ROOT / name).is_file()
    ]


def clang_format(*flags: str) -> Result:
    files = cpp_files(*CPP_SUFFIXES)
    return call("clang-format", "--style=file", *flags, *files) if files else Result(0, "")


# ---- clang-tidy: only files that changed, or whose headers did ---------------------------------


@functools.cache
def torch_folder() -> Path | None:
    """Torch's, if cpp/torch can be configured here."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None or not debian.has_header("boost/json/src.hpp"):
        return None
    return Path(found.origin).parent


def configurations() -> list[list[str]]:
    """The commands that configure the builds; recsdk-core is built when it is installed."""
    engine, torch = cpp_tests.Variant(), torch_folder()
    if torch is None:
        print("      clang-tidy: without cpp/torch, which needs torch and libboost1.81-dev")
        return [cpp_tests.configure(engine)]
    operators = [
        *("cmake", "-S", "cpp/torch", "-B", str(OPERATORS), "-G", "Ninja", "--log-level=WARNING"),
        *(f"-Drecsdk_serving_DIR={engine.path}", f"-DRECSDK_TORCH={torch}"),
        "-DRECSDK_BUILD_TESTS=ON",
    ]
    return [cpp_tests.configure(engine), operators]


def compile_databases() -> list[tuple[str, Path]]:
    """Folder of sources and the build folder that says how they are compiled; the first fits."""
    return [
        *([("cpp/torch/", OPERATORS)] if torch_folder() else []),
        ("cpp/", cpp_tests.Variant().path),
        ("packages/recsdk-core/src/", set_up.BUILD / "recsdk-core"),
    ]


def tidy_key(name: str, shared: str) -> str:
    return set_up.digest([shared, (set_up.ROOT / name).read_bytes()])


def tidy(name: str) -> Result:
    for prefix, folder in compile_databases():
        if name.startswith(prefix):
            # The compiler's precompiled headers are not clang's, which reads the headers instead.
            extra = "--extra-arg-before=-Wno-ignored-gch"
            return call("clang-tidy", "--quiet", extra, "-p", str(database_of(folder)), name)
    return Result(1, f"{name}: no compile database covers it")


def sources_of(file: Path) -> set[Path]:
    """What is compiled: the file, or those that it joins."""
    if file.parent.name != "Unity":
        return {file.resolve()}
    return {(file.parent / name).resolve() for name in JOINED.findall(file.read_text())}


def database_of(folder: Path) -> Path:
    """Where the commands of a build folder lie as if no source were joined with others."""
    return set_up.BUILD / "tidy" / folder.name


def compiled_sources() -> list[str]:
    """The sources that a build compiles; examples and consumers outside the tree have none.

    How each is compiled is written to its `database_of`.
    """
    known: set[Path] = set()
    for _, folder in compile_databases():
        alone = []
        for entry in json.loads((folder / "compile_commands.json").read_text()):
            sources = sources_of(Path(entry["file"]))
            known |= sources
            for source in sorted(map(str, sources)):
                command = entry["command"].replace(entry["file"], source)
                alone.append({**entry, "file": source, "command": command})
        database_of(folder).mkdir(parents=True, exist_ok=True)
        (database_of(folder) / "compile_commands.json").write_text(json.dumps(alone, indent=1))
    return [name for name in cpp_files(".cc") if (set_up.ROOT / name).resolve() in known]


def clang_tidy() -> Result:
    for command in configurations():
        configured = call(*command)
        if configured.status:
            return configured
    headers = [set_up.ROOT / name for name in cpp_files(".h", ".inc")]
    settings = [set_up.ROOT / name for name in (".clang-tidy", set_up.CONSTRAINTS)]
    shared = set_up.digest_of_files([*headers, *settings])
    cache = json.loads(TIDY_CACHE.read_text()) if TIDY_CACHE.exists() else {}
    keys = {name: tidy_key(name, shared) for name in compiled_sources()}
    changed = [name for name, key in keys.items() if cache.get(name) != key]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        results = dict(zip(changed, pool.map(tidy, changed), strict=True))
    clean = {name: keys[name] for name in keys if name not in results or not results[name].status}
    TIDY_CACHE.parent.mkdir(parents=True, exist_ok=True)
    TIDY_CACHE.write_text(json.dumps(clean, indent=1))
    bad = [result.output for result in results.values() if result.status]
    return Result(1 if bad else 0, "\n".join(bad))


# ---- the list of checks ------------------------------------------------------------------------

# Not from a cache: which imports are of the repository depends on other files than the one checked.
CHECKS: dict[str, Callable[[], Result]] = {
    "tree": lambda: call(sys.executable, "tools/check_tree.py"),
    "ruff": lambda: call("ruff", "check", "--no-cache", "."),
    "ruff-format": lambda: call("ruff", "format", "--check", "."),
    "mypy": lambda: call("mypy", *SOURCE_FOLDERS, EXAMPLES, "tools"),
    "imports": lambda: call("lint-imports"),
    "cpp-layers": lambda: call(sys.executable, "tools/check_cpp_layers.py"),
    "clang-format": lambda: clang_format("--dry-run", "--Werror"),
    "clang-tidy": clang_tidy,
}

FIXES: dict[str, Callable[[], Result]] = {
    "ruff": lambda: call("ruff", "check", "--no-cache", "--fix", "."),
    "ruff-format": lambda: call("ruff", "format", "."),
    "clang-format": lambda: clang_format("-i"),
}


def run_all(names: Sequence[str], checks: dict[str, Callable[[], Result]]) -> int:
    """Runs the checks, each to its end; returns how many failed."""
    failed = 0
    for name in names:
        start = time.monotonic()
        result = checks[name]()
        seconds = time.monotonic() - start
        print(f"{'FAIL' if result.status else 'ok':5} {name:14} {seconds:5.1f} s", flush=True)
        if result.status:
            failed += 1
            print(result.output.rstrip(), flush=True)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--fix", action="store_true", help="format instead of checking")
    parser.add_argument("--only", nargs="+", choices=sorted(CHECKS), help="run only these checks")
    args = parser.parse_args()
    checks = FIXES if args.fix else CHECKS
    failed = run_all([name for name in checks if name in (args.only or checks)], checks)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
