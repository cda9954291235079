"""torchrec's sharding classes with ids in place of row numbers.

A mix-in puts the host dist where torchrec has its input dist and the engine where it has its
lookup; how tables are laid out over the ranks and how results return stays with the class it is
mixed into.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingSharding
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import PoolingType

from recsdk_sharding.features import TableInput
from recsdk_sharding.host_dist import HostDist, HostDistConfig, HostGroup
from recsdk_sharding.lookup import HashLookup
from recsdk_sharding.output_dist import RowWiseOutputDist
from recsdk_sharding.rows import TableRows

__all__ = ["HashRowWiseSharding"]


class HashShardingMixin:
    """Creates the host dist and the engine lookup of a pooled sharding group."""

    _host: HostGroup
    _rows_by_name: Mapping[str, TableRows]

    def create_input_dist(self, device: torch.device | None = None) -> HostDist:
        """What sends ids to their owners and maps them."""
        tables = self._tables()
        configs = [self._rows_by_name[table.name].config for table in tables]
        is_mean = [c.pooling == PoolingType.MEAN for c in configs for _ in c.feature_names]
        return HostDist(
            HostDistConfig(
                group=self._host,
                feature_names=[name for table in tables for name in table.feature_names],
                is_mean=is_mean,
                is_weighted=tables[0].is_weighted,
                inputs=self._inputs(),
            )
        )

    def create_lookup(
        self,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: Any = None,
    ) -> HashLookup:
        """What pools and trains the rows."""
        rows = [self._rows_by_name[table.name] for table in self._tables()]
        return HashLookup(rows, sum(self.embedding_dims()))  # type: ignore[attr-defined]

    def _tables(self) -> list[Any]:
        tables: list[Any] = self.embedding_tables()  # type: ignore[attr-defined]
        return tables

    def _inputs(self) -> list[TableInput]:
        inputs: list[TableInput] = []
        position = column = 0
        for table in self._tables():
            count, width = len(table.feature_names), table.local_cols
            inputs.append(
                TableInput(
                    table=self._rows_by_name[table.name].table,
                    features=list(range(position, position + count)),
                    columns=[column + index * width for index in range(count)],
                    pooling="sum",
                )
            )
            position, column = position + count, column + count * width
        return inputs


class HashRowWiseSharding(HashShardingMixin, RwPooledEmbeddingSharding):  # type: ignore[misc]
    """Every rank holds the rows of the ids it owns, of every table."""

    def __init__(
        self,
        host: HostGroup,
        rows_by_name: Mapping[str, TableRows],
        sharding_infos: Sequence[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
    ) -> None:
        self._host = host
        self._rows_by_name = rows_by_name
        super().__init__(list(sharding_infos), env, device)

    def create_output_dist(self, device: torch.device | None = None) -> RowWiseOutputDist:
        """What adds up the ranks' parts."""
        return RowWiseOutputDist(self._pg, self.embedding_dims())
