"""The sharders to give to torchrec's planner and DistributedModelParallel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.fused_embeddingbag import FusedEmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import (
    CommOp,
    ModuleSharder,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingEnv,
    ShardingType,
)

from recsdk_sharding._batch.context import HostGroup
from recsdk_sharding._configs.checking import check_switch, check_text_or_none
from recsdk_sharding._configs.settings import (
    Subject,
    check_columns_of,
    check_fused_params,
    check_groups_of,
    check_names,
    check_plan,
    check_shared_rows_of,
    kernel_of,
    num_column_shards,
    num_row_shards,
)
from recsdk_sharding._modules.feature_processed import (
    HashFeatureProcessedEmbeddingBagCollectionSharder,
)
from recsdk_sharding._modules.host_env import check_env, check_groups, make_host_group
from recsdk_sharding._modules.sharded_bags import ShardedHashEmbeddingBagCollection
from recsdk_sharding._modules.sharded_sequences import ShardedHashEmbeddingCollection
from recsdk_sharding._modules.sharded_tables import ShardedTables, configs_of
from recsdk_sharding._modules.sharding_types import POOLED_TYPES, SEQUENCE_TYPES
from recsdk_sharding._modules.single_bag import HashEmbeddingBagSharder
from recsdk_sharding._modules.unsharded import HashEmbeddingBagCollection, HashEmbeddingCollection
from recsdk_sharding.placement.devices import check_device
from recsdk_sharding.placement.ranks import RankRule

__all__ = [
    "HashEmbeddingBagCollectionSharder",
    "HashEmbeddingCollectionSharder",
    "are_hybrid_sharders",
    "get_default_hybrid_sharders",
    "host_of",
    "planned_parameters",
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
        """The sharded module.

        Raises TypeError or ValueError for a module, plan, device or group that does not fit.
        """
        made = check_device(device, type(self).__name__)
        self._check_module(module)
        check_env(env)
        check_text_or_none(f"{type(self).__name__}: module_fqn", module_fqn)
        self._check_params(module, params, made)
        check_groups(self._host, env)
        codecs = self.qcomm_codecs_registry  # type: ignore[attr-defined]
        return self._sharded_type(
            module, params, env, self._host, made, codecs, module_fqn, **self.options
        )

    @property
    def options(self) -> dict[str, Any]:
        """Further arguments of the sharded module."""
        return {}

    def _check_params(self, module: Any, params: Any, device: torch.device) -> None:
        """Raises TypeError or ValueError for a plan that does not fit the module's tables."""
        configs = configs_of(module)
        check_names(type(module).__name__, params, [config.name for config in configs])
        for config in configs:
            has_half_rows = config.dtype != "float32"
            subject = Subject(config.name, has_half_rows, device.type)
            check_plan(subject, params[config.name], self._types)
            cut = num_row_shards(params[config.name])
            rule = self._host.ranks.rule
            check_groups_of(config.name, config.num_groups, cut, rule)
            check_shared_rows_of(config.name, config.default.n, cut, rule)
            check_columns_of(config.name, config.eviction, num_column_shards(params[config.name]))
            of_sharder = Subject(f"table {config.name!r}", has_half_rows, device.type)
            check_fused_params(of_sharder, self.fused_params)  # type: ignore[attr-defined]

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """All that torchrec has for such modules, on every device."""
        return list(self._types)

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Fused: the optimizer runs in backward. torchrec's planner calls data_parallel's dense."""
        return [kernel_of(sharding_type)]

    def shardable_parameters(self, module: Any) -> dict[str, nn.Parameter]:
        """A meta tensor (num_embeddings, D) per table, for the planner."""
        self._check_module(module)
        return planned_parameters(module)

    def _check_module(self, module: Any) -> None:
        if not isinstance(module, self._module_type):
            raise TypeError(
                f"{type(self).__name__}: module must be a {self._module_type.__name__}, got "
                f"{type(module).__name__}"
            )

    @property
    def module_type(self) -> type[nn.Module]:
        """The type of module that it shards."""
        return self._module_type

    @property
    def sharded_module_type(self) -> type[ShardedTables]:
        """The type of module that it makes."""
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
        fused_params: dict[str, Any] | None = None,
    ) -> None:
        """As in `get_default_hybrid_sharders`.

        `fused_params` may say what these tables do anyway: output_dtype FP32, BoundsCheckMode NONE,
        enforce_hbm on a device, stochastic_rounding of rows of 16 bits. Anything else raises a
        ValueError that names it.
        """
        _check_options(type(self).__name__, qcomm_codecs_registry, fused_params)
        super().__init__(qcomm_codecs_registry=qcomm_codecs_registry, fused_params=fused_params)
        self._host = make_host_group(host_env, rank_rule)


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
        fused_params: dict[str, Any] | None = None,
    ) -> None:
        """As in `HashEmbeddingBagCollectionSharder` and `get_default_hybrid_sharders`."""
        _check_options(type(self).__name__, qcomm_codecs_registry, fused_params)
        check_switch(f"{type(self).__name__}: use_index_dedup", use_index_dedup)
        super().__init__(
            qcomm_codecs_registry=qcomm_codecs_registry,
            use_index_dedup=use_index_dedup,
            fused_params=fused_params,
        )
        self._host = make_host_group(host_env, rank_rule)

    @property
    def options(self) -> dict[str, Any]:
        return {"use_index_dedup": self._use_index_dedup}


def _check_options(what: str, codecs: Any, fused_params: Any) -> None:
    """Raises TypeError or ValueError for options that hash tables cannot honour."""
    names = [operation.name for operation in CommOp]
    if codecs is not None and not isinstance(codecs, Mapping):
        raise TypeError(
            f"{what}: qcomm_codecs_registry must be a dict, as of torchrec's "
            f"get_qcomm_codecs_registry, got {type(codecs).__name__}"
        )
    unknown = [name for name in codecs or () if name not in names]
    if unknown:
        raise ValueError(
            f"{what}: qcomm_codecs_registry has {unknown}, which are no operations of torchrec's; "
            f"choose of {names}"
        )
    check_fused_params(Subject(what), fused_params)


def planned_parameters(module: Any) -> dict[str, nn.Parameter]:
    """A meta tensor (num_embeddings, D) for each table of a collection, as if it were trained.

    torchrec's functions for plans made by hand choose the kernel by the optimizer of a parameter.
    """
    shapes = {c.name: (c.num_embeddings, c.embedding_dim) for c in configs_of(module)}
    found = {
        name: nn.Parameter(torch.empty(*shape, dtype=torch.float32, device="meta"))
        for name, shape in shapes.items()
    }
    for parameter in found.values():
        parameter.__dict__["_in_backward_optimizers"] = []
    return found


def host_of(sharder: Any) -> HostGroup | None:
    """The ranks among which a sharder spreads hash tables; None: it is not for hash tables."""
    return sharder._host if isinstance(sharder, _HashSharder) else None


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
    `qcomm_codecs_registry`, from torchrec's `get_qcomm_codecs_registry`, makes the vectors and
    gradients of hash tables smaller on their way. `use_index_dedup` sends an id once that a feature
    of a sequence has several times. All ranks must pass the same arguments. torchrec's sharders are
    its default ones, with row-wise types on the cpu too.

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
    """One of torchrec's sharders, adapted to stand beside hash tables."""
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
