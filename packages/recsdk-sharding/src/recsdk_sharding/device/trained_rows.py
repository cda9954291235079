"""The part of a shard on a device that training uses: its keys, its rows, and rows that are new.

Shape letters: R rows of the store, n or N keys, D row width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.modules.embedding_configs import DataType

import recsdk_core
from recsdk_core import Admit, Evict, _ext, optim
from recsdk_core.checkpoint import Position
from recsdk_core.checkpoint.replacing import NewRows
from recsdk_core.table import DType
from recsdk_core.virtual_shards import eviction_groups_of
from recsdk_sharding._configs.configs import HashTableConfig
from recsdk_sharding.device.clocks import UpdateClock
from recsdk_sharding.device.host_index import HostIndex, NumberedRows
from recsdk_sharding.device.leaving import DeviceLeavers, UnwrittenRows, copied_rows
from recsdk_sharding.device.new_rows import write_new_rows
from recsdk_sharding.device.optimizers import Step, check_optimizer
from recsdk_sharding.device.store import DeviceStore, StoredTable
from recsdk_sharding.device.stored_rows import StoredRows, norms_of
from recsdk_sharding.placement.layout import Shard

__all__ = ["TrainedRows"]


class TrainedRows:
    """An index on the host, and the rows of its keys in tensors on a device."""

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
        self._keys.tell(self.store.news, id(self.stored))
        self.clock = UpdateClock()
        """Counts its updates, and those of tables that are trained together with it."""
        self.clock.num_tables = 1
        self._write_shared(None)
        self._evicted_by_request = 0

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
    def update_count(self) -> int:
        """Optimizer updates so far, empty ones included; set it when restoring a table."""
        return self.clock.count

    @update_count.setter
    def update_count(self, value: int) -> None:
        UpdateClock(value, self.log_decay).give_to([self])

    @property
    def log_decay(self) -> float:
        """Sum of log(1 - lr * weight_decay) over all updates with `catch_up`, else 0."""
        return self.clock.log_decay

    @log_decay.setter
    def log_decay(self, value: float) -> None:
        UpdateClock(self.update_count, value).give_to([self])

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

    # ---- training, on the device -----------------------------------------------------------------

    def next_step(self) -> Step:
        """The next update."""
        return Step(self._optimizer, self.clock.count + 1, self.clock.log_decay)

    @property
    def has_news(self) -> bool:
        """Whether there are new rows to be written, or somebody reads what leaves."""
        return id(self.stored) in self.store.news

    def take_new_rows(self) -> list[NumberedRows]:
        """The new rows of all batches mapped by now; they must be written, or put back."""
        return self._keys.take_new_rows()

    def put_back(self, made: list[NumberedRows]) -> None:
        """New rows that were taken are written later."""
        self._keys.put_back(made)

    def _write_new_rows(self, numbers: NDArray[np.int64] | None = None) -> None:
        """Writes the initial rows of all batches mapped by now; nothing reads them before.

        Where rows begin with shared ones, those of these rows (n,) and of batches before theirs, as
        what they begin with is known only then; None: of all.
        """
        write_new_rows([[self]])
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

    @property
    def _first_shared(self) -> int:
        return self.spare_row - self._num_shared

    @torch.no_grad()
    def _norms(self, numbers: NDArray[np.int64]) -> NDArray[np.float32]:
        """The norms of rows (n,); all batches before have been trained, or are with the device."""
        norms_n = self._rows.norms(numbers)
        if not len(numbers):
            return norms_n  # keys of rows to be written may have been erased
        for each in self._keys.unwritten_rows():
            places = np.searchsorted(numbers, each.numbers)
            is_there = numbers[np.minimum(places, len(numbers) - 1)] == each.numbers
            values = each.values_nD[torch.from_numpy(is_there)]
            norms_n[places[is_there]] = norms_of(values).numpy()
        return norms_n

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

    def _end_leavers(self) -> None:
        reader = self._keys.reader
        if reader is not None:
            reader.close()
