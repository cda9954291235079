"""Rows of the page for users of torchrec: plans, sharders, modules, pipelines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchrec
from torch import nn
from torchrec.distributed.embedding_tower_sharding import (
    EmbeddingTowerCollectionSharder,
    EmbeddingTowerSharder,
)
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
from torchrec.distributed.model_tracker.types import ModelTrackerConfigs
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.perf_models import NoopPerfModel
from torchrec.distributed.planner.proposers import GreedyProposer
from torchrec.distributed.planner.stats import NoopEmbeddingStats
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import (
    BasicCommsBandwidths,
    CustomTopologyData,
    KernelConfig,
    ParameterConstraints,
    TopologyFactory,
    TrainerConfig,
)
from torchrec.distributed.shard import shard, shard_modules
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    get_default_sharders,
    row_wise,
)
from torchrec.distributed.train_pipeline.gradient_accumulation import (
    GradientAccumulationConfig,
    GradientAccumulationWrapper,
)
from torchrec.distributed.types import (
    BoundsCheckMode,
    CacheParams,
    KeyValueParams,
    ShardingEnv,
)
from torchrec.modules.activation import SwishLayerNorm
from torchrec.modules.crossnet import (
    CrossNet,
    LowRankCrossNet,
    LowRankMixtureCrossNet,
    VectorCrossNet,
)
from torchrec.modules.deepfm import DeepFM, FactorizationMachine
from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection
from torchrec.modules.feature_processor import (
    BaseFeatureProcessor,
    BaseGroupedFeatureProcessor,
    PositionWeightedProcessor,
)
from torchrec.modules.feature_processor_ import (
    FeatureProcessor,
    FeatureProcessorsCollection,
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from torchrec.modules.fp_embedding_modules import (
    FeatureProcessedEmbeddingBagCollection,
    FeatureProcessorDictWrapper,
)
from torchrec.modules.mlp import MLP, Perceptron
from torchrec.modules.regroup import KTRegroupAsDict, PermuteMultiEmbedding
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import recsdk_sharding
import sampling
from claims import Page, holds
from one_rank import (
    CPU,
    META,
    Batch,
    Model,
    bag_config,
    bags,
    batch,
    host_env,
    optimized,
    plan_of,
    sharded,
    sharders,
)
from public_names import public_classes
from recsdk_pipeline import HybridEvalPipeline, HybridTrainPipelineSparseDist
from recsdk_sharding import HashEmbeddingEnumerator, HashEmbeddingShardingPlanner
from recsdk_sharding.exchange import go_on

PAGE = Page(Path(__file__).parents[2] / "docs" / "coming_from" / "torchrec.md")
EMPTY: Any = object()
pytestmark = pytest.mark.usefixtures("world")


def model_of(module: Any = None) -> Model:
    return Model(optimized(bags(device=META)) if module is None else module)


def constrained(**fields: Any) -> Any:
    """What the stock planner plans for the table under a constraint."""
    plan = plan_of(model_of(), constraints={"user": ParameterConstraints(**fields)})
    return plan.plan["ebc"]["user"]


def step(model: Any) -> torch.Tensor:
    """One step; returns the output."""
    loss, output = model(Batch(batch()))
    loss.backward()
    return output.detach()


def train(model: Any, num_steps: int = 3) -> list[float]:
    torch.manual_seed(0)
    return [step(model).sum().item() for _ in range(num_steps)]


# Sharding types and kernels

TYPES = (
    *("row_wise", "table_wise", "column_wise", "table_row_wise", "table_column_wise"),
    *("grid_shard", "data_parallel"),
)


@holds("ShardingType", "same", *TYPES)
@holds("ParameterConstraints", "same", "sharding_types")
@holds("ParameterSharding", "same", "sharding_type", "ranks", "sharding_spec")
@pytest.mark.parametrize("kind", TYPES)
def test_sharding_types(kind: str) -> None:
    assert constrained(sharding_types=[kind]).sharding_type == kind
    plan = plan_of(model_of(), constraints={"user": ParameterConstraints(sharding_types=[kind])})
    model = sharded(plan=plan)
    step(model)
    assert sum(len(table) for table in model.module.ebc.tables().values()) == 2
    ec = sharders()[1].sharding_types("cpu")
    assert set(ec) == set(TYPES) - {"table_row_wise", "table_column_wise", "grid_shard"}


@holds("EmbeddingComputeKernel", "same", "fused")
@holds("EmbeddingComputeKernel", "differs", "dense")
@holds("ParameterConstraints", "stricter", "compute_kernels")
@holds("ParameterSharding", "stricter", "compute_kernel")
def test_kernels() -> None:
    assert constrained(sharding_types=["row_wise"]).compute_kernel == "fused"
    assert constrained(sharding_types=["data_parallel"]).compute_kernel == "dense"
    replicated = ParameterConstraints(sharding_types=["data_parallel"], compute_kernels=["dense"])
    model = sharded(plan=plan_of(model_of(), constraints={"user": replicated}))
    before = step(model)
    assert not torch.equal(step(model), before)
    with pytest.raises(PAGE.error("ParameterConstraints", "compute_kernels")):
        constrained(compute_kernels=["fused_uvm"])


OTHER_KERNELS = tuple(
    kind.value for kind in EmbeddingComputeKernel if kind.value not in ("fused", "dense")
)


@holds("EmbeddingComputeKernel", "refused", *OTHER_KERNELS)
@pytest.mark.parametrize("kernel", OTHER_KERNELS)
def test_other_kernels_are_refused(kernel: str) -> None:
    plan = plan_of(model_of())
    plan.plan["ebc"]["user"].compute_kernel = kernel
    with pytest.raises(PAGE.error("EmbeddingComputeKernel", kernel), match=kernel):
        sharded(plan=plan)
    with pytest.raises(PAGE.error("ParameterConstraints", "compute_kernels")):
        constrained(compute_kernels=[kernel])


# Constraints


@holds("ParameterConstraints", "same", "min_partition")
@holds("ParameterConstraints", "stricter", "device_group", "feature_names")
@holds("ParameterConstraints", "same", "pooling_factors", "num_poolings", "batch_sizes")
@holds("ParameterConstraints", "no effect", "is_weighted")
def test_constraints_that_the_planner_counts() -> None:
    for name, right, wrong in (
        ("device_group", "cpu", "cuda"),
        ("feature_names", ["user"], ["item"]),
    ):
        assert constrained(**{name: right}).sharding_type in TYPES
        with pytest.raises(PAGE.error("ParameterConstraints", name), match=name):
            constrained(**{name: wrong})
    topology = Topology(world_size=1, compute_device="cpu")

    def shards(kind: str, **fields: Any) -> Any:
        given = {"user": ParameterConstraints(sharding_types=[kind], **fields)}
        enumerator = HashEmbeddingEnumerator(topology, 512, given)
        wide = optimized(bags(bag_config(embedding_dim=8), device=META))
        [option] = enumerator.enumerate(model_of(wide), sharders())
        return option.shards

    def estimate(**fields: Any) -> Any:
        [shard] = shards("row_wise", **fields)
        return shard.perf.total + shard.storage.ddr

    assert len(shards("column_wise", min_partition=4)) == 2

    alone = estimate()
    assert estimate(pooling_factors=[30.0]) > alone
    assert estimate(batch_sizes=[4096]) > alone
    assert estimate(num_poolings=[8.0]) > alone
    assert estimate(is_weighted=True) == alone


SETTINGS: dict[str, tuple[Any, Any]] = {
    "enforce_hbm": (False, True),
    "stochastic_rounding": (True, "yes"),
    "bounds_check_mode": (BoundsCheckMode.NONE, BoundsCheckMode.FATAL),
    "output_dtype": (torchrec.DataType.FP32, torchrec.DataType.FP16),
}
"""A value that says what hash tables do on the cpu, and one that does not."""


@holds("ParameterConstraints", "stricter", *SETTINGS)
@holds("ParameterSharding", "stricter", *SETTINGS)
@pytest.mark.parametrize("field", SETTINGS)
def test_settings_that_say_what_is_done_anyway(field: str) -> None:
    taken, refused = SETTINGS[field]
    planned = constrained(**{field: taken})
    assert getattr(planned, field) == taken
    with pytest.raises(PAGE.error("ParameterConstraints", field), match=field):
        constrained(**{field: refused})
    assert_refused_in_a_plan(field, refused)


def assert_refused_in_a_plan(field: str, value: Any) -> None:
    plan = plan_of(model_of())
    setattr(plan.plan["ebc"]["user"], field, value)
    with pytest.raises(PAGE.error("ParameterSharding", field), match=field):
        sharded(plan=plan)


@holds("ParameterConstraints", "refused", "cache_params", "key_value_params", "use_virtual_table")
@holds("ParameterSharding", "refused", "cache_params", "key_value_params")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cache_params", CacheParams(load_factor=0.1)),
        ("key_value_params", KeyValueParams()),
        ("use_virtual_table", True),
    ],
)
def test_settings_that_are_refused(field: str, value: Any) -> None:
    with pytest.raises(PAGE.error("ParameterConstraints", field), match=field):
        constrained(**{field: value})
    if field != "use_virtual_table":
        assert_refused_in_a_plan(field, value)


# DistributedModelParallel


@holds("DistributedModelParallel", "same", "module", "device", "plan")
@holds("DistributedModelParallel", "differs", "sharders")
def test_sharders_make_the_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    model = sharded()
    assert isinstance(model.module.ebc, recsdk_sharding.ShardedHashEmbeddingBagCollection)
    left = DistributedModelParallel(model_of(optimized(bags())), device=CPU)
    ebc = left.module.ebc
    assert type(ebc) is recsdk_sharding.HashEmbeddingBagCollection
    monkeypatch.setattr("recsdk_sharding._modules.unsharded.active_data_parallel_size", lambda: 2)
    with pytest.raises(PAGE.error("DistributedModelParallel", "sharders"), match="shard it"):
        step(left)
    named = {"module": model_of(optimized(bags())), "device": CPU, "plan": model.plan}
    for theirs in (None, get_default_sharders()):
        with pytest.raises(ValueError, match=r"plan shards 'ebc', .* sharders has none for it"):
            DistributedModelParallel(**named, sharders=theirs)
    model = DistributedModelParallel(**named, sharders=iter(sharders()))
    assert isinstance(model.module.ebc, recsdk_sharding.ShardedHashEmbeddingBagCollection)


NPU_ONLY = {
    "env": lambda: ShardingEnv.from_process_group(dist.GroupMember.WORLD),
    "init_data_parallel": lambda: False,
    "init_parameters": lambda: False,
    "data_parallel_wrapper": DefaultDataParallelWrapper,
    "model_tracker_configs": lambda: ModelTrackerConfigs(),
}


@holds("DistributedModelParallel", "stricter", *NPU_ONLY)
@pytest.mark.parametrize("name", NPU_ONLY)
def test_arguments_that_have_one_value_on_npu(name: str) -> None:
    value = NPU_ONLY[name]()
    if name != "model_tracker_configs":
        step(sharded(**{name: value}))
    with pytest.raises(PAGE.error("DistributedModelParallel", name), match=name):
        DistributedModelParallel(model_of(), device="npu", sharders=sharders(), **{name: value})


# Sharders

OURS = {
    "EmbeddingBagCollectionSharder": "HashEmbeddingBagCollectionSharder",
    "EmbeddingCollectionSharder": "HashEmbeddingCollectionSharder",
    "EmbeddingBagSharder": "HashEmbeddingBagSharder",
    "FeatureProcessedEmbeddingBagCollectionSharder": (
        "HashFeatureProcessedEmbeddingBagCollectionSharder"
    ),
}
OF_FROZEN = {
    "QuantEmbeddingBagCollectionSharder": "QuantHashEmbeddingBagCollectionSharder",
    "QuantEmbeddingCollectionSharder": "QuantHashEmbeddingCollectionSharder",
}
SHARDERS = "Sharders"


@holds(SHARDERS, "renamed", *OURS)
@holds(SHARDERS, "same", "ModuleSharder", "BaseEmbeddingSharder")
def test_sharders_of_hash_tables() -> None:
    made = {type(each).__name__ for each in sharders()}
    assert set(OURS.values()) <= made
    for theirs, ours in OURS.items():
        assert f"`{ours}`" in PAGE.text(SHARDERS, theirs)
        assert issubclass(getattr(recsdk_sharding, ours), torchrec.distributed.types.ModuleSharder)


@holds(SHARDERS, "renamed", *OF_FROZEN)
@holds(SHARDERS, "same", "BaseQuantEmbeddingSharder")
def test_sharders_of_frozen_tables() -> None:
    stock = public_classes("torchrec.distributed")
    for theirs, ours in OF_FROZEN.items():
        assert f"`{ours}`" in PAGE.text(SHARDERS, theirs)
        kind = getattr(recsdk_sharding, ours)
        assert issubclass(kind, stock[theirs])
        assert issubclass(kind, stock["BaseQuantEmbeddingSharder"])


@holds("EmbeddingBagCollectionSharder", "same", "qcomm_codecs_registry", "use_index_dedup")
def test_arguments_of_sharders() -> None:
    config = QCommsConfig(forward_precision=CommType.FP16, backward_precision=CommType.BF16)
    codecs = get_qcomm_codecs_registry(config, device=CPU)
    given = sharders(qcomm_codecs_registry=codecs, use_index_dedup=True)
    assert given[0].qcomm_codecs_registry is codecs
    assert step(sharded(sharders=given)).shape == (3, 1)


@holds("EmbeddingBagCollectionSharder", "stricter", "fused_params")
@pytest.mark.parametrize(
    "kind",
    [
        recsdk_sharding.HashEmbeddingBagCollectionSharder,
        recsdk_sharding.HashEmbeddingCollectionSharder,
    ],
)
def test_fused_params_that_say_what_is_done_anyway(kind: Any) -> None:
    taken = {"output_dtype": torchrec.DataType.FP32, "bounds_check_mode": BoundsCheckMode.NONE}
    assert kind(host_env(), fused_params=taken).fused_params == taken
    for wrong in ({"learning_rate": 0.1}, {"cache_load_factor": 0.2}):
        with pytest.raises(PAGE.error("EmbeddingBagCollectionSharder", "fused_params")):
            kind(host_env(), fused_params=wrong)


@holds("EmbeddingBagCollectionSharder", "refused", "sharded_module_order_overwrite")
def test_an_argument_that_sharders_have_not() -> None:
    name = "sharded_module_order_overwrite"
    error = PAGE.error("EmbeddingBagCollectionSharder", name)
    with pytest.raises(error, match=name):
        sharders(**{name: {}})
    with pytest.raises(error, match=name):
        recsdk_sharding.HashEmbeddingBagCollectionSharder(host_env(), **{name: {}})


# Planner and topology


def names_in(table: str, here: str) -> list[str]:
    return sorted(c.name for c in PAGE.claims if (c.table, c.here) == (table, here))


PLANNING: dict[str, Callable[[], Any]] = {
    "topology": lambda: Topology(world_size=1, compute_device="cpu"),
    "batch_size": lambda: 64,
    "constraints": lambda: {"user": ParameterConstraints(sharding_types=["table_wise"])},
    "storage_reservation": lambda: FixedPercentageStorageReservation(0.1),
    "proposer": GreedyProposer,
    "partitioner": GreedyPerfPartitioner,
    "performance_model": lambda: NoopPerfModel(Topology(world_size=1, compute_device="cpu")),
    "stats": NoopEmbeddingStats,
    "debug": lambda: False,
    "callbacks": lambda: [lambda options: options],
    "timeout_seconds": lambda: 60,
    "plan_loader": lambda: None,
    "enumerator": lambda: HashEmbeddingEnumerator(Topology(world_size=1, compute_device="cpu"), 64),
}


@holds("EmbeddingShardingPlanner", "same", *PLANNING)
@pytest.mark.parametrize("name", PLANNING)
@pytest.mark.parametrize("planner", [EmbeddingShardingPlanner, HashEmbeddingShardingPlanner])
def test_arguments_of_planners(planner: type, name: str) -> None:
    plan = plan_of(model_of(), planner=planner, **{name: PLANNING[name]()})
    assert step(sharded(plan=plan)).shape == (3, 1)


@holds("Topology", "looser", "compute_device")
@holds(
    "Topology",
    "same",
    *("world_size", "hbm_cap", "ddr_cap", "ssd_cap", "local_world_size", "pod_size", "hbm_mem_bw"),
    *("ddr_mem_bw", "ssd_mem_bw", "hbm_to_ddr_mem_bw", "intra_host_bw", "inter_host_bw"),
    *("bwd_compute_multiplier", "custom_topology_data", "generalized_comms_bandwidths"),
    *("weighted_feature_bwd_compute_multiplier", "uneven_sharding_perf_multiplier"),
    "created_by_factory",
)
def test_topologies() -> None:
    given = {
        **dict.fromkeys(("hbm_cap", "ddr_cap", "ssd_cap"), 2**30),
        **dict.fromkeys(("world_size", "local_world_size", "pod_size"), 1),
        **{name: 1e6 for name in names_in("Topology", "same") if name.endswith("_bw")},
        **{name: 1.5 for name in names_in("Topology", "same") if name.endswith("_multiplier")},
        "created_by_factory": False,
    }
    for device in ("cpu", "cuda"):
        topology = Topology(compute_device=device, **given)
        plan = plan_of(model_of(), topology=topology)
        [shard] = plan.plan["ebc"]["user"].sharding_spec.shards
        assert str(shard.placement).startswith(f"rank:0/{device}")
    for name, value in (
        ("custom_topology_data", CustomTopologyData({"hbm_cap": [2**30]}, 1)),
        ("generalized_comms_bandwidths", BasicCommsBandwidths(1e6, 1e6)),
    ):
        topology = Topology(world_size=1, compute_device="cuda", **{name: value})
        assert plan_of(model_of(), topology=topology).plan["ebc"]


HABITS = "Habits"


@holds(HABITS, "looser", "TopologyFactory.create_topology")
@pytest.mark.parametrize("device", ["cpu", "cuda", "npu"])
def test_topologies_of_the_factory(device: str) -> None:
    kernel = KernelConfig(compute_device=device)
    made = TopologyFactory.create_topology(TrainerConfig(world_size=2), kernel_config=kernel)
    assert len(made.devices) == 2


@holds(HABITS, "same", "construct_module_sharding_plan", "shard")
@holds(HABITS, "stricter", "shard_modules")
def test_functions_that_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    [pooled, *_] = given = sharders()
    ebc = optimized(bags(device=META))
    plan = construct_module_sharding_plan(
        ebc, {"user": row_wise()}, sharder=pooled, world_size=1, device_type="cpu"
    )
    assert plan["user"].compute_kernel == "fused"
    made = shard(ebc, plan, device=CPU, sharder=pooled)
    assert isinstance(made, recsdk_sharding.ShardedHashEmbeddingBagCollection)
    model = shard_modules(model_of(), device=CPU, sharders=given)
    assert isinstance(model.ebc, recsdk_sharding.ShardedHashEmbeddingBagCollection)
    monkeypatch.setattr(dist, "get_world_size", lambda *_: 2)
    with pytest.raises(PAGE.error(HABITS, "shard_modules"), match="get_default_hybrid_sharders"):
        shard_modules(model_of(), device=CPU)


# What stays torchrec's

PACKAGES = {
    "Sharders": "torchrec.distributed",
    "torchrec.modules": "torchrec.modules",
    "torchrec.optim": "torchrec.optim",
    "train_pipeline": "torchrec.distributed.train_pipeline",
}
LEFT_ALONE = [(table, name) for table in PACKAGES for name in names_in(table, "torchrec's")]


@holds("Sharders", "torchrec's", *names_in("Sharders", "torchrec's"))
@holds("torchrec.modules", "torchrec's", *names_in("torchrec.modules", "torchrec's"))
@holds("torchrec.optim", "torchrec's", *names_in("torchrec.optim", "torchrec's"))
@holds("train_pipeline", "torchrec's", *names_in("train_pipeline", "torchrec's"))
@pytest.mark.parametrize(("table", "name"), LEFT_ALONE)
def test_what_recsdk_has_nothing_in_place_of(table: str, name: str) -> None:
    theirs = public_classes(PACKAGES[table])[name]
    packages = ("recsdk_core", "recsdk_sharding", "recsdk_pipeline")
    ours = [kind for package in packages for kind in public_classes(package).values()]
    assert [kind for kind in ours if issubclass(kind, theirs)] == []


def test_torchrecs_tables_stand_beside_hash_tables() -> None:
    given = sharders()
    for stock in get_default_sharders():
        assert any(each.module_type is stock.module_type for each in given)
    config = torchrec.EmbeddingBagConfig(
        name="old", embedding_dim=4, num_embeddings=9, feature_names=["old"]
    )
    old = torchrec.EmbeddingBagCollection(tables=[config], device=META)
    both = nn.ModuleDict({"new": optimized(bags(device=META)), "old": optimized(old)})
    plan = plan_of(both, given)
    model = DistributedModelParallel(both, device=CPU, plan=plan, sharders=given).module
    new = model["new"](batch()).values()
    (new + model["old"](batch([1, 2, 3], names=["old"])).values()).sum().backward()
    assert len(model["new"].tables()["user"]) == 2


# Modules

CROSSES = {
    "CrossNet": lambda: CrossNet(4, 2),
    "LowRankCrossNet": lambda: LowRankCrossNet(4, 2, 2),
    "VectorCrossNet": lambda: VectorCrossNet(4, 2),
    "LowRankMixtureCrossNet": lambda: LowRankMixtureCrossNet(4, 2, 2, 2),
    "MLP": lambda: MLP(4, [3]),
    "Perceptron": lambda: Perceptron(4, 3),
    "SwishLayerNorm": lambda: SwishLayerNorm([4]),
}


@holds("torchrec.modules", "same", *CROSSES)
@pytest.mark.parametrize("name", CROSSES)
def test_modules_over_pooled_vectors(name: str) -> None:
    output = CROSSES[name]()(optimized(bags())(batch()).values())
    output.sum().backward()
    assert len(output) == 3


@holds("torchrec.modules", "same", "DeepFM", "FactorizationMachine", "KTRegroupAsDict")
@holds("torchrec.modules", "same", "PermuteMultiEmbedding")
def test_modules_over_several_tables() -> None:
    ebc = optimized(bags(bag_config("a"), bag_config("b")))
    pooled = ebc(batch([1, 2, 3, 4], [1, 1, 1, 1], "ab"))
    parts = [pooled["a"], pooled["b"]]
    assert DeepFM(nn.Linear(8, 5))(parts).shape == (2, 5)
    assert FactorizationMachine()(parts).shape == (2, 1)
    grouped = KTRegroupAsDict([["b"], ["a"]], ["x", "y"])([pooled])
    assert torch.equal(grouped["x"], pooled["b"])
    assert PermuteMultiEmbedding([["a"]])(parts) == parts


PROCESSORS: dict[str, Callable[[], nn.Module]] = {
    "PositionWeightedModuleCollection": lambda: PositionWeightedModuleCollection({"user": 5}),
    "FeatureProcessorDictWrapper": lambda: FeatureProcessorDictWrapper(
        nn.ModuleDict({"user": PositionWeightedModule(max_feature_length=5)})
    ),
}


@holds("torchrec.modules", "same", "FeatureProcessedEmbeddingBagCollection", *PROCESSORS)
@holds("torchrec.modules", "same", "PositionWeightedModule", "FeatureProcessor")
@holds("torchrec.modules", "same", "FeatureProcessorsCollection")
@pytest.mark.parametrize("name", PROCESSORS)
def test_feature_processors(name: str) -> None:
    def made(device: torch.device) -> Any:
        ebc = optimized(bags(device=device, is_weighted=True))
        return FeatureProcessedEmbeddingBagCollection(ebc, PROCESSORS[name]())

    assert issubclass(PositionWeightedModule, FeatureProcessor)
    assert issubclass(PositionWeightedModuleCollection, FeatureProcessorsCollection)
    alone = made(CPU)(batch()).values()
    model = sharded(made(META))
    assert torch.allclose(model.module.ebc(batch()).values(), alone)


@holds("torchrec.modules", "same", "BaseFeatureProcessor", "BaseGroupedFeatureProcessor")
@holds("torchrec.modules", "same", "PositionWeightedProcessor")
def test_processors_in_front_of_a_collection() -> None:
    processor = PositionWeightedProcessor({"user": 5})
    assert isinstance(processor, (BaseFeatureProcessor, BaseGroupedFeatureProcessor))
    pooled = optimized(bags(is_weighted=True))(processor(batch())).values()
    assert torch.equal(pooled, optimized(bags())(batch()).values())


class Reads(nn.Module):
    """A tower's interaction: what was pooled, through a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, pooled: torchrec.KeyedTensor) -> torch.Tensor:
        return self.layer(pooled.values())


