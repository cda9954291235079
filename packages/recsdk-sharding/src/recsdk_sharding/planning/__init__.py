"""Planning for tables without a fixed number of rows.

Give `HashParameterConstraints` to `HashEmbeddingShardingPlanner`, or `HashEmbeddingEnumerator` to
torchrec's own planner.
"""

from __future__ import annotations

from recsdk_sharding.planning.constraints import HashParameterConstraints, planned_rows
from recsdk_sharding.planning.memory import TableMemory, memory_of_shard
from recsdk_sharding.planning.perf import HashPerfEstimator
from recsdk_sharding.planning.planner import HashEmbeddingEnumerator, HashEmbeddingShardingPlanner
from recsdk_sharding.planning.printing import PlanTable, format_plan
from recsdk_sharding.planning.storage import HashStorageEstimator

__all__ = [
    "HashEmbeddingEnumerator",
    "HashEmbeddingShardingPlanner",
    "HashParameterConstraints",
    "HashPerfEstimator",
    "HashStorageEstimator",
    "PlanTable",
    "TableMemory",
    "format_plan",
    "memory_of_shard",
    "planned_rows",
]
