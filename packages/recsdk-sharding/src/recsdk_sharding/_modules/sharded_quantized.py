"""Collections of frozen tables behind a plan: torchrec's sharding for inference, on the cpu.

All ranks of such a plan are in one process. Shape letters: N keys, F features, G bags of a feature,
D row width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.quant_embedding import QuantEmbeddingCollectionSharder
from torchrec.distributed.quant_embeddingbag import QuantEmbeddingBagCollectionSharder
from torchrec.distributed.types import (
    ParameterSharding,
    ShardedModule,
    ShardingEnv,
    ShardingType,
)
from torchrec.modules.embedding_configs import PoolingType
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.streamable import Multistreamable

from recsdk_core.serving import ServingTable, pool_serving
from recsdk_core.virtual_shards import NUM_VIRTUAL_SHARDS, virtual_shards
from recsdk_sharding._batch.features import (
    Features,
    features_on_host,
    mean_divisor,
    read_features,
)
from recsdk_sharding._batch.sequences import jagged_tensors, lengths_and_keys, without_duplicates
from recsdk_sharding._modules.quantized import (
    QuantHashEmbeddingBagCollection,
    QuantHashEmbeddingCollection,
)

__all__ = [
    "QuantHashEmbeddingBagCollectionSharder",
    "QuantHashEmbeddingCollectionSharder",
    "ShardedQuantHashEmbeddingBagCollection",
    "ShardedQuantHashEmbeddingCollection",
]

_TYPES = (
    ShardingType.TABLE_WISE.value,
    ShardingType.ROW_WISE.value,
    ShardingType.COLUMN_WISE.value,
)
_PLANNED_AS = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.uint8,
    "int4": torch.uint8,
}


@dataclass(frozen=True)
class _Part:
    """What one rank has of a table."""

    rank: int
    columns: slice | None = None
    """Of a table that is cut by columns; else all."""


@dataclass(frozen=True)
class _Share:
    """What one rank reads of one feature."""

    keys_N: torch.Tensor
    lengths_G: torch.Tensor
    weights_N: torch.Tensor | None
    places_N: torch.Tensor | None = None
    """Where the keys were among the feature's; None: they are all of them."""

    def of(self, places_N: torch.Tensor) -> _Share:
        """Some of its keys, with all of its bags."""
        bag_N = torch.repeat_interleave(self.lengths_G)[places_N]
        weights_N = None if self.weights_N is None else self.weights_N[places_N]
        lengths_G = torch.bincount(bag_N, minlength=len(self.lengths_G))
        return _Share(self.keys_N[places_N], lengths_G, weights_N, places_N)

    def offsets(self) -> torch.Tensor:
        """Where its bags begin, and the last one's end."""
        offsets = torch.zeros(len(self.lengths_G) + 1, dtype=torch.int64)
        torch.cumsum(self.lengths_G, 0, out=offsets[1:])
        return offsets


@dataclass
class _Context(Multistreamable):  # type: ignore[misc]
    """One batch."""

    batch: Features | None = None
    shares: list[list[_Share]] = field(default_factory=list)
    """Of each rank, those of its features."""

    def record_stream(self, stream: Any) -> None:
        """Nothing: all is on the cpu."""


