"""A shard whose rows are tensors on a device.

Shape letters: n or N keys, D row width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import recsdk_core
from recsdk_core import Admit, optim
from recsdk_core.admission import record_names
from recsdk_core.checkpoint.admission_records import Records
from recsdk_core.checkpoint.replacing import NewRows
from recsdk_core.leavers import LeaveCause, Leavers, OnOverflow
from recsdk_core.nn.row_entries import rows_of
from recsdk_sharding.device.host_index import is_limited
from recsdk_sharding.device.leaving import DeviceLeavers
from recsdk_sharding.device.optimizers import check_optimizer
from recsdk_sharding.device.readable_rows import ReadableRows
from recsdk_sharding.placement.room import require_room

__all__ = ["DeviceTable"]


class DeviceTable(ReadableRows):
    """Rows and optimizer state in tensors on a device, found through an index on the host.

    The store has one row more than the table takes keys: its last row keeps the default value,
    which refused and missing keys read. If they share rows, these are those before it. Row numbers,
    refusals and initial rows are the engine's.

    Offers what `recsdk_core.Table` offers to its owner: rows in and out, len, stats, learning rate,
    update count. The `index` maps keys and opens leases. It may be used from any thread; all else
    belongs to the thread and the current stream that train.
    """

    def evict(
        self,
        *,
        fraction: float | None = None,
        max_rows: int | None = None,
        where: str | None = None,
    ) -> int:
        """As `recsdk_core.Table.evict`."""
        num_evicted = self.index.evict(fraction=fraction, max_rows=max_rows, where=where)
        self._evicted_by_request += num_evicted
        self.copy_left()
        return num_evicted

    def would_evict(
        self,
        *,
        fraction: float | None = None,
        max_rows: int | None = None,
        where: str | None = None,
    ) -> dict[LeaveCause, int]:
        """As `recsdk_core.Table.would_evict`."""
        return self.index.would_evict(fraction=fraction, max_rows=max_rows, where=where)

    def expire(self) -> int:
        """As `recsdk_core.Table.expire`."""
        num_expired = self.index.expire()
        self.copy_left()
        return num_expired

    def leavers(
        self,
        *,
        max_rows: int = 65_536,
        on_overflow: OnOverflow = "count",
        block_seconds: float = 60.0,
    ) -> Leavers:
        """As `recsdk_core.Table.leavers`.

        Rows are copied on the device by the thread that trains, in each forward of the table, and
        when it reads or evicts: other threads read what was copied. The copies stay on the device
        until they are read; they, and what is not copied yet, take places. A call that is to wait
        does so for places of what was copied. That thread makes the reader and closes it: if
        another one does, what left last can be read after the next forward.
        """
        self._write_new_rows()
        queue = self.index.leavers(
            max_rows=max_rows, on_overflow=on_overflow, block_seconds=block_seconds
        )
        reader = DeviceLeavers(queue, self.dim, sum(width for _, width in self.state_fields))
        reader.read_from(self, self.copy_left)
        self._keys.reader = reader
        return Leavers(reader, self.state_fields)

    @torch.no_grad()
    def set_optimizer(self, optimizer: optim.Optimizer) -> None:
        """As `recsdk_core.Table.set_optimizer`."""
        checked = check_optimizer(optimizer, self.name)
        self._write_new_rows()
        self.check_idle()
        self._end_leavers()  # whose rows have the fields of the one before
        fields = recsdk_core.Table(self.dim, optimizer=optimizer).state_fields
        _, numbers = self.index.keys_and_rows()
        self._rows.set_optimizer(checked, fields, numbers)
        self._take_optimizer(checked)
        self.state_fields, self.log_decay = fields, 0.0
        self.position = None

    # ---- rows and keys that come and go ----------------------------------------------------------

    @torch.no_grad()
    def upsert(
        self,
        keys: NDArray[np.int64],
        values: NDArray[np.float32],
        state: Mapping[str, NDArray[np.float32]] | None = None,
        *,
        times: NDArray[np.int64] | int | None = None,
    ) -> None:
        """Writes rows (n, D) and their state (without it: fresh) for keys (n,).

        Of equal keys the last wins. With eviction others leave for them, and those that find no
        room are not written; no rule of admission keeps a key out; `times` as
        `recsdk_core.Table.upsert`. Raises CapacityError if they do not fit, BusyError while leases
        with a step are open, and ValueError or TypeError for arrays that do not fit; then nothing
        has changed.
        """
        self._write_new_rows()
        self.check_idle()
        # What can fail does so before keys are there.
        room = self._rows.make_room(len(keys), values, state)
        if self.eviction is None:
            self.check_room(keys)
        with self._keys.given_rows():
            numbers, outcomes = self.index.map(keys, insert=True, times=times, admits_all=True)
        numbers[(outcomes == recsdk_core.Outcome.REFUSED) | ~_are_last(keys)] = self.spare_row
        self.index.note_changed(numbers[numbers != self.spare_row])
        self.copy_left()
        room.write(numbers, has_begun=True)

    def check_room(self, keys: NDArray[np.int64]) -> None:
        """Raises CapacityError unless keys without a row can have one."""
        held, _ = self.index.keys_and_rows()
        limit, num_groups = self.index.max_rows, self.index.eviction_groups
        if is_limited(self._config):
            assert limit is not None
            assert num_groups is not None
            require_room(self.name, limit, num_groups, [held, keys])
            return
        room = self.max_rows - len(held)
        if len(np.setdiff1d(keys.astype(np.int64), held)) > room:  # keys may be uint64
            raise recsdk_core.CapacityError(
                f"table {self.name!r} is full: it takes {self.max_rows} rows on this rank; raise "
                "num_embeddings, which the device memory of a table follows, or erase keys"
            )

    def erase(self, keys: NDArray[np.int64], *, return_outcomes: bool = False) -> Any:
        """Takes keys (N,) out of the table, which makes room for others.

        The row of a key is given to another one, with its initial values and fresh optimizer state,
        once no lease taken before is open. With `return_outcomes` returns outcomes uint8 (N,), else
        None. Raises BusyError while leases with a step are open: batches in flight, and those whose
        gradients wait for an update.
        """
        outcomes = self.index.erase(keys, return_outcomes=return_outcomes)
        self.copy_left()
        return outcomes

    def clear(self) -> None:
        """Removes every key."""
        self.index.clear()
        try:
            self.copy_left()
        finally:
            self._keys.forget_new_rows()

    def empty_host_table(self) -> recsdk_core.Table:
        """An empty table of the engine with the same configuration.

        Where memory limits the rows, it keeps all counts of ids, which the index then limits.
        """
        admission = self._config.admission
        limits: dict[str, Any] = {}
        if not is_limited(self._config):
            limits = dict(self._keys.limits)
            if admission is not None:
                limits["admission"] = replace(admission, max_records=None)
        shard, num_groups = self._shard, self._config.num_groups
        owned = None if limits else shard.owned_groups(num_groups)
        table = self._config.make_table(self._optimizer, owned, shard.columns, **limits)
        table._admission = admission  # for what saves say of it
        table._position = self.position
        if self.time is not None:
            table.time = self.time
        return table

    def check_idle(self) -> None:
        """Raises BusyError while batches are in flight, so that rows cannot be replaced."""
        try:
            self.index.check_idle()
        except recsdk_core.BusyError as error:
            raise recsdk_core.BusyError(
                f"table {self.name!r}: its rows cannot be replaced while batches are in flight or "
                "it is being saved; finish or drop them first"
            ) from error

    def take_rows_of(self, table: recsdk_core.Table) -> None:
        """Replaces the rows, the rate and the count by those of a table on the host."""
        self.replace_rows(rows_of(table))
        self.learning_rate = table.learning_rate

    @torch.no_grad()
    def replace_rows(self, rows: NewRows) -> None:
        """Replaces all rows by these, which fit into the table; without state: with a fresh one.

        Raises BusyError while batches are in flight; then nothing has changed. If the device fails,
        the table is empty: no key may read a row that is not its own.
        """
        self.copy_left()
        if not rows.metadata and rows.records is None:
            self.index.assign(rows.keys)
        else:
            self.index.assign(
                rows.keys,
                metadata=rows.metadata,
                records=_by_name(self.admission, rows.records),
                clock=rows.clock,
            )
        self.position = None
        self._keys.forget_new_rows()
        size = self._rows_per_batch()
        try:
            for begin in range(0, len(rows.keys), size):
                numbers = np.arange(begin, min(begin + size, len(rows.keys)))
                part = slice(begin, begin + size)
                state = {name: values[part] for name, values in rows.state.items()}
                self._rows.write(numbers, rows.weights[part], state or None)
                self._rows.settle()
            self._write_shared(rows.shared)
        except BaseException:
            self._end_leavers()  # no row is that of a key that left
            self.clear()
            raise
        self.update_count, self.log_decay = rows.update_count, rows.log_decay


def _are_last(keys: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether each key (n,) is the last of those that equal it."""
    _, from_end = np.unique(keys[::-1], return_index=True)
    found = np.zeros(len(keys), np.bool_)
    found[len(keys) - 1 - from_end] = True
    return found


def _by_name(rule: Admit | None, records: Records | None) -> dict[str, NDArray[np.int64]] | None:
    if records is None or rule is None:  # without a rule the index refuses them
        return None if records is None else records.by_name
    found = records.by_name
    for name in record_names(rule)[3:]:  # what was kept by another rule
        found.setdefault(name, np.zeros_like(records.counts))
    return {name: found[name] for name in record_names(rule)}
