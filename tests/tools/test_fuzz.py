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
