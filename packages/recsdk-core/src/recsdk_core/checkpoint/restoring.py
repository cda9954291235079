"""Putting a chain of checkpoints into a table: all is read and verified before a row changes."""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from dataclasses import replace
from typing import Any

import numpy as np

from recsdk_core import _ext
from recsdk_core.checkpoint.admission_records import read_records
from recsdk_core.checkpoint.columns import shared_name
from recsdk_core.checkpoint.manifest import METADATA, Described, TableEntry
from recsdk_core.checkpoint.owners import Owner
from recsdk_core.checkpoint.reading import Checkpoint, Progress
from recsdk_core.checkpoint.replacing import NewRows
from recsdk_core.checkpoint.saving import describe
from recsdk_core.errors import CheckpointError

__all__ = [
    "ALLOWANCES",
    "allowances",
    "check_sketch",
    "check_table",
    "default_entry",
    "read_shared",
    "shown_default",
    "stage",
]

ALLOWANCES = ("admission", "default", "eviction", "initializer", "optimizer", "seed")
"""What may differ between a table and a checkpoint, if the caller says so.

"admission": how often keys without a row were seen is dropped: they count from 0. "default": keys
without a row read what the table says; rows that they shared are dropped, and those
that they will are as in a new table. "eviction": what the saved table's kept of keys is dropped:
they count as never seen, and leave first. "optimizer": its state is dropped and made fresh. "seed"
and "initializer": rows that are made later differ from those that the saved table would have made.
"""


def allowances(allow: Collection[str]) -> Collection[str]:
    """What may differ; TypeError or ValueError for what is no list of such names."""
    are_names = isinstance(allow, (Sequence, Set)) and not isinstance(allow, str)
    if not are_names or not all(isinstance(each, str) for each in allow):
        raise TypeError(f"allow must be a list of {ALLOWANCES}, got {allow!r}")
    unknown = sorted(set(allow) - set(ALLOWANCES))
    if unknown:
        raise ValueError(f"allow must be of {ALLOWANCES}, got {unknown}")
    return allow


def check_table(
    table: Any, fields: Sequence[Any], checkpoint: Checkpoint, name: str, allow: Collection[str]
) -> TableEntry:
    """The checkpoint's entry of a table; CheckpointError, naming both, if it does not fit."""
    _, entry = checkpoint.table(name)
    place = f"{checkpoint.location}: table {name!r}"
    if entry.dim != table.dim:
        raise CheckpointError(f"{place} was saved with dim={entry.dim}, it now has {table.dim}")
    stored, wanted = entry.fields[0].dtype, fields[0].dtype
    if stored != wanted:
        raise CheckpointError(
            f"{place} was saved with weights as {stored}, it now has {wanted}; load it into a "
            f"table with dtype={stored!r}, and copy the rows with export and upsert to change that"
        )
    optimizer = describe(table.optimizer)
    keeps_state = "optimizer" not in allow and entry.optimizer is not None
    is_same_kind = entry.optimizer is not None and entry.optimizer.kind == optimizer.kind
    if keeps_state and not (is_same_kind and _are_alike(entry.fields, fields)):
        raise CheckpointError(
            f"{place} was saved with {entry.optimizer}, it now has {optimizer}: their state "
            "differs; load with the same, or allow 'optimizer' to drop the saved state"
        )
    if "admission" not in allow:
        check_sketch(table, entry, place)
    if "eviction" not in allow:
        _check_metadata(table, fields, entry, place)
    wanted_default = default_entry(table)
    if entry.default != wanted_default and "default" not in allow:
        saved_default = shown_default(entry.default, entry.default_value)
        raise CheckpointError(
            f"{place} was saved with {saved_default}, it now has "
            f"{shown_default(wanted_default, table.default.value)}: keys without a row would read "
            "something else; load with the same, or allow 'default'"
        )
    differences = {
        "seed": (entry.seed, table.seed),
        "initializer": (entry.initializer, describe(table.initializer)),
    }
    for what, (saved, now) in differences.items():
        if saved is not None and saved != now and what not in allow:
            raise CheckpointError(
                f"{place} was saved with {what} {saved}, it now has {now}: new rows would not be "
                f"those of the saved table; load with the same, or allow {what!r}"
            )
    return entry


