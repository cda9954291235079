"""A save that fails or dies at any point leaves the checkpoint before it, and nothing broken."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sampling import IS_FULL

HERE = Path(__file__).parent


def run(*arguments: str, preload: Path | None = None) -> dict[str, int]:
    env = dict(os.environ)
    if preload is not None:
        env["LD_PRELOAD"] = str(preload)
    done = subprocess.run(
        [sys.executable, str(HERE / "crashing_saves.py"), *arguments],
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    tally: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return tally


@pytest.fixture(scope="module")
def faulty_calls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library to preload."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    assert compiler is not None, "there is no C compiler; make test installs one"
    library = tmp_path_factory.mktemp("faults") / "faulty_calls.so"
    source = str(HERE / "faulty_calls.c")
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", str(library)]
    subprocess.run([compiler, *flags, source, "-ldl"], check=True)
    return library


@pytest.fixture
def quick_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: faults are made, so its syncs may cost nothing."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=shared) as name:
        yield Path(name)


def test_every_call_that_changes_the_file_system(faulty_calls: Path, quick_folder: Path) -> None:
    tally = run("calls", str(quick_folder), preload=faulty_calls)
    assert tally["killed"] >= 2 * tally["calls"] - 10
    assert tally["failed"] > tally["calls"]
    assert tally["saved"] < tally["calls"]


def test_random_moments(tmp_path: Path) -> None:
    tally = run("moments", str(tmp_path), "600" if IS_FULL else "45")
    assert tally["killed"] > 0