class _ShardedFrozen(ShardedModule):  # type: ignore[misc]
    """What both have in common."""

    def __init__(self, module: Any, plan: Mapping[str, ParameterSharding], world_size: int) -> None:
        super().__init__()
        # In a tuple, so that it is no child: planners look for what they can shard among these.
        self._of = (module,)
        self._tables: dict[str, ServingTable] = module.serving_tables()
        self._configs = list(module.configs_of_features())
        parts = {
            name: _parts_of(name, table.dim, plan, world_size)
            for name, table in self._tables.items()
        }
        self._parts = [parts[config.name] for config in self._configs]
        self._features_of_rank: list[list[tuple[int, slice | None]]] = [
            [
                (f, part.columns)
                for f, of_feature in enumerate(self._parts)
                for part in of_feature
                if part.rank == rank
            ]
            for rank in range(world_size)
        ]

    def serving_tables(self) -> dict[str, ServingTable]:
        """The frozen tables by name, which all ranks read: `follow`, `stats`, `preload`."""
        return dict(self._tables)

    def output_dtype(self) -> torch.dtype:
        """The dtype of the vectors."""
        dtype: torch.dtype = self._of[0].output_dtype()
        return dtype

    @property
    def unsharded_module_type(self) -> type[nn.Module]:
        """The module's type before it was sharded."""
        return type(self._of[0])

    def create_context(self) -> _Context:
        """The context of a batch."""
        return _Context()

    def forward(self, features: KeyedJaggedTensor) -> Any:
        """What the unsharded module gives: all three stages, one after the other."""
        context = self.create_context()
        return self.output_dist(context, self.compute(context, self.input_dist(context, features)))

    def _shares(self, batch: Features) -> list[list[_Share]]:
        """By rank, what it reads: whole features, and its keys of those that are cut by rows."""
        shares: list[list[_Share]] = [[] for _ in self._features_of_rank]
        keys = batch.keys_N.split_with_sizes(batch.counts)
        lengths = batch.lengths_G.split_with_sizes(batch.num_bags)
        weights: Sequence[Any] = [None] * len(keys)
        if batch.weights_N is not None:
            weights = batch.weights_N.detach().split_with_sizes(batch.counts)
        for parts, *of_feature in zip(self._parts, keys, lengths, weights, strict=True):
            whole = _Share(*of_feature)
            if not _is_by_rows(parts):
                for part in parts:
                    shares[part.rank].append(whole)
                continue
            part_N = virtual_shards(whole.keys_N.numpy()) * len(parts) // NUM_VIRTUAL_SHARDS
            for number, part in enumerate(parts):
                places_N = torch.from_numpy(np.flatnonzero(part_N == number))
                shares[part.rank].append(whole.of(places_N))
        return shares


def _is_by_rows(parts: Sequence[_Part]) -> bool:
    return len(parts) > 1 and parts[0].columns is None


def _parts_of(
    name: str, dim: int, plan: Mapping[str, ParameterSharding], world_size: int
) -> list[_Part]:
    """What the ranks have of a table."""
    if name not in plan:
        raise ValueError(f"the plan lacks table {name!r}; it has {sorted(plan)}")
    sharding = plan[name]
    ranks = list(sharding.ranks or [])
    is_one = sharding.sharding_type == ShardingType.TABLE_WISE.value
    if sharding.sharding_type not in _TYPES or not ranks or (is_one and len(ranks) != 1):
        raise ValueError(
            f"table {name!r} is planned as {sharding.sharding_type} on ranks {ranks}; frozen "
            "tables are sharded table_wise on one rank, row_wise or column_wise on several"
        )
    is_by_columns = sharding.sharding_type == ShardingType.COLUMN_WISE.value
    is_twice = not is_by_columns and len(set(ranks)) < len(ranks)
    if not all(0 <= rank < world_size for rank in ranks) or is_twice:
        raise ValueError(
            f"table {name!r} is planned on ranks {ranks} of {world_size}; plan for as many ranks "
            "as the environment has"
        )
    if not is_by_columns:
        return [_Part(rank) for rank in ranks]
    columns = _columns_of(name, dim, sharding)
    return [_Part(rank, each) for rank, each in zip(ranks, columns, strict=True)]


def _columns_of(name: str, dim: int, sharding: ParameterSharding) -> list[slice]:
    """The columns of each shard of a table that is cut by columns."""
    shards = [] if sharding.sharding_spec is None else sharding.sharding_spec.shards
    columns = [
        slice(shard.shard_offsets[1], shard.shard_offsets[1] + shard.shard_sizes[1])
        for shard in shards
    ]
    ends = [0, *(each.stop for each in columns)]
    follow_on = [each.start for each in columns] == ends[:-1]
    if len(columns) != len(sharding.ranks or []) or not follow_on or ends[-1] != dim:
        raise ValueError(
            f"table {name!r} of width {dim} is planned by columns, "
            f"{[[each.start, each.stop] for each in columns]} on ranks {sharding.ranks}; give its "
            "ParameterSharding a sharding_spec with a shard for each rank that together have all "
            "columns in order, as torchrec's planner does"
        )
    return columns


