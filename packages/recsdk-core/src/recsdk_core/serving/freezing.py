"""Makes a frozen checkpoint of a checkpoint or a chain, in bounded memory."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recsdk_core import _ext
from recsdk_core._internal.checks import require_int
from recsdk_core._internal.version import __version__
from recsdk_core.checkpoint.comparing import as_floats
from recsdk_core.checkpoint.manifest import TableEntry
from recsdk_core.checkpoint.merging import merged_rows
from recsdk_core.checkpoint.reading import Checkpoint, Progress, chain_of
from recsdk_core.checkpoint.stores import Store, naming, open_store
from recsdk_core.errors import CapacityError, CheckpointError
from recsdk_core.files import local_path
from recsdk_core.serving.manifest import (
    DTYPES,
    FrozenDType,
    FrozenFileEntry,
    FrozenManifest,
    FrozenSource,
    FrozenTableEntry,
)

__all__ = ["freeze"]

MAX_SHARDS = 65_536


def freeze(
    source: Any | Sequence[Any],
    target: Any,
    *,
    dtype: FrozenDType | Mapping[str, FrozenDType] = "float32",
    num_shards: int = 1,
    max_rows: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> FrozenManifest:
    """Freezes every table of a checkpoint for `ServingTable`; returns what was written.

    `source` is a checkpoint, the last delta of a chain, or the list of a chain's paths, as in
    `Table.load`, whatever ranks wrote it. Optimizer state is left out. `target` is a local folder,
    complete or absent like a checkpoint: a server never sees half of one. `dtype` is one for all
    tables or by name; 16 bits round to the nearest, "int8" and "int4" keep a scale and a bias for
    each row. `num_shards` (1 to 65536) files for each table. With `max_rows`, a table of more rows
    is refused as a whole: no row is chosen or left out. `overwrite` replaces a frozen checkpoint at `target`; servers that have it open go
    on with the old one.

    Memory: some 200 MiB and the keys of the deltas. Disk: twice the size of the result until it is
    done. Raises CheckpointError for a source that is damaged or no chain, and for a target that
    cannot be written; CapacityError for more than `max_rows` rows; ValueError for rows that int8
    and int4 cannot hold, as they are not finite, and for other arguments. Then nothing is at
    `target` but what was there.
    """
    require_int("freeze", 1, num_shards=num_shards)
    if num_shards > MAX_SHARDS:
        raise ValueError(f"freeze: num_shards must be 1 to {MAX_SHARDS}, got {num_shards}")
    if max_rows is not None:
        require_int("freeze", 0, max_rows=max_rows)
    folder = local_path(target)
    chain = chain_of(source)
    dtypes = _dtypes(dtype, chain[-1])
    store = open_store(folder)
    _refuse_other(store, chain, overwrite)
    token = secrets.token_hex(16)
    try:
        store.begin(token, overwrite)
        tables = []
        for index, entry in enumerate(chain[-1].manifest.tables):
            table = _Table(store, token, index, entry, dtypes[entry.name], num_shards)
            tables.append(table.write(chain, max_rows, progress))
        manifest = FrozenManifest(
            token=token,
            source=_source_of(chain),
            tables=tuple(tables),
            writer=f"recsdk-core {__version__}",
        )
        raw = manifest.to_bytes()
        FrozenManifest.from_bytes(raw, store.location)  # what cannot be read is not committed
        store.commit(token, raw)
        return manifest
    except BaseException:
        store.abandon(token)
        raise


def _dtypes(
    dtype: FrozenDType | Mapping[str, FrozenDType], checkpoint: Checkpoint
) -> dict[str, FrozenDType]:
    """The dtype of each table."""
    names = [entry.name for entry in checkpoint.manifest.tables]
    given = dtype if isinstance(dtype, Mapping) else dict.fromkeys(names, dtype)
    if set(given) != set(names):
        raise ValueError(f"dtype must name the tables {names}, got {sorted(given)}")
    for name, one in given.items():
        if one not in DTYPES:
            raise ValueError(f"dtype of table {name!r} must be one of {DTYPES}, got {one!r}")
    return dict(given)


def _refuse_other(store: Store, chain: Sequence[Checkpoint], overwrite: bool) -> None:
    """Raises if the target is one of the source's, or holds what must not be replaced."""
    if any(checkpoint.store.address == store.address for checkpoint in chain):
        raise ValueError(f"target {store.location!r} is one of the source's; choose another")
    _refuse_taken(store, overwrite)


