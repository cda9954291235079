"""The corpora of the fuzzers, and a few seconds of each where atheris is installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from file_readers import READERS, read_one

from recsdk_core import CheckpointError
from recsdk_core.checkpoint.manifest import Manifest
from recsdk_core.serving.manifest import FrozenManifest
from sampling import IS_FULL

HERE = Path(__file__).parent
MANIFESTS = sorted((HERE / "manifests").iterdir())
FILES = sorted((HERE / "files").iterdir())


@pytest.mark.parametrize("file", MANIFESTS, ids=lambda path: path.name)
def test_a_manifest_of_the_corpus_is_read_or_refused(file: Path) -> None:
    raw = file.read_bytes()[1:]
    kind = FrozenManifest if "frozen" in file.name else Manifest
    if file.name.startswith("good"):
        assert kind.from_bytes(raw, file.name).to_bytes() == raw
    else:
        with pytest.raises(CheckpointError):
            kind.from_bytes(raw, file.name)


@pytest.mark.filterwarnings("ignore:Stored array in format 3.0")
@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_a_file_of_the_corpus_is_read_or_refused(file: Path) -> None:
    assert read_one(file.read_bytes()) == file.name.startswith("good")


def test_each_reader_has_files_that_it_reads_and_others() -> None:
    found = {(file.read_bytes()[0], file.name.startswith("good")) for file in FILES}
    assert found == {(reader, good) for reader in range(len(READERS)) for good in (False, True)}


@pytest.mark.skipif(find_spec("atheris") is None, reason="atheris is not installed")
@pytest.mark.parametrize("fuzzer", ["manifest", "files"])
def test_fuzzing_finds_nothing(fuzzer: str, tmp_path: Path) -> None:
    limit = "-max_total_time=180" if IS_FULL else "-runs=3000"
    command = [sys.executable, str(HERE / f"fuzz_{fuzzer}.py"), str(tmp_path)]
    done = subprocess.run(
        [*command, limit, "-max_len=8192"],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},  # atheris ends without removing what is there
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    covered = re.findall(r"cov: (\d+)", done.stdout)
    assert covered, "nothing tells atheris what it reaches"
    assert int(covered[-1]) > 50
