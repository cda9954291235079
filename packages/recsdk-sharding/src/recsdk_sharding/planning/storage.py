"""Memory that shards take, for torchrec's planner."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    ShardEstimator,
    ShardingOption,
    Storage,
    Topology,
)

from recsdk_sharding.planning.checking import constraints_of, count_of, topology_of
from recsdk_sharding.planning.constraints import planned_rows
from recsdk_sharding.planning.memory import memory_of_shard
from recsdk_sharding.planning.planned_tables import (
    INDEX_BYTES_ON_DEVICE,
    PlannedTable,
    has_device_rows,
    row_shards_of,
    table_of_option,
    traffic_of,
    weight_bytes_of,
)
from recsdk_sharding.planning.traffic import Traffic

__all__ = ["HashStorageEstimator"]

_ID_BYTES = 8 + 8 + 1  # an id, its row number and its outcome
_OFFSET_BYTES = 8
_FLOAT_BYTES = 4


class HashStorageEstimator(ShardEstimator):  # type: ignore[misc]
    """Memory of hash tables by expected rows and traffic; of others as torchrec estimates it.

    On the cpu a shard takes what its expected rows take in the engine. On a device it takes its
    whole row budget, and on the host the index of the expected rows. The ids of batches in flight,
    and one batch's vectors and gradients, are added.
    """

    def __init__(
        self,
        topology: Topology,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        batches_in_flight: int = 7,
    ) -> None:
        """`batches_in_flight`: batches that a pipeline has mapped, the one in training included.

        Raises TypeError or ValueError for what does not fit.
        """
        self._topology = topology_of(topology)
        self._constraints = constraints_of(constraints)
        self._batches_in_flight = count_of("batches_in_flight", batches_in_flight, 1)
        self._stock = EmbeddingStorageEstimator(topology, self._constraints)

    def estimate(
        self,
        sharding_options: list[ShardingOption],
        sharder_data_map: Any = None,
    ) -> None:
        """Sets `storage` of every shard.

        Raises ValueError for a table that expects more rows than its device has room for.
        """
        others = []
        for option in sharding_options:
            table = table_of_option(option)
            if table is None:
                others.append(option)
            else:
                self._estimate(option, table)
        if others:
            self._stock.estimate(others, sharder_data_map)

    def _estimate(self, option: ShardingOption, table: PlannedTable) -> None:
        constraints = self._constraints.get(option.name)
        num_rows = planned_rows(table, constraints)
        num_shards = row_shards_of(option, self._topology)
        on_device = has_device_rows(self._topology)
        if on_device:
            _check_budget(table, num_rows, num_shards)
        traffic = traffic_of(option, table, self._topology, constraints)
        id_bytes = _ID_BYTES + weight_bytes_of(option, constraints)
        for shard in option.shards:
            width = shard.size[1]
            memory = memory_of_shard(
                table,
                num_rows=num_rows,
                width=width,
                num_shards=num_shards,
                on_device=on_device,
            )
            batches = self._memory_of_batches(traffic, width, id_bytes, on_device)
            shard.storage = Storage(hbm=memory.device + batches.hbm, ddr=memory.host + batches.ddr)

    def _memory_of_batches(
        self, traffic: Traffic, width: int, id_bytes: int, on_device: bool
    ) -> Storage:
        ids = traffic.ids * id_bytes + traffic.bags * _OFFSET_BYTES
        floats = (traffic.vectors + traffic.gradients) * width * _FLOAT_BYTES
        host, device = ids * self._batches_in_flight, floats
        if on_device:
            device += traffic.ids * INDEX_BYTES_ON_DEVICE * self._batches_in_flight
            return Storage(hbm=math.ceil(device), ddr=math.ceil(host))
        return Storage(hbm=0, ddr=math.ceil(host + device))


def _check_budget(table: PlannedTable, num_rows: int, num_shards: int) -> None:
    budget = table.rows_on_device(num_shards) * num_shards
    if num_rows > budget:
        raise ValueError(
            f"table {table.name!r} is to have {num_rows} rows (expected_rows * growth), but "
            f"num_embeddings={table.num_embeddings} makes room for {budget} in device "
            "memory, and further ids would be refused; raise num_embeddings"
        )
