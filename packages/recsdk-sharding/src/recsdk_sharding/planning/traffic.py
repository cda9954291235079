"""What the batches of one step bring to one shard of a table.

Shape letters: B batch, D row width, F features, W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchrec.distributed.types import ShardingType

__all__ = ["Traffic", "num_row_shards"]

_ROW_WISE = ShardingType.ROW_WISE.value
_REPLICATED = ShardingType.DATA_PARALLEL.value
_BY_NODE = (ShardingType.TABLE_ROW_WISE.value, ShardingType.GRID_SHARD.value)


def num_row_shards(sharding_type: str, world_size: int, ranks_of_node: int) -> int:
    """The number of shards into which a column range's rows are cut."""
    if sharding_type == _ROW_WISE:
        return world_size
    return ranks_of_node if sharding_type in _BY_NODE else 1


@dataclass(frozen=True)
class Traffic:
    """What one step brings from all ranks, on average."""

    ids: float
    """Ids that the shard's rank maps."""
    bags: float
    """Bags that the shard's rank is asked for, empty ones included."""
    vectors: float
    """Vectors that the rank pools and sends: one for each bag that has ids there, or for each
    id."""
    gradients: float
    """Gradients of vectors that come back."""

    @staticmethod
    def of_features(
        ids_per_sample: Sequence[float],
        samples: Sequence[float],
        sharding_type: str,
        world_size: int,
        ranks_of_node: int,
        *,
        is_pooled: bool,
    ) -> Traffic:
        """The traffic of a table with these features; `samples` are one rank's, by feature."""
        shards = num_row_shards(sharding_type, world_size, ranks_of_node)
        pairs = list(zip(ids_per_sample, samples, strict=True))
        own_ids = sum(length * count for length, count in pairs)
        own_bags = sum(count for _, count in pairs)
        if is_pooled:
            own_vectors = sum(_share_with_ids(length, shards) * count for length, count in pairs)
        else:
            own_vectors = own_ids / shards
        ids, bags, gradients = own_ids * world_size / shards, own_bags * world_size, own_vectors
        if sharding_type == _REPLICATED:
            # A rank maps the ids of all ranks and gets all gradients, but pools for itself only.
            return Traffic(ids, bags, own_vectors, gradients * world_size)
        return Traffic(ids, bags, own_vectors * world_size, gradients * world_size)


def _share_with_ids(length: float, shards: int) -> float:
    """The share of bags of `length` ids that have some in one of `shards` shards."""
    if length <= 1:
        return length / shards
    return 1.0 - float((1 - 1 / shards) ** length)
