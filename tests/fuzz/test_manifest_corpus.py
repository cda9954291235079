"""The corpus of the manifest's fuzzer, and a few seconds of it where atheris is installed."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from recsdk_core import CheckpointError
from recsdk_core.checkpoint.manifest import Manifest
from sampling import IS_FULL

HERE = Path(__file__).parent
CORPUS = sorted((HERE / "manifests").iterdir())


def test_the_corpus_is_there() -> None:
    assert len(CORPUS) > 5


@pytest.mark.parametrize("file", CORPUS, ids=lambda path: path.name)
def test_a_file_of_the_corpus_is_read_or_refused(file: Path) -> None:
    raw = file.read_bytes()[1:]
    if "good" in file.name and raw:
        found = Manifest.from_bytes(raw, file.name)
        assert found.to_bytes() == raw
    else:
        with pytest.raises(CheckpointError):
            Manifest.from_bytes(raw, file.name)


@pytest.mark.skipif(find_spec("atheris") is None, reason="atheris is not installed")
def test_fuzzing_finds_nothing(tmp_path: Path) -> None:
    limit = "-max_total_time=180" if IS_FULL else "-runs=3000"
    command = [sys.executable, str(HERE / "fuzz_manifest.py"), str(tmp_path)]
    done = subprocess.run(
        [*command, limit, "-max_len=8192"],
        cwd=tmp_path,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    covered = re.findall(r"cov: (\d+)", done.stdout)
    assert covered, "nothing tells atheris what it reaches"
    assert int(covered[-1]) > 50
