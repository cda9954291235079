"""Frozen tables: rows by raw keys, read only, mapped from files that many processes share.

`freeze` makes them of any checkpoint; `ServingTable` reads them. docs/reference/frozen.md describes
the files byte by byte.
"""

from __future__ import annotations

from recsdk_core.serving.following import ServingStats
from recsdk_core.serving.freezing import freeze, freeze_tables
from recsdk_core.serving.manifest import (
    FrozenFileEntry,
    FrozenManifest,
    FrozenSource,
    FrozenTableEntry,
)
from recsdk_core.serving.one_freeze import open_frozen
from recsdk_core.serving.table import ServingTable, open_tables, pool_serving

__all__ = [
    "FrozenFileEntry",
    "FrozenManifest",
    "FrozenSource",
    "FrozenTableEntry",
    "ServingStats",
    "ServingTable",
    "freeze",
    "freeze_tables",
    "open_frozen",
    "open_tables",
    "pool_serving",
]
