"""What the tests of planning run on every rank; each function returns plain values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from worlds import host_env

from recsdk_core import Table, optim
from recsdk_core.nn import HashEmbeddingBag
from recsdk_sharding import (
    HashEmbeddingBagCollection,
    HashEmbeddingBagConfig,
    HashEmbeddingCollection,
    HashEmbeddingConfig,
    HashEmbeddingEnumerator,
    HashEmbeddingShardingPlanner,
    HashParameterConstraints,
    PeerError,
    failing_together,
    format_plan,
    get_default_hybrid_sharders,
)
from recsdk_sharding.planning import HashPerfEstimator, HashStorageEstimator

# Estimates are within this factor of what was measured, either way.
FACTOR = 1.25
PIECE = 1 << 21  # tables take memory in huge pages, and may just need one more

DIM = 64


class Tables(nn.Module):
    """A model of nothing but hash tables, a feature each; and, if asked for, one of torchrec's."""

    def __init__(
        self,
        configs: list[Any],
        optimizers: Mapping[str, tuple[type, dict[str, Any]]],
        *,
        has_stock: bool = False,
    ) -> None:
        super().__init__()
        is_sequence = isinstance(configs[0], HashEmbeddingConfig)
        kind = HashEmbeddingCollection if is_sequence else HashEmbeddingBagCollection
        self.ebc = kind(configs, device=torch.device("meta"))
        rows = self.ebc.embeddings if is_sequence else self.ebc.embedding_bags
        for name, (optimizer, arguments) in optimizers.items():
            parameter = rows[name].weight
            _apply_optimizer_in_backward(optimizer, [parameter], dict(arguments))
        if has_stock:
            config = EmbeddingBagConfig(
                name="stock", embedding_dim=DIM, num_embeddings=1000, feature_names=["stock"]
            )
            self.stock = EmbeddingBagCollection([config], device=torch.device("meta"))


def tables(
    names: str, num_embeddings: int = 1000, *, is_sequence: bool = False, **fields: Any
) -> Tables:
    """Tables named by letters, trained with Adagrad."""
    config = HashEmbeddingConfig if is_sequence else HashEmbeddingBagConfig
    configs = [
        config(
            name=name,
            embedding_dim=DIM,
            num_embeddings=num_embeddings,
            feature_names=[f"of_{name}"],
            **fields,
        )
        for name in names
    ]
    return Tables(configs, {name: (torch.optim.Adagrad, {"lr": 0.1}) for name in names})


def choose(
    model: dict[str, Any],
    topology: dict[str, Any],
    constraints: Mapping[str, ParameterConstraints],
    how: str = "ours",
    host_ids_per_ms: float = 5_000.0,
    batch_size: int = 512,
) -> dict[str, Any]:
    """How a planner shards each table, or what it raises; and how the plan prints."""
    made = Topology(**topology)
    sharders = get_default_hybrid_sharders(host_env=host_env())
    common = {"topology": made, "batch_size": batch_size, "constraints": dict(constraints)}
    if how == "stock":
        planner: Any = EmbeddingShardingPlanner(**common)
    else:
        enumerator = HashEmbeddingEnumerator(
            made,
            batch_size,
            dict(constraints),
            [
                HashPerfEstimator(made, constraints, host_ids_per_ms),
                HashStorageEstimator(made, constraints),
            ],
        )
        kind = HashEmbeddingShardingPlanner if how == "ours" else EmbeddingShardingPlanner
        planner = kind(enumerator=enumerator, **common)
    try:
        plan = planner.plan(tables(**model), sharders)
    except (PlannerError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}", "text": str(planner)}
    types = {name: sharding.sharding_type for name, sharding in plan.plan["ebc"].items()}
    ranks = {name: sorted(sharding.ranks) for name, sharding in plan.plan["ebc"].items()}
    return {"types": types, "ranks": ranks, "text": str(planner), "plan": format_plan(plan)}


def interrupted(*_: Any) -> Any:
    """In place of planning."""
    raise KeyboardInterrupt("by the user")


def plan_together(kind: str, num_embeddings: int) -> tuple[str, int | None, bool]:
    """What `collective_plan` raises, of which rank; and whether all ranks then plan another."""
    planner = HashEmbeddingShardingPlanner if kind == "ours" else EmbeddingShardingPlanner
    topology = Topology(world_size=dist.get_world_size(), compute_device="cpu", ddr_cap=2**20)
    sharders = get_default_hybrid_sharders(host_env=host_env())
    group = dist.GroupMember.WORLD

    def planned(num_rows: int) -> Any:
        constraints = {"a": HashParameterConstraints(expected_rows=num_rows)}
        made = planner(
            topology=topology,
            batch_size=8,
            constraints=constraints,
            enumerator=HashEmbeddingEnumerator(topology, 8, constraints),
        )
        if kind == "interrupted" and num_rows == num_embeddings:
            made.plan = interrupted
        return made.collective_plan(tables("a"), sharders, group)

    try:
        with failing_together():
            planned(num_embeddings)
    except (PlannerError, PeerError, KeyboardInterrupt) as error:
        rank = error.rank if isinstance(error, PeerError) else None
        return str(error), rank, set(planned(10).plan) == {"ebc"}
    raise AssertionError("there was room")


