"""Checking every byte of a frozen checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recsdk_core.checkpoint.reading import Progress
from recsdk_core.checkpoint.stores import is_url, open_store
from recsdk_core.errors import CheckpointError
from recsdk_core.files import local_path
from recsdk_core.serving.manifest import FORMAT, FrozenManifest
from recsdk_core.serving.one_freeze import read_whole
from recsdk_core.serving.table import ServingTable

__all__ = ["is_frozen", "verify_frozen"]

_MARK = f'"format":"{FORMAT}"'.encode()
"""Stands in a manifest of frozen tables, whose JSON is canonical, and in no other."""


def is_frozen(path: Any) -> bool:
    """Whether a frozen checkpoint is there, of which the manifest may be damaged."""
    if is_url(str(path)):
        return False
    try:
        return _MARK in open_store(path).read_manifest()
    except CheckpointError:
        return False


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
