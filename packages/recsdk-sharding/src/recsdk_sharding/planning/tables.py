"""The hash tables among what torchrec's planner may shard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from recsdk_core import optim
from recsdk_sharding.npu import compute_device_of
from recsdk_sharding.planning.traffic import Traffic, num_row_parts
from recsdk_sharding.rows import TableRows

__all__ = [
    "INDEX_BYTES_ON_DEVICE",
    "has_device_rows",
    "optimizer_of",
    "row_parts_of",
    "rows_of_option",
    "traffic_of",
]

INDEX_BYTES_ON_DEVICE = 3 * 8
"""Of an id in a batch for a device: its row, its bag, and its place among those of equal row."""


def rows_of_option(option: Any) -> TableRows | None:
    """The table that a sharding option is of; None for one of torchrec's own."""
    _, module = option.module
    for child in module.modules():
        if isinstance(child, TableRows) and child.config.name == option.name:
            return child
    return None


def optimizer_of(rows: TableRows) -> optim.Optimizer:
    """The table's optimizer; SGD, which keeps no state, if it has none yet."""
    return rows.optimizer or optim.SGD()


def has_device_rows(topology: Any) -> bool:
    """Whether tables keep their rows in device memory."""
    return compute_device_of(topology) != "cpu"


def row_parts_of(option: Any, topology: Any) -> int:
    """Into how many parts the rows of the option's column ranges are cut."""
    return num_row_parts(option.sharding_type, topology.world_size, topology.intra_group_size)


def traffic_of(option: Any, rows: TableRows, topology: Any, constraints: Any) -> Traffic:
    """What a step brings to each shard of the option.

    Raises ValueError for constraints that do not fit the table's features.
    """
    sizes = getattr(constraints, "batch_sizes", None) or [option.batch_size]
    poolings = option.num_poolings or getattr(constraints, "num_poolings", None) or [1.0]
    lengths, counts, times = (
        _for_features(name, values, rows)
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


def _for_features(name: str, values: Sequence[float], rows: TableRows) -> list[float]:
    """A value for each feature; one that is given alone is of all of them."""
    features = rows.config.feature_names
    if len(values) not in (1, len(features)):
        raise ValueError(
            f"table {rows.config.name!r}: {name} of its constraints has {len(values)} values for "
            f"{len(features)} features; give one for each of {features}, or one for all"
        )
    return [float(value) for value in values] * (len(features) if len(values) == 1 else 1)
