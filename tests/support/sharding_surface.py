"""What the public callables of recsdk_sharding are called with, when one argument is odd.

They are called in a world of one rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.ao.quantization import PlaceholderObserver, QConfig
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.planner import Topology
from torchrec.distributed.types import Awaitable, ShardingEnv
from torchrec.modules.embedding_configs import DataType
from torchrec.sparse.jagged_tensor import JaggedTensor

from odd_arguments import Surface, new_place
from one_rank import (
    META,
    Model,
    bag_config,
    bags,
    batch,
    host_env,
    optimized,
    plan_of,
    sequence_config,
    sequences,
    sharded,
    sharders,
)
from recsdk_core import RecsdkError, optim
from recsdk_core.nn import HashEmbeddingBag
from recsdk_core.serving import freeze_tables
from recsdk_sharding import (
    AdmitAndEvictPolicyType,
    HashEmbeddingBagCollectionSharder,
    HashEmbeddingBagSharder,
    HashEmbeddingCollectionSharder,
    KeyedJaggedTensorWithCount,
    KeyedJaggedTensorWithData,
    KeyedJaggedTensorWithTimestamp,
    QuantHashEmbeddingBagCollection,
    QuantHashEmbeddingCollection,
    RowOptimizer,
    Saver,
    ShowClickParams,
)
from recsdk_sharding.planning.planned_tables import PlannedTable

__all__ = ["SHARDING"]


@functools.cache
def _saved() -> str:
    path = new_place()
    Saver().save(_trained(), path)
    return path


def _trained() -> Any:
    module = optimized(bags())
    module(batch())
    return module


@functools.cache
def _frozen() -> str:
    path = new_place()
    freeze_tables(list(_trained().tables().values()), path)
    return path


def _quantized_bags() -> QuantHashEmbeddingBagCollection:
    return QuantHashEmbeddingBagCollection([bag_config()], path=_frozen())


def _quantized_sequences() -> QuantHashEmbeddingCollection:
    return QuantHashEmbeddingCollection([sequence_config()], path=_frozen())


def _bag_sharder() -> HashEmbeddingBagCollectionSharder:
    return HashEmbeddingBagCollectionSharder(host_env())


@functools.cache
def _plan() -> Any:
    return plan_of(Model(optimized(bags(device=META))))


@functools.cache
def _plan_of_sequences() -> Any:
    return plan_of(Model(optimized(sequences(device=META))))


def _sharded_bags() -> Any:
    return sharded(plan=_plan()).module.ebc


def _sharded_sequences() -> Any:
    made = sharded(optimized(sequences(device=META)), _plan_of_sequences())
    return made.module.ebc


def _bag(**options: Any) -> HashEmbeddingBag:
    return HashEmbeddingBag(4, name="user", optimizer=torch.optim.SGD, **options)


@functools.cache
def _plan_of_bag() -> Any:
    return plan_of(Model(_bag()))


def _sharded_bag() -> Any:
    return sharded(_bag(), _plan_of_bag()).module.ebc


def _quantizable(module: Any) -> Any:
    module.qconfig = QConfig(
        activation=PlaceholderObserver.with_args(dtype=torch.float32),
        weight=PlaceholderObserver.with_args(dtype=torch.qint8),
    )
    return module


def _finished(result: Any) -> Any:
    """What is waited for."""
    while isinstance(result, Awaitable):
        result = result.wait()
    return result


def _topology() -> Topology:
    return Topology(world_size=1, compute_device="cpu")


@functools.cache
def _planned_table() -> PlannedTable:
    return PlannedTable("user", 100, None, "float32", optim.SGD(), num_features=1)


def _parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(2))]


def _state(held: Any) -> Any:
    """What a refused call leaves: rows and counts of tables."""
    if isinstance(held, torch.nn.Module) and hasattr(held, "tables"):
        return {name: (len(table), table.stats().outcomes) for name, table in held.tables().items()}
    return None


def _ids() -> torch.Tensor:
    return torch.tensor([1, 2])


_KEYED: dict[str, Callable[[], Any]] = {
    "KeyedJaggedTensorWithData": lambda: _with("times", KeyedJaggedTensorWithData),
    "KeyedJaggedTensorWithTimestamp": lambda: _with("timestamps", KeyedJaggedTensorWithTimestamp),
    "KeyedJaggedTensorWithCount": lambda: _with("counts", KeyedJaggedTensorWithCount),
}


def _with(data: str, kind: type) -> Any:
    return kind(["user"], _ids(), lengths=torch.tensor([1, 1]), **{data: _ids()})


_VALUES: dict[str, Callable[..., Any]] = {
    "name": lambda: "user",
    "num_embeddings": lambda: 10,
    "embedding_dim": lambda: 4,
    "feature_names": lambda: ["user"],
    "data_type": lambda: DataType.FP32,
    "keys": lambda: ["user"],
    "values": _ids,
    "lengths": lambda: torch.tensor([1, 1]),
    "timestamps": _ids,
    "counts": _ids,
    "features": lambda: batch(),
    "with_clicks.click_labels": lambda: torch.tensor([1, 0, 1]),
    "jt_dict": lambda: {"user": JaggedTensor(_ids(), lengths=torch.tensor([1, 1]))},
    "tables": lambda: [bag_config()],
    "HashEmbeddingCollection.tables": lambda: [sequence_config()],
    "module": _trained,
    "path": new_place,
    "Saver.load.path": _saved,
    "rank": lambda: 0,
    "params": _parameters,
    "settings": optim.SGD,
    "host_env": host_env,
    "rank_rule": lambda: "virtual_shard",
    "import_rows.state_dict": lambda: {"user.weight": torch.ones(2, 4)},
    "ids": lambda: {"user": _ids()},
    "time": lambda: 3,
    "showclick_params": ShowClickParams,
    "policy_type": lambda: AdmitAndEvictPolicyType.POLICY_COUNT,
    "planning.planned_rows.table": bag_config,
    "planning.planned_rows.constraints": lambda: None,
    "topology": _topology,
    "HashEmbeddingEnumerator.batch_size": lambda: 8,
    "planning.memory_of_shard.table": _planned_table,
    "num_rows": lambda: 10,
    "width": lambda: 4,
    "num_shards": lambda: 2,
    "on_device": lambda: False,
    "plan": _plan,
    "kjt_list": lambda: [batch(), batch(names=["item"])],
    "groups": lambda: [(0,)],
    "ctx": lambda module: module.create_context(),
    "env": lambda: ShardingEnv.from_process_group(dist.GroupMember.WORLD),
    "HashEmbeddingBagCollectionSharder.shard.params": lambda: _plan().plan["ebc"],
    "HashEmbeddingCollectionSharder.shard.module": lambda: optimized(sequences(device=META)),
    "HashEmbeddingCollectionSharder.shard.params": lambda: _plan_of_sequences().plan["ebc"],
    "HashEmbeddingCollectionSharder.shardable_parameters.module": lambda: sequences(),
    "HashEmbeddingBagSharder.collection_sharder": _bag_sharder,
    "HashEmbeddingBagSharder.shard.module": lambda: _bag(),
    "HashEmbeddingBagSharder.shard.params": lambda: _plan_of_bag().plan["ebc"],
    "HashEmbeddingBagSharder.shardable_parameters.module": lambda: _bag(),
    "hash_sharder": _bag_sharder,
    "stock": FeatureProcessedEmbeddingBagCollectionSharder,
    "QuantHashEmbeddingCollection.tables": lambda: [sequence_config()],
    "QuantHashEmbeddingBagCollection.path": _frozen,
    "QuantHashEmbeddingCollection.path": _frozen,
    "QuantHashEmbeddingBagCollection.from_float.module": lambda: _quantizable(_trained()),
    "QuantHashEmbeddingCollection.from_float.module": lambda: _quantizable(sequences()),
    "ShardedHashEmbeddingBag.input_dist.keys": _ids,
    "ShardedHashEmbeddingBag.input_dist.offsets": lambda: torch.tensor([0]),
    "ShardedHashEmbeddingBag.input_dist.counts": lambda: None,
    "mesh": lambda: init_device_mesh("cpu", (1,)),
    "parallelize.model": lambda: Model(optimized(bags(device=META))),
    "dense_plan": lambda: {"over": ColwiseParallel(input_layouts=Shard(0))},
    "sharders": sharders,
    "sparse_plan": _plan,
    **{
        f"{kind}.{name}": make
        for kind in _KEYED
        for name, make in (("permute.indices", lambda: [0]), ("split.segments", lambda: [1]))
    },
}


SHARDING = Surface(
    package="recsdk_sharding",
    receivers={
        "Saver": Saver,
        "HashEmbeddingBagCollection": _trained,
        "HashEmbeddingCollection": lambda: optimized(sequences()),
        "RowOptimizer": lambda: RowOptimizer(_parameters(), settings=optim.SGD()),
        "HashEmbeddingBagCollectionSharder": lambda: HashEmbeddingBagCollectionSharder(host_env()),
        "HashEmbeddingCollectionSharder": lambda: HashEmbeddingCollectionSharder(host_env()),
        "HashEmbeddingBagSharder": lambda: HashEmbeddingBagSharder(_bag_sharder()),
        "ShardedHashEmbeddingBag": _sharded_bag,
        "ShardedHashEmbeddingBagCollection": _sharded_bags,
        "ShardedHashEmbeddingCollection": _sharded_sequences,
        "QuantHashEmbeddingBagCollection": _quantized_bags,
        "QuantHashEmbeddingCollection": _quantized_sequences,
        **_KEYED,
    },
    values=_VALUES,
    state=_state,
    finished=_finished,
    errors=(TypeError, ValueError, KeyError, RecsdkError, OSError, ImportError),
    taken=frozenset({"RowOptimizer.step.closure"}),
    together={
        f"{config}.eviction_groups": lambda: {"max_rows": 10, "eviction_groups": 1}
        for config in ("HashEmbeddingConfig", "HashEmbeddingBagConfig")
    },
    called={
        "tables": "table",
        "path": "chain|odd|lock|No such",
        "ids": "hash table",
        "state_dict": "entry",
        "evict_threshold": "evict_step_interval",
        "Saver.save.incremental": "a delta needs",
        **{
            f"{kind}.shard.params": "plan"
            for kind in (
                "HashEmbeddingBagSharder",
                "HashEmbeddingBagCollectionSharder",
                "HashEmbeddingCollectionSharder",
            )
        },
    },
    left_out={
        r"HashEmbedding\w*Config\((num_embeddings_post_pruning|input_dim|total_num_buckets)=.*": (
            "torchrec's; refused unless it is the default"
        ),
        r"Sharded\w+|QuantHash\w+Sharder": "made by others",
        r"Sharded\w+\.(create|compute|output_dist|results_of|preprocess|sharded_).*": "so",
        r"Sharded\w+\.input_dist\((ctx|times|scores|counts|clicks)=.*": "torchrec's, or one check",
        r"Sharded\w*(FeatureProcessed|Quant)\w+\..*": "as those that they stand before",
        r"(QuantHash|HashFeatureProcessed)\w+Sharder\..*": "torchrec calls them",
        r".*\.from_float\(use_precomputed_fake_quant=.*": "torch's, and means nothing here",
        r"Hash\w+Sharder\.(sharding_types|compute_kernels)": "torchrec calls them",
        r"TensorParallelWrapper\.wrap|planning\.(Hash\w+\.estimate|PlanTable\.log)": "so",
        r"(exchange|tensor_parallel)\..*|failing_together": "for several ranks",
        r"planning\.(HashEmbedding\w+|HashParameterConstraints|format_plan).*": "named above too",
        r"HashParameterConstraints\((?!expected_rows|growth).*": "checked when tables are planned",
        r"\w*JaggedTensor\w*\.(to|record_stream)": "torch checks",
        r"\w+Config\.(initializer_of|make_table)": "sharders call them",
        r"Sharded\w+\.require_equal_batches\(groups=number\)": "numbers within",
        r"(Accumulate\w+|RowOptimizer)\(params=.*": "torch checks",
        r".*=nested tensor\)": "a sequence of none: torch raises when its items are asked for",
    },
)