def _refuse_taken(store: Store, overwrite: bool) -> None:
    if not store.has_manifest():
        return
    try:
        FrozenManifest.from_bytes(store.read_manifest(), f"{store.location}/manifest.json")
    except CheckpointError as error:
        raise CheckpointError(
            f"{store.location}: what is there is no frozen checkpoint that could be replaced "
            f"({error}); remove it or choose another path"
        ) from error
    if not overwrite:
        raise CheckpointError(
            f"{store.location}: there is a frozen checkpoint already; choose another path or pass "
            "overwrite=True"
        )


def _source_of(chain: Sequence[Checkpoint]) -> FrozenSource:
    last = chain[-1]
    return FrozenSource(
        hash=last.hash,
        base=chain[0].hash,
        sequence=len(chain) - 1,
        step=last.manifest.step,
    )


class _Table:
    """Writes the files of one table."""

    def __init__(
        self,
        store: Store,
        token: str,
        index: int,
        entry: TableEntry,
        dtype: FrozenDType,
        num_shards: int,
    ) -> None:
        self._store, self._token, self._index = store, token, index
        self._entry, self._dtype, self._num_shards = entry, dtype, num_shards

    def write(
        self, chain: Sequence[Checkpoint], max_rows: int | None, progress: Progress | None
    ) -> FrozenTableEntry:
        """Writes the rows that the chain stands for."""
        writer = self._writer(sum(link.table(self._entry.name)[1].num_rows for link in chain))
        dtype = self._entry.fields[0].dtype
        for rows in merged_rows(chain, self._entry.name, None, progress):
            weights = as_floats(rows.fields["weight"], dtype)
            floats = np.ascontiguousarray(weights, dtype=np.float32)
            writer.add(np.ascontiguousarray(rows.keys), floats, self._entry.dim)
            self._refuse_more(writer.num_rows, max_rows)
        return FrozenTableEntry(
            name=self._entry.name,
            dim=self._entry.dim,
            dtype=self._dtype,
            default_value=self._entry.default_value,
            files=tuple(self._write_shard(writer, shard) for shard in range(self._num_shards)),
        )

    def _writer(self, expected_rows: int) -> _ext.FrozenWriter:
        scratch = os.fsencode(Path(os.path.abspath(self._store.location)).parent)
        return _ext.FrozenWriter(
            self._entry.name,
            self._entry.dim,
            self._dtype,
            self._entry.default_value,
            self._num_shards,
            expected_rows,
            bytes.fromhex(self._token),
            self._index,
            int(self._token[:16], 16),  # nobody knows it who chooses keys
            scratch,
        )

    def _refuse_more(self, num_rows: int, max_rows: int | None) -> None:
        if max_rows is not None and num_rows > max_rows:
            raise CapacityError(
                f"table {self._entry.name!r} has more than {max_rows} rows, which max_rows allows; "
                "raise it, or train with fewer rows"
            )

    def _write_shard(self, writer: _ext.FrozenWriter, shard: int) -> FrozenFileEntry:
        path = FrozenFileEntry.path_of(self._token, self._index, shard)
        with self._store.create(self._token, path) as file, naming(file.name, "writing"):
            if not isinstance(file.write, int):
                raise CheckpointError(f"{file.name}: is no local file; freeze to a local folder")
            num_rows, num_bytes, checksum = writer.write_shard(shard, file.write, file.name)
        return FrozenFileEntry(
            path=path, num_bytes=num_bytes, num_rows=num_rows, checksum=f"{checksum:016x}"
        )
