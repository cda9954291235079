"""The rows and optimizer state of all tables of one width, in one store on a device.

A store is one tensor of rows. Each table has the rows from its first one on, of which the last
stays as it is: its spare row, which has the default value in each column. So a batch of many tables
is pooled, and trained, as if of one table.

Shape letters: R rows of the store, L rows by number, T tables (2T: two numbers for each), D row
width.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from recsdk_core import optim
from recsdk_sharding.device.kernel_choice import choose_kernels
from recsdk_sharding.device.optimizers import initial_state
from recsdk_sharding.device.writes import Writes

__all__ = ["DeviceStore", "Fields", "StateBlock", "StoredTable"]

Fields: TypeAlias = tuple[tuple[str, int], ...]
"""Name and width of each field of optimizer state that a row has."""


@dataclass(eq=False)
class StoredTable:
    """What a store knows of one of its tables."""

    first_row: int
    """Of the store."""
    num_rows: int
    """Of the store, the spare one included."""
    fields: Fields
    fresh: dict[str, float]
    """What each field of a new row begins with."""
    spare_value: float = 0.0
    """What its spare row has in each column."""
    num_shared: int = 0
    """Of the rows before the spare one: how many keys without a row share, and train."""
    block: StateBlock | None = None
    """Where its optimizer state is; None: nowhere yet."""

    @property
    def spare_row(self) -> int:
        """The last of its rows, which nobody trains."""
        return self.first_row + self.num_rows - 1

    @property
    def default_row(self) -> int:
        """The row of the store that keys without a row read, or the first that they share."""
        return self.spare_row - self.num_shared

    def set_optimizer(self, optimizer: optim.Optimizer, fields: Fields) -> None:
        """Takes the fields of another optimizer; their numbers are made when they are wanted."""
        self.fields, self.block = fields, None
        self.fresh = {name: initial_state(optimizer, name) for name, _ in fields}


@dataclass(eq=False)
class StateBlock:
    """The optimizer state of tables with the same fields; a row of the block for each of theirs."""

    tables: Sequence[StoredTable]
    """In the order of their rows."""
    state: Mapping[str, torch.Tensor]
    """float32 (rows of the block, width)."""
    shift: int | torch.Tensor | None = None
    """How far its rows are behind those of the store; of each table, int64 (2, T), with one past
    its last row, where that differs. None: not known yet."""

    def rows_of(self, table: StoredTable) -> dict[str, torch.Tensor]:
        """One table's state, as views (rows of the table, width)."""
        before = self.tables[: self.tables.index(table)]
        first = sum(each.num_rows for each in before)
        return {name: each.narrow(0, first, table.num_rows) for name, each in self.state.items()}

    def places(self, rows_L: torch.Tensor) -> torch.Tensor:
        """The rows of the block of these rows of the store, which are of its tables."""
        if self.shift is None:
            self.shift = self._make_shift(rows_L.device)
        if isinstance(self.shift, int):
            return rows_L if self.shift == 0 else rows_L - self.shift
        ends_T, shifts_T = self.shift.unbind()
        which_L = torch.bucketize(rows_L, ends_T, right=True)
        return rows_L - shifts_T.index_select(0, which_L)

    def _make_shift(self, device: torch.device) -> int | torch.Tensor:
        shifts, end = [], 0
        for each in self.tables:
            shifts.append(each.first_row - end)
            end += each.num_rows
        if len(set(shifts)) == 1:
            return shifts[0]
        ends = [each.first_row + each.num_rows for each in self.tables]
        return torch.tensor([ends, shifts]).to(device)


