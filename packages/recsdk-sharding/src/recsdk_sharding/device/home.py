"""Device memory as the home of rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import recsdk_core
from recsdk_core import ExportBatch, optim
from recsdk_core.checkpoint.replacing import NewRows
from recsdk_sharding._configs.configs import HashTableConfig
from recsdk_sharding.device.batch import plan_batch
from recsdk_sharding.device.pooling import DeviceBatch
from recsdk_sharding.device.saving import DeviceCut, take_saved_rows
from recsdk_sharding.device.table import DeviceTable
from recsdk_sharding.placement.devices import row_budget
from recsdk_sharding.placement.layout import Shard

__all__ = ["DeviceHome", "DeviceShard"]


@dataclass(frozen=True)
class DeviceHome:
    """Keeps rows and optimizer state in tensors on a device, and their keys on the host.

    The parameter of a table is the store of its shard's rows, float32 (row budget + 1, columns);
    the last row stays zero. The stores of several shards lie one after the other in one dimension.
    """

    device: torch.device
    pools_to_results = False
    copies_tables = False  # their rows are the parameter's

    def make_store(self, config: HashTableConfig, shards: Sequence[Shard]) -> torch.Tensor:
        """All the memory that the rows ever take."""
        shapes = [_shape_of(config, shard) for shard in shards]
        if not shapes:
            return torch.empty(0, config.embedding_dim, device=self.device)
        if len(shapes) == 1:
            return torch.zeros(*shapes[0], device=self.device)
        return torch.zeros(sum(map(math.prod, shapes)), device=self.device)

    def make_shards(
        self,
        config: HashTableConfig,
        shards: Sequence[Shard],
        store: torch.Tensor,
        optimizer: optim.Optimizer,
    ) -> list[DeviceShard]:
        """Empty tables, whose rows are contiguous views of the store."""
        shapes = [_shape_of(config, shard) for shard in shards]
        flat = store.detach().view(-1).split_with_sizes([math.prod(shape) for shape in shapes])
        return [
            DeviceShard(
                DeviceTable(
                    config,
                    own.view(shape),
                    optimizer,
                    shard.share_of(config.max_rows),
                    shard.columns,
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
        """Gives each shard its rows, one after the other, once all can take theirs."""
        for held, _ in changes:
            held.check_idle()
        for held, rows in changes:
            held.replace_rows(rows)

    def plan(self, mapped: Sequence[Any], request: Any, *, training: bool) -> DeviceBatch:
        """Plans which rows are added up in which order."""
        assert request.shape is None, "results are put together from what is pooled"
        assert request.shared is None, (
            "only what goes to the results at once is trained by other sums"
        )
        parcel, plans = plan_batch(mapped, training, request.weight_starts, request.pooled)
        return DeviceBatch(self.device, parcel, plans, request.num_values, training)


def _shape_of(config: HashTableConfig, shard: Shard) -> tuple[int, int]:
    return row_budget(config.num_embeddings, shard.ranks.world_size) + 1, shard.width


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

    def replace_rows(self, rows: NewRows) -> None:
        """Takes these rows in place of all that it has."""
        table, state = self.table, dict(rows.state)
        table.replace_rows([ExportBatch(keys=rows.keys, weights=rows.weights, state=state)])
        table.update_count, table.log_decay = rows.update_count, rows.log_decay

    def host_table(self) -> recsdk_core.Table:
        """An empty table on the host."""
        return self.table.empty_host_table()

    def cutter(self, table: recsdk_core.Table) -> Callable[[bool], DeviceCut]:
        """Cuts the rows on the device."""
        return partial(DeviceCut, self.table, table)

    def take_loaded(self, table: recsdk_core.Table) -> None:
        """Copies the rows to the device."""
        take_saved_rows(self.table, table)
