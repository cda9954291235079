"""Sharders of collections of frozen tables, as planners and `shard_quant_model` ask for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.quant_embedding import QuantEmbeddingCollectionSharder
from torchrec.distributed.quant_embeddingbag import QuantEmbeddingBagCollectionSharder
from torchrec.distributed.types import ParameterSharding, ShardingEnv

from recsdk_core.serving import ServingTable
from recsdk_sharding._modules.frozen_parts import TYPES
from recsdk_sharding._modules.quantized import (
    QuantHashEmbeddingBagCollection,
    QuantHashEmbeddingCollection,
)
from recsdk_sharding._modules.sharded_quantized import (
    ShardedFrozen,
    ShardedQuantHashEmbeddingBagCollection,
    ShardedQuantHashEmbeddingCollection,
)

__all__ = ["QuantHashEmbeddingBagCollectionSharder", "QuantHashEmbeddingCollectionSharder"]

_PLANNED_AS = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.uint8,
    "int4": torch.uint8,
}


class _SharderOfFrozen:
    """What planners and `shard_quant_model` ask of a sharder."""

    _unsharded: type[nn.Module]
    _sharded: type[ShardedFrozen]
    _shardable_params: list[str]

    @property
    def module_type(self) -> type[nn.Module]:
        """What it shards."""
        return self._unsharded

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """By tables, rows and columns, on the cpu; nothing on other devices."""
        return list(TYPES) if compute_device_type == "cpu" else []

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """torchrec's name for tables of quantized rows."""
        return [EmbeddingComputeKernel.QUANT.value]

    def shardable_parameters(self, module: Any) -> dict[str, nn.Parameter]:
        """The size of each table as a planner wants it: a tensor without memory.

        Raises ValueError if `shardable_params` has some of a module's tables only.
        """
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