@dataclass(eq=False)
class DeviceStore:
    """Rows of equal width, and what their tables share.

    All calls belong to the thread that trains, and its current stream.
    """

    weight_RD: torch.Tensor
    """float32; the memory of the parameters that users see."""
    tables: list[StoredTable] = field(default_factory=list)
    """In the order of their rows."""
    writes: Writes = field(default_factory=Writes)
    """Updates happen in all of their tables, or in none. Finish them before tensors are read."""
    nonfinite_2T: torch.Tensor | None = None
    """Gradients of rows that were not finite, int64, by table; behind each table's those of its
    spare row, which are not looked at. None: there were no gradients."""
    is_updated_R: torch.Tensor | None = None
    """uint8; 1: updated since the table's updates are tracked. None: no table's are."""
    ends_2T: torch.Tensor | None = None
    """Each table's spare row, and one past it; None: not on the device yet."""
    spare: tuple[torch.Tensor, torch.Tensor] | None = None
    """Each table's spare row, int64 (T,), and what they have, float32 (T, D); None: as above."""
    others: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)
    """What `of_others` gave, by the first rows of the tables."""
    news: set[int] = field(default_factory=set)
    """The tables, by `id`, with new rows to be written, or with a reader of what leaves. Threads
    that map keys add to it."""

    @staticmethod
    def holding(rows: torch.Tensor, *, is_joint: bool) -> tuple[DeviceStore, int]:
        """The store that has these rows (n, D), which are contiguous, and the first's number.

        `is_joint`: all memory that they were cut from has rows of their width. Else it is theirs
        alone.
        """
        width, first = rows.shape[1], 0
        whole = rows.detach()
        if is_joint:
            count = rows.untyped_storage().nbytes() // (rows.element_size() * width)
            whole = whole.as_strided((count, width), (width, 1), 0)
            first = rows.storage_offset() // width
        place = whole.device, whole.data_ptr(), width
        found = _stores.get(place)
        if found is None or found.weight_RD.shape != whole.shape:
            choose_kernels(whole.device)
            found = _stores[place] = DeviceStore(whole)
        return found, first

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.weight_RD.device

    def add(
        self,
        first: int,
        num_rows: int,
        optimizer: optim.Optimizer,
        fields: Fields,
        spare_value: float,
        num_shared: int,
    ) -> StoredTable:
        """A table that has the rows from `first` on; one that had them before is gone."""
        table = StoredTable(first, num_rows, (), {}, spare_value, num_shared)
        table.set_optimizer(optimizer, fields)
        others = [each for each in self.tables if each.first_row != first]
        counts = {id(each): self.nonfinite_of(each) for each in others}
        self.tables = sorted([*others, table], key=lambda each: each.first_row)
        if self.nonfinite_2T is not None:
            kept = [[counts.get(id(each), 0), 0] for each in self.tables]
            self.nonfinite_2T = torch.tensor(kept).flatten().to(self.device)
        self.ends_2T = self.spare = None
        self.others.clear()
        self.news.intersection_update([id(each) for each in others])
        self.restore_spare_rows()
        return table

    def restore_spare_rows(self) -> None:
        """Gives all spare rows what they have, after a write into some of them."""
        if self.spare is None:
            rows = torch.tensor([each.spare_row for each in self.tables])
            values = self.weight_RD.new_tensor([[each.spare_value] for each in self.tables])
            values_TD = values.repeat(1, self.weight_RD.shape[1])
            self.spare = rows.to(self.device), values_TD
        self.weight_RD.index_copy_(0, *self.spare)

    def settle(self) -> None:
        """Completes a write that failed half-way; raises if that fails again."""
        self.writes.finish()

    @torch.inference_mode(False)  # a first lookup may run under it, and training goes on later
    def _make_block(self, table: StoredTable) -> None:
        alike = [each for each in self.tables if each.block is None]
        alike = [each for each in alike if each.fields == table.fields]
        num_rows = sum(each.num_rows for each in alike)
        state = {name: self.weight_RD.new_zeros(num_rows, width) for name, width in table.fields}
        made = StateBlock(alike, state)
        for each in alike:
            each.block = made
            _begin_shared(each, made)

    def block_of(self, table: StoredTable) -> StateBlock:
        """Where a table's state is; made for all tables with the same fields that have none yet.

        Until they are trained or written to, tables have no state.
        """
        if table.block is None:
            self._make_block(table)
        assert table.block is not None
        return table.block

    def places_of(self, rows_L: torch.Tensor) -> torch.Tensor:
        """Twice the number of each row's table, and one more for spare rows: int64 (L,)."""
        return torch.bucketize(rows_L, self.ends(), right=True)

    def ends(self) -> torch.Tensor:
        """Each table's spare row, and one past it: int64 (2T,)."""
        if self.ends_2T is None:
            ends = [[each.spare_row, each.spare_row + 1] for each in self.tables]
            self.ends_2T = torch.tensor(ends).flatten().to(self.device)
        return self.ends_2T

    def of_others(self, tables: Sequence[StoredTable]) -> torch.Tensor:
        """Whether places, as `places_of` gives them, are of other tables than these: bool (2T,).

        Kept on the device, as most batches ask for those of the batch before.
        """
        own = tuple(each.first_row for each in tables)
        if own not in self.others:
            if len(self.others) >= len(self.tables):  # those of tables that parted otherwise
                self.others.clear()
            is_other_T = torch.tensor([each.first_row not in own for each in self.tables])
            self.others[own] = is_other_T.repeat_interleave(2).to(self.device)
        return self.others[own]

    def counts(self) -> torch.Tensor:
        """The counts of gradients that were not finite, int64 (2T,)."""
        if self.nonfinite_2T is None:
            size = 2 * len(self.tables)
            with torch.inference_mode(False):
                self.nonfinite_2T = torch.zeros(size, dtype=torch.int64, device=self.device)
        return self.nonfinite_2T

    def counts_with(self, places_L: torch.Tensor, is_bad_L: torch.Tensor) -> torch.Tensor:
        """The counts of gradients that were not finite with these, int64 (2T,)."""
        return self.counts().index_add(0, places_L, is_bad_L.to(torch.int64))

    def nonfinite_of(self, table: StoredTable) -> int:
        """Gradients of a table's rows that were not finite so far; waits for the device."""
        self.settle()
        if self.nonfinite_2T is None:
            return 0
        return int(self.nonfinite_2T[2 * self.tables.index(table)])

    def track_updates(self, table: StoredTable) -> torch.Tensor:
        """Notes from here on which rows of a table are updated: uint8 (rows of the table,)."""
        if self.is_updated_R is None:
            with torch.inference_mode(False):
                self.is_updated_R = self.weight_RD.new_zeros(len(self.weight_RD), dtype=torch.uint8)
        own = self.is_updated_R.narrow(0, table.first_row, table.num_rows)
        return own.zero_()


def _begin_shared(table: StoredTable, block: StateBlock) -> None:
    """Gives rows that keys without one share the state of new rows."""
    if table.num_shared:
        first = table.num_rows - 1 - table.num_shared
        for name, state in block.rows_of(table).items():
            state.narrow(0, first, table.num_shared).fill_(table.fresh[name])


_stores: weakref.WeakValueDictionary[tuple[torch.device, int, int], DeviceStore] = (
    weakref.WeakValueDictionary()
)
