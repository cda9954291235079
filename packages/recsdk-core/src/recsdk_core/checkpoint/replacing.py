"""Replaces all rows of tables by rows in memory: in all tables, or in none.

Shape letters: n rows, D row width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from recsdk_core import _ext
from recsdk_core.errors import CapacityError

if TYPE_CHECKING:
    from recsdk_core.table import Table

__all__ = ["NewRows", "as_stored", "replace_rows", "stage_rows"]


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


def replace_rows(changes: Sequence[tuple[Table, NewRows]]) -> None:
    """Replaces all rows of each table by its new rows. The next save of each must be full.

    Memory: the new rows beside the old ones, until the change. Raises CapacityError beyond
    `max_rows`, BusyError while batches are in flight or a save is under way, CheckpointError for a
    repeated key, ValueError for shapes that do not fit; then no table has changed.
    """
    staged = [(table, rows, stage_rows(table, rows)) for table, rows in changes]
    for _, rows, restore in staged:
        restore.check(rows.update_count, rows.log_decay)
    for table, rows, restore in staged:
        restore.commit(rows.update_count, rows.log_decay)
        table._position = None


def stage_rows(table: Table, rows: NewRows) -> _ext.Restore:
    """Makes rows ready beside a table, which does not change yet. Raises as `replace_rows`."""
    if table.max_rows is not None and len(rows.keys) > table.max_rows:
        raise CapacityError(
            f"table {table.name!r}: {len(rows.keys)} rows to load do not fit into its max_rows, "
            f"{table.max_rows}; raise max_rows"
        )
    if table.eviction is not None:
        raise ValueError(
            f"table {table.name!r}: rows in memory lack what eviction keeps of a key; load them "
            "into a table without eviction"
        )
    fields: dict[str, NDArray[Any]] = {"weight": as_stored(rows.weights, table.dtype)}
    fields |= {name: np.ascontiguousarray(rows.state[name]) for name, _ in table.state_fields}
    restore = _ext.Restore(table._engine)
    restore.add_rows(_ext.RowBlock.rows(np.ascontiguousarray(rows.keys), fields))
    return restore


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
