"""Rows in memory with all that belongs to them, and tables whose rows are replaced by such.

All tables are changed, or none.

Shape letters: n rows, D row width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from recsdk_core import _ext
from recsdk_core._internal.interruptions import held_back
from recsdk_core.checkpoint.admission_records import Records
from recsdk_core.checkpoint.manifest import METADATA
from recsdk_core.checkpoint.saving import fields_of
from recsdk_core.errors import CapacityError
from recsdk_core.eviction import EvictionClock

if TYPE_CHECKING:
    from recsdk_core.stats import ExportBatch
    from recsdk_core.table import Table

__all__ = [
    "NewRows",
    "add_shared",
    "as_stored",
    "check_room",
    "give_state",
    "metadata_of",
    "replace_rows",
    "rows_with_metadata",
    "shared_of",
    "stage_rows",
]

_NEVER = -(2**63)
_NEVER_SEEN = {
    "evict_step": _NEVER,
    "evict_time": _NEVER,
    "evict_born": _NEVER,
    "evict_norm": float("inf"),
    "evict_place": float("inf"),
    "evict_worth": -2,
}


@dataclass(frozen=True, kw_only=True)
class NewRows:
    """What a table is to hold."""

    keys: NDArray[np.int64]
    """Distinct keys, int64 (n,)."""
    weights: NDArray[np.float32]
    """float32 (n, D); rounded to the nearest where the table stores 16 bits."""
    state: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    """float32 (n, width) for each of the table's `state_fields`."""
    update_count: int = 0
    """Optimizer updates so far."""
    log_decay: float = 0.0
    """See `Table.log_decay`."""
    metadata: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """(n,) for each of `metadata_of` the table; none at all: its keys count as never seen. A table
    without eviction takes none of them."""
    clock: EvictionClock = field(default_factory=EvictionClock)
    """That of eviction and admission."""
    records: Records | None = None
    """What admission knows of keys without a row; none: nothing. A table without admission takes
    none."""
    shared: NewRows | None = None
    """The rows that keys without one share, under the keys that stand for them, weights and state
    only. Those left out are as in a new table."""


def replace_rows(
    changes: Sequence[tuple[Table, NewRows]], let_go: Callable[[], None] | None = None
) -> None:
    """Replaces all rows of each table by its new rows. The next save of each must be full.

    `let_go` is called once the rows are known to fit, and ends what waits for the old ones.

    Memory: the new rows beside the old ones, until the change. With eviction the lowest keys of
    groups that are too large leave at once. Raises CapacityError beyond `max_rows` without it,
    BusyError while batches are in flight or a save is under way, CheckpointError for a repeated
    key, ValueError for shapes that do not fit; then no table has changed.
    """
    staged = [(table, rows, stage_rows(table, rows)) for table, rows in changes]
    if let_go is not None:
        let_go()
    for _, rows, restore in staged:
        restore.check(rows.update_count, rows.log_decay)
    with held_back():
        for table, rows, restore in staged:
            step = rows.clock.step
            state = _ext.EvictionState(step or 0, None, step is not None, rows.clock.time)
            restore.commit(rows.update_count, rows.log_decay, state)
            table._position = None


def stage_rows(table: Table, rows: NewRows) -> _ext.Restore:
    """Makes rows ready beside a table, which does not change yet. Raises as `replace_rows`."""
    check_room(table, len(rows.keys))
    fields: dict[str, NDArray[Any]] = {"weight": as_stored(rows.weights, table.dtype)}
    fields |= {name: np.ascontiguousarray(rows.state[name]) for name, _ in table.state_fields}
    fields |= _metadata_for(table, rows)
    restore = _ext.Restore(table._engine)
    restore.add_rows(_ext.RowBlock.rows(np.ascontiguousarray(rows.keys), fields))
    if rows.records is not None:
        kept = rows.records
        restore.add_records(kept.keys, kept.counts, kept.steps, kept.clicks)
    if rows.shared is not None:
        add_shared(restore, table, rows.shared)
    return restore


def check_room(table: Table, num_rows: int) -> None:
    """Raises CapacityError for more rows than a table takes; with eviction the lowest leave."""
    if table.max_rows is None or num_rows <= table.max_rows or table.eviction is not None:
        return
    raise CapacityError(
        f"table {table.name!r}: {num_rows} rows to load do not fit into its max_rows, "
        f"{table.max_rows}; raise max_rows"
    )


def add_shared(restore: _ext.Restore, table: Table, rows: NewRows) -> None:
    """Stages rows that keys without one share; without state: with a fresh one.

    Raises ValueError for rows that the table does not have.
    """
    packed = None
    if rows.state and table.state_fields:
        parts = [rows.state[name] for name, _ in table.state_fields]
        packed = np.ascontiguousarray(np.concatenate(parts, axis=1), np.float32)
    restore.add_shared(
        np.ascontiguousarray(rows.keys), np.ascontiguousarray(rows.weights, np.float32), packed
    )


def shared_of(rows: ExportBatch) -> NewRows | None:
    """What `shared_rows` of a table gave; None if that is nothing."""
    if not len(rows.keys):
        return None
    return NewRows(keys=rows.keys, weights=rows.weights, state=dict(rows.state))


