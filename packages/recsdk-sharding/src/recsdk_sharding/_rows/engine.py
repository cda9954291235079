"""The engine as the home of rows.

Shape letters: n keys, M weights that come late.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.streamable import Multistreamable

from recsdk_core import JoinedBags, Lease, Table, optim
from recsdk_core.batch_leases import BatchLeases
from recsdk_core.checkpoint.replacing import NewRows, replace_rows
from recsdk_core.nn.function import TableBags, pack_features, pool_features
from recsdk_core.nn.joined import pool_joined_bags
from recsdk_core.nn.row_entries import rows_of
from recsdk_sharding._configs.configs import HashTableConfig
from recsdk_sharding._rows.home import Anchor, GroupBags, Guard, MappedBags, PoolRequest
from recsdk_sharding.placement.layout import Shard
from recsdk_sharding.placement.room import require_room

__all__ = ["EngineBatch", "EngineHome", "EnginePlan", "EngineShard", "JoinedBatch"]


@dataclass(frozen=True)
class EngineHome:
    """Keeps rows in tables of the engine, on the host."""

    device: torch.device
    pools_to_results = True
    averages_late_weights = True
    trains_with_all_gradients = True
    reads_at_once = True
    copies_tables = True

    def make_stores(
        self, tables: Sequence[tuple[HashTableConfig, Sequence[Shard]]]
    ) -> list[torch.Tensor]:
        """Handles without rows, (0, D)."""
        return [
            torch.empty(0, config.embedding_dim, dtype=torch.float32, device=self.device)
            for config, _ in tables
        ]

    def make_shards(
        self,
        config: HashTableConfig,
        shards: Sequence[Shard],
        store: torch.Tensor,
        optimizer: optim.Optimizer,
    ) -> list[EngineShard]:
        """Empty tables."""
        return [
            EngineShard(
                config.make_table(optimizer, shard.owned_groups(config.num_groups), shard.columns)
            )
            for shard in shards
        ]

    def check_dtype(self, table: str, dtype: torch.dtype) -> None:
        """Any type is fine: the handle has no rows."""

    def replace_rows(self, changes: Sequence[tuple[Any, NewRows]]) -> None:
        """Gives each shard its rows, or none."""
        replace_rows([(held.table, rows) for held, rows in changes])

    def plan(self, bags: GroupBags, request: PoolRequest, *, training: bool) -> EnginePlan:
        """Nothing: the mapped bags are taken as they are."""
        return _PLAN


class EnginePlan:
    """The engine takes row numbers as they are given."""

    numbers = None

    def batch(self, bags: MappedBags, request: PoolRequest) -> EngineBatch | JoinedBatch:
        """The mapped bags as they are."""
        if request.shared is None and request.weight_starts_P is None and bags.are_plain:
            return JoinedBatch(bags.group.tables, list(bags.leases), bags.joined(), request)
        group = bags.group
        parts = zip(group.tables, bags.features, bags.leases, group.accumulations, strict=True)
        tables = [
            TableBags(table=table, features=features, lease=lease, accumulation=accumulation)
            for table, features, lease, accumulation in parts
        ]
        return EngineBatch(tables, request)


_PLAN = EnginePlan()


@dataclass(frozen=True)
class EngineShard:
    """A shard in a table of the engine."""

    table: Table

    @property
    def index(self) -> Table:
        """The table, which maps its keys itself."""
        return self.table

    def check_idle(self) -> None:
        """Raises BusyError while batches are in flight, so that rows cannot be replaced."""
        self.table.check_idle()

    def check_room(self, keys: NDArray[np.int64]) -> None:
        """Raises CapacityError unless keys (n,) without a row can have one."""
        table = self.table
        if table.max_rows is not None and table.eviction_groups is not None:
            held = [batch.keys for batch in table.export(state=False)]
            require_room(table.name, table.max_rows, table.eviction_groups, [*held, keys])

    def rows(self) -> NewRows:
        """The rows that readers see now, with what eviction and admission keep of keys."""
        return rows_of(self.table)

    def host_table(self) -> Table:
        """The table itself."""
        return self.table

    def cutter(self, table: Table) -> None:
        """None: the table has the rows."""

    def take_loaded(self, table: Table) -> None:
        """Does nothing: the table was loaded into."""


class _OnHost(Multistreamable):  # type: ignore[misc]
    """A mapped batch of which nothing is on a device."""

    def open(self) -> None:
        """Does nothing."""

    def record_stream(self, stream: torch.Stream) -> None:
        """Does nothing."""

    def variable_stride_per_key(self) -> bool:
        """False, in torchrec's words: every feature has the same batch size."""
        return False


@dataclass
class JoinedBatch(_OnHost):
    """Bags in one array of each kind: their keys have no weights, their tables accumulate not."""

    tables: list[Table]
    leases: list[Lease]
    bags: JoinedBags
    request: PoolRequest

    def __post_init__(self) -> None:
        self.in_flight = BatchLeases(self.leases)

    def take_weights(self, weights_M: torch.Tensor) -> None:
        """Is not called: no weights come late."""
        raise AssertionError("the keys of these bags have no weights")

    def pool(self, anchor: Anchor, guard: Guard) -> torch.Tensor:
        """The vectors as one autograd node: float32 (num_values,), or of the `shape`."""
        to = self.request
        shape = (to.num_values,) if to.shape is None else to.shape
        pooled = _pooled_of(self.tables, to)
        return pool_joined_bags(
            self.tables, self.leases, self.bags, shape, anchor, guard, pooled, to.out
        )


@dataclass
class EngineBatch(_OnHost):
    """The bags that this rank pools, mapped to rows of the engine."""

    tables: list[TableBags]
    request: PoolRequest

    def __post_init__(self) -> None:
        self.in_flight = BatchLeases([entry.lease for entry in self.tables])

    def take_weights(self, weights_M: torch.Tensor) -> None:
        """Takes the weights that came late."""
        assert self.request.weight_starts_P is not None
        features = [feature for entry in self.tables for feature in entry.features]
        for feature, start in zip(features, self.request.weight_starts_P.tolist(), strict=True):
            feature.weights = weights_M.narrow(0, start, len(feature.rows))

    def pool(self, anchor: Anchor, guard: Guard) -> torch.Tensor:
        """The vectors as one autograd node: float32 (num_values,), or of the `shape`."""
        to = self.request
        if to.shape is not None:
            return pool_features(self.tables, *to.shape, anchor, to.shared, guard)
        pooled = _pooled_of([entry.table for entry in self.tables], to)
        return pack_features(self.tables, to.num_values, anchor, guard, pooled)


def _pooled_of(tables: Sequence[Table], request: PoolRequest) -> range | None:
    """Which numbers are read; None: all, of tables whose new rows begin with shared ones.

    They begin when they are read. A rank that left that to the backward would begin them after
    updates that others have yet to come.
    """
    pooled = request.pooled
    if pooled is not None and any(each.default.begin_with == "shared_row" for each in tables):
        return None
    return pooled
