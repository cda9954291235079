"""In which pages frozen files come into memory."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from recsdk_core import Table
from recsdk_core.serving import ServingTable, freeze_tables

pytestmark = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="Linux only")


def dropped_from_cache(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def huge_bytes(path: Path) -> int:
    """How much of a mapped file is in huge pages, in KiB."""
    parts = Path("/proc/self/smaps").read_text().split("VmFlags")
    [part] = [part for part in parts if str(path) in part]
    [line] = [line for line in part.splitlines() if line.startswith("FilePmdMapped")]
    return int(line.split()[1])


def test_a_table_that_is_opened_lies_in_huge_pages_where_any_mapping_would(tmp_path: Path) -> None:
    table = Table(dim=256, name="t")
    keys = np.arange(12_000)
    table.upsert(keys, np.ones((len(keys), table.dim), dtype=np.float32))
    freeze_tables([table], tmp_path / "frozen", dtype="float32")
    [path] = (tmp_path / "frozen").rglob("*.frozen")
    dropped_from_cache(path)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        mapped.madvise(mmap.MADV_HUGEPAGE)
        assert any(mapped[:: mmap.PAGESIZE])
        wanted = huge_bytes(path)
    dropped_from_cache(path)
    served = ServingTable(tmp_path / "frozen")
    served.preload()
    assert huge_bytes(path) >= wanted
