"""The hash tables among what torchrec's planner may shard."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from recsdk_core import optim
from recsdk_core.nn import HashEmbeddingBag
from recsdk_core.table import DType
from recsdk_core.virtual_shards import NUM_VIRTUAL_SHARDS
from recsdk_sharding._adapt.npu import compute_device_of
from recsdk_sharding._rows.rows import TableRows
from recsdk_sharding.placement.devices import row_budget, rows_with_eviction
from recsdk_sharding.planning.traffic import Traffic, num_row_shards

__all__ = [
    "COPIED_BYTES",
    "INDEX_BYTES_ON_DEVICE",
    "PlannedTable",
    "has_device_rows",
    "row_shards_of",
    "table_of_option",
    "traffic_of",
    "weight_bytes_of",
]

COPIED_BYTES = 2 * 4
"""Bytes of an id that are copied to a device: its row, and at most as many for its bag."""

INDEX_BYTES_ON_DEVICE = COPIED_BYTES + 4 * 8
"""Bytes of an id in a batch on a device: those, and what is found there (`device.kernels`'s
`RowIndex`)."""

_WEIGHT_BYTES = 4


@dataclass(frozen=True)
class PlannedTable:
    """What estimates need to know of a table."""

    name: str
    num_embeddings: int
    max_rows: int | None
    dtype: DType
    optimizer: optim.Optimizer
    """The optimizer; SGD, which keeps no state, if it has none yet."""
    num_features: int
    num_groups: int | None = None
    """Groups of ids that `max_rows` divides over."""
    evicts: bool = False
    num_shared: int = 0
    """Rows that ids without one share, on each rank."""

    def rows_on_device(self, num_shards: int) -> int:
        """For which one of so many shards of its rows has room in device memory."""
        cuts = [count for count in (self.num_groups, self.num_shared) if count]
        units = max(min(cuts, default=NUM_VIRTUAL_SHARDS), num_shards)  # a shard has whole ones
        budget = row_budget(self.num_embeddings, math.ceil(units / num_shards) / units)
        if self.max_rows is None or self.num_groups is None:
            return rows_with_eviction(budget) if self.evicts else budget
        if not self.evicts and self.max_rows > self.num_embeddings:
            return budget
        of_group = math.ceil(self.max_rows / self.num_groups)
        quota = min(self.max_rows, math.ceil(self.num_groups / num_shards) * of_group)
        return max(budget, rows_with_eviction(quota) if self.evicts else quota)


def table_of_option(option: Any) -> PlannedTable | None:
    """The hash table of a sharding option; None for one of torchrec's own tables."""
    _, module = option.module
    if isinstance(module, HashEmbeddingBag):
        table, planned = module.table, int(option.tensor.shape[0])
        return PlannedTable(
            table.name,
            planned,
            table.max_rows,
            table.dtype,
            table.optimizer,
            num_features=1,
            num_groups=table.eviction_groups,
            evicts=table.eviction is not None,
            num_shared=table.default.n or 0,
        )
    for child in module.modules():
        if isinstance(child, TableRows) and child.config.name == option.name:
            config, optimizer = child.config, child.optimizer or optim.SGD()
            return PlannedTable(
                config.name,
                config.num_embeddings,
                config.max_rows,
                config.dtype,
                optimizer,
                len(config.feature_names),
                config.num_groups,
                config.eviction is not None,
                config.default.n or 0,
            )
    return None


def has_device_rows(topology: Any) -> bool:
    """Whether tables keep their rows in device memory."""
    return compute_device_of(topology) != "cpu"


def row_shards_of(option: Any, topology: Any) -> int:
    """The number of shards into which the rows of the option's column ranges are cut."""
    return num_row_shards(option.sharding_type, topology.world_size, topology.intra_group_size)


def weight_bytes_of(option: Any, constraints: Any) -> int:
    """Bytes of an id's weight: 0 unless the module or the constraints say that ids have weights."""
    given = option.is_weighted
    is_weighted = getattr(constraints, "is_weighted", False) if given is None else given
    return _WEIGHT_BYTES if is_weighted else 0


def traffic_of(option: Any, table: PlannedTable, topology: Any, constraints: Any) -> Traffic:
    """What a step brings to each shard of the option.

    Raises ValueError for constraints that do not fit the table's features.
    """
    sizes = getattr(constraints, "batch_sizes", None) or [option.batch_size]
    poolings = option.num_poolings or getattr(constraints, "num_poolings", None) or [1.0]
    lengths, counts, times = (
        _for_features(name, values, table)
        for name, values in (
            ("pooling_factors", option.input_lengths),
            ("batch_sizes", sizes),
            ("num_poolings", poolings),
        )
    )
    return Traffic.of_features(
        lengths,
        [count * many for count, many in zip(counts, times, strict=True)],
        option.sharding_type,
        topology.world_size,
        topology.intra_group_size,
        is_pooled=option.is_pooled,
    )


def _for_features(name: str, values: Sequence[float], table: PlannedTable) -> list[float]:
    """A value for each feature; a single value holds for all of them."""
    count = table.num_features
    if len(values) not in (1, count):
        raise ValueError(
            f"table {table.name!r}: {name} of its constraints has {len(values)} values for "
            f"{count} features; give one for each of its feature_names, or one for all"
        )
    return [float(value) for value in values] * (count if len(values) == 1 else 1)
