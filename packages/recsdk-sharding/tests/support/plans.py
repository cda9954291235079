"""Explicit sharding plans: what torchrec's planner could say, written down.

Shape letters: W ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding

Spec: TypeAlias = tuple[Any, ...]
"""("row_wise",), ("data_parallel",), ("table_wise", rank), ("table_row_wise", node), or
("column_wise" | "table_column_wise", [(width, rank), ...]), or
("grid_shard", [(width, node), ...])."""
Plan: TypeAlias = dict[str, Spec]
"""How to shard each table of `worlds`."""


def module_plan(
    configs: Sequence[Any],
    specs: Mapping[str, Spec],
    world_size: int,
    local_size: int,
    device: str = "cpu",
) -> EmbeddingModuleShardingPlan:
    """The plan of one collection, on a type of device."""
    plan = EmbeddingModuleShardingPlan()
    for config in configs:
        cut = _cut(config, specs[config.name], world_size, local_size)
        plan[config.name] = _sharding(specs[config.name][0], cut, world_size, device)
    return plan


def _sharding(
    kind: str, cut: Sequence[tuple[int, int, int, int, int]], world_size: int, device: str
) -> ParameterSharding:
    if kind == "data_parallel":
        return ParameterSharding(kind, "dense", list(range(world_size)), None)
    places = ("cpu" if device == "cpu" else f"{device}:{shard[-1]}" for shard in cut)
    shards = [
        ShardMetadata([row, column], [rows, columns], f"rank:{rank}/{place}")
        for (row, column, rows, columns, rank), place in zip(cut, places, strict=True)
    ]
    ranks = [shard.placement.rank() for shard in shards]
    return ParameterSharding(kind, "fused", ranks, EnumerableShardingSpec(shards))


def _cut(
    config: Any, spec: Spec, world_size: int, local_size: int
) -> list[tuple[int, int, int, int, int]]:
    """First row and column, rows, columns and rank of every shard."""
    kind, dim = spec[0], config.embedding_dim
    if kind == "data_parallel":
        return []
    if kind == "row_wise":
        ranges = [(0, dim, list(range(world_size)))]
    elif kind == "table_wise":
        ranges = [(0, dim, [spec[1]])]
    elif kind == "table_row_wise":
        ranges = [(0, dim, _ranks_of_node(spec[1], local_size))]
    else:
        ranges, first = [], 0
        for width, place in spec[1]:
            ranks = _ranks_of_node(place, local_size) if kind == "grid_shard" else [place]
            ranges.append((first, width, ranks))
            first += width
        assert first == dim, f"the columns of {config.name} add up to {first}, not {dim}"
    shards = []
    for first, width, ranks in ranges:
        cuts = [config.num_embeddings * i // len(ranks) for i in range(len(ranks) + 1)]
        for row, end, rank in zip(cuts[:-1], cuts[1:], ranks, strict=True):
            shards.append((row, first, end - row, width, rank))
    return shards


def _ranks_of_node(node: int, local_size: int) -> list[int]:
    return list(range(node * local_size, (node + 1) * local_size))


def same(*spec: Any) -> Plan:
    """One way for all tables."""
    return dict.fromkeys(("user", "genre", "other"), spec)


def columns(kind: str, places: list[int]) -> Plan:
    """Tables of widths 8, 3 and 5 cut over two or more places."""
    first, second, *_ = [*places, *places]
    last = places[-1]
    return {
        "user": (kind, [(3, first), (4, second), (1, last)]),
        "genre": (kind, [(1, second), (2, first)]),
        "other": (kind, [(5, last)]),
    }


def replicated(plan: Plan) -> list[str]:
    """Tables that every rank has all rows of."""
    return [table for table, spec in plan.items() if spec[0] == "data_parallel"]


ONE: dict[str, Plan] = {
    "table_wise": same("table_wise", 0),
    "column_wise": columns("column_wise", [0]),
    "table_row_wise": same("table_row_wise", 0),
    "grid_shard": columns("grid_shard", [0]),
    "data_parallel": same("data_parallel"),
}
TWO: dict[str, Plan] = {
    "table_wise": {**same("table_wise", 0), "genre": ("table_wise", 1)},
    "table_wise_on_one_rank": same("table_wise", 1),
    "column_wise": columns("column_wise", [0, 1]),
    "table_column_wise": columns("table_column_wise", [1, 0]),
    "table_row_wise": same("table_row_wise", 0),
    "grid_shard": columns("grid_shard", [0]),
    "data_parallel": same("data_parallel"),
    "mixed": {
        "user": ("column_wise", [(4, 1), (4, 0)]),
        "genre": ("data_parallel",),
        "other": ("row_wise",),
    },
    "mixed_more": {
        "user": ("table_wise", 1),
        "genre": ("row_wise",),
        "other": ("grid_shard", [(2, 0), (3, 0)]),
    },
}
NODES_OF_TWO: dict[str, Plan] = {
    "table_row_wise": {**same("table_row_wise", 1), "genre": ("table_row_wise", 0)},
    "grid_shard": columns("grid_shard", [0, 1]),
    "table_column_wise": columns("table_column_wise", [2, 3]),
    "mixed": {
        "user": ("grid_shard", [(4, 1), (4, 0)]),
        "genre": ("table_row_wise", 1),
        "other": ("data_parallel",),
    },
}
PLANS = {1: ONE, 2: TWO, 3: TWO, 4: {**TWO, **NODES_OF_TWO}, 5: TWO}
MIXED_SEQUENCES: Plan = {
    "user": ("column_wise", [(3, 1), (5, 0)]),
    "genre": ("row_wise",),
    "other": ("data_parallel",),
}
"""For tables of one width."""
