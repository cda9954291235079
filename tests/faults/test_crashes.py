"""A save that fails or dies at any point leaves the checkpoint before it, and nothing broken."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import sampling
from quick_folders import quick_folder

HERE = Path(__file__).parent


def run(*arguments: str, preload: Path | None = None) -> dict[str, int]:
    env = dict(os.environ) | {"PYTHONPATH": str(Path(sampling.__file__).parent)}
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
def folder() -> Iterator[str]:
    """Faults are made, so syncs may cost nothing."""
    with quick_folder() as name:
        yield name


def test_every_call_that_changes_the_file_system(faulty_calls: Path, folder: str) -> None:
    tally = run("small", folder, preload=faulty_calls)
    assert tally["direct"] == 0
    assert tally["killed"] >= tally["calls"]
    assert tally["failed"] > tally["calls"]


def test_every_call_of_what_is_made_of_a_chain(faulty_calls: Path, folder: str) -> None:
    """Merged, cut anew, frozen and exported."""
    tally = run("made", folder, "150", preload=faulty_calls)
    assert min(tally["killed"], tally["failed"], tally["saved"]) > 0


def test_calls_past_the_page_cache(faulty_calls: Path, folder: str) -> None:
    tally = run("large", folder, "20", preload=faulty_calls)
    assert tally["direct"] > 6
    assert min(tally["killed"], tally["failed"], tally["saved"]) > 0


def test_reads_past_the_page_cache(faulty_calls: Path, folder: str) -> None:
    tally = run("loads", folder, "20", preload=faulty_calls)
    assert tally["direct"] > 6
    assert min(tally["failed"], tally["loaded"]) > 0


def test_random_moments(tmp_path: Path) -> None:
    tally = run("moments", str(tmp_path), "600" if sampling.IS_FULL else "20")
    assert tally["killed"] > 0
