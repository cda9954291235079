"""The sharders to give to torchrec's planner and DistributedModelParallel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.fused_embeddingbag import FusedEmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import (
    ModuleSharder,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingEnv,
    ShardingType,
)

from recsdk_sharding.devices import check_device
from recsdk_sharding.exchange import exchange_of_group
from recsdk_sharding.feature_processed import HashFeatureProcessedEmbeddingBagCollectionSharder
from recsdk_sharding.host_job import HostGroup
from recsdk_sharding.modules import HashEmbeddingBagCollection, HashEmbeddingCollection
from recsdk_sharding.ranks import RankMap, RankRule
from recsdk_sharding.sharded import ShardedHashEmbeddingBagCollection
from recsdk_sharding.sharded_sequence import ShardedHashEmbeddingCollection
from recsdk_sharding.sharded_tables import ShardedTables, configs_of
from recsdk_sharding.shardings import POOLED_TYPES, SEQUENCE_TYPES
from recsdk_sharding.single_bag import HashEmbeddingBagSharder

__all__ = [
    "HashEmbeddingBagCollectionSharder",
    "HashEmbeddingCollectionSharder",
    "are_hybrid_sharders",
    "get_default_hybrid_sharders",
]


class _HashSharder:
    """What the sharders of hash collections have in common; mixed into torchrec's."""

    _module_type: type[nn.Module]
    _sharded_type: type[ShardedTables]
    _types: tuple[str, ...]
    _host: HostGroup

    def shard(
        self,
        module: Any,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedTables:
        """The sharded module. Raises ValueError for a plan, device or group that does not fit."""
        made = check_device(device, type(self).__name__)
        for name, sharding in params.items():
            _check_plan(name, sharding, self._types)
        _check_groups(self._host, env)
        codecs = self.qcomm_codecs_registry  # type: ignore[attr-defined]
        options = self._options()
        return self._sharded_type(
            module, params, env, self._host, made, codecs, module_fqn, **options
        )

    def _options(self) -> dict[str, Any]:
        """Further arguments of the sharded module."""
        return {}

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """All that torchrec has for such modules, on every device."""
        return list(self._types)

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Fused: the optimizer runs in backward. torchrec's planner calls data_parallel's dense."""
        return [_kernel_of(sharding_type)]

    def shardable_parameters(self, module: Any) -> dict[str, nn.Parameter]:
        """A meta tensor (num_embeddings, D) per table, for the planner."""
        shapes = {c.name: (c.num_embeddings, c.embedding_dim) for c in configs_of(module)}
        return {
            name: nn.Parameter(torch.empty(*shape, device="meta")) for name, shape in shapes.items()
        }

    @property
    def module_type(self) -> type[nn.Module]:
        """What it shards."""
        return self._module_type

    @property
    def sharded_module_type(self) -> type[ShardedTables]:
        """What it makes."""
        return self._sharded_type


class HashEmbeddingBagCollectionSharder(
    _HashSharder,
    EmbeddingBagCollectionSharder,  # type: ignore[misc]
):
    """Shards a `HashEmbeddingBagCollection`, by any of torchrec's sharding types."""

    _module_type = HashEmbeddingBagCollection
    _sharded_type = ShardedHashEmbeddingBagCollection
    _types = POOLED_TYPES

    def __init__(
        self,
        host_env: ShardingEnv,
        rank_rule: RankRule = "virtual_shard",
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        """As in `get_default_hybrid_sharders`."""
        super().__init__(qcomm_codecs_registry=qcomm_codecs_registry)
        self._host = _host_group(host_env, rank_rule)


class HashEmbeddingCollectionSharder(
    _HashSharder,
    EmbeddingCollectionSharder,  # type: ignore[misc]
):
    """Shards a `HashEmbeddingCollection`: row_wise, table_wise, column_wise or data_parallel."""

    _module_type = HashEmbeddingCollection
    _sharded_type = ShardedHashEmbeddingCollection
    _types = SEQUENCE_TYPES

    def __init__(
        self,
        host_env: ShardingEnv,
        rank_rule: RankRule = "virtual_shard",
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        use_index_dedup: bool = False,
    ) -> None:
        """As in `get_default_hybrid_sharders`."""
        super().__init__(
            qcomm_codecs_registry=qcomm_codecs_registry, use_index_dedup=use_index_dedup
        )
        self._host = _host_group(host_env, rank_rule)

    def _options(self) -> dict[str, Any]:
        return {"use_index_dedup": self._use_index_dedup}


def _kernel_of(sharding_type: str) -> str:
    is_replicated = sharding_type == ShardingType.DATA_PARALLEL.value
    kernel = EmbeddingComputeKernel.DENSE if is_replicated else EmbeddingComputeKernel.FUSED
    return str(kernel.value)


def _host_group(host_env: ShardingEnv, rank_rule: RankRule) -> HostGroup:
    group = _check_host_env(host_env)
    return HostGroup(exchange_of_group(group), RankMap(host_env.world_size, rank_rule))


class _RowWiseOnCpuMixin:
    """Offers on the cpu the row-wise types that torchrec's sharder offers on cuda only."""

    _more_types: tuple[ShardingType, ...]

    def sharding_types(self, compute_device_type: str) -> list[str]:
        types: list[str] = super().sharding_types(compute_device_type)  # type: ignore[misc]
        if compute_device_type != "cpu":
            return types
        return types + [t.value for t in self._more_types if t.value not in types]


class _CpuEmbeddingBagCollectionSharder(
    _RowWiseOnCpuMixin,
    EmbeddingBagCollectionSharder,  # type: ignore[misc]
):
    _more_types = (ShardingType.ROW_WISE, ShardingType.TABLE_ROW_WISE)


class _CpuFusedEmbeddingBagCollectionSharder(
    _RowWiseOnCpuMixin,
    FusedEmbeddingBagCollectionSharder,  # type: ignore[misc]
):
    _more_types = (ShardingType.ROW_WISE, ShardingType.TABLE_ROW_WISE)


_ADAPTED: dict[type, type] = {
    EmbeddingBagCollectionSharder: _CpuEmbeddingBagCollectionSharder,
    FusedEmbeddingBagCollectionSharder: _CpuFusedEmbeddingBagCollectionSharder,
}


def get_default_hybrid_sharders(
    host_env: ShardingEnv,
    rank_rule: RankRule = "virtual_shard",
    *,
    qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    use_index_dedup: bool = False,
) -> list[ModuleSharder[nn.Module]]:
    """The sharders for hash tables and for torchrec's own modules.

    `host_env` is `ShardingEnv(world_size, rank, pg)` over a gloo group that nothing else uses, made
    by `dist.new_group(backend="gloo")` on all ranks; ids are exchanged over it. `rank_rule` says
    which rank owns an id: "virtual_shard", or "modulo" for `uint64(id) % world_size`.
    `qcomm_codecs_registry`, of torchrec's `get_qcomm_codecs_registry`, makes the vectors and
    gradients of hash tables smaller on their way; `use_index_dedup` sends an id that a feature of a
    sequence has several times once. All ranks must pass the same. torchrec's sharders are its
    default ones, offering row-wise types on the cpu too.

    Raises TypeError or ValueError for a `host_env` that does not fit.
    """
    codecs = qcomm_codecs_registry
    pooled = HashEmbeddingBagCollectionSharder(host_env, rank_rule, codecs)
    return [
        pooled,
        HashEmbeddingCollectionSharder(host_env, rank_rule, codecs, use_index_dedup),
        HashEmbeddingBagSharder(pooled),
        *(_adapted(sharder, pooled) for sharder in get_default_sharders()),
    ]


def _adapted(sharder: Any, pooled: HashEmbeddingBagCollectionSharder) -> Any:
    """One of torchrec's sharders as it goes with hash tables."""
    if isinstance(sharder, FeatureProcessedEmbeddingBagCollectionSharder):
        return HashFeatureProcessedEmbeddingBagCollectionSharder(pooled, sharder)
    return _ADAPTED[type(sharder)]() if type(sharder) in _ADAPTED else sharder


def are_hybrid_sharders(sharders: Sequence[Any] | None) -> bool:
    """Whether these are of `get_default_hybrid_sharders`, those for hash tables included."""
    kinds = {type(sharder) for sharder in sharders or ()}
    stock = {_ADAPTED.get(type(sharder), type(sharder)) for sharder in get_default_sharders()}
    stock |= {HashFeatureProcessedEmbeddingBagCollectionSharder, HashEmbeddingBagSharder}
    pooled, sequences = HashEmbeddingBagCollectionSharder, HashEmbeddingCollectionSharder
    return {pooled, sequences} <= kinds <= {pooled, sequences, *stock}


def _check_host_env(host_env: ShardingEnv) -> dist.ProcessGroup:
    """The host process group; raises if it cannot carry ids."""
    make = 'dist.new_group(backend="gloo")'
    if not isinstance(host_env, ShardingEnv):
        raise TypeError(f"host_env must be a torchrec ShardingEnv, got {type(host_env).__name__}")
    group: dist.ProcessGroup | None = host_env.process_group
    if group is None:
        raise ValueError(f"host_env has no process group; pass ShardingEnv(..., pg={make})")
    backend = dist.get_backend(group)
    if backend != "gloo":
        raise ValueError(
            f"host_env must be on a gloo group, since ids are exchanged on the host; got a "
            f"{backend} group; make one with {make}"
        )
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if (host_env.world_size, host_env.rank) != (size, rank):
        raise ValueError(
            f"host_env says rank {host_env.rank} of {host_env.world_size}, its group rank "
            f"{rank} of {size}"
        )
    if group is dist.GroupMember.WORLD:
        raise ValueError(
            "host_env must be on a group of its own, since its collectives run in the background; "
            f"got the default group; make one with {make}"
        )
    return group


def _check_groups(host: HostGroup, env: ShardingEnv) -> None:
    """Raises if the module's ranks are not the host group's."""
    exchange = host.exchange
    if (env.world_size, env.rank) != (exchange.world_size, exchange.rank):
        raise ValueError(
            f"the module is sharded as rank {env.rank} of {env.world_size}, but host_env is rank "
            f"{exchange.rank} of {exchange.world_size}; both must be the same ranks"
        )
    if env.process_group is exchange.group:
        raise ValueError(
            "host_env and the sharded module use the same process group; give host_env its own: "
            'dist.new_group(backend="gloo")'
        )


def _check_plan(name: str, sharding: Any, types: Sequence[str]) -> None:
    """Raises if the plan asks for what hash tables cannot do."""
    kind, kernel = sharding.sharding_type, sharding.compute_kernel
    if kind not in types:
        raise ValueError(
            f"table {name!r}: the plan says {kind}, but these tables are sharded by one of "
            f"{list(types)}; constrain it with ParameterConstraints(sharding_types=[...])"
        )
    if kernel != _kernel_of(kind):
        raise ValueError(
            f"table {name!r}: hash tables are sharded {kind} with kernel {_kernel_of(kind)}; the "
            f"plan says {kernel}; constrain it with "
            f"ParameterConstraints(compute_kernels=[{_kernel_of(kind)!r}])"
        )