@holds("torchrec.modules", "same", "EmbeddingTower", "EmbeddingTowerCollection")
@holds("Sharders", "refused", "EmbeddingTowerSharder", "EmbeddingTowerCollectionSharder")
def test_towers() -> None:
    alone = EmbeddingTower(optimized(bags()), Reads())
    assert alone(batch()).shape == (3, 2)
    assert EmbeddingTowerCollection([alone])(batch()).shape == (3, 2)
    model = nn.Sequential(EmbeddingTower(optimized(bags(device=META)), Reads()))
    plan = plan_of(model)
    assert list(plan.plan) == ["0.embedding"]
    with pytest.raises(PAGE.error("Sharders", "EmbeddingTowerSharder"), match="take it out"):
        plan_of(model, [EmbeddingTowerSharder(), *sharders()])
    both = nn.Sequential(EmbeddingTowerCollection([EmbeddingTower(bags(device=META), Reads())]))
    with pytest.raises(PAGE.error("Sharders", "EmbeddingTowerCollectionSharder")):
        plan_of(both, [EmbeddingTowerCollectionSharder(), *sharders()])
    whole = DistributedModelParallel(model, device=CPU, plan=plan, sharders=sharders())
    assert whole(batch()).shape == (3, 2)


# Pipelines


def rows_after(kind: Any, **arguments: Any) -> list[list[float]]:
    """Rows of a table that a pipeline trained, or, without one, the plain loop."""
    torch.manual_seed(0)
    model = sharded()
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    optimizer = CombinedOptimizer([model.fused_optimizer, dense])
    batches = [Batch(batch((i, 5, 7))) for i in range(4)]
    if kind is None:
        for each in batches:
            optimizer.zero_grad()
            model(each)[0].backward()
            optimizer.step()
    else:
        run_all(kind(model, optimizer, CPU, **arguments), iter(batches))
    [table] = model.module.ebc.tables().values()
    rows: list[list[float]] = table.lookup(torch.tensor([0, 1, 2, 3, 5, 7])).tolist()
    return rows


