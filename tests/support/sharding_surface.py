"""What the public callables of recsdk_sharding are called with, when one argument is odd.

They are called in a world of one rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torchrec.modules.embedding_configs import DataType
from torchrec.sparse.jagged_tensor import JaggedTensor

from odd_arguments import Surface, new_place
from one_rank import bag_config, bags, batch, host_env, optimized, sequence_config, sequences
from recsdk_core import RecsdkError, optim
from recsdk_sharding import (
    AdmitAndEvictPolicyType,
    HashEmbeddingBagCollectionSharder,
    HashEmbeddingCollectionSharder,
    RowOptimizer,
    Saver,
    ShowClickParams,
)

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


def _parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(2))]


def _state(held: Any) -> Any:
    """What a refused call leaves: rows and counts of tables."""
    if isinstance(held, torch.nn.Module) and hasattr(held, "tables"):
        return {name: (len(table), table.stats().outcomes) for name, table in held.tables().items()}
    return None


def _ids() -> torch.Tensor:
    return torch.tensor([1, 2])


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
    "features": batch,
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
    },
    values=_VALUES,
    state=_state,
    errors=(TypeError, ValueError, KeyError, RecsdkError, OSError, ImportError),
    taken=frozenset({"RowOptimizer.step.closure", "planning.planned_rows.constraints"}),
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
    },
    left_out={
        r"HashEmbedding\w*Config\((num_embeddings_post_pruning|input_dim|total_num_buckets)=.*": (
            "torchrec's; refused unless it is the default"
        ),
        r"(Sharded|Quant|TensorParallel|HashFeatureProcessed|HashLoadPlanner).*": "torchrec's",
        r"(exchange|tensor_parallel)\..*|parallelize|failing_together": "for several ranks",
        r"(planning\.)?HashEmbedding(Enumerator|ShardingPlanner).*": "torchrec checks",
        r"planning\.(Hash\w+Estimator|PlanTable|memory_of_shard).*|(planning\.)?format_plan": "so",
        r"(planning\.)?HashParameterConstraints\((?!expected_rows|growth).*": "torchrec checks",
        r"Hash\w+Sharder\..*|HashEmbeddingBagSharder": "torchrec calls them",
        r"\w*JaggedTensor\w*\.(?!from_jt_dict).*": "torchrec checks",
        r"HashEmbedding\w*\.(forward|initializer_of|make_table)": "models and sharders call them",
        r"(Accumulate\w+|RowOptimizer)\(params=.*": "torch checks",
        r".*=nested tensor\)": "a sequence of none: torch raises when its items are asked for",
    },
)
