"""What one rank knows of its training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from time import perf_counter
from typing import Any

from torch import nn

from recsdk_core.nn import HashEmbedding, HashEmbeddingBag
from recsdk_pipeline.telemetry.metrics import Values
from recsdk_sharding import (
    HashEmbeddingBagCollection,
    HashEmbeddingCollection,
    ShardedHashEmbeddingBagCollection,
    ShardedHashEmbeddingCollection,
)
from recsdk_sharding.exchange import exchanges_of
from recsdk_sharding.exchange.parts import Parts

__all__ = ["Collector", "replicated_tables"]

_SHARDED = (ShardedHashEmbeddingBagCollection, ShardedHashEmbeddingCollection)
_COLLECTIONS = (*_SHARDED, HashEmbeddingBagCollection, HashEmbeddingCollection)
_NUMBERS = {
    "num_rows": "recsdk_table_rows",
    "num_rows_in_flight": "recsdk_table_rows_in_flight",
    "num_rows_held_back": "recsdk_table_rows_held_back",
    "erased": "recsdk_table_erased_total",
    "returned": "recsdk_table_returned_total",
    "updates": "recsdk_table_updates_total",
    "nonfinite": "recsdk_table_nonfinite_total",
    "checkpoint_copied_bytes": "recsdk_save_copied_bytes_total",
    "checkpoint_waits": "recsdk_save_waits_total",
    "checkpoint_wait_seconds": "recsdk_save_wait_seconds_total",
}


class Collector:
    """Reads tables, exchanges and the pipeline's clock."""

    def __init__(self, model: nn.Module, parts: Parts) -> None:
        """`parts`: of the training thread."""
        self._model = model
        self._parts = parts
        self._exchanges = exchanges_of(model)
        self._start = self._last = perf_counter()
        self._before = sum(parts.seconds.values())
        self._rows: dict[str, float] = {}
        self._left: dict[str, float] = {}
        self._positions: dict[str, Any] = {}
        self._saved_at = self._start
        self._note_saves(dict(tables_of(model)))
        self._changes({name: table.stats() for name, table in tables_of(model)})

    def values(self) -> Values:
        """Everything that this rank counts by itself; no part of a step ever shrinks."""
        found: Values = {}
        tables = dict(tables_of(self._model))
        stats = {name: table.stats() for name, table in tables.items()}
        for name, of_table in stats.items():
            _add_stats(found, name, of_table)
        found |= self._changes(stats)
        self._note_saves(tables)
        found["recsdk_save_age_seconds"] = {(): perf_counter() - self._saved_at}
        found["recsdk_step_seconds_total"] = self._of_step()
        found["recsdk_host_seconds_total"] = self._of_host()
        found["recsdk_sent_bytes_total"] = self._sent()
        return found

    def _of_step(self) -> dict[tuple[str, ...], float]:
        # A part counts once it has ended. Until then its time is not that of any other.
        open_since, seconds = self._parts.open_since, dict(self._parts.seconds)
        now = perf_counter() if open_since is None else open_since
        known = sum(seconds.values()) - self._before
        elsewhere = max(0.0, now - self._start - known)
        return {(part,): spent for part, spent in {**seconds, "elsewhere": elsewhere}.items()}

    def _of_host(self) -> dict[tuple[str, ...], float]:
        found: dict[tuple[str, ...], float] = {}
        for exchange in self._exchanges:
            for part, spent in dict(exchange.parts.seconds).items():
                found[part,] = found.get((part,), 0.0) + spent
        return found

    def _sent(self) -> dict[tuple[str, ...], float]:
        found: dict[tuple[str, ...], float] = {}
        for module in self._model.modules():
            for sharding, sent in module.stats().items() if isinstance(module, _SHARDED) else ():
                kinds = {
                    "ids": sent.id_bytes,
                    "vectors": sent.forward_bytes,
                    "gradients": sent.backward_bytes,
                }
                for kind, number in kinds.items():
                    found[sharding, kind] = found.get((sharding, kind), 0) + number
        return found

    def _changes(self, stats: Mapping[str, Any]) -> Values:
        """Growth, and rows that left, in rows a second since it was asked before."""
        now = perf_counter()
        elapsed, self._last = max(now - self._last, 1e-9), now
        rows = {name: float(found.num_rows) for name, found in stats.items()}
        left = {
            name: float(found.evicted + found.expired + found.erased)
            for name, found in stats.items()
        }
        growth = {name: n - self._rows.get(name, 0.0) for name, n in rows.items()}
        leaving = {name: n - self._left.get(name, 0.0) for name, n in left.items()}
        # A table's counts begin anew with another optimizer or name.
        leaving = {name: left[name] if n < 0 else n for name, n in leaving.items()}
        self._rows, self._left = rows, left
        return {
            f"recsdk_table_{what}_rows_per_second": {(n,): by / elapsed for n, by in rates.items()}
            for what, rates in (("growth", growth), ("leaving", leaving))
        }

    def _note_saves(self, tables: Mapping[str, Any]) -> None:
        positions = {name: table.position for name, table in tables.items()}
        if positions != self._positions:
            self._saved_at = perf_counter()
        self._positions = positions


def tables_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """This rank's shards of a model's hash tables, by name."""
    for module in model.modules():
        if isinstance(module, _COLLECTIONS):
            yield from module.tables().items()
        elif isinstance(module, HashEmbedding | HashEmbeddingBag):
            yield str(module.table.name), module.table


def replicated_tables(model: nn.Module) -> set[str]:
    """The tables of which every rank has a copy."""
    return {
        name
        for module in model.modules()
        if isinstance(module, _SHARDED)
        for name, planned in module.module_sharding_plan.items()
        if planned.sharding_type == "data_parallel"
    }


def _add_stats(found: Values, table: str, stats: Any) -> None:
    """Adds what a table counts: numbers that have a name, memory, and counts by cause."""
    for field in fields(stats):
        name, value = field.name, getattr(stats, field.name)
        if name in _NUMBERS:
            found.setdefault(_NUMBERS[name], {})[table,] = value
        elif name == "evicted":
            asked = stats.evicted_by_request
            evicted = found.setdefault("recsdk_table_evicted_total", {})
            evicted[table, "full"], evicted[table, "asked"] = value - asked, asked
            evicted[table, "expired"] = stats.expired
        elif name.endswith("_bytes"):
            part = name.removesuffix("_bytes")
            found.setdefault("recsdk_table_bytes", {})[table, part] = value
        elif isinstance(value, Mapping):
            metric = "keys" if name == "outcomes" else name
            counts = found.setdefault(f"recsdk_table_{metric}_total", {})
            for cause, number in value.items():
                counts[table, str(getattr(cause, "name", cause)).lower()] = number
