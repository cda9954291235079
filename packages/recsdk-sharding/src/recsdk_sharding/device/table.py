"""A shard whose rows are tensors on a device.

Shape letters: R rows of the store, n or N keys, D row width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.modules.embedding_configs import DataType

import recsdk_core
from recsdk_core import Admit, Evict, ExportBatch, IndexCut, _ext, optim
from recsdk_core.admission import record_names
from recsdk_core.checkpoint import Position
from recsdk_core.checkpoint.records import Records
from recsdk_core.checkpoint.replacing import NewRows, shared_of
from recsdk_core.eviction import EvictionClock
from recsdk_core.leavers import LeaveCause, Leavers, OnOverflow
from recsdk_core.nn.row_entries import rows_of
from recsdk_core.records import Explanation
from recsdk_core.table import DType
from recsdk_core.virtual_shards import eviction_groups_of
from recsdk_sharding._configs.configs import HashTableConfig
from recsdk_sharding.device.host_index import HostIndex, NumberedRows, is_limited, latest_rows
from recsdk_sharding.device.leaving import DeviceLeavers, UnwrittenRows, copied_rows
from recsdk_sharding.device.optimizers import Step, check_optimizer
from recsdk_sharding.device.store import DeviceStore, StoredTable
from recsdk_sharding.device.stored_rows import StoredRows, norms_of
from recsdk_sharding.exchange.parts import shown
from recsdk_sharding.placement.layout import Shard
from recsdk_sharding.placement.room import require_room

__all__ = ["DeviceTable", "Kept", "write_new_rows"]

_EXPORT_ROWS, _EXPORT_BYTES = 65_536, 2**24  # of a batch, by default; at least a row


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What rules keep of keys."""

    metadata: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Of eviction, (n,) by name."""
    records: Records | None = None
    """Of admission: keys without a row; None: the table has none."""
    clock: EvictionClock = field(default_factory=EvictionClock)


class DeviceTable:
    """Rows and optimizer state in tensors on a device, found through an index on the host.

    The store has one row more than the table takes keys: its last row keeps the default value,
    which refused and missing keys read. If they share rows, these are those before it. Row numbers,
    refusals and initial rows are the engine's.

    Offers what `recsdk_core.Table` offers to its owner: rows in and out, len, stats, learning rate,
    update count. The `index` maps keys and opens leases. It may be used from any thread; all else
    belongs to the thread and the current stream that train.
    """

    def __init__(
        self,
        config: HashTableConfig,
        store_RD: torch.Tensor,
        optimizer: optim.Optimizer,
        shard: Shard,
        *,
        is_joint: bool = True,
    ) -> None:
        """Makes an empty table; `shard`: which rows and columns of the config's it has.

        `store_RD`, `is_joint`: its rows, which may lie in a store with others, as
        `DeviceStore.holding`.

        Raises ValueError for an optimizer that cannot run on a device, and for 16-bit rows.
        """
        if config.data_type != DataType.FP32:
            raise ValueError(
                f"table {config.name!r}: data_type must be DataType.FP32 for rows in device "
                f"memory, got {config.data_type}; or keep the table on the cpu"
            )
        self._config = config
        self._take_optimizer(check_optimizer(optimizer, config.name))
        _check_records(config)
        self._num_shared = config.default.n or 0
        capacity = store_RD.shape[0] - 1 - self._num_shared
        self._shard = shard
        self._keys = HostIndex(config, capacity, shard)
        self.index = self._keys.index
        """From keys to row numbers."""
        self.position: Position | None = None
        """The checkpoint from which changes are counted; None: the next one must be full."""
        shape = recsdk_core.Table(store_RD.shape[1], optimizer=optimizer)
        self.state_fields: tuple[tuple[str, int], ...] = shape.state_fields
        """(name, width) of each field of optimizer state that a row has."""
        self._rows = StoredRows(
            config.name,
            store_RD,
            optimizer,
            self.state_fields,
            is_joint=is_joint,
            spare_value=config.default.value,
            num_shared=self._num_shared,
        )
        self._note_what_stays()
        self._keys.norms = self._norms
        self._write_shared(None)
        self._evicted_by_request = 0
        self.update_count = 0
        """Optimizer updates so far, empty ones included; set it when restoring a table."""
        self.log_decay = 0.0
        """Sum of log(1 - lr * weight_decay) over all updates with `catch_up`, else 0."""

    def _note_what_stays(self) -> None:
        """Attributes, not properties: the host work of each batch reads them of every table."""
        self.store: DeviceStore = self._rows.store
        """Where the rows are, with those of other tables."""
        self.stored: StoredTable = self._rows.stored
        """What the store knows of this table."""
        self.placing = self.stored.first_row, self.stored.default_row, self._num_shared
        """As `join_rows` takes it: its first row of the store, the default row, the shared ones."""
        self.spare_row_of_store = self.stored.spare_row
        """The spare row, as the store counts."""
        self.reads_initial_rows = self._config.default.kind == "initial_row"
        """Whether a key without a row reads its initial row, which is made for each batch."""
        self.begins_with_shared = self._keys.begins_with_shared
        """Whether a new row begins with the shared row that its key read."""

    def _take_optimizer(self, optimizer: optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.settings: tuple[Any, ...] = (optimizer, self.on_nonfinite)
        """What tables that are updated at once have in common."""

    # ---- what the table is ---------------------------------------------------------------------

    @property
    def dim(self) -> int:
        """Row width D."""
        return self._rows.weight_RD.shape[1]

    @property
    def name(self) -> str:
        """Part of the identity of initial rows."""
        return self.index.name

    @property
    def dtype(self) -> DType:
        """The type in which weights are stored."""
        return "float32"

    @property
    def seed(self) -> int:
        """Drives initial rows."""
        return self._config.seed

    @property
    def max_rows(self) -> int:
        """Keys beyond this number are refused; a group of ids may be full before."""
        return self._keys.limit

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self._rows.device

    @property
    def spare_row(self) -> int:
        """The last row, which keeps the default value."""
        return self._rows.weight_RD.shape[0] - 1

    @property
    def first_row(self) -> int:
        """The table's first row in the store."""
        return self.stored.first_row

    @property
    def on_nonfinite(self) -> str:
        """What becomes of gradients that are not finite: as in the config."""
        return self._config.on_nonfinite

    @property
    def optimizer(self) -> optim.Optimizer:
        """The optimizer, with the learning rate in use."""
        return self._optimizer

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next updates."""
        return self._optimizer.lr

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self._take_optimizer(replace(self._optimizer, lr=float(value)))

    @property
    def eviction(self) -> Evict | None:
        """Who leaves when the table is full; None: nobody."""
        return self.index.eviction

    @property
    def admission(self) -> Admit | None:
        """Which new keys get a row; None: all."""
        return self.index.admission

    @property
    def has_clock(self) -> bool:
        """Whether a rule counts steps, and keeps something of keys."""
        return self.eviction is not None or self.admission is not None

    @property
    def time(self) -> int | None:
        """As `recsdk_core.Table.time`."""
        return self.index.time

    @time.setter
    def time(self, value: int) -> None:
        self.index.time = value

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

    def copy_left(self, taken: Sequence[NumberedRows] = ()) -> None:
        """Copies rows that left, before those of other keys are written; only if somebody reads.

        `taken`: new rows that are about to be written, all that there were.
        """
        reader = self._keys.reader
        if reader is not None:
            self._copy_for(reader, taken)

    @torch.no_grad()
    def _copy_for(self, reader: DeviceLeavers, taken: Sequence[NumberedRows]) -> None:
        was_closed = reader.is_closed  # before all is taken that had left by then
        left = reader.take()
        if left:
            made = [*taken, *self._keys.unwritten_rows()]
            new = UnwrittenRows(made, self._keys.waiting_rows(), self._first_shared)
            reader.add([copied_rows(rows, new, self._rows) for rows in left])
        elif was_closed:
            self._keys.forget_reader()

    @property
    def _first_shared(self) -> int:
        return self.spare_row - self._num_shared

    def _end_leavers(self) -> None:
        reader = self._keys.reader
        if reader is not None:
            reader.close()

    def explain(self, key: int) -> Explanation:
        """As `recsdk_core.Table.explain`."""
        return self.index.explain(key)

    def __len__(self) -> int:
        """Number of visible keys."""
        return len(self.index)

    def __contains__(self, key: object) -> bool:
        """True if the key has a visible row."""
        return key in self.index

    def stats(self) -> recsdk_core.TableStats:
        """Counts of keys and updates, and the device memory of rows; waits for the device."""
        return recsdk_core.TableStats(
            **vars(self.index.stats()),
            updates=self.update_count,
            evicted_by_request=self._evicted_by_request,
            nonfinite=self._rows.num_nonfinite,
            row_bytes=self._rows.num_bytes,
            checkpoint_copied_bytes=0,
            checkpoint_waits=0,
            checkpoint_wait_seconds=0.0,
        )

    def check_invariants(self) -> None:
        """Raises RecsdkError naming the first broken invariant of the index."""
        self.index.check_invariants()

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

    # ---- training, on the device ---------------------------------------------------------------

    def next_step(self) -> Step:
        """The next update."""
        return Step(self._optimizer, self.update_count + 1, self.log_decay)

    def count_update(self, step: Step) -> None:
        """Notes that the update was made."""
        self.update_count, self.log_decay = step.count, step.next_log_decay()

    def _last_of(self, made: Sequence[NumberedRows]) -> Sequence[NumberedRows]:
        """What is to be written of new rows, of which some may have come to other keys since."""
        return made if self.eviction is None else latest_rows(made)

    def _write_new_rows(self, numbers: NDArray[np.int64] | None = None) -> None:
        """Writes the initial rows of all batches mapped by now; nothing reads them before.

        Where rows begin with shared ones, those of these rows (n,) and of batches before theirs, as
        what they begin with is known only then; None: of all.
        """
        write_new_rows([self])
        if self.begins_with_shared:
            self.begin_rows(None if numbers is None else self.last_call_of(numbers))

    def initial_rows(self, keys: NDArray[np.int64]) -> NDArray[np.float32]:
        """The initial rows of keys (n,), float32 (n, D). Thread-safe."""
        return self._keys.initial_rows(keys)

    def last_call_of(self, rows: NDArray[np.int64]) -> int:
        """For `begin_rows`: the last call that made one of these rows (n,), which have keys."""
        return self._keys.last_call_of(rows)

    @torch.no_grad()
    def begin_rows(self, last_call: int | None) -> None:
        """Copies shared rows to the new rows that wait for it, of calls up to this one."""
        taken = self._keys.take_waiting(last_call)
        if not taken:
            return
        try:
            self._rows.copy(
                np.concatenate([each.shared for each in taken]) + self._first_shared,
                np.concatenate([each.numbers for each in taken]),
            )
        except BaseException:
            self._keys.put_back_waiting(taken)
            raise

    @torch.no_grad()
    def _norms(self, numbers: NDArray[np.int64]) -> NDArray[np.float32]:
        """The norms of rows (n,); all batches before have been trained, or are with the device."""
        norms_n = self._rows.norms(numbers)
        for each in self._keys.unwritten_rows():
            places = np.searchsorted(numbers, each.numbers)
            is_there = numbers[np.minimum(places, len(numbers) - 1)] == each.numbers
            values = each.values_nD[torch.from_numpy(is_there)]
            norms_n[places[is_there]] = norms_of(values).numpy()
        return norms_n

    # ---- rows in and out -----------------------------------------------------------------------

    def lookup(self, keys: NDArray[np.int64], *, return_outcomes: bool = False) -> Any:
        """The rows of keys (N,), read only: numpy float32 (N, D).

        A key without one reads the default. With `return_outcomes` returns (values, outcomes uint8
        (N,)).
        """
        return self._read(*self.index.map(keys, insert=False), return_outcomes)

    def find_or_insert(
        self,
        keys: NDArray[np.int64],
        *,
        lease: recsdk_core.Lease | None = None,
        return_outcomes: bool = False,
    ) -> Any:
        """As `lookup`, but unseen keys get a row first."""
        return self._read(*self.index.map(keys, insert=True, lease=lease), return_outcomes)

    @torch.no_grad()
    def _read(
        self, rows_N: NDArray[np.int64], outcomes_N: NDArray[np.uint8], return_outcomes: bool
    ) -> Any:
        self._write_new_rows(rows_N[outcomes_N <= recsdk_core.Outcome.INSERTED])
        readable_N = np.empty(len(rows_N), np.int64)
        whole = (0, len(rows_N), 0, self._first_shared, self._num_shared)
        parts: Any = tuple(np.array([number], np.int64) for number in whole)
        recsdk_core.join_rows(rows_N, outcomes_N, parts, readable_N)
        values = self._rows.read(torch.from_numpy(readable_N).to(self.device))
        if self.reads_initial_rows:
            has_none_N = outcomes_N > recsdk_core.Outcome.INSERTED
            values[has_none_N] = self.initial_rows(rows_N[has_none_N])
        return (values, outcomes_N) if return_outcomes else values

    @torch.no_grad()
    def shared_rows(self) -> ExportBatch:
        """As `recsdk_core.Table.shared_rows`."""
        self._rows.settle()
        keys = _ext.shared_row_keys(self._num_shared)
        return self._rows_of(keys, torch.from_numpy(self._shared_numbers()).to(self.device), True)

    def _shared_numbers(self) -> NDArray[np.int64]:
        return np.arange(self._first_shared, self.spare_row)

    @torch.no_grad()
    def _write_shared(self, rows: NewRows | None) -> None:
        """Gives the rows that keys without one share their first values, but for these."""
        if not self._num_shared:
            return
        keys, numbers = _ext.shared_row_keys(self._num_shared), self._shared_numbers()
        self._rows.begin(int(numbers[0]), self._keys.initial_rows(keys))
        if rows is not None:
            which = eviction_groups_of(rows.keys, self._num_shared)
            if not np.array_equal(keys[which], rows.keys):
                raise ValueError(
                    f"table {self.name!r}: rows that keys without one share are not all among its "
                    f"{self._num_shared}; load them into a table with as many, or leave them out"
                )
            self._rows.write(numbers[which], rows.weights, rows.state or None)
        self._rows.settle()

    def export(self, batch_size: int | None = None, *, state: bool = True) -> Iterator[ExportBatch]:
        """As `recsdk_core.Table.export`."""
        if batch_size is None:
            batch_size = self._rows_per_batch()
        if batch_size < 1:
            raise ValueError(f"DeviceTable.export: batch_size must be at least 1, got {batch_size}")
        return self._export(batch_size, state)

    def _rows_per_batch(self) -> int:
        width = self.dim + sum(width for _, width in self.state_fields)
        return min(max(_EXPORT_BYTES // (8 + 4 * width), 1), _EXPORT_ROWS)

    @torch.no_grad()
    def _export(self, batch_size: int, state: bool) -> Iterator[ExportBatch]:
        for keys, numbers in self.index.export(batch_size):
            self._write_new_rows(numbers)  # keys may have come until now, not later
            yield self._rows_of(keys, torch.from_numpy(numbers).to(self.device), state)

    @torch.no_grad()
    def cut(self, *, changes_only: bool) -> IndexCut:
        """A cut of the index: of changes, the rows updated since `track_updates` are among them."""
        if changes_only:
            updated = self._rows.updated()
            self.index.note_changed(updated[updated < self.index.end_row])
        return self.index.cut(changes_only=changes_only)

    @torch.no_grad()
    def rows_of_cut(
        self, keys: NDArray[np.int64], numbers: NDArray[np.int64]
    ) -> Iterator[ExportBatch]:
        """The rows of keys (n,) of a cut, whose row numbers are (n,), as `export`."""
        self._write_new_rows(numbers)
        size = self._rows_per_batch()
        for begin in range(0, len(keys), size):
            some = slice(begin, begin + size)
            yield self._rows_of(keys[some], torch.from_numpy(numbers[some]).to(self.device), True)

    def track_updates(self) -> None:
        """Notes from here on which rows are updated, for `cut`."""
        self._rows.track_updates()

    def note_saved(self, position: Position | None) -> None:
        """Counts changes from here on: from the checkpoint at `position`."""
        self.position = position
        self.track_updates()

    def _rows_of(self, keys: NDArray[np.int64], rows_n: torch.Tensor, state: bool) -> ExportBatch:
        return ExportBatch(
            keys=keys,
            weights=self._rows.read(rows_n),
            state=self._rows.read_state(rows_n) if state else {},
        )

    @torch.no_grad()
    def rows(self) -> NewRows:
        """The rows that readers see now, by row number, with what the rules keep of keys.

        With eviction or admission BusyError while a save is under way.
        """
        kept = Kept()
        if not self.has_clock:
            keys, numbers = self.index.keys_and_rows()
        else:
            with self.index.cut() as cut:
                keys, numbers = cut.keys, cut.rows
                kept = self.kept_of(numbers)
        batches = list(self.rows_of_cut(keys, numbers))
        return NewRows(
            keys=keys,
            weights=np.concatenate([_no_rows(self.dim), *(each.weights for each in batches)]),
            state={
                name: np.concatenate([_no_rows(width), *(each.state[name] for each in batches)])
                for name, width in self.state_fields
            },
            update_count=self.update_count,
            log_decay=self.log_decay,
            metadata=kept.metadata,
            clock=kept.clock,
            records=kept.records,
            shared=shared_of(self.shared_rows()) if self._num_shared else None,
        )

    def kept_of(self, numbers: NDArray[np.int64]) -> Kept:
        """What the rules keep of the keys of rows (n,), ascending, and of keys without a row."""
        return Kept(
            metadata=self.index.metadata(numbers) if self.eviction is not None else {},
            records=None if self.admission is None else Records(*self.index.records().values()),
            clock=self.index.clock,
        )

    @torch.no_grad()
    def upsert(
        self,
        keys: NDArray[np.int64],
        values: NDArray[np.float32],
        state: Mapping[str, NDArray[np.float32]] | None = None,
        *,
        times: NDArray[np.int64] | int | None = None,
    ) -> None:
        """Writes rows (n, D) and their state (without it: fresh) for distinct keys (n,).

        With eviction others leave for them, and those that find no room are not written; no rule of
        admission keeps a key out; `times` as `recsdk_core.Table.upsert`. Raises CapacityError if
        they do not fit, BusyError while leases with a step are open, and ValueError or TypeError
        for arrays that do not fit; then nothing has changed.
        """
        self._write_new_rows()
        self.check_idle()
        # What can fail does so before keys are there.
        room = self._rows.make_room(len(keys), values, state)
        if self.eviction is None:
            self.check_room(keys)
        with self._keys.given_rows():
            numbers, outcomes = self.index.map(keys, insert=True, times=times, admits_all=True)
        numbers[outcomes == recsdk_core.Outcome.REFUSED] = self.spare_row
        self.index.note_changed(numbers[numbers != self.spare_row])
        self.copy_left()
        room.write(numbers, has_begun=True)

    @torch.no_grad()
    def give_rows(
        self,
        keys: NDArray[np.int64],
        values: NDArray[np.float32],
        state: Mapping[str, NDArray[np.float32]],
    ) -> None:
        """Writes rows (n, D) and their state of distinct keys (n,) that are there, unseen by it."""
        numbers, _ = self.index.map(keys, insert=False)
        self._write_new_rows(numbers)
        self._rows.write(numbers, values, state)
        self.index.note_changed(numbers)

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
        """An empty table of the engine with the same configuration."""
        limits = {} if is_limited(self._config) else self._keys.limits
        shard, num_groups = self._shard, self._config.num_groups
        owned = None if limits else shard.owned_groups(num_groups)
        table = self._config.make_table(self._optimizer, owned, shard.columns, **limits)
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


def _check_records(config: HashTableConfig) -> None:
    limit = None if config.admission is None else config.admission.max_records
    if limit is not None and not is_limited(config):
        raise ValueError(
            f"table {config.name!r}: max_records of admission divides over the groups of ids of "
            f"max_rows, which here is {config.max_rows} and does not limit the rows in device "
            "memory; set max_rows to num_embeddings or less, leave max_records out, or keep the "
            "table on the cpu"
        )


def _by_name(rule: Admit | None, records: Records | None) -> dict[str, NDArray[np.int64]] | None:
    if records is None or rule is None:  # without a rule the index refuses them
        return None if records is None else records.by_name
    found = records.by_name
    for name in record_names(rule)[3:]:  # what was kept by another rule
        found.setdefault(name, np.zeros_like(records.counts))
    return {name: found[name] for name in record_names(rule)}


def _no_rows(width: int) -> NDArray[np.float32]:
    return np.empty((0, width), np.float32)


@torch.no_grad()
def write_new_rows(tables: Sequence[DeviceTable]) -> None:
    """Writes the initial rows of all batches that tables have mapped by now.

    Those of a store at once. If it raises, they are written later.
    """
    stores: dict[int, list[DeviceTable]] = {}
    for table in tables:
        stores.setdefault(id(table.store), []).append(table)
    for own in stores.values():
        own[0].store.settle()
        taken = [(table, table._keys.take_new_rows()) for table in own]
        try:
            for table, entries in taken:
                table.copy_left(entries)
            with shown("new_rows"):
                _write_to_store([(table, table._last_of(made)) for table, made in taken if made])
        except BaseException:
            for table, entries in taken:
                table._keys.put_back(entries)
            raise


def _write_to_store(taken: Sequence[tuple[DeviceTable, Sequence[NumberedRows]]]) -> None:
    """Writes new rows of tables of one store, with fresh state; doing it again does no harm."""
    if not taken:
        return
    store = taken[0][0].store
    rows = [each.numbers_n + table.first_row for table, entries in taken for each in entries]
    values = [each.values_nD for _, entries in taken for each in entries]
    rows_n = _joined(rows).to(store.device, non_blocking=True)
    values_nD = _joined(values).to(store.device, non_blocking=True)
    store.weight_RD.index_copy_(0, rows_n, values_nD)
    _make_fresh(taken, rows_n)


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """One tensor in pinned memory."""
    if len(parts) == 1:
        return parts[0] if parts[0].is_pinned() else parts[0].pin_memory()
    joined = parts[0].new_empty((sum(map(len, parts)), *parts[0].shape[1:]), pin_memory=True)
    return torch.cat(list(parts), out=joined)


def _make_fresh(
    taken: Sequence[tuple[DeviceTable, Sequence[NumberedRows]]], rows_n: torch.Tensor
) -> None:
    """Gives new rows of the store fresh state; runs of tables that begin alike are one."""
    end = 0
    alike: list[tuple[Any, int, int]] = []
    for table, entries in taken:
        begin, end = end, end + sum(len(each.numbers_n) for each in entries)
        block = table.store.block_of(table.stored)
        same = alike and alike[-1][0][0] is block and alike[-1][0][1] == table.stored.fresh
        if same:
            alike[-1] = (alike[-1][0], alike[-1][1], end)
        else:
            alike.append(((block, table.stored.fresh), begin, end))
    for (block, fresh), first, last in alike:
        places_n = block.places(rows_n.narrow(0, first, last - first))
        for name, values in block.state.items():
            values.index_fill_(0, places_n, fresh[name])
