"""Models, plans and batches that the tests train with, the same on every rank and in any world.

Shape letters: B batch, W ranks.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from plans import Spec, module_plan
from processors import PROCESSORS, in_bags, processed
from torch import nn
from torch.distributed.tensor import DTensor
from torchrec.distributed import comm
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import PoolingType
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

import recsdk_core
from recsdk_sharding import (
    HashEmbeddingBagCollection,
    HashEmbeddingBagConfig,
    HashEmbeddingCollection,
    HashEmbeddingConfig,
    get_default_hybrid_sharders,
)

logging.getLogger("torchrec").setLevel(logging.ERROR)

EDGE_KEYS = [0, 1, -1, 2**63 - 1, -(2**63), 2**62, -(2**62), 2**32, -(2**31)]
FEATURES = ("shared", "user", "ad", "genre")


def tables(num_rows: int | None = None, **options: Any) -> list[HashEmbeddingBagConfig]:
    """Tables of mixed widths: two features of one table, one feature of two, sum and mean.

    `num_rows` is each table's num_embeddings; by default less than the batches' keys.
    """
    user = HashEmbeddingBagConfig(
        name="user",
        embedding_dim=8,
        num_embeddings=num_rows or 64,
        feature_names=["user", "ad"],
        **options,
    )
    genre = HashEmbeddingBagConfig(
        name="genre",
        embedding_dim=3,
        num_embeddings=num_rows or 100,
        feature_names=["genre", "shared"],
        pooling=PoolingType.MEAN,
        seed=7,
        **options,
    )
    shared = HashEmbeddingBagConfig(
        name="other",
        embedding_dim=5,
        num_embeddings=num_rows or 10,
        feature_names=["shared"],
        **options,
    )
    return [user, genre, shared]


@dataclass
class Batch(Pipelineable):
    """One rank's samples."""

    sparse: KeyedJaggedTensor
    dense: torch.Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        dense = self.dense.to(device, non_blocking=non_blocking)
        return Batch(self.sparse.to(device, non_blocking), dense)

    def pin_memory(self) -> Batch:
        return Batch(self.sparse.pin_memory(), self.dense.pin_memory())

    def record_stream(self, stream: Any) -> None:
        self.sparse.record_stream(stream)
        self.dense.record_stream(stream)


def make_batch(seed: int, size: int, *, weighted: bool = False) -> Batch:
    """A batch of `size` samples: repeated, edge and random keys, empty bags."""
    rng = np.random.default_rng(seed)
    common = np.array(EDGE_KEYS + rng.integers(-(2**63), 2**63 - 1, 20).tolist())
    lengths = rng.integers(0, 5, (len(FEATURES), size))
    values = rng.choice(common, int(lengths.sum()))
    weights = torch.from_numpy(rng.uniform(-1, 2, len(values)).astype(np.float32))
    sparse = KeyedJaggedTensor(
        keys=list(FEATURES),
        values=torch.from_numpy(values),
        lengths=torch.from_numpy(lengths.reshape(-1)),
        weights=weights if weighted else None,
    )
    return Batch(sparse, torch.from_numpy(rng.normal(size=(size, 2)).astype(np.float32)))


Bags = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def features_of(batch: Batch) -> dict[str, Bags]:
    """(lengths, keys, weights) of each feature; torchrec's own `to_dict` fails on empty batches."""
    sparse = batch.sparse
    lengths = sparse.lengths().view(len(FEATURES), -1)
    counts = lengths.sum(1).tolist()
    weights = sparse.weights_or_none()
    split_weights = [None] * len(FEATURES) if weights is None else weights.split(counts)
    parts = zip(lengths, sparse.values().split(counts), split_weights, strict=True)
    return dict(zip(FEATURES, parts, strict=True))


