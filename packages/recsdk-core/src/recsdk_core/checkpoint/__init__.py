"""Checkpoints: complete or absent, checksummed, chained, readable at any world size.

`Table.save`, `save_delta`, `save_async` and `load` write and read them; this module looks at them,
merges and compares them. docs/reference/checkpoint.md describes the files byte by byte.
"""

from __future__ import annotations

from recsdk_core.checkpoint.handle import SaveHandle
from recsdk_core.checkpoint.manifest import (
    AdmissionEntry,
    ChainLink,
    ColumnsEntry,
    Described,
    EvictionEntry,
    Field,
    FileEntry,
    Manifest,
    RowsEntry,
    Sharding,
    TableEntry,
    UserEntry,
)
from recsdk_core.checkpoint.reading import Checkpoint, Position, chain_of, open_checkpoint

__all__ = [
    "AdmissionEntry",
    "ChainLink",
    "Checkpoint",
    "ColumnsEntry",
    "Described",
    "EvictionEntry",
    "Field",
    "FileEntry",
    "Manifest",
    "Position",
    "RowsEntry",
    "SaveHandle",
    "Sharding",
    "TableDifference",
    "TableEntry",
    "UserEntry",
    "chain_of",
    "compact",
    "diff",
    "open_checkpoint",
    "reshard",
]


def __getattr__(name: str) -> object:
    """What makes and compares checkpoints builds on `Table`, which builds on this package."""
    if name in ("compact", "reshard"):
        from recsdk_core.checkpoint import transforming

        return getattr(transforming, name)
    if name in ("TableDifference", "diff"):
        from recsdk_core.checkpoint import comparing

        return getattr(comparing, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
