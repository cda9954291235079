"""Threads and instruction sets of the process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

import recsdk_core


@pytest.fixture(autouse=True)
def restored_process() -> Iterator[None]:
    before = recsdk_core.isa(), recsdk_core.num_threads()
    yield
    recsdk_core.set_isa(before[0])
    recsdk_core.set_num_threads(before[1])


def test_version() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", recsdk_core.version)
    assert re.fullmatch(r"\d+\.\d+\.\d+", recsdk_core.__version__)


def test_instruction_sets() -> None:
    available = recsdk_core.available_isas()
    assert available[0] == "baseline"
    assert recsdk_core.isa() in available
    for name in available:
        recsdk_core.set_isa(name)
        assert recsdk_core.isa() == name
    with pytest.raises(ValueError, match=r"mmx.*baseline"):
        recsdk_core.set_isa("mmx")


def test_threads() -> None:
    recsdk_core.set_num_threads(3)
    assert recsdk_core.num_threads() == 3
    for count in (0, -1, 1025, 2**40):
        with pytest.raises(
            ValueError, match="set_num_threads: count must be at (least 1|most 1024), got"
        ):
            recsdk_core.set_num_threads(count)
    assert recsdk_core.num_threads() == 3


def test_a_table_that_is_a_global_is_no_leak() -> None:
    done = run("r.keep = r.Table(1); r.keep.keep = r.keep; print(len(r.keep))")
    assert (done.stdout, done.stderr) == ("0\n", "")


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", f"import recsdk_core as r; {code}"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=400,
    )


def test_environment() -> None:
    done = run("print(r.num_threads(), r.isa())", RECSDK_NUM_THREADS="5", RECSDK_ISA="baseline")
    assert done.stdout.split() == ["5", "baseline"]


def test_a_wrong_instruction_set_in_the_environment() -> None:
    done = run("r.isa()", RECSDK_ISA="mmx")
    assert "ValueError" in done.stderr
    assert "mmx" in done.stderr
