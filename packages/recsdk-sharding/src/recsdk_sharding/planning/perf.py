"""Time that shards take, for torchrec's planner.

Shape letters: D row width, W ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchrec.distributed.planner.constants import DEFAULT_PERF_ESTIMATOR, kernel_bw_lookup
from torchrec.distributed.planner.estimator import EmbeddingPerfEstimatorFactory
from torchrec.distributed.planner.types import (
    CollectiveType,
    ParameterConstraints,
    Perf,
    ShardEstimator,
    ShardingOption,
    Topology,
)
from torchrec.distributed.types import ShardingType

from recsdk_sharding._compat.private import sharder_data
from recsdk_sharding._modules.sharding_types import comm_op_of
from recsdk_sharding.planning.checking import constraints_of, finite_of, topology_of
from recsdk_sharding.planning.memory import record_bytes
from recsdk_sharding.planning.planned_tables import (
    COPIED_BYTES,
    PlannedTable,
    has_device_rows,
    table_of_option,
    traffic_of,
    weight_bytes_of,
)
from recsdk_sharding.planning.traffic import Traffic

__all__ = ["HashPerfEstimator"]

_FLOAT_BYTES = 4
_ID_BYTES = 8
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_REPLICATED = ShardingType.DATA_PARALLEL.value


class HashPerfEstimator(ShardEstimator):  # type: ignore[misc]
    """Times of hash tables by torchrec's model; of other tables as torchrec estimates them.

    The model: bytes moved divided by the topology's bandwidths, in milliseconds. Hash tables differ
    from torchrec's in this: the host maps ids to rows (`prefetch_compute`), once for every column
    range and, with data_parallel, on every rank for all ranks; each shard of a rank takes some time
    there too; only vectors of ids that are there travel, but with data_parallel all gradients; an
    update reads and writes optimizer state.
    """

    def __init__(
        self,
        topology: Topology,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        host_ids_per_ms: float = 5_000.0,
        shard_ms: float = 0.02,
    ) -> None:
        """`host_ids_per_ms`: ids that one rank's host prepares and maps in a millisecond.

        One core of the development machine maps 2,200 to 16,000, in batches of 10,000 ids and more.
        `shard_ms`: milliseconds of a step for each shard that a rank has, whatever it is sent. So
        of ways that move as much, that with fewer shards is cheaper: whole tables on one rank each,
        where these come out even. Source: `docs/perf/shared_memory_epyc_202611.md`, tables cut by
        rows beside the same on one rank each.

        Raises TypeError or ValueError for what does not fit: the first must be above 0, the second
        at least 0, both finite.
        """
        self._topology = topology_of(topology)
        self._constraints = constraints_of(constraints)
        self._host_ids_per_ms = finite_of("host_ids_per_ms", host_ids_per_ms)
        self._shard_ms = finite_of("shard_ms", shard_ms)
        if not self._host_ids_per_ms > 0:
            raise ValueError(f"host_ids_per_ms must be above 0, got {host_ids_per_ms}")
        if not self._shard_ms >= 0:
            raise ValueError(f"shard_ms must be at least 0, got {shard_ms}")
        self._stock = EmbeddingPerfEstimatorFactory.create(
            DEFAULT_PERF_ESTIMATOR, topology=topology, constraints=self._constraints
        )

    def estimate(
        self, sharding_options: list[ShardingOption], sharder_data_map: Any = None
    ) -> None:
        """Sets `perf` of every shard."""
        others = []
        for option in sharding_options:
            table = table_of_option(option)
            if table is None:
                others.append(option)
                continue
            data = sharder_data((sharder_data_map or {}).get(option.module_type_key))
            step = self._step(option, table, getattr(data, "qcomm_dtype_sizes", {}))
            for shard in option.shards:
                shard.perf = self._perf(step, table, shard.size[1])
        if others:
            self._stock.estimate(others, sharder_data_map)

    def _step(
        self, option: ShardingOption, table: PlannedTable, comm_bytes: Mapping[str, Any]
    ) -> _Step:
        topology, is_replicated = self._topology, option.sharding_type == _REPLICATED
        traffic = traffic_of(option, table, topology, self._constraints.get(option.name))
        sizes = (_FLOAT_BYTES, _FLOAT_BYTES)
        if not is_replicated:
            operation = comm_op_of(option.sharding_type, is_sequence=not option.is_pooled)
            sizes = comm_bytes.get(operation.name, sizes)
        memory = kernel_bw_lookup(
            topology.compute_device,
            option.compute_kernel,
            topology.hbm_mem_bw,
            topology.ddr_mem_bw,
            topology.hbm_to_ddr_mem_bw,
        )
        network = topology.comms_bandwidths.get_bw(
            topology.local_world_size, topology.world_size, CollectiveType.ALL_TO_ALL
        )
        id_bytes = _ID_BYTES + weight_bytes_of(option, self._constraints.get(option.name))
        return _Step(traffic, is_replicated, sizes, id_bytes, memory, network)

    def _perf(self, step: _Step, table: PlannedTable, width: int) -> Perf:
        world_size, traffic = self._topology.world_size, step.traffic
        record = record_bytes(width, table.optimizer, table.dtype)
        weights = width * _DTYPE_BYTES[table.dtype]
        vector = width * _FLOAT_BYTES
        to_others = (world_size - 1) / world_size
        pooled_ids = traffic.ids / world_size if step.is_replicated else traffic.ids
        fwd = pooled_ids * (step.id_bytes + weights) + traffic.vectors * vector
        bwd = traffic.gradients * vector + traffic.ids * (step.id_bytes + vector + 2 * record)
        sent = 0.0 if step.is_replicated else traffic.vectors
        forward_bytes, backward_bytes = step.comm_bytes
        return Perf(
            fwd_compute=fwd / step.memory,
            fwd_comms=sent * width * forward_bytes * to_others / step.network,
            bwd_compute=bwd / step.memory,
            bwd_comms=traffic.gradients * width * backward_bytes * to_others / step.network,
            input_dist_comms=traffic.ids * step.id_bytes * to_others / step.network,
            prefetch_compute=self._host_time(traffic),
        )

    def _host_time(self, traffic: Traffic) -> float:
        mapping = self._shard_ms + traffic.ids / self._host_ids_per_ms
        if not has_device_rows(self._topology):
            return mapping
        copied = traffic.ids * COPIED_BYTES
        return mapping + copied / float(self._topology.hbm_to_ddr_mem_bw)


@dataclass(frozen=True)
class _Step:
    """What a step costs each shard of an option, whatever its width."""

    traffic: Traffic
    is_replicated: bool
    comm_bytes: tuple[float, float]
    """Bytes of a number on its way, forward and backward."""
    id_bytes: int
    """Bytes of an id, with its weight if it has one."""
    memory: float
    """Bytes a millisecond."""
    network: float
    """Bytes a millisecond."""
