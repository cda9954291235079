"""A table's shard on one rank, as it is saved and loaded with those of its model.

Shape letter: D row width.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias

from recsdk_core import _ext
from recsdk_core.checkpoint.admission_records import admission_entry
from recsdk_core.checkpoint.columns import name_of
from recsdk_core.checkpoint.manifest import (
    ColumnsEntry,
    EvictionEntry,
    Field,
    Sharding,
    TableEntry,
)
from recsdk_core.checkpoint.owners import Owner
from recsdk_core.checkpoint.reading import Checkpoint, Progress
from recsdk_core.checkpoint.replacing import NewRows
from recsdk_core.checkpoint.restoring import default_entry
from recsdk_core.checkpoint.saving import Codec, describe, fields_of
from recsdk_core.checkpoint.stores import Target

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from recsdk_core.table import Table

__all__ = ["Assembled", "Shard", "ShardCut", "entry_of", "row_fields"]


@dataclass(frozen=True, kw_only=True)
class Assembled:
    """Rows that were put together from a checkpoint's tables with other columns."""

    rows: NewRows
    """The rows, with state of the table's optimizer."""
    entry: TableEntry
    """One of the tables that they come from, for its count of updates and learning rate."""
    has_state: bool
    """Whether the state is that of the checkpoint, and not fresh."""


Assemble: TypeAlias = "Callable[[Sequence[Checkpoint], Collection[str]], Assembled]"
"""Makes a shard's rows from a chain, given what may differ; CheckpointError if some are missing."""


class ShardCut(Protocol):
    """What a shard holds at one moment, of rows that are in no table, until `finish`."""

    update_count: int
    log_decay: float
    eviction: _ext.EvictionState | None
    """Where the clock of eviction and admission stands, if the table has one of them."""
    admission: tuple[NDArray[np.int64], ...] | None
    """Keys without a row, how often they were seen, and the step that saw each last, int64 (m,)
    each, if the table has admission."""
    shared_rows: tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]] | None
    """The rows that keys without one share: keys (n,), weights (n, D), packed state; None: none."""

    @property
    def num_rows(self) -> int:
        """Rows to save."""

    @property
    def num_erased(self) -> int:
        """Keys that left."""

    def write(
        self, target: Target, token: bytes, codec: Codec, progress: Progress | None
    ) -> _ext.RowFileSummary:
        """Writes a file of rows."""

    def finish(self, durable: bool) -> None:
        """Ends it; durable: changes are counted from here, else as if it had never been."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One rank's shard of a table."""

    table: Table
    """The rows; if there is a `cut`, what describes them."""
    owner: Owner = field(default_factory=Owner)
    """Which keys belong here."""
    columns: tuple[int, int] | None = None
    """The range of the table's columns that the rows have, the second excluded; None: all."""
    assemble: Assemble | None = None
    """Makes its rows from a checkpoint that has the table cut into other column ranges."""
    cut: Callable[[bool], ShardCut] | None = None
    """Cuts rows that are elsewhere: all of them, or what changed."""
    let_go: Callable[[], None] | None = None
    """Releases batches that are done but would keep its rows from being replaced; called when all
    of a checkpoint is read."""
    check_idle: Callable[[], None] | None = None
    """Raises BusyError if rows that follow those of the table cannot be replaced now."""

    @property
    def label(self) -> str:
        """The table's name in checkpoints."""
        name = self.table.name
        return name if self.columns is None else name_of(name, self.columns)


def row_fields(table: Table) -> tuple[Field, ...]:
    """The fields of a table's rows."""
    return fields_of(table.dim, table.state_fields, table.dtype, table.eviction)


def entry_of(shard: Shard, cut: _ext.Cut | ShardCut | None, sharding: Sharding) -> TableEntry:
    """The manifest's entry of a shard's table, as of a cut if given, without files."""
    table = shard.table
    return TableEntry(
        name=shard.label,
        dim=table.dim,
        columns=(
            None
            if shard.columns is None
            else ColumnsEntry(table=table.name, first=shard.columns[0])
        ),
        seed=table.seed,
        initializer=describe(table.initializer),
        default_value=float(table.default.value),
        optimizer=describe(table.optimizer),
        update_count=table.update_count if cut is None else cut.update_count,
        log_decay=table.log_decay if cut is None else cut.log_decay,
        eviction=_eviction_entry(table, cut),
        admission=admission_entry(table, cut),
        default=default_entry(table),
        fields=row_fields(table),
        sharding=sharding,
        files=(),
    )


def _eviction_entry(table: Table, cut: _ext.Cut | ShardCut | None) -> EvictionEntry | None:
    state = None if cut is None else cut.eviction
    if table.eviction is None or state is None:
        return None
    return EvictionEntry(
        rule=describe(table.eviction),
        step=state.step if state.is_begun else None,
        time=state.time,
    )
