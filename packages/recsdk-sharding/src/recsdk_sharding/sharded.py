"""The sharded collection of hash tables with pooling.

Shape letters: B batch, C columns, G bags of a feature, D width of its vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

import torch
from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionContext,
    ShardedEmbeddingBagCollection,
)
from torchrec.distributed.types import (
    LazyAwaitable,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingEnv,
    ShardingType,
)
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import KeyedTensor

from recsdk_sharding.devices import keeps_rows_in_engine
from recsdk_sharding.host_dist import HostGroup
from recsdk_sharding.in_place import Places
from recsdk_sharding.modules import HashEmbeddingBagCollection
from recsdk_sharding.output_dist import Transfer, return_results
from recsdk_sharding.sharded_tables import (
    HashGroups,
    ShardedTables,
    bags_of_samples,
    late_divisors,
    separate_results,
)

__all__ = ["ShardedHashEmbeddingBagCollection"]


class ShardedHashEmbeddingBagCollection(
    ShardedTables,
    ShardedEmbeddingBagCollection,  # type: ignore[misc]
):
    """A `HashEmbeddingBagCollection` over several ranks; made by its sharder.

    Each rank holds the rows and columns that the plan gives it. Host work of a batch starts at
    `input_dist` and runs in the background; whatever is wrong with a batch is raised when its
    result is waited for, on all ranks in the same step. Batch sizes may differ between ranks and be
    0. Features are in the order of the unsharded module, whatever the plan.
    """

    _is_sequence = False

    def __init__(
        self,
        module: HashEmbeddingBagCollection,
        table_name_to_parameter_sharding: dict[str, ParameterSharding],
        env: ShardingEnv,
        host: HostGroup,
        device: torch.device | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        module_fqn: str | None = None,
    ) -> None:
        self._attach_tables(module.embedding_bags, host, module.is_weighted())
        super().__init__(
            module=module,
            table_name_to_parameter_sharding=table_name_to_parameter_sharding,
            env=env,
            device=device or torch.device("cpu"),
            qcomm_codecs_registry=qcomm_codecs_registry,
            module_fqn=module_fqn,
        )
        self._has_mean_pooling_callback = False  # means are taken where results are put together
        self._input_dists = [sharding.create_input_dist() for sharding in self._embedding_shardings]
        self._has_uninitialized_input_dist = False
        is_alone = host.ranks.world_size == 1 and not qcomm_codecs_registry
        if is_alone or self._sharding_types == [ShardingType.DATA_PARALLEL.value]:
            self._pool_in_place()

    def _pool_in_place(self) -> None:
        """Has results made at once, if all tables are sharded alike."""
        if len(self._input_dists) != 1 or not keeps_rows_in_engine(self._device):
            return
        *starts, width = accumulate(self._embedding_dims, initial=0)
        columns = [starts[position] for position in self._groups.positions[0]]
        self._input_dists[0].places = Places(columns, width, self._input_dists[0].config.is_mean)

    def create_grouped_sharding_infos(
        self,
        module: HashEmbeddingBagCollection,
        table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
        prefix: str,
        fused_params: dict[str, Any] | None,
        suffix: str | None = "weight",
    ) -> dict[str, list[EmbeddingShardingInfo]]:
        """The tables by sharding type."""
        configs = module.embedding_bag_configs()
        names = get_embedding_names_by_table(configs)
        return self._sharding_infos(configs, names, table_name_to_parameter_sharding)

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

    def _create_output_dist(self) -> None:
        shardings = self._embedding_shardings
        self._output_dists = [sharding.create_output_dist(self._device) for sharding in shardings]
        configs = self._embedding_bag_configs
        self._groups = HashGroups.of_shardings(shardings, configs)
        names = get_embedding_names_by_table(configs)
        self._embedding_names = [name for of_table in names for name in of_table]
        self._embedding_dims = [c.embedding_dim for c in configs for _ in c.feature_names]

    def _initialize_torch_state(self, skip_registering: bool = False) -> None:
        self.embedding_bags = self._registered_rows()

    def output_dist(
        self, ctx: EmbeddingBagCollectionContext, output: list[torch.Tensor]
    ) -> LazyAwaitable[KeyedTensor]:
        """Starts the return of the results."""
        if ctx.sharding_contexts[0].assembly is None:  # made at once
            return _PooledAwaitable(self, lambda: output[0])
        transfers = self._start_return(ctx, output)
        return _PooledAwaitable(self, lambda: self.results_of(ctx, transfers))

    def results_of(
        self, ctx: EmbeddingBagCollectionContext, transfers: list[Transfer]
    ) -> torch.Tensor:
        """The pooled vectors of this rank's samples, float32 (B, C)."""
        contexts, groups, like = ctx.sharding_contexts, self._groups, transfers[0].numbers
        bags = bags_of_samples(groups, contexts, like.device)
        widths = self._embedding_dims
        divisors = late_divisors(groups, contexts)
        if bags is not None or divisors is not None:
            parts = return_results(transfers, separate_results(groups, contexts, widths, like))
            if divisors is not None:
                divided = zip(parts, divisors, strict=True)
                parts = [part if d is None else part / d[:, None] for part, d in divided]
            if bags is not None:
                pairs = zip(parts, bags, strict=True)
                parts = [part.index_select(0, bag) for part, bag in pairs]
            return torch.cat(parts, dim=1)

        def parts_of(tensors: Any) -> list[list[torch.Tensor]]:
            return groups.parts_of(tensors[0].split_with_sizes(widths, dim=1))

        def make() -> tuple[list[torch.Tensor], Callable[[Any], list[list[torch.Tensor]]]]:
            return [like.new_empty(contexts[0].features.batch_size, sum(widths))], parts_of

        return return_results(transfers, make)[0]

    @property
    def unsharded_module_type(self) -> type[HashEmbeddingBagCollection]:
        """The module that this is the sharded form of."""
        return HashEmbeddingBagCollection


class _PooledAwaitable(LazyAwaitable[KeyedTensor]):  # type: ignore[misc]
    def __init__(
        self,
        owner: ShardedHashEmbeddingBagCollection,
        values: Callable[[], torch.Tensor],
    ) -> None:
        super().__init__()
        self._owner = owner
        self._values = values

    def _wait_impl(self) -> KeyedTensor:
        owner = self._owner
        return KeyedTensor(
            keys=owner._embedding_names,
            length_per_key=owner._embedding_dims,
            values=self._values(),
        )
