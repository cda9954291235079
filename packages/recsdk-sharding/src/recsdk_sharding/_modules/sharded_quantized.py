"""Collections of frozen tables behind a plan: torchrec's sharding for inference, on the cpu.

All ranks of such a plan are in one process. Shape letters: N keys, F features, G bags of a feature,
D row width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torchrec.distributed.types import ParameterSharding, ShardedModule
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
from recsdk_sharding._batch.sequences import jagged_tensors, samples_of, without_duplicates
from recsdk_sharding._modules.frozen_parts import Share, is_by_rows, parts_of

__all__ = [
    "ShardedFrozen",
    "ShardedQuantHashEmbeddingBagCollection",
    "ShardedQuantHashEmbeddingCollection",
]


@dataclass
class _Context(Multistreamable):  # type: ignore[misc]
    """One batch."""

    batch: Features | None = None
    shares: list[list[Share]] = field(default_factory=list)
    """Of each rank, those of its features."""

    def record_stream(self, stream: Any) -> None:
        """Nothing: all is on the cpu."""


def _on_host(make: Callable[..., torch.Tensor], *shape: int) -> torch.Tensor:
    return make(shape, dtype=torch.float32, device="cpu")


class ShardedFrozen(ShardedModule):  # type: ignore[misc]
    """What both have in common."""

    def __init__(self, module: Any, plan: Mapping[str, ParameterSharding], world_size: int) -> None:
        super().__init__()
        # In a tuple, so that it is no child: planners look for what they can shard among these.
        self._of = (module,)
        self._tables: dict[str, ServingTable] = module.serving_tables()
        self._configs = list(module.configs_of_features())
        parts = {
            name: parts_of(name, table.dim, plan, world_size)
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

    def _shares(self, batch: Features) -> list[list[Share]]:
        """By rank, what it reads: whole features, and its keys of those that are cut by rows."""
        shares: list[list[Share]] = [[] for _ in self._features_of_rank]
        keys = batch.keys_N.split_with_sizes(batch.counts)
        lengths = batch.lengths_G.split_with_sizes(batch.num_bags)
        weights: Sequence[Any] = [None] * len(keys)
        if batch.weights_N is not None:
            weights = batch.weights_N.detach().split_with_sizes(batch.counts)
        for parts, *of_feature in zip(self._parts, keys, lengths, weights, strict=True):
            whole = Share(*of_feature)
            if not is_by_rows(parts):
                for part in parts:
                    shares[part.rank].append(whole)
                continue
            part_N = virtual_shards(whole.keys_N.numpy()) * len(parts) // NUM_VIRTUAL_SHARDS
            for number, part in enumerate(parts):
                places_N = torch.from_numpy(np.flatnonzero(part_N == number))
                shares[part.rank].append(whole.of(places_N))
        return shares


class ShardedQuantHashEmbeddingBagCollection(ShardedFrozen):
    """A `QuantHashEmbeddingBagCollection` behind a plan, all of whose ranks are in this process.

    A rank pools whole features, or of a table that is cut by rows its keys of each: those of its
    virtual shards, as ranks have them in training. Partial bags are then added. Of a table that is
    cut by columns each rank reads the rows and keeps its columns: they lie in the same lines of
    memory. All ranks read the same mapped files. Vectors are those of the unsharded module, bit for
    bit, where tables are cut by rows in another order of additions.
    """

    def input_dist(self, ctx: _Context, features: KeyedJaggedTensor) -> list[list[Share]]:
        """What each rank reads."""
        module = self._of[0]
        names = [name for config in module.embedding_bag_configs() for name in config.feature_names]
        ctx.batch = read_features(features_on_host(features), names, module.is_weighted())
        ctx.shares = self._shares(ctx.batch)
        return ctx.shares

    def compute(self, ctx: _Context, dist_input: list[list[Share]]) -> list[list[torch.Tensor]]:
        """Of each rank, the vectors of its features' bags, float32 (G, D) each."""
        pairs = zip(self._features_of_rank, dist_input, strict=True)
        return [self._pooled(features, shares) for features, shares in pairs]

    def _pooled(
        self, features: Sequence[tuple[int, slice | None]], shares: Sequence[Share]
    ) -> list[torch.Tensor]:
        calls: list[Any] = []
        for (f, _), share in zip(features, shares, strict=True):
            config = self._configs[f]
            out = _on_host(torch.empty, len(share.lengths_G), config.embedding_dim)
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
            _on_host(torch.zeros, count, config.embedding_dim)
            for count, config in zip(batch.num_bags, self._configs, strict=True)
        ]
        for features, vectors in zip(self._features_of_rank, output, strict=True):
            for (f, columns), part in zip(features, vectors, strict=True):
                sums[f][:, columns or slice(None)] += part
        is_mean = [
            config.pooling == PoolingType.MEAN and is_by_rows(parts)
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


class ShardedQuantHashEmbeddingCollection(ShardedFrozen):
    """A `QuantHashEmbeddingCollection` behind a plan, all of whose ranks are in this process.

    As `ShardedQuantHashEmbeddingBagCollection`; its vectors are the unsharded module's, bit for
    bit.
    """

    def input_dist(self, ctx: _Context, features: KeyedJaggedTensor) -> list[list[Share]]:
        """What each rank reads."""
        names = [name for config in self.embedding_configs() for name in config.feature_names]
        batch = read_features(features_on_host(features), names, is_weighted=False)
        ctx.batch = without_duplicates(batch, drops_duplicates=False)
        each_N = torch.ones(len(ctx.batch.keys_N), dtype=torch.int64, device="cpu")
        ctx.shares = self._shares(replace(ctx.batch, lengths=each_N))
        return ctx.shares

    def compute(self, ctx: _Context, dist_input: list[list[Share]]) -> list[list[torch.Tensor]]:
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
        vectors = [_on_host(torch.empty, count, config.embedding_dim) for count, config in pairs]
        for features, shares, parts in zip(self._features_of_rank, ctx.shares, output, strict=True):
            for (f, columns), share, part in zip(features, shares, parts, strict=True):
                of_part = vectors[f][:, columns or slice(None)]
                of_part[slice(None) if share.places_N is None else share.places_N] = part
        if batch.bag_of_sample is not None:
            vectors = [each[bags] for each, bags in zip(vectors, batch.bag_of_sample, strict=True)]
        made = [each.to(self.output_dtype()) for each in vectors]
        names = [name for table in module.embedding_names_by_table() for name in table]
        samples = samples_of(batch, with_keys=module.need_indices())
        return jagged_tensors(names, made, samples)

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
