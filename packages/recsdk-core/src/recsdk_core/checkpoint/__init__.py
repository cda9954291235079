"""Checkpoints: complete or absent, checksummed, chained, readable at any world size.

`Table.save`, `save_delta`, `save_async` and `load` write and read them; this module looks at them,
merges and compares them. docs/reference/checkpoint.md describes the files byte by byte.
"""

from __future__ import annotations

from recsdk_core.checkpoint.handle import SaveHandle
from recsdk_core.checkpoint.manifest import Manifest, Sharding, TableEntry
from recsdk_core.checkpoint.reading import Checkpoint, Position, chain_of, open_checkpoint

__all__ = [
    "Checkpoint",
    "Manifest",
    "Position",
    "SaveHandle",
    "Sharding",
    "TableEntry",
    "chain_of",
    "compact",
    "diff",
    "open_checkpoint",
    "reshard",
]


def __getattr__(name: str) -> object:
    """`compact`, `reshard` and `diff` build on `Table`, which builds on this package."""
    if name in ("compact", "reshard"):
        from recsdk_core.checkpoint import transforming

        return getattr(transforming, name)
    if name == "diff":
        from recsdk_core.checkpoint import comparing

        return comparing.diff
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
