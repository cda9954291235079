"""The tables that exported programs read, of one freeze for each program."""

from __future__ import annotations

from functools import partial

from recsdk_core.errors import CheckpointError
from recsdk_core.serving.manifest import FrozenManifest
from recsdk_core.serving.one_freeze import Pinned, is_replaced
from recsdk_core.serving.table import ServingTable

__all__ = ["ExportedTables"]


class ExportedTables:
    """Tables of what is at a path when the first of them is asked for.

    All that can be opened are opened then, so that another freeze cannot take them away: a program
    does not say which ones it will ask for. One that is missing or damaged is refused when it is
    asked for. Thread safety: any method from any thread.
    """

    def __init__(self, path: str, shards: tuple[int, ...] | None) -> None:
        self._freeze, self._shards = Pinned(path), shards
        self._tables: dict[str, ServingTable] = {}

    def __len__(self) -> int:
        """How many are open."""
        return len(self._tables)

    def table(self, name: str) -> ServingTable:
        """Raises CheckpointError for a table that is not there, damaged, or of a freeze that
        another one has replaced. If it was the first, the next call looks at the path anew."""
        if name not in self._tables:
            for each, opened in self._freeze.read(name, partial(self._opened, name)).items():
                self._tables.setdefault(each, opened)  # what came first is kept
        return self._tables[name]

    def _opened(self, name: str, manifest: FrozenManifest) -> dict[str, ServingTable]:
        """A table and, if it is the first, all others that can be opened."""
        found = self._of(manifest, name)
        others = () if self._tables else [entry.name for entry in manifest.tables]
        opened = {each: self._opened_if_can_be(manifest, each) for each in others if each != name}
        return {name: found, **{each: table for each, table in opened.items() if table is not None}}

    def _of(self, manifest: FrozenManifest, name: str) -> ServingTable:
        return ServingTable._of(self._freeze.folder, manifest, name=name, shards=self._shards)

    def _opened_if_can_be(self, manifest: FrozenManifest, name: str) -> ServingTable | None:
        """Raises only if another freeze has come."""
        try:
            return self._of(manifest, name)
        except CheckpointError:
            if is_replaced(self._freeze.folder, manifest):
                raise
            return None
