"""The sharded collection of hash tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo, KJTListSplitsAwaitable
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionContext,
    ShardedEmbeddingBagCollection,
)
from torchrec.distributed.types import ParameterSharding, ShardingEnv, ShardingType
from torchrec.modules.embedding_configs import EmbeddingTableConfig, PoolingType
from torchrec.modules.embedding_modules import get_embedding_names_by_table

import recsdk_core
from recsdk_sharding.exchange import HostExchange
from recsdk_sharding.host_dist import HashShardingContext, HostGroup
from recsdk_sharding.modules import HashEmbeddingBagCollection
from recsdk_sharding.rows import TableRows
from recsdk_sharding.shardings import HashRowWiseSharding

__all__ = ["ShardedHashEmbeddingBagCollection"]


class ShardedHashEmbeddingBagCollection(ShardedEmbeddingBagCollection):  # type: ignore[misc]
    """A `HashEmbeddingBagCollection` over several ranks; made by its sharder.

    Each rank holds the rows of the ids it owns. Host work of a batch starts at `input_dist` and
    runs in the background; whatever is wrong with a batch is raised when its result is waited for,
    on all ranks in the same step. Batch sizes may differ between ranks and be 0.
    """

    def __init__(
        self,
        module: HashEmbeddingBagCollection,
        table_name_to_parameter_sharding: dict[str, ParameterSharding],
        env: ShardingEnv,
        host: HostGroup,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> None:
        # torchrec's constructor calls the factories below, which need these two; an nn.Module
        # takes plain attributes before it is initialized.
        self._host = host
        self._rows_by_name = _own_rows(module, host, env.rank)
        super().__init__(
            module=module,
            table_name_to_parameter_sharding=table_name_to_parameter_sharding,
            env=env,
            device=device or torch.device("cpu"),
            module_fqn=module_fqn,
        )
        self._has_mean_pooling_callback = False  # the output dist divides, without an epsilon
        self._input_dists = [sharding.create_input_dist() for sharding in self._embedding_shardings]
        self._has_uninitialized_input_dist = False

    @property
    def host_exchange(self) -> HostExchange:
        """Where this module's host jobs run."""
        return self._host.exchange

    def tables(self) -> dict[str, recsdk_core.Table]:
        """This rank's part of each table by name: export, len, stats."""
        return {name: rows.table for name, rows in self._rows_by_name.items()}

    def create_grouped_sharding_infos(
        self,
        module: HashEmbeddingBagCollection,
        table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
        prefix: str,
        fused_params: dict[str, Any] | None,
        suffix: str | None = "weight",
    ) -> dict[str, list[EmbeddingShardingInfo]]:
        """The tables by sharding type, without the arguments of fbgemm's kernels."""
        configs = module.embedding_bag_configs()
        grouped: dict[str, list[EmbeddingShardingInfo]] = {}
        names = get_embedding_names_by_table(configs)
        for config, embedding_names in zip(configs, names, strict=True):
            sharding = table_name_to_parameter_sharding[config.name]
            info = EmbeddingShardingInfo(
                embedding_config=EmbeddingTableConfig(
                    num_embeddings=config.num_embeddings,
                    embedding_dim=config.embedding_dim,
                    name=config.name,
                    feature_names=list(config.feature_names),
                    # The ranks' parts are always added; the output dist divides means. It also
                    # keeps torchrec from grouping by pooling, so columns stay in table order.
                    pooling=PoolingType.SUM,
                    is_weighted=module.is_weighted(),
                    embedding_names=embedding_names,
                ),
                param_sharding=sharding,
                param=self._rows_by_name[config.name].weight,
            )
            grouped.setdefault(sharding.sharding_type, []).append(info)
        return grouped

    def create_embedding_bag_sharding(
        self,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        permute_embeddings: bool = False,
        qcomm_codecs_registry: Any = None,
    ) -> HashRowWiseSharding:
        """The sharding of one group of tables."""
        sharding_type = sharding_infos[0].param_sharding.sharding_type
        if sharding_type != ShardingType.ROW_WISE.value:
            raise ValueError(f"sharding type {sharding_type!r} is not supported by hash tables")
        return HashRowWiseSharding(self._host, self._rows_by_name, sharding_infos, env, device)

    def _initialize_torch_state(self, skip_registering: bool = False) -> None:
        """Registers the handles, in place of tensors of num_embeddings rows."""
        self.embedding_bags = nn.ModuleDict(self._rows_by_name)
        for part in self._rows_by_name.values():
            # What has an optimizer in backward is left out of dense optimizers.
            part.weight.__dict__["_in_backward_optimizers"] = [self._optim]

    def reset_parameters(self) -> None:
        """Does nothing: rows are made when their ids first show up."""

    def input_dist(
        self, ctx: EmbeddingBagCollectionContext, features: Any
    ) -> KJTListSplitsAwaitable:
        """Starts the host work of a batch; it trains if the module does now.

        Returns at once. Raises only for what is wrong with the module, on every rank alike.
        """
        if self.training:
            for part in self._rows_by_name.values():
                part.check_trainable()
        awaitables = []
        for dist in self._input_dists:
            context = HashShardingContext()
            ctx.sharding_contexts.append(context)
            awaitables.append(dist(features, context, self.training))
        return KJTListSplitsAwaitable(awaitables, ctx, self._module_fqn, self._sharding_types)

    def update_shards(self, *args: Any, **kwargs: Any) -> None:
        """Not supported; raises NotImplementedError."""
        raise NotImplementedError(
            "hash tables cannot be moved between ranks in place: save, and load under another plan"
        )

    @property
    def unsharded_module_type(self) -> type[HashEmbeddingBagCollection]:
        """The module that this is the sharded form of."""
        return HashEmbeddingBagCollection


def _own_rows(
    module: HashEmbeddingBagCollection, host: HostGroup, rank: int
) -> dict[str, TableRows]:
    """This rank's parts of the module's tables, with the rows that they have already."""
    parts = {}
    for name, whole in module.embedding_bags.items():
        part = TableRows(whole.config, host.ranks, rank)
        part.take_rows_of(whole)
        parts[name] = part
    return parts
