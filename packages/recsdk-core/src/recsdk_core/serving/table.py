"""Frozen tables as Python has them.

Shape letters: N keys, B bags, C columns of a matrix, D row width.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from recsdk_core import _ext
from recsdk_core.checkpoint.stores import naming, open_store
from recsdk_core.errors import CheckpointError
from recsdk_core.files import local_path
from recsdk_core.serving.manifest import FrozenFileEntry, FrozenManifest

__all__ = ["ServingTable", "open_frozen", "pool_serving"]

Array: TypeAlias = Any
"""A numpy array, a torch CPU tensor, or any DLPack CPU array."""

_HEADER_BYTES = 8192


def open_frozen(path: Any) -> FrozenManifest:
    """Reads what a frozen checkpoint at a local path holds; its tables are not opened.

    Raises CheckpointError if there is none or its manifest is damaged.
    """
    store = open_store(local_path(path))
    return FrozenManifest.from_bytes(store.read_manifest(), f"{store.location}/manifest.json")


class ServingTable:
    """A table of a frozen checkpoint: rows by raw keys, read only, mapped from its files.

    Opening takes the same time whatever the size; processes that open the same files share their
    memory. A server opens it once and keeps it.

    A pickle has the path only, and opens what is there then; a copy is the table itself.

    Thread safety: every method may be called from any thread and at once; reads take no lock and
    let go of the GIL. After fork both processes go on reading.
    """

    def __init__(
        self, path: Any, table: str | None = None, *, shards: Sequence[int] | None = None
    ) -> None:
        """Opens a table of the frozen checkpoint at a local path.

        `table` may be left out if there is only one. With `shards` only those files are opened, and
        a key of another shard is refused. Raises CheckpointError, naming file and reason, for what
        is missing, damaged in its header, or of another table; ValueError for shards that are not
        there or twice.
        """
        folder = local_path(path)
        self._path = os.path.abspath(folder)
        self._shards = None if shards is None else tuple(shards)
        self._manifest = open_frozen(folder)
        self._index, self._entry = self._manifest.table(table, str(folder))
        chosen = range(len(self._entry.files)) if shards is None else shards
        files = [self._checked(folder, self._file(shard)) for shard in chosen]
        self._engine = _ext.ServingTable(files)
        self._info = self._engine.info()
        self._check(folder)

    def _file(self, shard: int) -> FrozenFileEntry:
        count = len(self._entry.files)
        if isinstance(shard, bool) or not isinstance(shard, int) or not 0 <= shard < count:
            raise ValueError(f"shards must be of 0 to {count - 1}, got {shard!r}")
        return self._entry.files[shard]

    @staticmethod
    def _checked(folder: Path, entry: FrozenFileEntry) -> bytes:
        """The path of a file, which is that of the manifest: its header says so."""
        path = folder / entry.path
        with naming(str(path), "opening"), path.open("rb") as file:
            head = file.read(_HEADER_BYTES)
            size = os.fstat(file.fileno()).st_size
        if size != entry.num_bytes:
            raise CheckpointError(
                f"{path}: has {size} bytes, {entry.num_bytes} were written; it was cut short or "
                "changed"
            )
        if f"{int.from_bytes(head[-8:], 'little'):016x}" != entry.checksum:
            raise CheckpointError(f"{path}: its header is not that of the manifest; it was changed")
        return os.fsencode(path)

    def _check(self, folder: Path) -> None:
        """Raises if the files and the manifest tell of different tables."""
        entry = self._entry
        expected = (
            ("name", entry.name),
            ("dim", entry.dim),
            ("dtype", entry.dtype),
            ("num_shards", len(entry.files)),
        )
        for what, wanted in expected:
            if self._info[what] != wanted:
                raise CheckpointError(
                    f"{folder}: the {what} of table {entry.name!r} is {wanted!r} in the manifest "
                    f"and {self._info[what]!r} in its files; they do not belong together"
                )

    @property
    def name(self) -> str:
        """Its name."""
        return self._entry.name

    @property
    def dim(self) -> int:
        """Row width."""
        return self._entry.dim

    @property
    def dtype(self) -> str:
        """How rows are stored; all calls give float32."""
        return self._entry.dtype

    @property
    def default_value(self) -> float:
        """What every column of a missing key reads."""
        return float(self._info["default_value"])

    @property
    def num_shards(self) -> int:
        """Files that the table is cut into."""
        return len(self._entry.files)

    @property
    def is_whole(self) -> bool:
        """Whether all of them are open."""
        return bool(self._info["is_whole"])

    @property
    def num_bytes(self) -> int:
        """Size of the files that are open."""
        return int(self._info["num_bytes"])

    @property
    def manifest(self) -> FrozenManifest:
        """What the frozen checkpoint holds, and what it was made of."""
        return self._manifest

    @property
    def path(self) -> str:
        """Where the frozen checkpoint lies, as an absolute path."""
        return self._path

    @property
    def shards(self) -> tuple[int, ...] | None:
        """Those that were asked for; None: all."""
        return self._shards

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self._path, self.name, self._shards)

    def __copy__(self) -> ServingTable:
        return self

    def __deepcopy__(self, memo: Any) -> ServingTable:
        return self  # it never changes

    def __len__(self) -> int:
        """Rows of the files that are open."""
        return int(self._info["num_rows"])

    def __repr__(self) -> str:
        return (
            f"ServingTable(name={self.name!r}, dim={self.dim}, dtype={self.dtype!r}, "
            f"rows={len(self)})"
        )

    def lookup(self, keys: Array, *, return_outcomes: bool = False) -> Any:
        """The rows of keys (N,), float32 (N, D).

        A key without a row reads the default value and is MISSING. With `return_outcomes` returns
        (values, outcomes uint8 (N,)). Keys may repeat. Raises ValueError for a key of a shard that
        is not open.
        """
        return self._engine.lookup(keys, return_outcomes)

    def pool(
        self,
        keys: Array,
        offsets: Array,
        weights: Array | None = None,
        pooling: str = "sum",
        *,
        return_outcomes: bool = False,
    ) -> Any:
        """Reduces bags of keys to one vector each, float32 (B, D), as `Table.pool` does.

        Of a float32 table the result is that of `Table.pool`, bit for bit. Arguments as there, and
        errors as in `lookup`.
        """
        return self._engine.pool(keys, offsets, weights, pooling, return_outcomes)

    def verify(self) -> None:
        """Reads every byte and compares it with its checksum; CheckpointError names what differs.

        Cost: reading the files once. Opening does not do it.
        """
        self._engine.verify()

    def preload(self) -> None:
        """Has the system read the files into memory, so that no later call waits for a disk."""
        self._engine.preload()


def _reopen(path: str, table: str, shards: tuple[int, ...] | None) -> ServingTable:
    return ServingTable(path, table, shards=shards)


def pool_serving(calls: Sequence[tuple[Any, ...]]) -> None:
    """Writes the pooled vectors of bags of many tables, on the calling thread.

    Each call is (table, keys (N,), offsets (B + 1,), out, column), optionally with weights (N,) or
    None, then with the pooling. Bag b goes to `out[b, column : column + D]`; `out` is float32 (at
    least B, C), each row contiguous. All calls are checked before the first is read. Raises
    ValueError and TypeError for arrays that do not fit.
    """
    _ext.pool_serving([(call[0]._engine, *call[1:]) for call in calls])
