"""Makes a checkpoint from others, or from rows, without a table: compact, reshard, import."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from recsdk_core import _ext
from recsdk_core._internal.checks import int_within, require_one_of
from recsdk_core.checkpoint.admission_records import Records, read_records
from recsdk_core.checkpoint.manifest import Sharding, TableEntry
from recsdk_core.checkpoint.merging import KeptRows, Rows, merged_rows
from recsdk_core.checkpoint.owners import Owner
from recsdk_core.checkpoint.participants import OneRank
from recsdk_core.checkpoint.reading import Checkpoint, Position, Progress, chain_of, read_whole
from recsdk_core.checkpoint.saving import Codec, SaveOptions, ShardFile, save_shards
from recsdk_core.checkpoint.stores import Target, open_store
from recsdk_core.virtual_shards import NUM_VIRTUAL_SHARDS

__all__ = ["compact", "reshard", "write_snapshot"]

RowsOf = Callable[[str, Owner, Progress | None], Iterable[Rows]]
"""Gives the rows of a table that belong to an owner."""


def compact(
    source: Any | Sequence[Any],
    path: Any,
    *,
    keep: str | Mapping[str, str] | None = None,
    overwrite: bool = False,
    codec: Codec = "none",
    progress: Progress | None = None,
) -> Position:
    """Merges a chain into a snapshot at `path`, cut into files as its last checkpoint is.

    `source` is the last delta, or the list of the chain's paths, as in `Table.load`. Nothing of the
    source is removed. `keep`, for all tables or by a table's name, is a predicate, see
    `recsdk_core.predicates.Predicate`; rows for which it is false are left out. Memory: the keys of
    the deltas, not the rows.

    Raises CheckpointError for a source that is damaged or no chain, and ValueError for a predicate
    that cannot be read, or asks for what a table does not keep.
    """

    def write(counted: Progress | None) -> Position:
        chain = chain_of(source)
        kept = KeptRows(chain, keep)
        options = SaveOptions(
            overwrite=overwrite,
            codec=codec,
            world_size=chain[-1].manifest.world_size,
            progress=counted,
        )
        layouts = {e.name: (len(e.files), e.sharding) for e in chain[-1].manifest.tables}
        return _rewrite(chain, path, layouts, options, kept.rows)

    return read_whole(write, progress)


def reshard(
    source: Any | Sequence[Any],
    path: Any,
    *,
    world_size: int,
    rule: str = "virtual_shard",
    overwrite: bool = False,
    codec: Codec = "none",
    progress: Progress | None = None,
) -> Position:
    """Writes what a chain holds as a snapshot of `world_size` ranks (1 to 65536).

    Any world size can load any checkpoint; one of its own world size reads less. `rule` is
    "virtual_shard" or "modulo". Other arguments, memory and errors as in `compact`.
    """
    size = int_within("reshard", 1, NUM_VIRTUAL_SHARDS + 1, world_size=world_size)
    require_one_of("reshard", ("virtual_shard", "modulo"), rule=rule)
    options = SaveOptions(overwrite=overwrite, codec=codec, world_size=size)

    def write(counted: Progress | None) -> Position:
        return _reshard(chain_of(source), path, rule, replace(options, progress=counted))

    return read_whole(write, progress)


def _reshard(chain: Sequence[Checkpoint], path: Any, rule: str, options: SaveOptions) -> Position:
    sketched = [e.name for e in chain[-1].manifest.tables if e.admission and e.admission.has_sketch]
    if sketched and rule == "modulo":
        raise ValueError(
            f"rule 'modulo' divides virtual shards, each of which has one sketch, and tables "
            f"{sketched} have some; pass 'virtual_shard'"
        )
    sharding = Sharding(rule="modulo" if rule == "modulo" else "virtual_shard")
    layouts = {e.name: (options.world_size or 1, sharding) for e in chain[-1].manifest.tables}
    return _rewrite(chain, path, layouts, options, partial(merged_rows, chain))


def _rewrite(
    chain: Sequence[Checkpoint],
    path: Any,
    layouts: Mapping[str, tuple[int, Sharding]],
    options: SaveOptions,
    rows_of: RowsOf,
) -> Position:
    """Writes rows of what a chain holds, each table cut into a number of files by a rule."""
    last = chain[-1]
    _refuse_source(path, chain)
    told = replace(options, step=last.manifest.step, user_state=last.user_state())
    shards = []
    for entry in last.manifest.tables:
        num_shards, sharding = layouts[entry.name]
        admission = None if entry.admission is None else replace(entry.admission, files=())
        bare = replace(entry, sharding=sharding, files=(), admission=admission)
        for index in range(num_shards):
            made = _shard_file(bare, rows_of, index, num_shards)
            if admission is not None:
                owner = Owner(index, num_shards, sharding)
                made = replace(made, records=partial(_records_of, last, entry.name, owner))
            shards.append(made)
    return save_shards(open_store(path), OneRank(), shards, told)


def _records_of(checkpoint: Checkpoint, name: str, owner: Owner) -> Records:
    return Records.joined(list(read_records(checkpoint, name, owner)))


def _refuse_source(path: Any, chain: Sequence[Checkpoint]) -> None:
    target = open_store(path)
    if any(checkpoint.store.is_place_of(target) for checkpoint in chain):
        raise ValueError(f"path {target.address!r} is one of the source's; choose another")


def write_snapshot(
    path: Any, entries: Sequence[TableEntry], rows_of: RowsOf, options: SaveOptions
) -> Position:
    """Writes rows that are in no table as a snapshot of `options.world_size` ranks."""
    world_size = options.world_size or 1
    shards = [
        _shard_file(entry, rows_of, index, world_size)
        for entry in entries
        for index in range(world_size)
    ]
    return save_shards(open_store(path), OneRank(), shards, replace(options, world_size=world_size))


def _shard_file(entry: TableEntry, rows_of: RowsOf, index: int, num_shards: int) -> ShardFile:
    fields = [(field.name, field.dtype, field.width) for field in entry.fields]

    def write(
        target: Target, token: bytes, codec: Codec, progress: Progress | None
    ) -> _ext.RowFileSummary:
        owner = Owner(index, num_shards, entry.sharding)
        return _ext.write_row_file(
            target.write,
            kind="snapshot",
            dim=entry.dim,
            fields=fields,
            blocks=map(_block, rows_of(entry.name, owner, progress)),
            token=token,
            codec=codec,
            name=target.name,
        )

    return ShardFile(entry=entry, write=write, index=index, num_shards=num_shards)


def _block(rows: Rows) -> _ext.RowBlock:
    fields = {name: np.ascontiguousarray(values) for name, values in rows.fields.items()}
    return _ext.RowBlock.rows(np.ascontiguousarray(rows.keys), fields)
