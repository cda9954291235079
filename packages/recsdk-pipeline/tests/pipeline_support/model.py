"""A small model with a hash table or torchrec's own, its batches, and the plain training loop."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DataParallelWrapper, DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.feature_processor_ import FeatureProcessorsCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsdk_pipeline.data import ClickBatch
from recsdk_sharding import (
    HashEmbeddingBagCollection,
    HashEmbeddingBagConfig,
    ShardedHashEmbeddingBagCollection,
    get_default_hybrid_sharders,
)

DEVICE = torch.device(os.environ.get("RECSDK_TEST_DEVICE", "cpu"))
FEATURES = ("user", "item", "tags")
NUM_DENSE = 3
WIDTH = 8
NUM_IDS = 60


@dataclass(frozen=True)
class World:
    """This rank among the others."""

    rank: int
    size: int
    host: ShardingEnv


def hash_tables() -> nn.Module:
    """Two tables, one of them read by two features."""
    return HashEmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            HashEmbeddingBagConfig(
                name="people", embedding_dim=WIDTH, num_embeddings=100, feature_names=["user"]
            ),
            HashEmbeddingBagConfig(
                name="things",
                embedding_dim=WIDTH,
                num_embeddings=100,
                feature_names=["item", "tags"],
                pooling=PoolingType.MEAN,
            ),
        ],
    )


class Positions(FeatureProcessorsCollection):
    """Weighs ids by a parameter of their place in the bag.

    torchrec's `PositionWeightedModule` would, but on a device its gradient is added atomically.
    """

    def __init__(self, longest: int) -> None:
        super().__init__()
        self.position_weight = nn.Parameter(torch.ones(longest))

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.position_weight.fill_(1)

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        lengths = features.lengths()
        first_N = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        place_N = torch.arange(len(first_N), device=first_N.device) - first_N
        places = torch.arange(len(self.position_weight), device=first_N.device)
        # A product, since the gradient of looking places up is added atomically on Ascend.
        is_at_NP = place_N.remainder(len(places))[:, None] == places
        weights_N = is_at_NP.to(self.position_weight.dtype) @ self.position_weight
        return KeyedJaggedTensor(
            keys=features.keys(),
            values=features.values(),
            weights=weights_N,
            lengths=lengths,
        )


def processed_tables() -> nn.Module:
    """The same two tables behind weights of positions."""
    tables = hash_tables()
    weighted = HashEmbeddingBagCollection(
        tables.embedding_bag_configs(), is_weighted=True, device=torch.device("meta")
    )
    return FeatureProcessedEmbeddingBagCollection(weighted, Positions(4))


def stock_tables() -> nn.Module:
    """torchrec's own tables of fixed size."""
    return EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingBagConfig(
                name=name, embedding_dim=WIDTH, num_embeddings=NUM_IDS, feature_names=[name]
            )
            for name in FEATURES
        ],
    )


class SmallModel(nn.Module):
    """Pooled rows and dense columns under two layers."""

    def __init__(self, **tables: nn.Module) -> None:
        super().__init__()
        self.tables = nn.ModuleDict(tables)
        num_columns = NUM_DENSE + len(tables) * len(FEATURES) * WIDTH
        self.layers = nn.Sequential(nn.Linear(num_columns, 16), nn.ReLU(), nn.Linear(16, 1))

    def sparse_of(self, batch: Any) -> Any:
        """What the tables are given."""
        return batch.sparse

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        sparse = self.sparse_of(batch)
        pooled = [tables(sparse).values() for tables in self.tables.values()]
        logits = self.layers(torch.cat([*pooled, batch.dense], dim=1)).squeeze(1)
        total = nn.functional.binary_cross_entropy_with_logits(
            logits, batch.labels, reduction="sum"
        )
        return total / max(len(batch.labels), 1), logits.detach()


class CopyingModel(SmallModel):
    """Gives its tables another object than the batch's field."""

    def sparse_of(self, batch: Any) -> Any:
        sparse = batch.sparse
        return KeyedJaggedTensor(sparse.keys(), sparse.values(), lengths=sparse.lengths())


def spread(
    model: nn.Module,
    world: World,
    wrapper: DataParallelWrapper | None = None,
    sharding: str = "row_wise",
) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """Shard the model's tables, by default by rows, with Adagrad in backward.

    `sharding`: how, or "ONE and OTHER" in turn.
    """
    torch.default_generator.manual_seed(7)  # torch's function keeps a traceback for each device
    for parameter in model.layers.parameters():
        nn.init.normal_(parameter, std=0.3)
    for tables in model.tables.values():  # torchrec writes into the arguments of its own tables
        rows = getattr(tables, "_embedding_bag_collection", tables).parameters()
        apply_optimizer_in_backward(torch.optim.Adagrad, rows, {"lr": 0.1})
    sharders = get_default_hybrid_sharders(host_env=world.host)
    plan = _plan_of(model, world, sharding, sharders)
    ddp = DistributedModelParallel(
        model, device=DEVICE, plan=plan, sharders=sharders, data_parallel_wrapper=wrapper
    )
    _fill_stock_tables(ddp)
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(ddp.named_parameters())),
        lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    )
    return ddp, CombinedOptimizer([ddp.fused_optimizer, dense])


_plans: dict[str, ShardingPlan] = {}


