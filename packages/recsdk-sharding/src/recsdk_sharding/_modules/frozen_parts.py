"""Who reads what of frozen tables behind a plan.

Shape letters: N keys, G bags of a feature.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torchrec.distributed.types import ParameterSharding, ShardingType

from recsdk_core import lay_out_offsets

__all__ = ["TYPES", "Part", "Share", "is_by_rows", "parts_of"]

TYPES = (
    ShardingType.TABLE_WISE.value,
    ShardingType.ROW_WISE.value,
    ShardingType.COLUMN_WISE.value,
)
"""The sharding types that frozen tables know."""


@dataclass(frozen=True)
class Part:
    """What one rank has of a table."""

    rank: int
    columns: slice | None = None
    """Of a table that is cut by columns; else all."""


@dataclass(frozen=True)
class Share:
    """What one rank reads of one feature."""

    keys_N: torch.Tensor
    lengths_G: torch.Tensor
    weights_N: torch.Tensor | None
    places_N: torch.Tensor | None = None
    """Where the keys were among the feature's; None: they are all of them."""

    def of(self, places_N: torch.Tensor) -> Share:
        """Some of its keys, with all of its bags."""
        bag_N = torch.repeat_interleave(self.lengths_G)[places_N]
        weights_N = None if self.weights_N is None else self.weights_N[places_N]
        lengths_G = torch.bincount(bag_N, minlength=len(self.lengths_G))
        return Share(self.keys_N[places_N], lengths_G, weights_N, places_N)

    def offsets(self) -> torch.Tensor:
        """Where its bags begin, and the last one's end."""
        offsets: torch.Tensor = lay_out_offsets(self.lengths_G, [len(self.lengths_G)])
        return offsets


def is_by_rows(parts: Sequence[Part]) -> bool:
    """Whether each part has rows of its own."""
    return len(parts) > 1 and parts[0].columns is None


def parts_of(
    name: str, dim: int, plan: Mapping[str, ParameterSharding], world_size: int
) -> list[Part]:
    """What the ranks have of a table."""
    if name not in plan:
        raise ValueError(f"the plan lacks table {name!r}; it has {sorted(plan)}")
    sharding = plan[name]
    ranks = list(sharding.ranks or [])
    is_one = sharding.sharding_type == ShardingType.TABLE_WISE.value
    if sharding.sharding_type not in TYPES or not ranks or (is_one and len(ranks) != 1):
        raise ValueError(
            f"table {name!r} is planned as {sharding.sharding_type} on ranks {ranks}; frozen "
            "tables are sharded table_wise on one rank, row_wise or column_wise on several"
        )
    is_by_columns = sharding.sharding_type == ShardingType.COLUMN_WISE.value
    is_twice = not is_by_columns and len(set(ranks)) < len(ranks)
    if not all(0 <= rank < world_size for rank in ranks) or is_twice:
        raise ValueError(
            f"table {name!r} is planned on ranks {ranks} of {world_size}; plan for as many ranks "
            "as the environment has"
        )
    if not is_by_columns:
        return [Part(rank) for rank in ranks]
    columns = _columns_of(name, dim, sharding)
    return [Part(rank, each) for rank, each in zip(ranks, columns, strict=True)]


def _columns_of(name: str, dim: int, sharding: ParameterSharding) -> list[slice]:
    """The columns of each shard of a table that is cut by columns."""
    shards = [] if sharding.sharding_spec is None else sharding.sharding_spec.shards
    columns = [
        slice(shard.shard_offsets[1], shard.shard_offsets[1] + shard.shard_sizes[1])
        for shard in shards
    ]
    ends = [0, *(each.stop for each in columns)]
    follow_on = [each.start for each in columns] == ends[:-1]
    if len(columns) != len(sharding.ranks or []) or not follow_on or ends[-1] != dim:
        raise ValueError(
            f"table {name!r} of width {dim} is planned by columns, "
            f"{[[each.start, each.stop] for each in columns]} on ranks {sharding.ranks}; give its "
            "ParameterSharding a sharding_spec with a shard for each rank that together have all "
            "columns in order, as torchrec's planner does"
        )
    return columns
