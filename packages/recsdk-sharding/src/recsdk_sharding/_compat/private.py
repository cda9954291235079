"""The private parts of torch and torchrec that this package uses.

They are checked at import. So another version fails there, with the line to install, and not in the
middle of a training run.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torchrec
from torch._C import _distributed_c10d
from torch.autograd import profiler
from torch.distributed import ProcessGroup, ProcessGroupGloo, distributed_c10d
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed import (
    embedding,
    embedding_sharding,
    embeddingbag,
    model_parallel,
    shard,
    sharding_plan,
)
from torchrec.distributed.planner import constants, planners
from torchrec.distributed.planner import utils as planner_utils
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import KernelConfig, ShardEstimator, Stats, Topology
from torchrec.distributed.sharding.dp_sharding import BaseDpEmbeddingSharding
from torchrec.distributed.sharding.grid_sharding import BaseGridEmbeddingSharding
from torchrec.distributed.sharding.rw_sharding import (
    BaseRwEmbeddingSharding,
    RwPooledEmbeddingSharding,
)
from torchrec.distributed.sharding.tw_sharding import BaseTwEmbeddingSharding
from torchrec.distributed.sharding.twrw_sharding import BaseTwRwEmbeddingSharding
from torchrec.distributed.train_pipeline import pipeline_stage, train_pipelines
from torchrec.distributed.train_pipeline.pipeline_stage import SparseDataDistUtil
from torchrec.distributed.train_pipeline.postproc import PipelinedPostproc
from torchrec.distributed.train_pipeline.runtime_forwards import EmbeddingPipelinedForward
from torchrec.distributed.train_pipeline.train_pipelines import (
    PrefetchTrainPipelineSparseDist,
    StagedTrainPipeline,
    TrainPipelineBase,
    TrainPipelineFusedSparseDist,
    TrainPipelineSemiSync,
    TrainPipelineSparseDist,
)
from torchrec.distributed.train_pipeline.utils import DataLoadingThread
from torchrec.distributed.types import ModuleSharder
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

__all__ = [
    "PIPELINE_STREAMS",
    "TORCHREC",
    "active_data_parallel_size",
    "adapt_group_names",
    "check_private_interfaces",
    "default_store",
    "is_in_backward",
    "is_profiling",
    "naming_groups",
    "process_groups",
    "sharder_data",
    "timeout_of",
]

PIPELINE_STREAMS: dict[type, tuple[str, ...]] = {
    TrainPipelineBase: ("_memcpy_stream",),
    TrainPipelineSparseDist: ("_memcpy_stream", "_data_dist_stream"),
    TrainPipelineFusedSparseDist: ("_emb_lookup_stream",),
    PrefetchTrainPipelineSparseDist: ("_prefetch_stream", "_default_stream"),
    StagedTrainPipeline: (),
    SparseDataDistUtil: ("_default_stream",),
    PipelinedPostproc: (),
}
"""The attributes that each class of torchrec fills with streams, beside `_stream_context`."""


@dataclass(frozen=True)
class _Method:
    """A method or function that is overridden or called: its parameters, in order."""

    owner: Any
    name: str
    parameters: tuple[str, ...]

    def problem(self) -> str | None:
        label = f"{self.owner.__name__}.{self.name}"
        found = getattr(self.owner, self.name, None)
        if found is None:
            return f"{label} is gone"
        names = tuple(name for name in inspect.signature(found).parameters if name != "self")
        if names[: len(self.parameters)] != self.parameters:
            return f"{label} takes {names}, not {self.parameters}"
        return None


@dataclass(frozen=True)
class _Attribute:
    """An attribute that a constructor sets."""

    owner: type
    name: str

    def problem(self) -> str | None:
        if self.name in inspect.unwrap(vars(self.owner)["__init__"]).__code__.co_names:
            return None
        return f"{self.owner.__name__}.{self.name} is gone"


@dataclass(frozen=True)
class _Member:
    """A member of a class or module that is not written in Python."""

    owner: Any
    name: str

    def problem(self) -> str | None:
        is_there = hasattr(self.owner, self.name)
        return None if is_there else f"{self.owner.__name__}.{self.name} is gone"


_HAVE_CONTEXT_OF_BASE = (TrainPipelineFusedSparseDist, PrefetchTrainPipelineSparseDist)
_SHARDED = embeddingbag.ShardedEmbeddingBagCollection
_SEQUENCES = embedding.ShardedEmbeddingCollection
TORCHREC: tuple[int, ...] = tuple(int(part) for part in torchrec.__version__.split(".")[:2])
"""The release of torchrec that was found, as (1, 8)."""

_OF_RELEASE: tuple[_Method | _Attribute | _Member, ...] = (
    (
        _Method(_SEQUENCES, "_initialize_torch_state", ()),
        _Method(ShardEstimator, "estimate", ("sharding_options", "sharder_map")),
        _Method(planner_utils, "build_sharder_data", ("sharder",)),
        _Member(embeddingbag, "DistributedDataParallel"),
        _Member(embedding, "DistributedDataParallel"),
    )
    if TORCHREC < (1, 7)
    else (
        _Method(_SEQUENCES, "_initialize_torch_state", ("skip_registering",)),
        _Method(_SHARDED, "init_data_parallel", ()),
        _Method(_SEQUENCES, "init_data_parallel", ()),
        _Method(ShardEstimator, "estimate", ("sharding_options", "sharder_data_map")),
    )
)
_INTERFACES: tuple[_Method | _Attribute | _Member, ...] = (
    *_OF_RELEASE,
    _Method(
        _SHARDED,
        "__init__",
        ("module", "table_name_to_parameter_sharding", "env", "fused_params", "device"),
    ),
    _Method(
        _SHARDED,
        "create_grouped_sharding_infos",
        ("module", "table_name_to_parameter_sharding", "prefix", "fused_params", "suffix"),
    ),
    _Method(
        _SHARDED,
        "create_embedding_bag_sharding",
        ("sharding_infos", "env", "device", "permute_embeddings", "qcomm_codecs_registry"),
    ),
    _Method(_SHARDED, "_initialize_torch_state", ("skip_registering",)),
    _Method(_SHARDED, "_create_output_dist", ()),
    _Method(_SHARDED, "input_dist", ("ctx", "features")),
    _Method(_SHARDED, "output_dist", ("ctx", "output")),
    _Method(_SHARDED, "compute_and_output_dist", ("ctx", "input")),
    _Attribute(_SHARDED, "_embedding_shardings"),
    _Attribute(_SHARDED, "_has_mean_pooling_callback"),
    _Attribute(_SHARDED, "_has_uninitialized_input_dist"),
    _Attribute(_SHARDED, "_input_dists"),
    _Attribute(_SHARDED, "_module_fqn"),
    _Attribute(_SHARDED, "_optim"),
    _Attribute(_SHARDED, "_sharding_types"),
    _Attribute(EmbeddingBagCollection, "_embedding_bag_configs"),
    _Attribute(EmbeddingBagCollection, "_embedding_names"),
    _Attribute(EmbeddingBagCollection, "_feature_names"),
    _Attribute(EmbeddingBagCollection, "_is_weighted"),
    _Attribute(EmbeddingBagCollection, "_lengths_per_embedding"),
    _Method(
        _SEQUENCES,
        "__init__",
        ("module", "table_name_to_parameter_sharding", "env", "fused_params", "device"),
    ),
    _Method(
        _SEQUENCES,
        "create_grouped_sharding_infos",
        ("module", "table_name_to_parameter_sharding", "fused_params"),
    ),
    _Method(
        _SEQUENCES,
        "create_embedding_sharding",
        ("sharding_type", "sharding_infos", "env", "device", "qcomm_codecs_registry"),
    ),
    _Method(_SEQUENCES, "_create_output_dist", ()),
    _Method(_SEQUENCES, "_generate_permute_indices_per_feature", ()),
    _Method(_SEQUENCES, "input_dist", ("ctx", "features")),
    _Method(_SEQUENCES, "output_dist", ("ctx", "output")),
    _Method(_SEQUENCES, "compute_and_output_dist", ("ctx", "input")),
    _Attribute(_SEQUENCES, "_sharding_type_to_sharding"),
    _Attribute(_SEQUENCES, "_has_uninitialized_input_dist"),
    _Attribute(_SEQUENCES, "_input_dists"),
    _Attribute(_SEQUENCES, "_use_index_dedup"),
    _Attribute(EmbeddingCollection, "_embedding_configs"),
    _Attribute(EmbeddingCollection, "_embedding_dim"),
    _Attribute(EmbeddingCollection, "_embedding_names_by_table"),
    _Attribute(EmbeddingCollection, "_feature_names"),
    _Attribute(EmbeddingCollection, "_need_indices"),
    *(
        _Attribute(base, "_grouped_embedding_configs_per_rank")
        for base in (
            BaseRwEmbeddingSharding,
            BaseTwEmbeddingSharding,
            BaseTwRwEmbeddingSharding,
            BaseGridEmbeddingSharding,
            BaseDpEmbeddingSharding,
        )
    ),
    _Method(RwPooledEmbeddingSharding, "create_input_dist", ("device",)),
    _Method(RwPooledEmbeddingSharding, "create_lookup", ("device", "fused_params")),
    _Method(RwPooledEmbeddingSharding, "create_output_dist", ("device",)),
    _Method(
        embedding_sharding,
        "KJTListSplitsAwaitable",
        ("awaitables", "ctx", "module_fqn", "sharding_types"),
    ),
    _Method(embedding_sharding, "KJTListAwaitable", ("awaitables", "ctx")),
    _Method(
        model_parallel.DistributedModelParallel,
        "__init__",
        (
            "module",
            "env",
            "device",
            "plan",
            "sharders",
            "init_data_parallel",
            "init_parameters",
            "data_parallel_wrapper",
        ),
    ),
    _Method(Topology, "__init__", ("world_size", "compute_device")),
    _Method(KernelConfig, "validate", ()),
    _Method(EmbeddingEnumerator, "__init__", ("topology", "batch_size", "constraints")),
    _Method(EmbeddingEnumerator, "enumerate", ("module", "sharders")),
    _Method(sharding_plan, "get_module_to_default_sharders", ()),
    _Method(shard, "get_module_to_default_sharders", ()),
    _Method(shard, "_shard_modules", ("module", "env", "device", "plan", "sharders")),
    _Method(planners, "to_sharding_plan", ("sharding_options", "topology")),
    _Method(planners, "invoke_on_rank_and_broadcast_result", ("pg", "rank", "func")),
    _Attribute(planners.EmbeddingPlannerBase, "_topology"),
    _Attribute(planners.EmbeddingPlannerBase, "_batch_size"),
    _Attribute(planners.EmbeddingPlannerBase, "_enumerator"),
    _Method(
        constants,
        "kernel_bw_lookup",
        ("compute_device", "compute_kernel", "hbm_mem_bw", "ddr_mem_bw", "hbm_to_ddr_mem_bw"),
    ),
    _Method(Stats, "log", ("sharding_plan", "topology", "batch_size")),
    _Method(AsyncCollectiveTensor, "wait", ()),
    _Method(DTensor, "__create_chunk_list__", ()),
    _Method(
        model_parallel.DefaultDataParallelWrapper,
        "wrap",
        ("dmp", "env", "device"),
    ),
    _Attribute(model_parallel.DefaultDataParallelWrapper, "_additional_params_to_ignore"),
    _Method(DistributedDataParallel, "_get_active_ddp_module", ()),
    _Member(torch._C, "_current_graph_task_id"),
    _Member(ProcessGroup, "_device_types"),
    _Member(ProcessGroup, "_get_backend"),
    _Member(ProcessGroupGloo, "_Options"),
    _Method(distributed_c10d, "_get_default_store", ()),
    _Method(distributed_c10d, "_hash_ranks_to_str", ("ranks",)),
    _Member(distributed_c10d, "_world"),
    _Member(_distributed_c10d, "_register_work"),
    _Member(_distributed_c10d, "_resolve_process_group"),
    _Member(profiler, "_is_profiler_enabled"),
    _Method(torch.random, "_manual_seed_impl", ("seed",)),
    *(_Method(torch.random, name, ()) for name in ("get_rng_state", "initial_seed", "seed")),
    _Method(torch.random, "set_rng_state", ("new_state",)),
    *(
        _Attribute(owner, name)
        for owner, names in PIPELINE_STREAMS.items()
        for name in (*names, *(() if owner in _HAVE_CONTEXT_OF_BASE else ("_stream_context",)))
    ),
    _Attribute(StagedTrainPipeline, "_compute_stream"),
    _Attribute(PipelinedPostproc, "_dist_stream"),
    _Attribute(SparseDataDistUtil, "_device"),
    _Method(EmbeddingPipelinedForward, "__init__", ("name", "args", "module", "context", "stream")),
    _Method(DataLoadingThread, "__init__", ("device",)),
    _Method(TrainPipelineSparseDist, "attach", ("model", "sparse_dist")),
    _Method(TrainPipelineSemiSync, "embedding_backward", ("context",)),
    _Method(TrainPipelineSparseDist, "start_sparse_data_dist", ("batch", "context")),
    _Method(TrainPipelineSparseDist, "_init_pipelined_modules", ("batch", "context")),
    _Method(train_pipelines, "_wait_for_events", ("batch", "context", "stream")),
    _Method(train_pipelines, "_start_embedding_lookup", ("module", "context")),
    _Method(SparseDataDistUtil, "start_sparse_data_dist", ("batch",)),
    _Attribute(SparseDataDistUtil, "initialized"),
    *(
        _Method(module, "_start_data_dist", ("pipelined_modules", "batch", "context"))
        for module in (pipeline_stage, train_pipelines)
    ),
)


def check_private_interfaces(
    interfaces: Iterable[_Method | _Attribute | _Member] = _INTERFACES,
) -> None:
    """Raises ImportError naming every private interface that is not as expected."""
    problems = [text for item in interfaces if (text := item.problem()) is not None]
    if problems:
        raise ImportError(
            f"torchrec {torchrec.__version__} is not as recsdk_sharding expects it: "
            f"{'; '.join(problems)}; install it with: pip install torchrec==1.8.0"
        )


def timeout_of(group: ProcessGroup) -> timedelta:
    """How long the collectives of a gloo group may take."""
    options: Any = group._get_backend(torch.device("cpu")).options
    timeout: timedelta = options._timeout
    return timeout


def default_store(prefix: str) -> Any:
    """The store by which the ranks of the default group found each other; `prefix` for its keys."""
    return _distributed_c10d.PrefixStore(prefix, distributed_c10d._get_default_store())


_wanted = threading.local()


@contextmanager
def naming_groups(name: str) -> Iterator[None]:
    """Inside, this thread's `new_group` with `use_local_synchronization` makes groups of this name.

    torch names them by their ranks, and by how many groups this process is in. Ranks that are not
    in equally many would wait for each other under different names. Threads that make groups do not
    wait for each other here: on another rank they may come in another order.
    """
    _wanted.name = name
    try:
        yield
    finally:
        _wanted.name = None


def adapt_group_names() -> None:
    """Lets `naming_groups` name groups; those of others are named as before."""
    of_torch = distributed_c10d._hash_ranks_to_str

    @functools.wraps(of_torch)
    def named(ranks: list[int]) -> str:
        return getattr(_wanted, "name", None) or of_torch(ranks)

    distributed_c10d._hash_ranks_to_str = named


def sharder_data(entry: Any) -> Any:
    """What torchrec's planner says of a sharder: 1.6 hands out the sharder itself."""
    return planner_utils.build_sharder_data(entry) if isinstance(entry, ModuleSharder) else entry


def is_profiling() -> bool:
    """Whether torch's profiler records, on whatever threads."""
    return bool(profiler._is_profiler_enabled)


def is_in_backward() -> bool:
    """Whether this thread runs a backward pass."""
    return bool(torch._C._current_graph_task_id() >= 0)


def process_groups() -> list[Any]:
    """The groups that this process is in."""
    return list(distributed_c10d._world.pg_map)


def active_data_parallel_size() -> int:
    """Ranks of the DistributedDataParallel whose forward is running; 1 if there is none."""
    get_active: Callable[[], DistributedDataParallel | None] = (
        DistributedDataParallel._get_active_ddp_module
    )
    active = get_active()
    return 1 if active is None else int(active.process_group.size())
