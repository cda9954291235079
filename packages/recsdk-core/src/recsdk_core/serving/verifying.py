"""Checking every byte of a frozen checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recsdk_core.checkpoint.reading import Progress
from recsdk_core.files import local_path
from recsdk_core.serving.manifest import FrozenManifest
from recsdk_core.serving.one_freeze import read_whole
from recsdk_core.serving.table import ServingTable

__all__ = ["verify_frozen"]


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
