"""Device memory as the home of rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import recsdk_core
from recsdk_core import StoreNumbers, optim
from recsdk_core.checkpoint.replacing import NewRows, replace_rows
from recsdk_core.nn.row_entries import rows_of
from recsdk_sharding._configs.configs import HashTableConfig
from recsdk_sharding.device.batch import PlannedBatch
from recsdk_sharding.device.host_index import rows_of_shard
from recsdk_sharding.device.pooling import DeviceBatch
from recsdk_sharding.device.saving import DeviceCut, take_saved_rows
from recsdk_sharding.device.table import DeviceTable
from recsdk_sharding.placement.layout import Shard

__all__ = ["DeviceHome", "DevicePlan", "DeviceShard"]


@dataclass(frozen=True)
class DeviceHome:
    """Keeps rows and optimizer state in tensors on a device, and their keys on the host.

    The parameter of a table has its shard's rows, float32 (row budget + 1, columns), and before the
    last row those that keys without one share; the last keeps the default value. Those of several
    shards lie one after the other in one dimension. Tables that are made together, and whose shards
    have one width, lie in one store.
    """

    device: torch.device
    pools_to_results = True
    averages_late_weights = False
    trains_with_all_gradients = False
    reads_at_once = False
    copies_tables = False  # their rows are the parameter's

    def make_stores(
        self, tables: Sequence[tuple[HashTableConfig, Sequence[Shard]]]
    ) -> list[torch.Tensor]:
        """All the memory that the rows ever take; tables of one width lie in one store."""
        sizes: dict[Any, int] = {}
        places: list[tuple[Any, int, int]] = []
        for number, (config, shards) in enumerate(tables):
            widths = {shard.width for shard in shards}
            store = widths.pop() if len(widths) == 1 else ("alone", number)
            count = sum(math.prod(_shape_of(config, shard)) for shard in shards)
            places.append((store, sizes.get(store, 0), count))
            sizes[store] = sizes.get(store, 0) + count
        new = partial(torch.zeros, dtype=torch.float32, device=self.device)
        memory = {store: new(size) for store, size in sizes.items()}
        made = []
        for (config, shards), (store, first, count) in zip(tables, places, strict=True):
            flat = memory[store].narrow(0, first, count)
            width = config.embedding_dim if not shards else shards[0].width
            made.append(flat if len(shards) > 1 else flat.view(-1, width))
        return made

    def make_shards(
        self,
        config: HashTableConfig,
        shards: Sequence[Shard],
        store: torch.Tensor,
        optimizer: optim.Optimizer,
    ) -> list[DeviceShard]:
        """Empty tables, whose rows are contiguous views of the store."""
        shapes = [_shape_of(config, shard) for shard in shards]
        is_joint = len({shard.width for shard in shards}) == 1
        flat = store.detach().view(-1).split_with_sizes([math.prod(shape) for shape in shapes])
        return [
            DeviceShard(
                DeviceTable(
                    config,
                    own.view(shape),
                    optimizer,
                    shard,
                    is_joint=is_joint,
                )
            )
            for own, shape, shard in zip(flat, shapes, shards, strict=True)
        ]

    def check_dtype(self, table: str, dtype: torch.dtype) -> None:
        """Raises ValueError for other rows than float32."""
        if dtype != torch.float32:
            raise ValueError(
                f"table {table!r}: rows in device memory are float32, and cannot become {dtype}; "
                "convert what the module gives instead"
            )

    def replace_rows(self, changes: Sequence[tuple[Any, NewRows]]) -> None:
        """Gives each shard its rows, one after the other; if one fails all get back what they had.

        What they had is on the host meanwhile. The next save of a shard that got it back must be
        full. A shard that cannot get it back, since the device fails once more, is empty.
        """
        for held, _ in changes:
            held.check_idle()
        with ExitStack() as put_back:
            for held, rows in changes:
                put_back.callback(held.keep())
                held.replace_rows(rows)
            put_back.pop_all()

    def plan(self, bags: Any, request: Any, *, training: bool) -> DevicePlan:
        """Puts together what goes to the device."""
        return DevicePlan(self.device, bags, request, training=training)


class DevicePlan:
    """A batch whose keys are not mapped yet."""

    def __init__(self, device: torch.device, bags: Any, request: Any, *, training: bool) -> None:
        self._device, self._training = device, training
        self._planned = PlannedBatch(bags, request, training=training)
        self.numbers: StoreNumbers | None = self._planned.numbers
        """Where row numbers are written when keys are mapped; None: `batch` does."""

    def batch(self, bags: Any, request: Any) -> DeviceBatch:
        """The mapped batch."""
        assert request.shared is None, "replicas on devices train with the vectors' gradients"
        planned = self._planned
        return DeviceBatch(
            self._device,
            planned.parcel,
            planned.mapped(bags),
            planned.leases(bags),
            request.num_values,
            request.shape,
            self._training,
        )


def _shape_of(config: HashTableConfig, shard: Shard) -> tuple[int, int]:
    return rows_of_shard(config, shard) + (config.default.n or 0) + 1, shard.width


@dataclass(frozen=True)
class DeviceShard:
    """A shard in a table on a device."""

    table: DeviceTable

    @property
    def index(self) -> recsdk_core.Index:
        """From keys to row numbers, on the host."""
        return self.table.index

    def check_idle(self) -> None:
        """Raises BusyError while batches are in flight, so that rows cannot be replaced."""
        self.table.check_idle()

    def check_room(self, keys: NDArray[np.int64]) -> None:
        """Raises CapacityError unless keys (n,) without a row can have one."""
        self.table.check_room(keys)

    def keep(self) -> Callable[[], None]:
        """Copies its rows to the host; returns what puts them back."""
        return partial(self.table.replace_rows, self.table.rows())

    def replace_rows(self, rows: NewRows) -> None:
        """Takes these rows in place of all that it has. If that fails it is empty.

        With eviction the lowest keys of groups that are too large leave at once, as do counts of
        keys without a row beyond their limit.
        """
        if self.table.has_clock:
            host = self.table.empty_host_table()
            replace_rows([(host, rows)])
            rows = rows_of(host)
        self.table.replace_rows(rows)

    def rows(self) -> NewRows:
        """The rows that readers see now, with what the rules keep of keys."""
        return self.table.rows()

    def host_table(self) -> recsdk_core.Table:
        """An empty table on the host."""
        return self.table.empty_host_table()

    def cutter(self, table: recsdk_core.Table) -> Callable[[bool], DeviceCut]:
        """Cuts the rows on the device."""
        return partial(DeviceCut, self.table, table)

    def take_loaded(self, table: recsdk_core.Table) -> None:
        """Copies the rows to the device."""
        take_saved_rows(self.table, table)
