"""Rows of a checkpoint whose tables are cut into other column ranges than the model's.

Shape letters: n rows, D row width.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recsdk_core import Table
from recsdk_core.checkpoint import Checkpoint, Sharding, TableEntry
from recsdk_core.checkpoint.admission_records import Records, read_records
from recsdk_core.checkpoint.comparing import as_floats
from recsdk_core.checkpoint.merging import Rows, merged_rows
from recsdk_core.checkpoint.model.shards import Assembled, row_fields
from recsdk_core.checkpoint.owners import Owner
from recsdk_core.checkpoint.restoring import check_table, default_entry, read_shared
from recsdk_core.errors import CheckpointError
from recsdk_core.eviction import EvictionClock
from recsdk_core.nn.row_entries import KEPT_OF_KEYS, rows_of
from recsdk_core.optim import Optimizer
from recsdk_sharding._rows.row_state import RowSettings, SavedShard, rows_for
from recsdk_sharding._rows.rows import OwnedShard
from recsdk_sharding.placement.layout import Shard

__all__ = ["assemble", "sharding_of"]


def assemble(
    wanted: RowSettings,
    optimizer: Optimizer | None,
    owned: OwnedShard,
    table: Table,
    chain: Sequence[Checkpoint],
    allow: Collection[str],
) -> Assembled:
    """The rows and columns of a shard, from a chain that has its table in any column ranges.

    `table`: what describes the shard. `allow`: what may differ, as in `restoring.ALLOWANCES`. If it
    has "optimizer", or the checkpoint has no optimizer, state is fresh. Memory: the shard's rows,
    of all columns. Raises CheckpointError, naming the checkpoint and the table, if columns are
    missing, and for all that `restoring.check_table` refuses.
    """
    last = chain[-1]
    entries = [entry for entry in last.manifest.tables if entry.whole_name == wanted.name]
    if not entries:
        last.table(wanted.name)  # raises, naming those that there are
    for entry in entries:
        first, end = _columns_of(entry) or (0, wanted.embedding_dim)
        made = table.empty_copy(dim=end - first, initializer=wanted.initializer_of((first, end)))
        check_table(made, row_fields(made), last, entry.name, allow)
    owner = Owner(owned.shard.index, owned.shard.ranks.world_size, sharding_of(owned.shard))
    keeps_state = "optimizer" not in allow and entries[0].optimizer is not None
    try:
        saved = [_saved_shard(owned.shard, entry, table, chain, owner) for entry in entries]
        found = rows_for(owned.shard, saved, wanted, optimizer if keeps_state else None)
    except ValueError as error:
        raise CheckpointError(f"{last.location}: table {wanted.name!r}: {error}") from None
    if "admission" in allow:
        found = replace(found, records=None)
    if "eviction" in allow:
        found = replace(found, metadata={}, clock=EvictionClock())
    if not keeps_state:
        found = replace(found, state=_fresh_state(found, table))
        if found.shared is not None:
            found = replace(found, shared=replace(found.shared, state={}))
    return Assembled(rows=found.new_rows(), entry=entries[0], has_state=keeps_state)


def _columns_of(entry: TableEntry) -> tuple[int, int] | None:
    """The columns of a range; None if the table has all."""
    columns = entry.columns
    return None if columns is None else (columns.first, columns.first + entry.dim)


def _fresh_state(saved: SavedShard, table: Table) -> dict[str, NDArray[np.float32]]:
    """Fresh state, as the table's optimizer gives it to new rows."""
    made = Table(table.dim, optimizer=table.optimizer)
    made.upsert(saved.keys, saved.weight)
    return dict(rows_of(made).state)


def sharding_of(shard: Shard) -> Sharding:
    """The rule by which a shard has its keys, in the words of checkpoints."""
    ranks = shard.ranks
    return Sharding(rule=ranks.rule, num_virtual_shards=ranks.num_virtual_shards)


def _saved_shard(
    shard: Shard, entry: TableEntry, table: Table, chain: Sequence[Checkpoint], owner: Owner
) -> SavedShard:
    """The owner's rows of one of the tables."""
    found = list(merged_rows(chain, entry.name, owner))
    names = {field.name: (field.dtype, field.width) for field in entry.fields}
    arrays = {
        name: as_floats(_joined(found, name, width, dtype), dtype).astype(np.float32)
        for name, (dtype, width) in names.items()
        if name not in KEPT_OF_KEYS
    }
    kept = {name: of for name, of in names.items() if name in KEPT_OF_KEYS}
    clock = EvictionClock()
    if entry.admission is not None:
        clock = EvictionClock(step=entry.admission.step)
    if entry.eviction is not None:
        clock = EvictionClock(step=entry.eviction.step, time=entry.eviction.time)
    counted = None
    if entry.admission is not None:
        counted = Records.joined(list(read_records(chain[-1], entry.name, owner)))
    weight = arrays.pop("weight")
    made = SavedShard(
        shard=Shard(shard.ranks, shard.index, _columns_of(entry) or (0, entry.dim)),
        keys=np.concatenate([np.zeros(0, np.int64), *(rows.keys for rows in found)]),
        weight=weight,
        dtype=getattr(torch, names["weight"][0]),
        state=arrays,
        update_count=entry.update_count,
        seed=table.seed,  # which may differ, if the caller says so
        log_decay=entry.log_decay,
        metadata={n: _joined(found, n, width, dtype)[:, 0] for n, (dtype, width) in kept.items()},
        records=counted,
        clock=clock,
    )
    if table.default.kind != "shared_rows" or entry.default != default_entry(table):
        return made
    shared = read_shared(chain, entry.name, owner, drop_state=False)
    return replace(made, shared=made.of_shared(shared))


def _joined(found: Sequence[Rows], name: str, width: int, dtype: str) -> NDArray[Any]:
    empty = np.empty((0, width), "uint16" if dtype == "bfloat16" else dtype)
    return np.concatenate([empty, *(rows.fields[name] for rows in found)])
