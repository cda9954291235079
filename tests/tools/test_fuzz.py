"""The set-up of the fuzzers."""

from __future__ import annotations

from pathlib import Path

import pytest

import fuzz


def test_a_clang_without_its_runtimes_is_not_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [need.package for need in fuzz.needs() if not need.is_present()] == [
        "clang",
        "libclang-rt-dev",
    ]
    compiler = tmp_path / "clang++"
    compiler.write_text("#!/bin/sh\nexit 1\n")
    compiler.chmod(0o755)
    assert [need.package for need in fuzz.needs() if not need.is_present()] == ["libclang-rt-dev"]


def test_fuzzers_of_calls_begin_with_random_bytes_and_others_with_their_files(
    tmp_path: Path,
) -> None:
    assert set(fuzz.OF_CALLS) < set(fuzz.CPP)
    assert fuzz.corpus_of("table", tmp_path) == [tmp_path]
    inputs = {file.read_bytes() for file in tmp_path.iterdir()}
    assert len(inputs) > fuzz.NUM_RANDOM // 2  # but for some of a byte or two
    assert all(1 <= len(each) <= fuzz.MOST_BYTES for each in inputs)
    [folder] = fuzz.corpus_of("row_file", tmp_path)
    assert (folder / "snapshot.bin").is_file()