class ShardedQuantHashEmbeddingBagCollection(_ShardedFrozen):
    """A `QuantHashEmbeddingBagCollection` behind a plan, all of whose ranks are in this process.

    A rank pools whole features, or of a table that is cut by rows its keys of each: those of its
    virtual shards, as ranks have them in training. Partial bags are then added. Of a table that is
    cut by columns each rank reads the rows and keeps its columns: they lie in the same lines of
    memory. All ranks read the same mapped files. Vectors are those of the unsharded module, bit for
    bit, where tables are cut by rows in another order of additions.
    """

    def input_dist(self, ctx: _Context, features: KeyedJaggedTensor) -> list[list[_Share]]:
        """What each rank reads."""
        module = self._of[0]
        names = [name for config in module.embedding_bag_configs() for name in config.feature_names]
        ctx.batch = read_features(features_on_host(features), names, module.is_weighted())
        ctx.shares = self._shares(ctx.batch)
        return ctx.shares

    def compute(self, ctx: _Context, dist_input: list[list[_Share]]) -> list[list[torch.Tensor]]:
        """Of each rank, the vectors of its features' bags, float32 (G, D) each."""
        pairs = zip(self._features_of_rank, dist_input, strict=True)
        return [self._pooled(features, shares) for features, shares in pairs]

    def _pooled(
        self, features: Sequence[tuple[int, slice | None]], shares: Sequence[_Share]
    ) -> list[torch.Tensor]:
        calls: list[Any] = []
        for (f, _), share in zip(features, shares, strict=True):
            config = self._configs[f]
            out = torch.empty(len(share.lengths_G), config.embedding_dim)
            is_mean = config.pooling == PoolingType.MEAN and share.places_N is None
            table, pooling = self._tables[config.name], "mean" if is_mean else "sum"
            keys_N = share.keys_N.contiguous()
            calls.append((table, keys_N, share.offsets(), out, 0, share.weights_N, pooling))
        pool_serving(calls)
        return [
            call[3] if columns is None else call[3][:, columns]
            for call, (_, columns) in zip(calls, features, strict=True)
        ]

    def output_dist(self, ctx: _Context, output: list[list[torch.Tensor]]) -> KeyedTensor:
        """The vectors of all samples, which torchrec calls pooled embeddings."""
        batch = ctx.batch
        assert batch is not None
        sums: list[torch.Tensor] = [
            torch.zeros(count, config.embedding_dim)
            for count, config in zip(batch.num_bags, self._configs, strict=True)
        ]
        for features, vectors in zip(self._features_of_rank, output, strict=True):
            for (f, columns), part in zip(features, vectors, strict=True):
                sums[f][:, columns or slice(None)] += part
        is_mean = [
            config.pooling == PoolingType.MEAN and _is_by_rows(parts)
            for config, parts in zip(self._configs, self._parts, strict=True)
        ]
        divisors = mean_divisor(batch, is_mean).split_with_sizes(batch.num_bags)
        values = [
            sums[f] / divisors[f].unsqueeze(1) if is_mean[f] else sums[f] for f in range(len(sums))
        ]
        if batch.bag_of_sample is not None:
            values = [each[bag] for each, bag in zip(values, batch.bag_of_sample, strict=True)]
        return KeyedTensor(
            keys=self._of[0].embedding_names(),
            length_per_key=[config.embedding_dim for config in self._configs],
            values=torch.cat(values, dim=1).to(self.output_dtype()),
        )

    def embedding_bag_configs(self) -> list[Any]:
        """The configs."""
        configs: list[Any] = self._of[0].embedding_bag_configs()
        return configs

    def is_weighted(self) -> bool:
        """Whether batches carry a weight per id."""
        return bool(self._of[0].is_weighted())