def metadata_of(table: Table) -> dict[str, type]:
    """What a table's rule keeps of a key, by the name of its field, with the type of the number."""
    fields = fields_of(table.dim, (), table.dtype, table.eviction)
    types = {"int64": np.int64, "float32": np.float32}
    return {each.name: types[each.dtype] for each in fields if each in METADATA}


def _metadata_for(table: Table, rows: NewRows) -> dict[str, NDArray[Any]]:
    """What the table's rule keeps of the rows' keys, as row files have it."""
    wanted, num_rows = metadata_of(table), len(rows.keys)
    if not rows.metadata:
        given = {name: _NEVER_SEEN.get(name, 0) for name in wanted}
        if table.eviction is not None and table.eviction.expires:
            given |= {"evict_step": 0, "evict_born": 0}  # never seen, all would expire at once
        return {name: np.full((num_rows, 1), given[name], kind) for name, kind in wanted.items()}
    missing = sorted(set(wanted) - set(rows.metadata))
    if missing:
        raise ValueError(
            f"table {table.name!r}: its {table.eviction} needs {missing} of each key, and got "
            f"{sorted(rows.metadata)}: load rows of a table with the same rule, or leave all of "
            "these out, so that keys count as never seen"
        )
    return {
        name: np.ascontiguousarray(rows.metadata[name], kind).reshape(num_rows, 1)
        for name, kind in wanted.items()
    }


def rows_with_metadata(table: Table) -> NewRows:
    """The rows that readers of a table see now, with what eviction and admission keep of keys.

    In ascending order of row number. BusyError while a save is under way. Cost: two copies of the
    rows.
    """
    image = table._image()

    def read(offset: int, size: int) -> bytes:
        return image.rows[offset : offset + size]

    file = _ext.RowFile(read, len(image.rows), "rows in memory")
    keys: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
    kinds = metadata_of(table)
    fields: dict[str, list[NDArray[Any]]] = {
        "weight": [np.empty((0, table.dim), np.float32)],
        **{name: [np.empty((0, width), np.float32)] for name, width in table.state_fields},
        **{name: [np.empty((0, 1), kind)] for name, kind in kinds.items()},
    }
    while (block := file.next_block()) is not None:
        keys.append(block.keys)
        for name, parts in fields.items():
            values = block.fields[name]
            parts.append(_as_float32(values) if name == "weight" else values)
    joined = {name: np.concatenate(parts) for name, parts in fields.items()}
    step, _, is_begun, time, _ = image.eviction
    return NewRows(
        keys=np.concatenate(keys),
        weights=joined["weight"],
        state={name: joined[name] for name, _ in table.state_fields},
        update_count=image.update_count,
        log_decay=image.log_decay,
        metadata={name: joined[name].reshape(-1) for name in kinds},
        clock=EvictionClock(step=step if is_begun else None, time=time),
        records=(
            None
            if image.records is None or table.admission is None
            else Records.of_rule(table.admission, image.records)
        ),
        shared=shared_of(table.shared_rows()),
    )


def give_state(
    table: Table,
    keys_n: NDArray[np.int64],
    state: Mapping[str, NDArray[np.float32]],
    shared: tuple[NDArray[np.int64], Mapping[str, NDArray[np.float32]]] | None = None,
) -> None:
    """Gives the rows of some keys (n,) this state, if they are there; no step of the table.

    `shared`: keys, and state, of rows that keys without one share; None: these stay. No key is seen
    by it. BusyError as `replace_rows`. Cost: copies of all rows.
    """
    rows = rows_with_metadata(table)
    _fill(rows, keys_n, state)
    if rows.shared is not None and shared is not None:
        _fill(rows.shared, *shared)
    replace_rows([(table, rows)])


def _fill(rows: NewRows, keys_n: NDArray[np.int64], state: Mapping[str, NDArray[Any]]) -> None:
    order = np.argsort(keys_n)
    places = np.searchsorted(keys_n, rows.keys, sorter=order)
    found = order[np.minimum(places, len(keys_n) - 1)] if len(keys_n) else places
    is_given = keys_n[found] == rows.keys if len(keys_n) else np.zeros(len(rows.keys), bool)
    for name, values in rows.state.items():
        values[is_given] = state[name][found[is_given]]


def _as_float32(stored: NDArray[Any]) -> NDArray[np.float32]:
    """Weights of rows of any type; bfloat16 comes as its bits."""
    if stored.dtype == np.uint16:
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32, copy=False)


def as_stored(weights: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """Weights as a table stores them: bfloat16 as its bits."""
    weights = np.ascontiguousarray(weights, np.float32)
    if dtype == "float32":
        return weights
    if dtype == "float16":
        with np.errstate(over="ignore"):  # becomes infinite, as in an upsert
            return weights.astype(np.float16)
    bits = weights.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16
    halves: NDArray[np.uint16] = np.where(np.isnan(weights), (bits >> 16) | 0x40, rounded).astype(
        np.uint16
    )
    return halves
