"""The sharded collection of hash tables without pooling.

Shape letters: N keys of a feature, D row width.
"""

from __future__ import annotations

from typing import Any

import torch
from torchrec.distributed.embedding import (
    EmbeddingCollectionContext,
    ShardedEmbeddingCollection,
)
from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo
from torchrec.distributed.types import (
    LazyAwaitable,
    QuantizedCommCodecs,
    ShardingEnv,
)
from torchrec.sparse.jagged_tensor import JaggedTensor

from recsdk_sharding._batch.output_dist import Transfer
from recsdk_sharding._batch.sequences import jagged_tensors
from recsdk_sharding._modules.failing import Results
from recsdk_sharding._modules.sharded_tables import ShardedTables
from recsdk_sharding._modules.sharding_types import HashSharding
from recsdk_sharding._modules.unsharded import HashEmbeddingCollection

__all__ = ["ShardedHashEmbeddingCollection"]


class ShardedHashEmbeddingCollection(
    ShardedTables,
    ShardedEmbeddingCollection,  # type: ignore[misc]
):
    """A `HashEmbeddingCollection` over several ranks; made by its sharder.

    As `ShardedHashEmbeddingBagCollection`. With index dedup an id that a feature of a batch has
    several times travels once, and its gradients are added before they travel.
    """

    _is_sequence = True

    def _complete(self) -> None:
        for dist in self._input_dists:
            dist.returns_keys = self._need_indices

    def _shardings(self) -> list[HashSharding]:
        return list(self._sharding_type_to_sharding.values())

    def create_embedding_sharding(
        self,
        sharding_type: str,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> Any:
        """The sharding of one group of tables."""
        return self._create_sharding(sharding_infos, env, device, qcomm_codecs_registry)

    def _generate_permute_indices_per_feature(self, *args: Any) -> None:
        """Not needed: columns are put in their places."""

    def _initialize_torch_state(self, skip_registering: bool = False) -> None:
        self.embeddings = self._registered_rows()

    def output_dist(
        self, ctx: EmbeddingCollectionContext, output: list[torch.Tensor]
    ) -> LazyAwaitable[dict[str, JaggedTensor]]:
        """Starts the return of the results."""
        transfers = self._start_return(ctx, output)
        return Results(lambda: self.results_of(ctx, transfers), self.host_exchange)

    def results_of(
        self, ctx: EmbeddingCollectionContext, transfers: list[Transfer]
    ) -> dict[str, JaggedTensor]:
        """The vectors of this rank's ids by name of the embedding."""
        contexts = ctx.sharding_contexts
        vectors = self._separate_results(contexts, transfers)
        found = [context.done.sent_samples for context in contexts]
        samples = self._groups.of_features([own.of_features() for own in found if own is not None])
        return jagged_tensors(self._embedding_names, vectors, samples)

    @property
    def unsharded_module_type(self) -> type[HashEmbeddingCollection]:
        """The type of the unsharded module."""
        return HashEmbeddingCollection