def run_all(pipeline: Any, batches: Any) -> int:
    count = 0
    while True:
        try:
            pipeline.progress(batches)
        except StopIteration:
            return count
        count += 1


TRAINING = (
    *("TrainPipelineSparseDist", "TrainPipelineBase", "TrainPipelineSparseDistLite"),
    *("TrainPipelinePT2", "TrainPipelineSparseDistT"),
)
LOOSER = ("TrainPipelineFusedSparseDist", "TrainPipelineSemiSync")
SLOW = () if sampling.IS_FULL else ("TrainPipelinePT2",)  # it compiles for half a minute
TRAINED = sorted({*TRAINING, *LOOSER, "HybridTrainPipelineSparseDist"} - {*SLOW})
EVALUATING = (
    *("EvalPipelineSparseDist", "EvalPipelineFusedSparseDist", "TrainEvalHybridPipelineBase"),
)


def pipeline_class(name: str) -> Any:
    return public_classes("torchrec.distributed.train_pipeline")[name]


@holds("train_pipeline", "same", *TRAINING)
@holds("train_pipeline", "looser", *LOOSER)
@holds("TrainPipelineSparseDist", "same", "model", "optimizer", "device")
@pytest.mark.parametrize("name", TRAINED)
def test_pipelines_train_what_the_plain_loop_trains(name: str) -> None:
    is_ours = name == "HybridTrainPipelineSparseDist"
    kind = HybridTrainPipelineSparseDist if is_ours else pipeline_class(name)
    assert rows_after(kind) == rows_after(None)