def joined(batches: Sequence[Batch]) -> Batch:
    """The batches of all ranks as one, rank after rank."""
    parts = [features_of(batch) for batch in batches]
    lengths, values, weights = zip(*(d[name] for name in FEATURES for d in parts), strict=True)
    sparse = KeyedJaggedTensor(
        keys=list(FEATURES),
        values=torch.cat(values),
        lengths=torch.cat(lengths),
        weights=None if weights[0] is None else torch.cat(weights),
    )
    return Batch(sparse, torch.cat([batch.dense for batch in batches]))


class Model(nn.Module):
    """A small model; returns (loss, output (B,)). An empty batch has loss 0."""

    def __init__(
        self,
        configs: list[HashEmbeddingBagConfig],
        device: torch.device,
        *,
        is_weighted: bool = False,
        processor: str | None = None,
    ) -> None:
        super().__init__()
        is_weighted = is_weighted or processor is not None
        self.ebc = HashEmbeddingBagCollection(configs, is_weighted=is_weighted, device=device)
        if processor is not None:
            names = [name for config in configs for name in config.feature_names]
            self.ebc = processed(self.ebc, PROCESSORS[processor](names, device))
        width = sum(c.embedding_dim * len(c.feature_names) for c in configs)
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.over = nn.Sequential(nn.Linear(width + 2, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        pooled = self.ebc(batch.sparse).values()
        out = self.over(torch.cat([pooled, batch.dense], dim=1)).squeeze(1)
        return loss_of(out), out


class SequenceModel(nn.Module):
    """A model over the vectors of sequences; returns as `Model`."""

    def __init__(self, configs: list[HashEmbeddingConfig], device: torch.device) -> None:
        super().__init__()
        self.ebc = HashEmbeddingCollection(configs, device)
        width = sum(c.embedding_dim * len(c.feature_names) for c in configs)
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.over = nn.Sequential(nn.Linear(width + 2, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        summed = sums_of(self.ebc(batch.sparse))
        out = self.over(torch.cat([summed, batch.dense], dim=1)).squeeze(1)
        return loss_of(out), out


@torch.fx.wrap
def sums_of(sequences: dict[str, Any]) -> torch.Tensor:
    """The sum of each sample's vectors, feature beside feature."""
    parts = [in_bags(jagged.lengths()) @ jagged.values() for jagged in sequences.values()]
    return torch.cat(parts, dim=1)


def sequence_tables(num_rows: int | None = None, **options: Any) -> list[HashEmbeddingConfig]:
    """Tables of one width: two features of one table, one feature of two."""
    features = {"user": ["user", "ad"], "genre": ["genre", "shared"], "other": ["shared"]}
    return [
        HashEmbeddingConfig(
            name=name,
            embedding_dim=8,
            num_embeddings=num_rows or 64,
            feature_names=names,
            **options,
        )
        for name, names in features.items()
    ]


@torch.fx.wrap
def loss_of(out_B: torch.Tensor) -> torch.Tensor:
    """The mean loss of one rank's samples; 0 if there are none."""
    return ((out_B - 1) ** 2).sum() / max(len(out_B), 1)


@dataclass
class Setup:
    """How a model is trained."""

    optimizer: type = torch.optim.SGD
    arguments: dict[str, Any] = field(default_factory=lambda: {"lr": 0.1})
    of_tables: tuple[dict[str, Any], ...] = ()
    """Arguments of the optimizer of each table, beside those that all have; none: only those."""
    dense_lr: float = 0.05
    weighted: bool = False
    rank_rule: str = "virtual_shard"
    options: dict[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    plan: dict[str, Spec] | None = None
    """How each table is sharded; None: the planner's plan."""
    local_size: int | None = None
    """Ranks of a node; None: all ranks are on one."""
    is_sequence: bool = False
    """Whether ids have a vector each."""
    processor: str | None = None
    """Which of `processors.PROCESSORS` makes the weights of ids."""
    drops_duplicates: bool = False
    """Whether an id of a sequence that comes several times is sent once."""


def new_model(setup: Setup, device: str) -> Any:
    """The unsharded model with its optimizer applied."""
    from torch.distributed.optim import _apply_optimizer_in_backward

    model: Any
    options = dict(setup.options)
    if options.get("max_rows") and dist.is_initialized():  # ranks have whole groups
        options.setdefault("eviction_groups", 1 << (dist.get_world_size() - 1).bit_length())
    if setup.is_sequence:
        model = SequenceModel(sequence_tables(**options), torch.device(device))
    else:
        model = Model(
            tables(**options),
            torch.device(device),
            is_weighted=setup.weighted,
            processor=setup.processor,
        )
    parameters = list(collection_of(model).parameters())
    for own, of_own in zip(setup.of_tables, parameters, strict=True) if setup.of_tables else ():
        _apply_optimizer_in_backward(setup.optimizer, [of_own], {**setup.arguments, **own})
    if not setup.of_tables:
        _apply_optimizer_in_backward(setup.optimizer, parameters, dict(setup.arguments))
    return model


def configs_of(model: Any) -> list[Any]:
    """The tables of an unsharded model."""
    collection = collection_of(model)
    if isinstance(collection, HashEmbeddingCollection):
        return collection.embedding_configs()
    return collection.embedding_bag_configs()


def collection_of(model: Any) -> Any:
    """The collection of hash tables of a model, behind its processors if it has any."""
    return getattr(model.ebc, "_embedding_bag_collection", model.ebc)


_host_envs: dict[Any, ShardingEnv] = {}


def host_env() -> ShardingEnv:
    """This rank's host environment, with one group for each world."""
    world = dist.GroupMember.WORLD
    if world not in _host_envs:
        _host_envs.clear()
        group = dist.new_group(backend="gloo")
        _host_envs[world] = ShardingEnv(dist.get_world_size(), dist.get_rank(), group)
    return _host_envs[world]


def shard(
    model: nn.Module, setup: Setup | None = None, *, constraints: dict[str, Any] | None = None
) -> DistributedModelParallel:
    """Shards a model by the setup's plan, else by rows; with constraints by the stock planner's."""
    setup = setup or Setup()
    world_size = dist.get_world_size()
    types = {spec[0] for spec in (setup.plan or {}).values()}
    knows_nodes = constraints is not None or bool(types & {"table_row_wise", "grid_shard"})
    use_nodes_of(setup.local_size or world_size, has_groups=knows_nodes)
    sharders = get_default_hybrid_sharders(
        host_env(), setup.rank_rule, use_index_dedup=setup.drops_duplicates
    )
    if constraints is None:
        configs, local_size = configs_of(model), setup.local_size or world_size
        specs = setup.plan or dict.fromkeys((config.name for config in configs), ("row_wise",))
        explicit = module_plan(configs, specs, world_size, local_size, setup.device)
        plan = ShardingPlan({"ebc": explicit})
    else:
        plan = planned(model, setup, sharders, constraints)
    return DistributedModelParallel(
        model, device=torch.device(setup.device), plan=plan, sharders=sharders
    )


def planned(
    model: nn.Module, setup: Setup, sharders: list[Any], constraints: dict[str, Any]
) -> ShardingPlan:
    """The stock planner's plan."""
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=dist.get_world_size(), compute_device=setup.device),
        constraints=constraints,
    )
    return planner.collective_plan(model, sharders, dist.GroupMember.WORLD)


_node_groups: dict[Any, Any] = {}


def use_nodes_of(local_size: int, *, has_groups: bool = True) -> None:
    """Makes torchrec take the ranks as nodes of `local_size`; it keeps their groups for ever.

    `has_groups`: whether a sharding type needs groups of nodes. Their threads are never idle.
    """
    os.environ["LOCAL_WORLD_SIZE"] = str(local_size)
    if not has_groups:
        comm._INTRA_PG = comm._CROSS_PG = None
        return
    world = dist.GroupMember.WORLD
    if (world, local_size) not in _node_groups:
        for key in [key for key in _node_groups if key[0] is not world]:
            del _node_groups[key]
        comm._INTRA_PG = comm._CROSS_PG = None
        groups = comm.intra_and_cross_node_pg(torch.device("cpu"), backend="gloo")
        _node_groups[world, local_size] = groups
    comm._INTRA_PG, comm._CROSS_PG = _node_groups[world, local_size]


def optimizer_of(model: DistributedModelParallel, lr: float) -> CombinedOptimizer:
    """The fused optimizers of the tables and SGD for the dense part."""
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    is_mixed = len({isinstance(parameter, DTensor) for parameter in dense.values()}) > 1
    foreach = False if is_mixed else None  # torch's default on a device takes no such mixture
    wrapper = KeyedOptimizerWrapper(
        dense, lambda params: torch.optim.SGD(params, lr=lr, foreach=foreach)
    )
    return CombinedOptimizer([model.fused_optimizer, wrapper])


Rows = dict[str, dict[int, tuple[np.ndarray, dict[str, np.ndarray]]]]


def rows_of(tables: dict[str, recsdk_core.Table]) -> Rows:
    """Weights and optimizer state by table and key."""
    found: Rows = {}
    for name, table in tables.items():
        found[name] = {}
        for batch in table.export():
            for index, key in enumerate(batch.keys.tolist()):
                state = {field: value[index] for field, value in batch.state.items()}
                found[name][key] = (batch.weights[index], state)
    return found


def weights_of(rows: Rows) -> dict[str, dict[int, np.ndarray]]:
    """Rows without the state of their optimizer."""
    return {
        name: {key: weight for key, (weight, _) in by_key.items()} for name, by_key in rows.items()
    }


def merged(parts: Sequence[Rows]) -> Rows:
    """The rows of all ranks; each key must be on one rank only."""
    whole: Rows = {}
    for part in parts:
        for name, rows in part.items():
            target = whole.setdefault(name, {})
            assert not set(target) & set(rows), "a key has rows on two ranks"
            target.update(rows)
    return whole


def whole_rows(parts: Sequence[Rows], replicated: Collection[str] = ()) -> Rows:
    """The rows of all ranks, with their columns side by side.

    A key must be on one rank only, or, of replicated tables, equal to the bit on all of them.
    Optimizer state must be of each column.
    """
    pieces: dict[str, dict[int, Rows]] = {}
    for part in parts:
        for name, rows in part.items():
            table, _, columns = name.partition(".columns_")
            first = int(columns.partition("_")[0] or 0)
            found = pieces.setdefault(table, {}).setdefault(first, {})
            if table in replicated and found:
                _assert_equal_rows(found, rows)
            assert table in replicated or not set(found) & set(rows), "a key is on two ranks"
            found.update(rows)
    return {table: _side_by_side(by_column) for table, by_column in pieces.items()}


def _assert_equal_rows(one: Any, other: Any) -> None:
    """Equal keys, weights and state, to the bit."""
    assert set(one) == set(other)
    for key, (weight, state) in one.items():
        other_weight, other_state = other[key]
        np.testing.assert_array_equal(weight, other_weight)
        assert set(state) == set(other_state)
        for name, value in state.items():
            np.testing.assert_array_equal(value, other_state[name])


def _side_by_side(by_column: dict[int, Any]) -> Any:
    columns = [by_column[first] for first in sorted(by_column)]
    assert all(set(rows) == set(columns[0]) for rows in columns), "columns have different keys"
    return {
        key: (
            np.concatenate([rows[key][0] for rows in columns]),
            {name: np.concatenate([rows[key][1][name] for rows in columns]) for name in state},
        )
        for key, (_, state) in columns[0].items()
    }


def dense_of(model: nn.Module) -> dict[str, np.ndarray]:
    """The dense weights by name."""
    return {
        re.split(r"over\.|_feature_processors\.", name)[1]: parameter.detach().cpu().numpy().copy()
        for name, parameter in model.named_parameters()
        if "over." in name or "_feature_processors." in name
    }


def dense_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of an unsharded model that are not tables."""
    return [p for n, p in model.named_parameters() if "embedding_bags." not in n]


def unwrapped(model: DistributedModelParallel) -> Model:
    """The model inside DistributedModelParallel and DistributedDataParallel."""
    return model.module