def default_entry(table: Any) -> Described | None:
    """What a manifest says of keys without a row that read no constant.

    What new rows begin with is not of it: it may change from one training to the next.
    """
    if table.default.kind == "constant":
        return None
    found = describe(table.default)
    reads = {name: value for name, value in found.arguments.items() if name != "begin_with"}
    return replace(found, arguments=reads)


def shown_default(reads: Described | None, value: float) -> str:
    """What keys without a row read, as one would write it; `reads` as `default_entry`."""
    if reads is None:
        return f"Default.constant({value})"
    n = reads.arguments.get("n")
    return f"Default.{reads.arguments.get('kind')}({'' if n is None else n})"


def _are_alike(saved: Sequence[Any], wanted: Sequence[Any]) -> bool:
    """Whether the fields are equal, but for what eviction keeps of keys."""
    kept, needed = ([f for f in fields if f not in METADATA] for fields in (saved, wanted))
    return kept == needed


def check_sketch(table: Any, entry: TableEntry, place: str) -> None:
    """Raises unless counts of keys without a row are kept as the table keeps them."""
    if table.admission is None or entry.admission is None:
        return
    saved = entry.admission.rule.arguments.get("max_bytes")
    if saved != table.admission.max_bytes:
        raise CheckpointError(
            f"{place} was saved with admission by {entry.admission.rule}, it now has "
            f"{table.admission}: a sketch takes the counters of one of its own max_bytes only; "
            "load with the same, or allow 'admission', so that keys without a row count from 0"
        )


def _check_metadata(table: Any, fields: Sequence[Any], entry: TableEntry, place: str) -> None:
    """Raises if there are metadata of keys, but not those that the table's rule needs."""
    missing = [f.name for f in fields if f in METADATA and f not in entry.fields]
    if missing and any(f in METADATA for f in entry.fields):
        rule = None if entry.eviction is None else entry.eviction.rule
        raise CheckpointError(
            f"{place} was saved with eviction by {rule}, it now has {table.eviction}: its rows "
            f"lack {', '.join(missing)}; load with the same rule, or allow 'eviction', so that "
            "keys count as never seen"
        )


def read_shared(
    chain: Sequence[Checkpoint], name: str, owner: Owner, *, drop_state: bool
) -> NewRows:
    """The rows of a chain's table that keys without one share, those of an owner.

    Its last checkpoint has them all, a delta too.
    """
    index, entry = chain[-1].table(shared_name(name))
    keys = np.empty(0, np.int64)
    fields = {field.name: np.empty((0, field.width), np.float32) for field in entry.fields}
    for rank in range(len(entry.files)):
        if not owner.may_share_keys(Owner(rank, len(entry.files), entry.sharding)):
            continue
        for block in chain[-1].blocks(index, rank):
            is_own = owner.owns(block.keys)
            keys = np.concatenate([keys, block.keys[is_own]])
            for field, values in fields.items():
                fields[field] = np.concatenate([values, block.fields[field][is_own]])
    weights = fields.pop("weight")
    return NewRows(keys=keys, weights=weights, state={} if drop_state else fields)


def stage(
    engine: _ext.Table,
    chain: Sequence[Checkpoint],
    name: str,
    owner: Owner,
    *,
    drop_state: bool = False,
    drop_metadata: bool = False,
    has_admission: bool = False,
    progress: Progress | None = None,
) -> tuple[_ext.Restore, int]:
    """Reads and verifies the rows of a chain that a rank owns; the table does not change yet.

    With admission also how often keys without a row were seen, if the chain's last has it.
    Also returns how many of them the snapshot had.
    """
    restore, num_in_snapshot = _ext.Restore(engine), 0
    mask, modulo = owner.mask(), owner.modulo()
    for checkpoint in chain:
        index, entry = checkpoint.table(name)
        for rank, file in enumerate(entry.files):
            of_file = Owner(rank, len(entry.files), entry.sharding)
            if not owner.may_share_keys(of_file):
                continue
            with checkpoint.rows_file(index, rank) as rows:
                restore.add_file(
                    rows,
                    owned=mask,
                    modulo=modulo,
                    drop_state=drop_state,
                    drop_metadata=drop_metadata,
                )
            if progress is not None:
                progress(file.num_bytes)
        if checkpoint.is_snapshot:
            num_in_snapshot = restore.num_rows
    for records in read_records(chain[-1], name, owner) if has_admission else ():
        restore.add_records(records.keys, records.counts, records.steps, records.clicks)
    return restore, num_in_snapshot