@holds(HABITS, "same", "GradientAccumulationWrapper")
def test_gradients_accumulate_around_pipelines() -> None:
    def rows_of(kind: Any) -> list[list[float]]:
        def make(model: Any, optimizer: Any, device: torch.device) -> Any:
            config = GradientAccumulationConfig(num_steps=2)
            made = kind(model, optimizer, device)
            return GradientAccumulationWrapper(made, optimizer, model, config)

        return rows_after(make)

    expected = rows_of(pipeline_class("TrainPipelineBase"))
    assert expected != rows_after(None)  # whose dense layers train with each batch
    for kind in (pipeline_class("TrainPipelineSparseDist"), HybridTrainPipelineSparseDist):
        assert rows_of(kind) == expected


@holds(HABITS, "refused", "model.eval()", "model.train()")
def test_modes_are_switched_between_batches() -> None:
    model = sharded()
    pipeline = pipeline_class("TrainPipelineSparseDist")(model, model.fused_optimizer, CPU)
    batches = iter([Batch(batch()) for _ in range(6)])
    pipeline.progress(batches)
    model.eval()
    with pytest.raises(PAGE.error(HABITS, "model.eval()"), match="sent ahead in train mode"):
        pipeline.progress(batches)
    pipeline.reset()
    pipeline.progress(batches)


