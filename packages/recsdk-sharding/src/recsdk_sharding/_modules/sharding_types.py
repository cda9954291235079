"""torchrec's sharding classes with ids in place of row numbers.

A mix-in replaces torchrec's input dist by the host's, its lookup by the engine, and its output dist
by an exchange of the vectors that are there. The class that it is mixed into still lays out the
tables over the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo
from torchrec.distributed.sharding.cw_sequence_sharding import CwSequenceEmbeddingSharding
from torchrec.distributed.sharding.cw_sharding import CwPooledEmbeddingSharding
from torchrec.distributed.sharding.dp_sequence_sharding import DpSequenceEmbeddingSharding
from torchrec.distributed.sharding.dp_sharding import DpPooledEmbeddingSharding
from torchrec.distributed.sharding.grid_sharding import GridPooledEmbeddingSharding
from torchrec.distributed.sharding.rw_sequence_sharding import RwSequenceEmbeddingSharding
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingSharding
from torchrec.distributed.sharding.tw_sequence_sharding import TwSequenceEmbeddingSharding
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingSharding
from torchrec.distributed.sharding.twcw_sharding import TwCwPooledEmbeddingSharding
from torchrec.distributed.sharding.twrw_sharding import TwRwPooledEmbeddingSharding
from torchrec.distributed.types import (
    CommOp,
    QuantizedCommCodecs,
    ShardingEnv,
    ShardingType,
)
from torchrec.modules.embedding_configs import PoolingType

from recsdk_sharding._batch.context import HostDistConfig, HostGroup
from recsdk_sharding._batch.input_dist import HostDist
from recsdk_sharding._batch.lookup import HashLookup
from recsdk_sharding._batch.output_dist import HashOutputDist, check_codecs, multiple_of
from recsdk_sharding._configs.configs import HashTableConfig
from recsdk_sharding._configs.data_taken import DTYPES
from recsdk_sharding._rows.rows import TableRows
from recsdk_sharding.exchange.shared_memory import SharedMemory, shared_memory_of
from recsdk_sharding.placement.layout import GroupLayout

__all__ = ["POOLED_TYPES", "SEQUENCE_TYPES", "HashSharding", "comm_op_of", "make_sharding"]

_POOLED: Mapping[str, type] = {
    ShardingType.ROW_WISE.value: RwPooledEmbeddingSharding,
    ShardingType.TABLE_WISE.value: TwPooledEmbeddingSharding,
    ShardingType.COLUMN_WISE.value: CwPooledEmbeddingSharding,
    ShardingType.TABLE_ROW_WISE.value: TwRwPooledEmbeddingSharding,
    ShardingType.TABLE_COLUMN_WISE.value: TwCwPooledEmbeddingSharding,
    ShardingType.GRID_SHARD.value: GridPooledEmbeddingSharding,
    ShardingType.DATA_PARALLEL.value: DpPooledEmbeddingSharding,
}
_SEQUENCE: Mapping[str, type] = {
    ShardingType.ROW_WISE.value: RwSequenceEmbeddingSharding,
    ShardingType.TABLE_WISE.value: TwSequenceEmbeddingSharding,
    ShardingType.COLUMN_WISE.value: CwSequenceEmbeddingSharding,
    ShardingType.DATA_PARALLEL.value: DpSequenceEmbeddingSharding,
}
POOLED_TYPES = tuple(_POOLED)
"""Sharding types of pooled collections."""
SEQUENCE_TYPES = tuple(_SEQUENCE)
"""Sharding types of sequence collections."""

_ADDS_UP = (
    ShardingType.ROW_WISE.value,
    ShardingType.TABLE_ROW_WISE.value,
    ShardingType.GRID_SHARD.value,
)


class HashSharding:
    """One sharding group: mixed into torchrec's class of its sharding type.

    `attach` must be called before the factories.
    """

    layout: GroupLayout
    """Where the tables are."""
    _host: HostGroup
    _rows: list[TableRows]
    _device: torch.device | None
    _is_sequence = False
    _drops_duplicates = False
    _sharding_type: str
    _counting: Mapping[str, str] = {}
    """Tables that have a rule that counts occurrences, and what it is."""

    def attach(
        self, host: HostGroup, configs: Sequence[HashTableConfig], is_weighted: bool
    ) -> None:
        """Takes the host's side, and the configs of the group's tables in the module's order."""
        self._host = host
        self._configs = list(configs)
        self._is_weighted = is_weighted
        self._counting = {c.name: rule for c in configs if (rule := c.counting_rule) is not None}
        is_replicated = self._sharding_type == ShardingType.DATA_PARALLEL.value
        placed: dict[str, list[tuple[int, tuple[int, int]]]] = {}
        for rank, table in self._placed_tables():
            metadata = table.local_metadata
            first = 0 if metadata is None else metadata.shard_offsets[1]
            columns = (first, first + table.local_cols)
            placed.setdefault(table.name, []).append((rank, columns))
        self.layout = GroupLayout.of_columns(
            [(c.name, c.embedding_dim, c.feature_names, c.num_cuts) for c in configs],
            placed,
            host.ranks.world_size,
            host.ranks.rule,
            is_replicated,
        )

    def _placed_tables(self) -> Iterator[tuple[int, Any]]:
        """Each rank and table, from torchrec's layout."""
        per_rank: Any = self._grouped_embedding_configs_per_rank  # type: ignore[attr-defined]
        for rank, groups in enumerate(per_rank):
            for group in groups:
                for table in group.embedding_tables:
                    yield rank, table

    def make_rows(self, device: torch.device | None) -> dict[str, TableRows]:
        """This rank's shards of the group's tables, by name; it may have none of some tables."""
        own = self.layout.shards_of(self._host.exchange.rank)
        shards = [
            [placed.shard for table, placed in own if table.name == config.name]
            for config in self._configs
        ]
        self._rows = TableRows.of_tables(self._configs, shards, device)
        return {rows.config.name: rows for rows in self._rows}

    def drop_duplicates(self, is_wanted: bool) -> None:
        """Whether an id that a feature has several times is sent once; for sequences.

        Raises ValueError if a table's rule counts occurrences.
        """
        for table, rule in self._counting.items() if is_wanted else ():
            raise ValueError(
                f"table {table!r}: {rule} counts every occurrence of an id, and use_index_dedup "
                "sends each once; leave one of them out"
            )
        self._drops_duplicates = is_wanted

    def create_input_dist(self, device: torch.device | None = None) -> HostDist:
        """The input dist, which sends ids to their owners and maps them."""
        shards = [shard for rows in self._rows for shard in rows.shards]
        is_mean = [
            not self._is_sequence and config.pooling == PoolingType.MEAN  # type: ignore[attr-defined]
            for config in self._configs
            for _ in config.feature_names
        ]
        taken = {name for config in self._configs for name in config.data_taken}
        takes = tuple(name for name in DTYPES if name in taken)
        return HostDist(
            HostDistConfig(
                group=self._host,
                layout=self.layout,
                home=self._rows[0].home,
                shards=shards,
                is_mean=is_mean,
                is_weighted=self._is_weighted,
                is_sequence=self._is_sequence,
                drops_duplicates=self._drops_duplicates,
                sends_every_id=bool(self._counting)
                or any(c.default.begin_with == "shared_row" for c in self._configs),
                takes=takes,
                needs={c.name: c.data_needed for c in self._configs if c.data_needed},
                has_norms=any(c.eviction and c.eviction.order == "low_norm" for c in self._configs),
                multiple=multiple_of(self._codecs()),
                memory=None if self.layout.is_replicated else self._memory(),
            )
        )

    def create_lookup(
        self,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: Any = None,
    ) -> HashLookup:
        """The lookup, which pools and trains the rows."""
        return HashLookup(self._rows, self._host.exchange.group)

    def create_output_dist(self, device: torch.device | None = None) -> HashOutputDist:
        """The output dist, which returns vectors to the ranks that asked for them."""
        home = self._rows[0].home
        codecs = self._codecs()
        if codecs is not None:
            operation = comm_op_of(self._sharding_type, is_sequence=self._is_sequence)
            check_codecs(codecs, operation.name, home.device)
        return HashOutputDist(
            self._group(),
            codecs,
            self._memory(),
            is_replicated=self.layout.is_replicated,
            may_combine=home.trains_with_all_gradients,
        )

    def _group(self) -> dist.ProcessGroup:
        group: dist.ProcessGroup = self._env.process_group  # type: ignore[attr-defined]
        return group

    def _memory(self) -> SharedMemory | None:
        """What results, and the gradients of replicas, go through; None: the process group.

        That takes what codecs make smaller, and what is on devices.
        """
        if self._codecs() is not None or self._rows[0].home.device.type != "cpu":
            return None
        return shared_memory_of(self._group())

    def _codecs(self) -> QuantizedCommCodecs | None:
        if self.layout.is_replicated:
            return None
        registry = self.qcomm_codecs_registry or {}  # type: ignore[attr-defined]
        operation = comm_op_of(self._sharding_type, is_sequence=self._is_sequence)
        found: QuantizedCommCodecs | None = registry.get(operation.name)
        return found