class ShardedQuantHashEmbeddingCollection(_ShardedFrozen):
    """A `QuantHashEmbeddingCollection` behind a plan, all of whose ranks are in this process.

    As `ShardedQuantHashEmbeddingBagCollection`; its vectors are the unsharded module's, bit for
    bit.
    """

    def input_dist(self, ctx: _Context, features: KeyedJaggedTensor) -> list[list[_Share]]:
        """What each rank reads."""
        names = [name for config in self.embedding_configs() for name in config.feature_names]
        batch = read_features(features_on_host(features), names, is_weighted=False)
        ctx.batch = without_duplicates(batch, drops_duplicates=False)
        each_N = torch.ones(len(ctx.batch.keys_N), dtype=torch.int64)
        ctx.shares = self._shares(replace(ctx.batch, lengths_G=each_N))
        return ctx.shares

    def compute(self, ctx: _Context, dist_input: list[list[_Share]]) -> list[list[torch.Tensor]]:
        """Of each rank, the vectors of its keys of each feature, float32 (N, D)."""
        return [
            [
                self._tables[self._configs[f].name].lookup(share.keys_N.contiguous())[
                    :, columns or slice(None)
                ]
                for (f, columns), share in zip(features, shares, strict=True)
            ]
            for features, shares in zip(self._features_of_rank, dist_input, strict=True)
        ]

    def output_dist(
        self, ctx: _Context, output: list[list[torch.Tensor]]
    ) -> dict[str, JaggedTensor]:
        """The vectors of every feature's ids, in their order, by name of the embedding."""
        batch, module = ctx.batch, self._of[0]
        assert batch is not None
        pairs = zip(batch.counts, self._configs, strict=True)
        vectors = [torch.empty(count, config.embedding_dim) for count, config in pairs]
        for features, shares, parts in zip(self._features_of_rank, ctx.shares, output, strict=True):
            for (f, columns), share, part in zip(features, shares, parts, strict=True):
                of_part = vectors[f][:, columns or slice(None)]
                of_part[slice(None) if share.places_N is None else share.places_N] = part
        if batch.bag_of_sample is not None:
            vectors = [each[bags] for each, bags in zip(vectors, batch.bag_of_sample, strict=True)]
        made = [each.to(self.output_dtype()) for each in vectors]
        names = [name for table in module.embedding_names_by_table() for name in table]
        return jagged_tensors(names, made, lengths_and_keys(batch), module.need_indices())

    def embedding_configs(self) -> list[Any]:
        """The configs."""
        configs: list[Any] = self._of[0].embedding_configs()
        return configs

    def embedding_names_by_table(self) -> list[list[str]]:
        """The names of the embeddings of each table."""
        names: list[list[str]] = self._of[0].embedding_names_by_table()
        return names

    def need_indices(self) -> bool:
        """Whether outputs carry the ids."""
        return bool(self._of[0].need_indices())


class _SharderOfFrozen:
    """What planners and `shard_quant_model` ask of a sharder."""

    _unsharded: type[nn.Module]
    _sharded: type[_ShardedFrozen]
    _shardable_params: list[str]

    @property
    def module_type(self) -> type[nn.Module]:
        """What it shards."""
        return self._unsharded

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """By tables, rows and columns, on the cpu; nothing on other devices."""
        return list(_TYPES) if compute_device_type == "cpu" else []

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """torchrec's name for tables of quantized rows."""
        return [EmbeddingComputeKernel.QUANT.value]

    def shardable_parameters(self, module: Any) -> dict[str, nn.Parameter]:
        """The size of each table as a planner wants it: a tensor without memory."""
        tables: dict[str, ServingTable] = module.serving_tables()
        chosen = {name for name in tables if name in self._shardable_params} or set(tables)
        if chosen != set(tables):
            raise ValueError(
                f"shardable_params has only {sorted(chosen)} of the tables {sorted(tables)} of a "
                f"{type(module).__name__}; give all of them"
            )
        return {
            name: nn.Parameter(
                torch.empty(
                    max(len(table), 1), table.dim, dtype=_PLANNED_AS[table.dtype], device="meta"
                ),
                requires_grad=False,
            )
            for name, table in tables.items()
        }

    def shard(
        self,
        module: Any,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> Any:
        """The sharded module. Raises ValueError for what frozen tables cannot do."""
        if not isinstance(env, ShardingEnv) or env.process_group is not None:
            raise ValueError(
                f"{type(module).__name__} is sharded within a process, whose files others may map "
                "too: give ShardingEnv.from_local(world_size, 0)"
            )
        if device is not None and device.type not in ("cpu", "meta"):
            raise ValueError(
                f"{type(module).__name__} reads frozen files on the cpu, got device {device}; "
                'call shard_quant_model with compute_device="cpu", sharding_device="cpu"'
            )
        return self._sharded(module, params, env.world_size)


class QuantHashEmbeddingBagCollectionSharder(
    _SharderOfFrozen,
    QuantEmbeddingBagCollectionSharder,  # type: ignore[misc]
):
    """Shards a `QuantHashEmbeddingBagCollection` for inference on the cpu.

    `torchrec.inference.modules.shard_quant_model` takes it by itself. Sharding types: table_wise,
    row_wise, column_wise. Arguments are those of torchrec's `QuantEmbeddingBagCollectionSharder`;
    of them `fused_params` says nothing of frozen tables.
    """

    _unsharded = QuantHashEmbeddingBagCollection
    _sharded = ShardedQuantHashEmbeddingBagCollection


class QuantHashEmbeddingCollectionSharder(
    _SharderOfFrozen,
    QuantEmbeddingCollectionSharder,  # type: ignore[misc]
):
    """Shards a `QuantHashEmbeddingCollection`; see `QuantHashEmbeddingBagCollectionSharder`."""

    _unsharded = QuantHashEmbeddingCollection
    _sharded = ShardedQuantHashEmbeddingCollection
