"""Makes a frozen checkpoint of a checkpoint, a chain, or tables in memory, in bounded memory."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from recsdk_core import _ext
from recsdk_core._internal.checks import int_if_given, int_within, require_callable
from recsdk_core._internal.version import __version__
from recsdk_core.checkpoint.columns import WholeTable, shares_rows, whole_tables
from recsdk_core.checkpoint.comparing import as_floats
from recsdk_core.checkpoint.joining import Block, joined_rows, side_by_side
from recsdk_core.checkpoint.manifest import Field, TableEntry
from recsdk_core.checkpoint.merging import KeptRows, Rows
from recsdk_core.checkpoint.owners import Owner
from recsdk_core.checkpoint.reading import Checkpoint, Progress, chain_of, read_whole
from recsdk_core.checkpoint.restoring import read_shared
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
from recsdk_core.virtual_shards import NUM_VIRTUAL_SHARDS

if TYPE_CHECKING:
    from recsdk_core.table import Table

__all__ = ["freeze", "freeze_tables"]

_HUGE_PAGE = 1 << 21


def freeze(
    source: Any | Sequence[Any],
    target: Any,
    *,
    dtype: FrozenDType | Mapping[str, FrozenDType] = "float32",
    num_shards: int = 1,
    max_rows: int | None = None,
    where: str | Mapping[str, str] | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> FrozenManifest:
    """Freezes every table of a checkpoint for `ServingTable`; returns what was written.

    A table that ranks had cut by columns is one table again, under its own name.

    `source` is a checkpoint, the last delta of a chain, or the list of a chain's paths, as in
    `Table.load`, whatever ranks wrote it. Optimizer state is left out. `target` is a local folder,
    complete or absent like a checkpoint: a server never sees half of one. `dtype` is one for all
    tables or by name; 16 bits round to the nearest, "int8" and "int4" keep a scale and a bias for
    each row. `num_shards` (1 to 65536) files for each table. With `max_rows`, a table of more
    rows is refused as a whole: no row is chosen or left out. `where`, for all tables or by name,
    is a predicate, see `recsdk_core.predicates.Predicate`; rows for which it is false are left out.
    A server that follows the chain takes all rows of later deltas. `overwrite` replaces a
    frozen checkpoint at `target`; servers that have it open go on with the old one.

    Memory: some 200 MiB and the keys of the deltas; while a table that was cut by columns is put
    together, some 70 bytes for each of its keys. Disk: twice the size of the result until it is
    done, and for such a table its rows as float32. Raises CheckpointError for a source that is
    damaged or no chain, or in which some column ranges of a table lack a key, and for a target that
    cannot be written; CapacityError for more than `max_rows` rows; ValueError for rows that the
    dtype cannot hold, which names a key: values that are not finite in int8 and int4, finite ones
    that 16 bits would make infinite, as float16 does from 65520 on; for a predicate that cannot be
    read, or asks for what a table does not keep; and for other arguments. Then nothing is at
    `target` but what was there.
    """
    num_files = _num_files(num_shards, overwrite)
    most = int_if_given("freeze", 0, max_rows=max_rows)
    require_callable("freeze", progress=progress)
    folder = local_path(target)

    def write(counted: Progress | None) -> FrozenManifest:
        chain = chain_of(source)
        tables = whole_tables(chain[-1].manifest.tables)
        dtypes = _dtypes(dtype, [table.name for table in tables])
        store = open_store(folder)
        if any(checkpoint.store.is_place_of(store) for checkpoint in chain):
            raise ValueError(f"target {store.location!r} is one of the source's; choose another")
        for table in tables:
            reads = table.parts[0].default
            _check_default(table.name, None if reads is None else reads.arguments)
        kept = KeptRows(chain, where)
        scratch = str(_scratch_folder(store))
        sources = [_of_chain(kept, chain, table, scratch, counted) for table in tables]
        return _write(store, sources, dtypes, _source_of(chain), num_files, most, overwrite)

    return read_whole(write, progress)


def freeze_tables(
    tables: Sequence[Table],
    target: Any,
    *,
    dtype: FrozenDType | Mapping[str, FrozenDType] = "float32",
    num_shards: int = 1,
    overwrite: bool = False,
) -> FrozenManifest:
    """Freezes tables as they are in memory, without a checkpoint; otherwise as `freeze`.

    Rows are read as by `Table.export`, and changes still count for the next delta. Nothing may
    train the tables meanwhile, or rows are of different moments. Raises ValueError for two tables
    of one name as well.
    """
    num_files = _num_files(num_shards, overwrite)
    if not isinstance(tables, (list, tuple)) or not all(hasattr(t, "export") for t in tables):
        raise TypeError(
            f"freeze_tables: tables must be a list of recsdk_core.Table, got {tables!r}"
        )
    names = [table.name for table in tables]
    if len(set(names)) < len(names):
        raise ValueError(f"freeze_tables: tables must have names of their own, got {names}")
    for table in tables:
        _check_default(table.name, {"kind": table.default.kind})
    store = open_store(local_path(target))
    sources = [_of_table(table) for table in tables]
    return _write(store, sources, _dtypes(dtype, names), None, num_files, None, overwrite)


def _check_default(name: str, reads: Mapping[str, Any] | None) -> None:
    if reads is not None and reads.get("kind") == "initial_row":
        raise ValueError(
            f"table {name!r}: keys without a row read their initial row, and those of a frozen "
            "table read a constant or shared rows; load the table with such a default and "
            "allow=['default'], and freeze that"
        )


def _scratch_folder(store: Store) -> Path:
    """Where files without a name lie meanwhile: beside the target, on its file system."""
    return Path(os.path.abspath(store.location)).parent


def _num_files(num_shards: int, overwrite: bool) -> int:
    if not isinstance(overwrite, bool):
        raise TypeError(f"freeze: overwrite must be True or False, got {overwrite!r}")
    return int_within("freeze", 1, NUM_VIRTUAL_SHARDS + 1, num_shards=num_shards)


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """What a table is frozen of."""

    name: str
    dim: int
    default_value: float
    expected_rows: int
    batches: Iterable[tuple[Any, Any]]
    """Keys (n,) and weights float32 (n, D), each key once."""
    shared: tuple[Any, Any] | None
    """Of the rows that missing keys share the keys that stand for them (m,), and weights."""


def _of_chain(
    kept: KeptRows,
    chain: Sequence[Checkpoint],
    table: WholeTable,
    scratch: str,
    progress: Progress | None,
) -> _Rows:
    def weights(entry: TableEntry) -> Iterator[Rows]:
        for rows in kept.rows(entry.name, None, progress):
            floats = as_floats(rows.fields["weight"], entry.fields[0].dtype)
            yield Rows(rows.keys, {"weight": floats})

    first = table.parts[0]
    ranges = [
        ([Field(name="weight", dtype="float32", width=part.dim)], weights(part))
        for part in table.parts
    ]
    rows = ranges[0][1] if len(ranges) == 1 else joined_rows(table.name, ranges, scratch)
    return _Rows(
        name=table.name,
        dim=table.dim,
        default_value=first.default_value,
        expected_rows=sum(link.table(first.name)[1].num_rows for link in chain),
        batches=((each.keys, each.fields["weight"]) for each in rows),
        shared=_shared_of_chain(chain, table),
    )


def _shared_of_chain(chain: Sequence[Checkpoint], table: WholeTable) -> Block | None:
    if not shares_rows(table.parts[0]):
        return None
    ranges = [read_shared(chain, part.name, Owner(), drop_state=True) for part in table.parts]
    return side_by_side(table.name, [(found.keys, found.weights) for found in ranges])


def _of_table(table: Table) -> _Rows:
    return _Rows(
        name=table.name,
        dim=table.dim,
        default_value=table.default.value,
        expected_rows=len(table),
        batches=((batch.keys, batch.weights) for batch in table.export(state=False)),
        shared=_shared_of_table(table),
    )


def _shared_of_table(table: Table) -> tuple[Any, Any] | None:
    if table.default.kind != "shared_rows":
        return None
    found = table.shared_rows()
    return found.keys, found.weights


def _write(
    store: Store,
    sources: Sequence[_Rows],
    dtypes: Mapping[str, FrozenDType],
    made_of: FrozenSource | None,
    num_shards: int,
    max_rows: int | None,
    overwrite: bool,
) -> FrozenManifest:
    """Writes a frozen checkpoint, whole or not at all."""
    _refuse_taken(store, overwrite)
    token = secrets.token_hex(16)
    try:
        store.begin(token, overwrite)
        tables = []
        for index, rows in enumerate(sources):
            table = _Table(store, token, index, rows, dtypes[rows.name], num_shards)
            tables.append(table.write(max_rows))
        manifest = FrozenManifest(
            token=token,
            source=made_of,
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
    dtype: FrozenDType | Mapping[str, FrozenDType], names: Sequence[str]
) -> dict[str, FrozenDType]:
    """The dtype of each table."""
    given = dtype if isinstance(dtype, Mapping) else dict.fromkeys(names, dtype)
    if set(given) != set(names):
        raise ValueError(f"dtype must name the tables {names}, got {sorted(map(str, given))}")
    for name, one in given.items():
        if not isinstance(one, str) or one not in DTYPES:
            raise ValueError(f"dtype of table {name!r} must be one of {DTYPES}, got {one!r}")
    return dict(given)


def _refuse_taken(store: Store, overwrite: bool) -> None:
    """Raises if the target holds what must not be replaced."""
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
        rows: _Rows,
        dtype: FrozenDType,
        num_shards: int,
    ) -> None:
        self._store, self._token, self._index = store, token, index
        self._rows, self._dtype, self._num_shards = rows, dtype, num_shards

    @property
    def _num_shared(self) -> int:
        return 0 if self._rows.shared is None else len(self._rows.shared[0])

    def write(self, max_rows: int | None) -> FrozenTableEntry:
        """Writes all rows."""
        writer = self._writer()
        if self._rows.shared is not None:
            writer.add_shared(*self._rows.shared, self._rows.dim)
        for keys, weights in self._rows.batches:
            floats = np.ascontiguousarray(weights, dtype=np.float32)
            writer.add(np.ascontiguousarray(keys), floats, self._rows.dim)
            self._refuse_more(writer.num_rows, max_rows)
        return FrozenTableEntry(
            name=self._rows.name,
            dim=self._rows.dim,
            dtype=self._dtype,
            default_value=self._rows.default_value,
            num_shared=self._num_shared,
            files=tuple(self._write_shard(writer, shard) for shard in range(self._num_shards)),
        )

    def _writer(self) -> _ext.FrozenWriter:
        scratch = os.fsencode(_scratch_folder(self._store))
        return _ext.FrozenWriter(
            self._rows.name,
            self._rows.dim,
            self._dtype,
            self._rows.default_value,
            self._num_shards,
            self._num_shared,
            self._rows.expected_rows,
            bytes.fromhex(self._token),
            self._index,
            int(self._token[:16], 16),  # a seed that whoever chooses keys cannot know
            scratch,
        )

    def _refuse_more(self, num_rows: int, max_rows: int | None) -> None:
        if max_rows is not None and num_rows > max_rows:
            raise CapacityError(
                f"table {self._rows.name!r} has more than {max_rows} rows, which max_rows allows; "
                "raise it, or train with fewer rows"
            )

    def _write_shard(self, writer: _ext.FrozenWriter, shard: int) -> FrozenFileEntry:
        path = FrozenFileEntry.path_of(self._token, self._index, shard)
        with self._store.create(self._token, path) as file, naming(file.name, "writing"):
            if not isinstance(file.write, int):
                raise CheckpointError(f"{file.name}: is no local file; freeze to a local folder")
            num_rows, num_bytes, checksum = writer.write_shard(shard, file.write, file.name)
            _drop_pages(file.write, num_bytes)
        return FrozenFileEntry(
            path=path, num_bytes=num_bytes, num_rows=num_rows, checksum=f"{checksum:016x}"
        )


def _drop_pages(descriptor: int, num_bytes: int) -> None:
    """Has the system keep none of a large file that was just written in memory.

    What was written lies in small pages. Who maps the file reads it anew, in huge pages where the
    file system can, and finds rows faster.
    """
    if num_bytes >= _HUGE_PAGE:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