@holds(HABITS, "stricter", "going on after an exception in a step of torchrec's pipelines")
@pytest.mark.parametrize("name", ["TrainPipelineBase", "TrainPipelineFusedSparseDist"])
def test_pipelines_go_on_after_an_exception(name: str) -> None:
    model = sharded()
    pipeline = pipeline_class(name)(model, model.fused_optimizer, CPU)
    wrong = Batch(KeyedJaggedTensor(["other"], torch.tensor([1]), lengths=torch.tensor([1])))
    with pytest.raises(ValueError, match="the batch lacks the feature"):
        run_all(pipeline, iter([Batch(batch()), wrong, Batch(batch())]))
    go_on(model)
    pipeline.reset()
    assert run_all(pipeline, iter([Batch(batch())] * 3)) == 3


@holds(HABITS, "refused", "calls with copies of parameters, by `functional_call`")
def test_calls_with_copies_of_parameters() -> None:
    model = optimized(bags())
    model(batch()).values().sum().backward()
    before = model.tables()["user"].lookup(torch.tensor([5]))
    copies = {name: each.detach().clone() for name, each in model.named_parameters()}
    read = torch.func.functional_call(model, copies, (batch(),)).values()
    assert not read.requires_grad
    trained = {name: each.requires_grad_() for name, each in copies.items()}
    with pytest.raises(ValueError, match="leave `weight` out of the parameters"):
        torch.func.functional_call(model, trained, (batch(),))
    assert (model.tables()["user"].lookup(torch.tensor([5])) == before).all()


