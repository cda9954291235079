"""What the examples share: joining the ranks, spreading a model over them, running all batches."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from recsdk_pipeline import HybridTrainPipelineSparseDist
from recsdk_sharding import get_default_hybrid_sharders

CPU = torch.device("cpu")
TIMEOUT = timedelta(seconds=60)  # how long a rank that has died goes unnoticed
Pipeline: TypeAlias = HybridTrainPipelineSparseDist[Any, Any]


@contextmanager
def joined() -> Iterator[ShardingEnv]:
    """Join the ranks that torchrun started; without torchrun, be the only one."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo", timeout=TIMEOUT)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        yield ShardingEnv(world_size=dist.get_world_size(), rank=dist.get_rank(), pg=group)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def spread(
    model: nn.Module, tables: nn.Module, host_env: ShardingEnv, *, row_lr: float, dense_lr: float
) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """Return the model over all ranks and its optimizer: Adagrad for rows, Adam for the rest.

    The planner chooses how each table is sharded.
    """
    apply_optimizer_in_backward(torch.optim.Adagrad, tables.parameters(), {"lr": row_lr})
    sharders = get_default_hybrid_sharders(host_env=host_env)
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=host_env.world_size, compute_device=CPU.type)
    )
    plan = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
    ddp_model = DistributedModelParallel(model, device=CPU, plan=plan, sharders=sharders)
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(ddp_model.named_parameters())),
        lambda parameters: torch.optim.Adam(parameters, lr=dense_lr),
    )
    return ddp_model, CombinedOptimizer([ddp_model.fused_optimizer, dense])


def run(pipeline: Pipeline, batches: Iterator[Any]) -> list[Any]:
    """Train or evaluate on all batches; return the (output, loss) of each."""
    results = []
    with suppress(StopIteration):
        while True:
            results.append(pipeline.progress(batches))
    return results


def mean_over_ranks(values: Sequence[float]) -> float:
    """Return the mean of all ranks' values; NaN if there are none."""
    total = torch.tensor([sum(values), len(values)], dtype=torch.float64)
    dist.all_reduce(total)
    return float(total[0] / total[1])
