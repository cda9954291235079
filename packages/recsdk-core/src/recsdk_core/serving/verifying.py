"""What tells that a checkpoint is frozen, and checking every byte of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recsdk_core.checkpoint.manifest import FORMAT as OTHER_FORMAT
from recsdk_core.checkpoint.reading import Progress
from recsdk_core.checkpoint.stores import Store
from recsdk_core.errors import CheckpointError
from recsdk_core.files import local_path
from recsdk_core.serving.manifest import FORMAT, FrozenManifest
from recsdk_core.serving.one_freeze import read_whole
from recsdk_core.serving.table import ServingTable

__all__ = ["is_frozen", "verify_frozen"]

_MARK = f'"format":"{FORMAT}"'.encode()
"""Stands in each manifest of frozen tables, whose JSON is canonical."""
_OTHER_MARK = f'"format":"{OTHER_FORMAT}"'.encode()
"""Stands in no such manifest. Other checkpoints may have both: they hold what users saved."""


def is_frozen(store: Store) -> bool:
    """Whether a frozen checkpoint is there, of which the manifest may be damaged."""
    try:
        raw = store.read_manifest()
    except CheckpointError:
        return False
    return _MARK in raw and _OTHER_MARK not in raw


def verify_frozen(path: Any, progress: Progress | None = None) -> FrozenManifest:
    """Compares every byte of a frozen checkpoint with its checksums.

    Raises CheckpointError, which names the file, if one differs. `progress` is called with the
    number of bytes of each table that is done.
    """
    folder = local_path(path)
    return read_whole(folder, lambda manifest: _verified(folder, manifest, progress))


def _verified(folder: Path, manifest: FrozenManifest, progress: Progress | None) -> FrozenManifest:
    for entry in manifest.tables:
        ServingTable._of(folder, manifest, name=entry.name, shards=None).verify()
        if progress is not None:
            progress(entry.num_bytes)
    return manifest