def times(
    model: dict[str, Any], topology: dict[str, Any], shard_ms: float
) -> dict[str, dict[str, tuple[float, int]]]:
    """What each way of sharding each table takes in all, and the number of its shards."""
    made = Topology(**topology)
    estimators = [HashPerfEstimator(made, shard_ms=shard_ms), HashStorageEstimator(made)]
    enumerator = HashEmbeddingEnumerator(made, 512, estimator=estimators)
    options = enumerator.enumerate(
        tables(**model), get_default_hybrid_sharders(host_env=host_env())
    )
    found: dict[str, dict[str, tuple[float, int]]] = {}
    for option in options:
        key = f"{option.sharding_type} {option.compute_kernel}"
        taken = sum(shard.perf.total for shard in option.shards)
        found.setdefault(option.name, {})[key] = taken, len(option.shards)
    return found


def plan_a_single_bag() -> dict[str, Any]:
    """As `choose`, of a model with a `HashEmbeddingBag`."""
    model = nn.ModuleDict({"bag": HashEmbeddingBag(DIM, name="a", optimizer=optim.Adagrad(lr=0.1))})
    constraints = {
        "a": HashParameterConstraints(sharding_types=["table_wise"], expected_rows=10_000)
    }
    planner = HashEmbeddingShardingPlanner(
        topology=Topology(world_size=2, compute_device="cpu"),
        batch_size=1,
        constraints=constraints,
    )
    plan = planner.plan(model, get_default_hybrid_sharders(host_env=host_env()))
    return {
        "types": {n: s.sharding_type for n, s in plan.plan["bag"].items()},
        "text": str(planner),
    }


def estimate_weighted(is_weighted: bool) -> tuple[float, int]:
    """Time on the way to its owner, and memory, of a single bag's table with weights or not."""
    model = nn.ModuleDict({"bag": HashEmbeddingBag(DIM, name="a", optimizer=optim.Adagrad(lr=0.1))})
    constraints = {
        "a": HashParameterConstraints(sharding_types=["table_wise"], is_weighted=is_weighted)
    }
    topology = Topology(world_size=2, compute_device="cpu")
    sharders = get_default_hybrid_sharders(host_env=host_env())
    made = HashEmbeddingEnumerator(topology, 512, constraints)
    (option,) = made.enumerate(model, sharders)
    (shard,) = option.shards
    return shard.perf.input_dist_comms, shard.storage.ddr


def estimate_beside_stock() -> list[Any]:
    """What our estimators and torchrec's say of a table of torchrec's."""
    model = tables("a")
    model = Tables(model.ebc.embedding_bag_configs(), {}, has_stock=True)
    topology = Topology(world_size=2, compute_device="cpu")
    sharders = get_default_hybrid_sharders(host_env=host_env())
    found = []
    for kind in (HashEmbeddingEnumerator, HashEmbeddingEnumerator.__mro__[1]):
        options = kind(topology, 512, {}).enumerate(model, sharders)
        shards = [shard for o in options if o.name == "stock" for shard in o.shards]
        found.append([(shard.storage, shard.perf) for shard in shards])
    return found


def fill(
    configs: list[Any],
    optimizers: Mapping[str, tuple[type, dict[str, Any]]],
    constraints: Mapping[str, HashParameterConstraints],
    num_ids: int,
    device: str = "cpu",
) -> dict[str, tuple[int, int, int, int]]:
    """Estimated and measured bytes of this rank's shard of each table, once it has its rows.

    By table: estimated on the host, on the device, measured on the host, on the device.
    """
    model = Tables(configs, optimizers)
    world_size = dist.get_world_size()
    topology = Topology(world_size=world_size, compute_device=device)
    sharders = get_default_hybrid_sharders(host_env=host_env())
    common = {"batch_size": 1, "constraints": dict(constraints)}
    planner = HashEmbeddingShardingPlanner(topology=topology, **common)
    plan = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
    options = HashEmbeddingEnumerator(topology, **common).enumerate(model, sharders)
    estimated = {
        option.name: _on_rank(option, plan.plan["ebc"][option.name].ranks) for option in options
    }
    sharded = DistributedModelParallel(
        model, device=torch.device(device), plan=plan, sharders=sharders
    )
    ebc = sharded.module.ebc
    features = [config.feature_names[0] for config in configs]
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(10):
        shape = (len(features), num_ids // world_size // 10)
        ids = torch.randint(-(2**63), 2**63 - 1, shape, generator=generator)
        lengths = torch.ones(ids.numel(), dtype=torch.int64)
        batch = KeyedJaggedTensor(features, ids.flatten(), lengths=lengths)
        ebc(batch.to(torch.device(device))).values().sum().backward()
    measured: dict[str, tuple[int, int]] = {}
    for name, table in ebc.tables().items():
        of_table = name.partition(".")[0]
        before = measured.get(of_table, (0, 0))
        host, on_device = _bytes_of(table)
        measured[of_table] = (before[0] + host, before[1] + on_device)
    return {name: (*bytes_, *measured.get(name, (0, 0))) for name, bytes_ in estimated.items()}


def _on_rank(option: Any, ranks: list[int]) -> tuple[int, int]:
    own = [s.storage for s, r in zip(option.shards, ranks, strict=True) if r == dist.get_rank()]
    return sum(storage.ddr for storage in own), sum(storage.hbm for storage in own)


def _bytes_of(table: Any) -> tuple[int, int]:
    """Host and device memory."""
    stats = table.stats()
    host = stats.index_bytes + stats.metadata_bytes
    if isinstance(table, Table):
        return host + stats.row_bytes, 0
    return host, stats.row_bytes
