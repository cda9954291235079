"""The sharded collection of hash tables without pooling.

Shape letters: N keys of a feature, D row width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torchrec.distributed.embedding import (
    EmbeddingCollectionContext,
    ShardedEmbeddingCollection,
)
from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo
from torchrec.distributed.types import (
    LazyAwaitable,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingEnv,
)
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import JaggedTensor

from recsdk_sharding.host_dist import HostGroup
from recsdk_sharding.modules import HashEmbeddingCollection
from recsdk_sharding.output_dist import Transfer, return_results
from recsdk_sharding.sequences import jagged_tensors, lengths_and_keys
from recsdk_sharding.sharded_tables import (
    HashGroups,
    ShardedTables,
    bags_of_samples,
    separate_results,
)

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

    def __init__(
        self,
        module: HashEmbeddingCollection,
        table_name_to_parameter_sharding: dict[str, ParameterSharding],
        env: ShardingEnv,
        host: HostGroup,
        device: torch.device | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        use_index_dedup: bool = False,
        module_fqn: str | None = None,
    ) -> None:
        self._attach_tables(module.embeddings, host, is_weighted=False)
        super().__init__(
            module=module,
            table_name_to_parameter_sharding=table_name_to_parameter_sharding,
            env=env,
            device=device or torch.device("cpu"),
            qcomm_codecs_registry=qcomm_codecs_registry,
            use_index_dedup=use_index_dedup,
            module_fqn=module_fqn,
        )
        shardings = list(self._sharding_type_to_sharding.values())
        for sharding in shardings:
            sharding.drop_duplicates(self._use_index_dedup)
        self._input_dists = [sharding.create_input_dist() for sharding in shardings]
        self._has_uninitialized_input_dist = False

    def create_grouped_sharding_infos(
        self,
        module: HashEmbeddingCollection,
        table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
        fused_params: dict[str, Any] | None,
    ) -> dict[str, list[EmbeddingShardingInfo]]:
        """The tables by sharding type."""
        names = module.embedding_names_by_table()
        return self._sharding_infos(
            module.embedding_configs(), names, table_name_to_parameter_sharding
        )

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

    def _create_output_dist(self) -> None:
        shardings = list(self._sharding_type_to_sharding.values())
        self._output_dists = [sharding.create_output_dist(self._device) for sharding in shardings]
        self._groups = HashGroups.of_shardings(shardings, self._embedding_configs)

    def _generate_permute_indices_per_feature(self, *args: Any) -> None:
        """Not needed: columns are put in their places."""

    def _initialize_torch_state(self, skip_registering: bool = False) -> None:
        self.embeddings = self._registered_rows()

    def output_dist(
        self, ctx: EmbeddingCollectionContext, output: list[torch.Tensor]
    ) -> LazyAwaitable[dict[str, JaggedTensor]]:
        """Starts the return of the results."""
        return _SequenceAwaitable(self, ctx, self._start_return(ctx, output))

    def results_of(
        self, ctx: EmbeddingCollectionContext, transfers: list[Transfer]
    ) -> dict[str, JaggedTensor]:
        """The vectors of this rank's ids by name of the embedding."""
        contexts, groups, like = ctx.sharding_contexts, self._groups, transfers[0].numbers
        bags = bags_of_samples(groups, contexts, like.device)
        configs = self._embedding_configs
        widths = [config.embedding_dim for config in configs for _ in config.feature_names]
        vectors = return_results(transfers, separate_results(groups, contexts, widths, like))
        if bags is not None:
            pairs = zip(vectors, bags, strict=True)
            vectors = [part.index_select(0, position) for part, position in pairs]
        names = [name for table in get_embedding_names_by_table(configs) for name in table]
        sequences = [lengths_and_keys(context.features) for context in contexts]
        return jagged_tensors(names, vectors, groups.of_features(sequences), self._need_indices)

    @property
    def unsharded_module_type(self) -> type[HashEmbeddingCollection]:
        """The module that this is the sharded form of."""
        return HashEmbeddingCollection


class _SequenceAwaitable(LazyAwaitable[dict[str, JaggedTensor]]):  # type: ignore[misc]
    def __init__(
        self,
        owner: ShardedHashEmbeddingCollection,
        ctx: EmbeddingCollectionContext,
        transfers: list[Transfer],
    ) -> None:
        super().__init__()
        self._owner = owner
        self._ctx = ctx
        self._transfers = transfers

    def _wait_impl(self) -> dict[str, JaggedTensor]:
        return self._owner.results_of(self._ctx, self._transfers)