class Traced:
    """The plain loop over a model that Dynamo traces, without the compiler behind it."""

    def __init__(self, model: Any, optimizer: Any, device: torch.device) -> None:
        self._model, self._optimizer = torch.compile(model, backend="eager"), optimizer

    def progress(self, batches: Iterator[Batch]) -> None:
        each = next(batches)
        self._optimizer.zero_grad()
        self._model(each)[0].backward()
        self._optimizer.step()


def test_a_model_that_is_traced_trains_what_the_plain_loop_trains() -> None:
    torch._dynamo.reset()
    assert rows_after(Traced) == rows_after(None)


@holds("train_pipeline", "same", *EVALUATING)
@pytest.mark.parametrize("name", [*EVALUATING, "HybridEvalPipeline"])
def test_pipelines_evaluate(name: str) -> None:
    model = sharded().eval()
    batches = iter([Batch(batch()) for _ in range(3)])
    if name == "HybridEvalPipeline":
        pipeline = HybridEvalPipeline(model, CPU)
    else:
        pipeline = pipeline_class(name)(model, model.fused_optimizer, CPU)
    assert run_all(pipeline, batches) == 3
    assert len(model.module.ebc.tables()["user"]) == 0


@holds("train_pipeline", "same", "TrainPipeline")
def test_the_base_class_of_pipelines() -> None:
    assert issubclass(pipeline_class("TrainPipelineBase"), pipeline_class("TrainPipeline"))
    assert not issubclass(HybridTrainPipelineSparseDist, pipeline_class("TrainPipeline"))


