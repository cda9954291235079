"""One rank of the demo: its process groups, and the model spread over all ranks."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.collective_utils import is_leader
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import (
    EmbeddingShardingPlanner,
    ParameterConstraints,
    Topology,
)
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from recsdk_pipeline.data.examples import Share
from recsdk_pipeline.demo.settings import Recipe
from recsdk_sharding import (
    HashEmbeddingBagCollection,
    ShardedHashEmbeddingBagCollection,
    get_default_hybrid_sharders,
)

# A rank that dies is noticed by the others after this time at the latest.
TIMEOUT = timedelta(seconds=60)
CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Rank:
    """Who this process is."""

    host: ShardingEnv
    """The gloo group over which ids travel."""

    @property
    def share(self) -> Share:
        """Which part of the data this rank reads."""
        return Share(rank=self.host.rank, world_size=self.host.world_size)

    @property
    def is_first(self) -> bool:
        """Whether this rank talks to the user."""
        return bool(is_leader(self.host.process_group))


@contextmanager
def joined_ranks() -> Iterator[Rank]:
    """Join the process groups that torchrun describes; leave them at the end."""
    dist.init_process_group("gloo", timeout=TIMEOUT)
    try:
        host_group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        host = ShardingEnv(world_size=world_size, rank=rank, pg=host_group)
        yield Rank(host=host)
        # A process that ends while gloo's threads still let go of a collective's tensors aborts:
        # a barrier has none, and without users the groups end their threads.
        # Source: pytorch/pytorch pull request 179291.
        dist.barrier()
    finally:
        gc.collect()
        dist.destroy_process_group()


def spread(model: nn.Module, rank: Rank, recipe: Recipe) -> tuple[nn.Module, Any]:
    """Return the model over all ranks, tables sharded by rows, and its optimizer."""
    collections = [m for m in model.modules() if isinstance(m, HashEmbeddingBagCollection)]
    row_optimizer = {"lr": recipe.learning_rate, "weight_decay": recipe.weight_decay}
    for collection in collections:
        apply_optimizer_in_backward(torch.optim.Adagrad, collection.parameters(), row_optimizer)
    tables = [name for collection in collections for name in collection.tables()]
    sharders = get_default_hybrid_sharders(host_env=rank.host)
    topology = Topology(world_size=rank.host.world_size, compute_device=CPU.type)
    by_rows = ParameterConstraints(sharding_types=["row_wise"])
    planner = EmbeddingShardingPlanner(
        topology=topology, constraints=dict.fromkeys(tables, by_rows)
    )
    plan = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
    spread_model = DistributedModelParallel(model, device=CPU, plan=plan, sharders=sharders)
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(spread_model.named_parameters())),
        lambda parameters: torch.optim.Adam(parameters, lr=recipe.dense_learning_rate),
    )
    return spread_model, CombinedOptimizer([spread_model.fused_optimizer, dense])


def num_rows(model: nn.Module) -> dict[str, int]:
    """Return the rows of each table over all ranks; every rank must call it."""
    own = {
        name: len(table)
        for module in model.modules()
        if isinstance(module, ShardedHashEmbeddingBagCollection)
        for name, table in module.tables().items()
    }
    counts = torch.tensor(list(own.values()), dtype=torch.int64)
    dist.all_reduce(counts)
    return dict(zip(own, counts.tolist(), strict=True))
