"""How much memory the rows of a shard take, by the engine's layouts.

Shape letters: D row width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

import recsdk_core
from recsdk_core import optim
from recsdk_core.table import DType
from recsdk_sharding._configs.checking import check_switch
from recsdk_sharding.planning.checking import check_instance, count_of
from recsdk_sharding.planning.planned_tables import PlannedTable

__all__ = ["TableMemory", "memory_of_shard", "record_bytes"]

# Bytes that the index takes for a scattered key while it is small, up to which size it is, and
# beyond. Source: docs/perf/engine_epyc_202611.md. Up to a MiB they are held in units of 4 KiB,
# beyond in huge pages (cpp/src/keymap/arena.cc).
_SMALL_INDEX_BYTES = 31.0
_SMALL_INDEX_KEYS = 300_000
_LARGE_INDEX_BYTES = 21.7
_UNIT = 4096
_SMALL_PAGES = 2**20
_HUGE_PAGE = 2**21
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class TableMemory:
    """Memory of a shard, in bytes."""

    host: int
    """Index, rows with optimizer state, and what is kept beside a row."""
    device: int = 0
    """Rows and optimizer state in device memory; all taken when the table is sharded."""


def memory_of_shard(
    table: PlannedTable,
    *,
    num_rows: int,
    width: int,
    num_shards: int,
    on_device: bool,
) -> TableMemory:
    """What `width` columns of one of `num_shards` shards of a table's rows take.

    `num_rows`: rows of the whole table. On the cpu it is the memory of `num_rows / num_shards`
    rows; a shard without rows takes next to nothing. On a device it is the memory of the shard's
    whole budget, which follows from `num_embeddings` and, with eviction, `max_rows`, and of the
    index on the host. Ids are assumed to be scattered; the index of consecutive ids takes a fifth.
    Raises TypeError or ValueError for what does not fit.
    """
    check_instance("table", table, PlannedTable, "a PlannedTable")
    width, num_shards = count_of("width", width, 1), count_of("num_shards", num_shards, 1)
    check_switch("on_device", on_device)
    rows = -(-count_of("num_rows", num_rows, 0) // num_shards)
    if not on_device:
        return TableMemory(
            host=_engine_bytes(rows, _row_bytes(width, table.optimizer, table.dtype))
        )
    budget = table.rows_on_device(num_shards)
    index = _engine_bytes(min(rows, budget), _bytes_of_a_key())
    floats = (budget + table.num_shared + 1) * (width + _state_width(width, table.optimizer))
    return TableMemory(host=index, device=floats * _FLOAT_BYTES)


def _engine_bytes(rows: int, row_bytes: int) -> int:
    return rows * row_bytes + _index_bytes(rows) if rows else 0


def _index_bytes(keys: int) -> int:
    small = min(keys, _SMALL_INDEX_KEYS) * _SMALL_INDEX_BYTES
    used = max(small, keys * _LARGE_INDEX_BYTES)
    if used <= _SMALL_PAGES:
        return math.ceil(used / _UNIT) * _UNIT
    return _SMALL_PAGES + math.ceil((used - _SMALL_PAGES) / _HUGE_PAGE) * _HUGE_PAGE


def record_bytes(width: int, optimizer: optim.Optimizer, dtype: DType) -> int:
    """Bytes of a row in the engine: weights and optimizer state, as they are laid out."""
    return _stats_of_a_row(width, optimizer, dtype).row_bytes


def _row_bytes(width: int, optimizer: optim.Optimizer, dtype: DType) -> int:
    stats = _stats_of_a_row(width, optimizer, dtype)
    return stats.row_bytes + stats.metadata_bytes


@lru_cache
def _stats_of_a_row(width: int, optimizer: optim.Optimizer, dtype: DType) -> recsdk_core.TableStats:
    """The statistics of a table with one row, so that the layout is the engine's own."""
    table = recsdk_core.Table(width, optimizer=optimizer, dtype=dtype, num_threads=1)
    table.find_or_insert(np.zeros(1, np.int64))
    return table.stats()


@lru_cache
def _bytes_of_a_key() -> int:
    """What an index without rows keeps of a key beside its map."""
    index = recsdk_core.Index(num_threads=1)
    index.map(np.zeros(1, np.int64), insert=True)
    return index.stats().metadata_bytes


@lru_cache
def _state_width(width: int, optimizer: optim.Optimizer) -> int:
    fields = recsdk_core.Table(width, optimizer=optimizer).state_fields
    return sum(numbers for _, numbers in fields)
