"""The sharded collection of hash tables with pooling.

Shape letters: B batch, C columns, G bags of a feature, D width of its vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionContext,
    ShardedEmbeddingBagCollection,
)
from torchrec.distributed.types import (
    LazyAwaitable,
    QuantizedCommCodecs,
    ShardingEnv,
    ShardingType,
)
from torchrec.sparse.jagged_tensor import KeyedTensor

from recsdk_core import in_huge_pages
from recsdk_sharding._batch.context import ResultColumns
from recsdk_sharding._batch.output_dist import Transfer, return_results
from recsdk_sharding._modules.failing import Results
from recsdk_sharding._modules.sharded_tables import HashGroups, ShardedTables
from recsdk_sharding._modules.sharding_types import HashSharding
from recsdk_sharding._modules.unsharded import HashEmbeddingBagCollection

__all__ = ["ShardedHashEmbeddingBagCollection"]


class ShardedHashEmbeddingBagCollection(
    ShardedTables,
    ShardedEmbeddingBagCollection,  # type: ignore[misc]
):
    """A `HashEmbeddingBagCollection` over several ranks; made by its sharder.

    Each rank holds the rows and columns that the plan gives it. The host work of a batch starts at
    `input_dist` and runs in the background. If something is wrong with a batch, waiting for its
    result raises, on all ranks in the same step. Batch sizes may differ between ranks and be 0.
    Features are in the order of the unsharded module, whatever the plan.
    """

    _is_sequence = False

    def _complete(self) -> None:
        self._has_mean_pooling_callback = False  # means are taken where results are put together
        is_alone = self._host.ranks.world_size == 1 and not self.qcomm_codecs_registry
        if is_alone or self._sharding_types == [ShardingType.DATA_PARALLEL.value]:
            self._pool_in_place()

    def _shardings(self) -> list[HashSharding]:
        return list(self._embedding_shardings)

    def _pool_in_place(self) -> None:
        """Makes results in place, if all tables are sharded alike."""
        config = self._input_dists[0].config
        home, is_alone = config.home, self._host.ranks.world_size == 1
        can = home.pools_to_results if is_alone else home.trains_with_all_gradients
        if len(self._input_dists) != 1 or not can:
            return
        *starts, width = accumulate(self._widths, initial=0)
        columns = np.array(starts, np.int64)[self._groups.positions[0]]
        [own], [output] = self._input_dists, self._output_dists
        own.results = ResultColumns(columns, width, np.array(config.is_mean), output.share)

    def create_embedding_bag_sharding(
        self,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        permute_embeddings: bool = False,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> Any:
        """The sharding of one group of tables."""
        return self._create_sharding(sharding_infos, env, device, qcomm_codecs_registry)

    def _initialize_torch_state(self, skip_registering: bool = False) -> None:
        self.embedding_bags = self._registered_rows()

    def output_dist(
        self, ctx: EmbeddingBagCollectionContext, output: list[torch.Tensor]
    ) -> LazyAwaitable[KeyedTensor]:
        """Starts the return of the results."""
        if ctx.sharding_contexts[0].done.assembly is None:  # made at once
            return Results(lambda: self._tensor_of(output[0]), self.host_exchange)
        transfers = self._start_return(ctx, output)
        return Results(lambda: self._tensor_of(self.results_of(ctx, transfers)), self.host_exchange)

    def _tensor_of(self, values: torch.Tensor) -> KeyedTensor:
        return KeyedTensor(keys=self._embedding_names, length_per_key=self._widths, values=values)

    def results_of(
        self, ctx: EmbeddingBagCollectionContext, transfers: list[Transfer]
    ) -> torch.Tensor:
        """The pooled vectors of this rank's samples, float32 (B, C)."""
        contexts, groups, like = ctx.sharding_contexts, self._groups, transfers[0].numbers
        is_plain = all(each.done.late_weights is None for each in contexts)
        if not is_plain or contexts[0].done.features.bag_of_sample is not None:
            return torch.cat(self._separate_results(contexts, transfers), dim=1)

        shape = contexts[0].done.features.batch_size, sum(self._widths)
        return return_results(transfers, _Matrix(groups, self._widths, shape, like))[0]

    @property
    def unsharded_module_type(self) -> type[HashEmbeddingBagCollection]:
        """The type of the unsharded module."""
        return HashEmbeddingBagCollection


@dataclass(frozen=True)
class _Matrix:
    """The vectors of all features side by side: one result (B, C)."""

    groups: HashGroups
    widths: Sequence[int]
    """D of each feature."""
    shape: tuple[int, int]
    like: torch.Tensor
    """On its device."""

    def empty(self) -> list[torch.Tensor]:
        """What is to be filled."""
        return [in_huge_pages(self.like.new_empty(*self.shape))]

    takes_views = True

    def joined(self, parts: list[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """The features' vectors, side by side."""
        return [torch.cat(self.groups.of_features(parts), dim=1)]

    def parts_of(self, tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """The columns of each group's features."""
        return self.groups.parts_of(tensors[0].split_with_sizes(list(self.widths), dim=1))
