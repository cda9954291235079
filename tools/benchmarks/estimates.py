"""What the planner takes a step of the tables for, to be held against what was measured."""

from __future__ import annotations

from collections import defaultdict

import torch.distributed as dist
from torch import nn
from torchrec.distributed.planner import Topology
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from benchmarks.records import Record
from benchmarks.steps import OPTIMIZER, OURS, Case, collection
from recsdk_sharding import (
    HashEmbeddingShardingPlanner,
    HashParameterConstraints,
    get_default_hybrid_sharders,
)

BANDWIDTHS = {"planned_step": None, "planned_step_at_1_gb_s": 1e6}
"""Bytes a millisecond between ranks: torchrec's default, which is for GPUs, and of gloo here."""


def estimates_of(name: str, num_ranks: int, case: Case, measured: float) -> list[Record]:
    """The planner's milliseconds for a step that took `measured`."""
    found = []
    for op, bandwidth in BANDWIDTHS.items():
        planned = planned_step(num_ranks, case, bandwidth)
        figures = {"measured": measured}
        ratios = {"measured": measured / planned}
        found.append(
            Record(workload=name, op=op, unit="ms", ours=planned, peers=figures, ratio=ratios)
        )
    return found


def planned_step(num_ranks: int, case: Case, bandwidth: float | None) -> float:
    """Milliseconds of the rank that has most to do."""
    model = nn.ModuleDict({"tables": collection(case, OURS)})
    apply_optimizer_in_backward(RowWiseAdagrad, model.parameters(), dict(OPTIMIZER))
    constraint = HashParameterConstraints(
        expected_rows=case.num_rows,
        growth=1.0,
        sharding_types=[case.sharding_type],
        pooling_factors=[float(case.bag_size)],
    )
    speeds = {} if bandwidth is None else {"intra_host_bw": bandwidth}
    planner = HashEmbeddingShardingPlanner(
        topology=Topology(num_ranks, "cpu", local_world_size=num_ranks, **speeds),
        batch_size=case.batch_size,
        constraints={f"table_{feature}": constraint for feature in case.features()},
    )
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    host = ShardingEnv(1, 0, dist.new_group(backend="gloo"))
    planner.plan(model, get_default_hybrid_sharders(host_env=host))
    by_rank: dict[int, float] = defaultdict(float)
    for option in planner._best_plan:
        for shard in option.shards:
            by_rank[shard.rank] += shard.perf.total
    return max(by_rank.values())