def _plan_of(model: nn.Module, world: World, sharding: str, sharders: list[Any]) -> ShardingPlan:
    """Planned once for all models that are alike, since it takes as long as making the model."""
    found = [(n, m.embedding_bag_configs()) for n, m in model.named_modules() if _has_configs(m)]
    name = f"{found} {sharding} {world.size}"
    if name not in _plans:
        by_type = [
            ParameterConstraints(
                sharding_types=[each],
                compute_kernels=["dense" if each == "data_parallel" else "fused"],
            )
            for each in sharding.split(" and ")
        ]
        planner = EmbeddingShardingPlanner(
            topology=Topology(world_size=world.size, compute_device=DEVICE.type),
            constraints=dict(zip(["people", "things", *FEATURES], cycle(by_type), strict=False)),
        )
        _plans[name] = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
    return copy.deepcopy(_plans[name])


def _has_configs(module: nn.Module) -> bool:
    return hasattr(module, "embedding_bag_configs")


def _fill_stock_tables(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(11)
    for value in model.state_dict().values():
        for shard in getattr(value, "local_shards", list)():
            shard.tensor.normal_(generator=generator)


def batches(world: World, count: int, seed: int = 0) -> list[ClickBatch]:
    """Batches of this rank with arbitrary int64 ids: bags of 0 to 3, some batches empty."""
    dense = dense_batches(world, count, seed)
    spread_ids = torch.tensor(-0x61C8864680B583EB)  # odd, so products modulo 2**64 stay distinct
    found = [_with_ids(batch, batch.sparse.values() * spread_ids) for batch in dense]
    return [_nothing() if index % 5 == 3 else batch for index, batch in enumerate(found)]


def dense_batches(world: World, count: int, seed: int = 0) -> list[ClickBatch]:
    """Batches of this rank with ids below NUM_IDS, as torchrec's tables need them."""
    generator = torch.Generator().manual_seed(1000 * seed + world.rank)
    return [_batch(generator, 6) for _ in range(count)]


def _batch(generator: torch.Generator, size: int) -> ClickBatch:
    lengths = torch.randint(0, 4, (len(FEATURES) * size,), generator=generator)
    ids = torch.randint(0, NUM_IDS, (int(lengths.sum()),), generator=generator)
    return ClickBatch(
        dense=torch.randn(size, NUM_DENSE, generator=generator),
        sparse=KeyedJaggedTensor(list(FEATURES), ids, lengths=lengths),
        labels=torch.randint(0, 2, (size,), generator=generator).float(),
    )


def _nothing() -> ClickBatch:
    return _batch(torch.Generator(), 0)


def _with_ids(batch: ClickBatch, ids: torch.Tensor) -> ClickBatch:
    sparse = KeyedJaggedTensor(batch.sparse.keys(), ids, lengths=batch.sparse.lengths())
    return ClickBatch(dense=batch.dense, sparse=sparse, labels=batch.labels)


def with_bad_ids(batch: ClickBatch) -> ClickBatch:
    """The batch with ids of a type that no table takes."""
    return _with_ids(batch, batch.sparse.values().to(torch.float32))


def plain_step(model: nn.Module, optimizer: Any, batch: ClickBatch) -> torch.Tensor:
    """One step of the loop that a pipeline has to equal."""
    optimizer.zero_grad()
    loss, output = model(batch.to(DEVICE))
    loss.sum().backward()
    optimizer.step()
    return output


@torch.no_grad()
def plain_evaluation(model: nn.Module, given: list[ClickBatch]) -> list[torch.Tensor]:
    """The outputs in evaluation mode."""
    model.eval()
    outputs = [model(batch.to(DEVICE))[1] for batch in given]
    model.train()
    return outputs


def rest_of(pipeline: Any, iterator: Iterator[Any]) -> list[Any]:
    """The outputs of all further batches of the iterator."""
    outputs = []
    with suppress(StopIteration):
        while True:
            outputs.append(pipeline.progress(iterator))
    return outputs


def content(model: nn.Module) -> dict[str, torch.Tensor]:
    """Dense parameters, and this rank's rows and optimizer state sorted by key."""
    dense = ("layers", "position_weights")
    found = {
        n: p.detach().clone()
        for n, p in model.named_parameters()
        if any(part in n for part in dense)
    }
    for module in model.modules():
        if isinstance(module, ShardedHashEmbeddingBagCollection):
            for name, table in module.tables().items():
                found.update(_rows(name, table))
    return found


def _rows(name: str, table: Any) -> dict[str, torch.Tensor]:
    parts: dict[str, list[torch.Tensor]] = {}
    for part in table.export():
        columns = {"keys": part.keys, "weight": part.weights, **part.state}
        for column, values in columns.items():
            parts.setdefault(f"{name}/{column}", []).append(torch.from_numpy(values))
    joined = {column: torch.cat(values) for column, values in parts.items()}
    if not joined:
        return {}
    order = joined[f"{name}/keys"].argsort()
    return {column: values[order] for column, values in joined.items()}


def assert_equal(found: Any, expected: Any) -> None:
    """Equal bit for bit, through lists and dicts of tensors."""
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for name in expected:
            assert torch.equal(found[name], expected[name]), name
    else:
        assert len(found) == len(expected)
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert torch.equal(one, other), index