@holds("TrainPipelineSparseDist", "stricter", "execute_all_batches", "apply_jit")
@pytest.mark.parametrize(("name", "wanted"), [("execute_all_batches", True), ("apply_jit", False)])
def test_arguments_of_our_pipeline_that_have_one_value(name: str, wanted: bool) -> None:
    model = sharded()
    made = HybridTrainPipelineSparseDist(model, model.fused_optimizer, CPU, **{name: wanted})
    assert made.num_batches_trained == 0
    with pytest.raises(PAGE.error("TrainPipelineSparseDist", name), match=name):
        HybridTrainPipelineSparseDist(model, model.fused_optimizer, CPU, **{name: not wanted})


NOT_TAKEN = (
    *("context_type", "pipeline_postproc", "custom_model_fwd", "enqueue_batch_after_forward"),
    *("dmp_collection_sync_interval_batches", "enable_inplace_copy_batch"),
    *("free_features_storage_early", "clear_data_dist_inputs"),
)


@holds("TrainPipelineSparseDist", "refused", *NOT_TAKEN)
@pytest.mark.parametrize("name", NOT_TAKEN)
def test_arguments_that_our_pipeline_has_not(name: str) -> None:
    model = sharded()
    with pytest.raises(PAGE.error("TrainPipelineSparseDist", name), match=name):
        HybridTrainPipelineSparseDist(model, model.fused_optimizer, CPU, **{name: None})
