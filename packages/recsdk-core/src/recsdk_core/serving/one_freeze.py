"""Reading a frozen checkpoint that another freeze may replace meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from recsdk_core.checkpoint.reading import MOST_READS
from recsdk_core.checkpoint.stores import open_store
from recsdk_core.errors import CheckpointError
from recsdk_core.files import local_path
from recsdk_core.serving.manifest import FrozenManifest

__all__ = ["Pinned", "is_replaced", "of_one_freeze", "open_frozen", "read_whole"]

T = TypeVar("T")


def open_frozen(path: Any) -> FrozenManifest:
    """Reads what a frozen checkpoint at a local path holds; its tables are not opened.

    Raises CheckpointError if there is none or its manifest is damaged.
    """
    store = open_store(local_path(path))
    return FrozenManifest.from_bytes(store.read_manifest(), f"{store.location}/manifest.json")


def is_replaced(folder: Path, manifest: FrozenManifest) -> bool:
    """Whether another frozen checkpoint is there now."""
    try:
        return open_frozen(folder).token != manifest.token
    except CheckpointError:
        return False


def read_whole(folder: Path, read: Callable[[FrozenManifest], T]) -> T:
    """What `read` makes of the manifest; calls it again if another freeze came meanwhile."""
    for _ in range(MOST_READS - 1):
        manifest = open_frozen(folder)
        try:
            return read(manifest)
        except CheckpointError:
            if not is_replaced(folder, manifest):
                raise
    return read(open_frozen(folder))


class Pinned:
    """The freeze that was at a path when the first of its tables was read, and no other.

    A pickle has the path only. All tables of one pickle that were of one freeze share it, so they
    are of one freeze where they are opened.
    """

    def __init__(self, path: str) -> None:
        self.folder = Path(path)
        self._manifest: FrozenManifest | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Pinned, (str(self.folder),)

    def read(self, table: str, read: Callable[[FrozenManifest], T]) -> T:
        """What `read` makes of its manifest, for a table. Raises CheckpointError, naming both, if
        another freeze has replaced it since the first table was read."""
        if self._manifest is None:
            result, self._manifest = read_whole(self.folder, lambda each: (read(each), each))
            return result
        self._manifest.table(table, str(self.folder))  # raises if it has none of this name
        try:
            return read(self._manifest)
        except CheckpointError:
            if not is_replaced(self.folder, self._manifest):
                raise
        raise CheckpointError(
            f"{self.folder}: another freeze has replaced the one whose tables are open already, so "
            f"table {table!r} of it cannot be opened; open all of them again"
        )


_pickled: dict[tuple[str, str], Pinned] = {}


def of_one_freeze(path: str, manifest: FrozenManifest) -> Pinned:
    """What pickles of all tables of a freeze share: one object for each path and token, which a
    pickle has once. It is small, and kept."""
    return _pickled.setdefault((path, manifest.token), Pinned(path))
