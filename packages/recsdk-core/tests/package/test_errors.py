"""The engine's errors as Python classes."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from recsdk_core import (
    BackendUnavailable,
    BusyError,
    CapacityError,
    CheckpointError,
    NonFiniteError,
    OutOfMemoryError,
    RecsdkError,
    Table,
)


def test_hierarchy() -> None:
    for error in (
        BackendUnavailable,
        BusyError,
        CapacityError,
        CheckpointError,
        NonFiniteError,
        OutOfMemoryError,
    ):
        assert issubclass(error, RecsdkError)
    assert issubclass(RecsdkError, RuntimeError)
    assert issubclass(OutOfMemoryError, MemoryError)


def test_more_rows_than_row_numbers() -> None:
    table = Table(1)
    with pytest.raises(CapacityError, match="2.32 - 1 rows"):
        table.reserve(2**33)
    table.check_invariants()


def test_no_memory_is_an_exception_and_the_table_stays_valid() -> None:
    """In a process of its own, under a limit of its address space."""
    script = """
        import resource
        import numpy as np
        from recsdk_core import OutOfMemoryError, Table
        table = Table(1024)
        table.find_or_insert(np.arange(100))
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        limit = used + 2**28
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        failures = 0
        for begin in range(0, 200_000, 2000):
            before = len(table)
            try:
                table.map(np.arange(begin, begin + 2000), insert=True)
            except OutOfMemoryError as error:
                failures += 1
                assert len(table) == before, "a failed call changed the table"
        assert failures > 0, "nothing failed"
        table.check_invariants()
        assert len(table.lookup(np.arange(100))) == 100
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=400)