def comm_op_of(sharding_type: str, *, is_sequence: bool) -> CommOp:
    """The operation whose codecs a sharding type uses for vectors and gradients."""
    if is_sequence:
        return CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL
    if sharding_type in _ADDS_UP:
        return CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER
    return CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL


def make_sharding(
    infos: Sequence[EmbeddingShardingInfo],
    env: ShardingEnv,
    device: torch.device | None,
    codecs: Mapping[str, QuantizedCommCodecs] | None,
    *,
    is_sequence: bool,
) -> Any:
    """torchrec's sharding for one sharding type, with the mix-in; call `attach` next.

    Raises ValueError for a sharding type that these tables cannot have.
    """
    sharding_type = infos[0].param_sharding.sharding_type
    made = (_SEQUENCE_CLASSES if is_sequence else _POOLED_CLASSES).get(sharding_type)
    if made is None:
        types = ", ".join(_SEQUENCE_CLASSES if is_sequence else _POOLED_CLASSES)
        raise ValueError(
            f"the sharding type of hash tables must be one of {types}, got {sharding_type!r}"
        )
    options: dict[str, Any] = {}
    if sharding_type != ShardingType.DATA_PARALLEL.value:
        options["qcomm_codecs_registry"] = codecs
    return made(list(infos), env, device, **options)


def _classes(stock: Mapping[str, type], is_sequence: bool) -> dict[str, type]:
    return {
        name: type(
            f"Hash{base.__name__}",
            (HashSharding, base),
            {"_sharding_type": name, "_is_sequence": is_sequence, "__doc__": HashSharding.__doc__},
        )
        for name, base in stock.items()
    }


_POOLED_CLASSES = _classes(_POOLED, is_sequence=False)
_SEQUENCE_CLASSES = _classes(_SEQUENCE, is_sequence=True)
