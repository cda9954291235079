"""In which pages frozen files come into memory."""

from __future__ import annotations

import mmap
import os
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from recsdk_core import Table
from recsdk_core.serving import ServingTable, freeze_tables

TRIES = 3
"""Memory may be in pieces that give now one mapping a huge page, and now the other."""

pytestmark = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="Linux only")


def dropped_from_cache(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Pages(NamedTuple):
    """Of a mapped file."""

    is_huge_wanted: bool
    """Whether the system was told that it may use huge pages."""
    huge_bytes: int
    """How much is in huge pages, in KiB."""


def pages_of(path: Path) -> Pages:
    [part] = (each for each in _mappings() if str(path) in each)
    lines = (line.partition(":") for line in part.splitlines())
    fields = {name: rest.split() for name, _, rest in lines}
    return Pages("hg" in fields["VmFlags"], int(fields["FilePmdMapped"][0]))


def _mappings() -> list[str]:
    """What the system says of each mapping; the last line of each are its flags."""
    return re.split(r"(?<=\n)(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())


def pages_of_a_mapping(path: Path) -> Pages:
    """Of one that is told so and read."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        mapped.madvise(mmap.MADV_HUGEPAGE)
        assert any(mapped[:: mmap.PAGESIZE])
        return pages_of(path)


def pages_of_a_table(folder: Path, path: Path) -> Pages:
    served = ServingTable(folder)
    served.preload()
    return pages_of(path)


def test_a_table_that_is_opened_lies_in_huge_pages_where_any_mapping_would(tmp_path: Path) -> None:
    table = Table(dim=256, name="t")
    keys = np.arange(12_000)
    table.upsert(keys, np.ones((len(keys), table.dim), dtype=np.float32))
    freeze_tables([table], tmp_path / "frozen", dtype="float32")
    [path] = (tmp_path / "frozen").rglob("*.frozen")
    found = []
    for _ in range(TRIES):
        dropped_from_cache(path)
        wanted = pages_of_a_mapping(path)
        dropped_from_cache(path)
        found.append((wanted, pages_of_a_table(tmp_path / "frozen", path)))
    assert all(of_table.is_huge_wanted == of_any.is_huge_wanted for of_any, of_table in found)
    assert any(of_table.huge_bytes >= of_any.huge_bytes for of_any, of_table in found), found
